"""A running server of the page, started as users start it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Starts a server with these options and returns its port.
Serve = Callable[..., int]


@pytest.fixture(scope="session")
def serve() -> Iterator[Serve]:
    """Start servers on free ports; all end with the session."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    with contextlib.ExitStack() as stack:

        def start(*options: str) -> int:
            words = [sys.executable, "-m", "zeroplan", "ui", "--port", "0", "--no-browser", *options]
            process = stack.enter_context(subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True))
            stack.callback(process.terminate)
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.fullmatch(r"The page is at http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends it\)\.\n", said)
            assert found is not None, said
            return int(found[1])

        yield start


@pytest.fixture(scope="session")
def port(serve: Serve) -> int:
    """The port of a server with the usual options."""
    return serve()
