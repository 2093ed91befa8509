"""``zeroplan ui``: the page, served on this machine for this machine."""

from __future__ import annotations

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

    Served on 127.0.0.1 alone. Nothing leaves this machine, unless --hub lets it ask for a model.
    """
    try:
        from zeroplan.ui.server import listen, serve
    except ImportError as missing:
        raise BadInput(f"needs {missing.name}", where="zeroplan ui", remedy='pip install "zeroplan[ui]"') from None
    if not 0 < timeout <= 3600:
        raise BadInput(f"{timeout:g} is out of range", where="--timeout", remedy="give 1 to 3600 seconds")
    listening = listen(port)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    show(f"The page is at {address} (Ctrl-C ends it).")
    if browser:
        import webbrowser

        webbrowser.open(address)
    serve(listening, timeout=timeout, hub=hub)
