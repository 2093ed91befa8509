"""``zeroplan ui``: the page, served on this machine for this machine."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from zeroplan.cli.main import show, verb
from zeroplan.core.errors import BadInput

Port = Annotated[int, typer.Option("--port", metavar="PORT", help="Of 127.0.0.1; 0 takes any that is free.")]
Browser = Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="That a question may take.")]
Hub = Annotated[bool, typer.Option("--hub", help="Ask the hub for models that are not shipped.")]


@verb("zeroplan ui", "zeroplan ui --port 0 --no-browser")
def ui(port: Port = 8642, browser: Browser = True, timeout: Timeout = 60.0, hub: Hub = False) -> None:
    """Plan in the browser, with sliders and timelines.

    Served on 127.0.0.1 alone, for those who have the token of the address. Nothing leaves this machine, unless --hub lets it
    ask for a model.
    """
    try:
        from zeroplan.ui.server import listen, serve
    except ImportError as missing:
        raise BadInput(f"needs {missing.name}", where="zeroplan ui", remedy='pip install "zeroplan[ui]"') from None
    if not 0 < timeout <= 3600:
        raise BadInput(f"{timeout:g} is out of range", where="--timeout", remedy="give 1 to 3600 seconds")
    listening = listen(port)
    token = secrets.token_urlsafe(24)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/?token={token}"
    show(f"The page is at {address} (Ctrl-C ends it).")
    with _opened(address) if browser else nullcontext():
        serve(listening, token, timeout=timeout, hub=hub)


@contextmanager
def _opened(address: str) -> Iterator[None]:
    """Open a browser by a file that this user alone can read: every user can read a command line, and so its address."""
    import webbrowser

    with tempfile.TemporaryDirectory(prefix="zeroplan-ui-") as folder:
        way = Path(folder) / "open.html"
        way.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}"><a href="{address}">zeroplan</a>')
        webbrowser.open(way.as_uri())
        yield
