"""A running server of the page, started as users start it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Served(NamedTuple):
    """Where a server is, and the token that it asks for."""

    port: int
    token: str

    @property
    def address(self) -> str:
        """What the terminal shows."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"


#: Starts a server with these options.
Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def serve() -> Iterator[Serve]:
    """Start servers on free ports; all end with the session."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    with contextlib.ExitStack() as stack:

        def start(*options: str) -> Served:
            words = [sys.executable, "-m", "zeroplan", "ui", "--port", "0", "--no-browser", *options]
            process = stack.enter_context(subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True))
            stack.callback(process.terminate)
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.fullmatch(r"The page is at http://127\.0\.0\.1:(\d+)/\?token=(\S{32}) \(Ctrl-C ends it\)\.\n", said)
            assert found is not None, said
            return Served(int(found[1]), found[2])

        yield start


@pytest.fixture(scope="session")
def served(serve: Serve) -> Served:
    """A server with the usual options."""
    return serve()
