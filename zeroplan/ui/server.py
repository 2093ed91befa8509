"""``zeroplan ui``: the page's files and its questions on 127.0.0.1, for pages of this server alone.

A page from anywhere else can neither read an answer nor ask for one: the Host of a request must be this machine's own name,
which stops names that others let resolve to it, and a question must come from this origin as JSON. Nor can another user of this
machine, who reaches 127.0.0.1 as well: a question carries the token of the address that the terminal shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mimetypes
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from zeroplan.core.errors import BadInput
from zeroplan.report.page import asset, look
from zeroplan.ui.answers import names
from zeroplan.ui.worker import HUB

#: Bytes of a question at most, files included: a captured run has some 100 kB, a long one a few MB.
MOST_BYTES = 8 << 20
#: Seconds in which a request must have come: its head, and then its body.
REQUEST_SECONDS = 20.0
#: Bytes of one line of the worker. The answer of a search with every plan's lines has about a tenth of it.
_MOST_LINE = 64 << 20
#: The page loads nothing from anywhere else and sends nothing there; a browser holds it to that.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Answerer:
    """A process that answers one question at a time; one that takes longer than `timeout` seconds is ended with it."""

    def __init__(self, timeout: float, *, hub: bool) -> None:
        self._timeout, self._hub = timeout, hub
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def ask(self, question: bytes) -> AsyncIterator[bytes]:
        """Yield the lines of the answer to a question of one line, the last of them ``{"answer": …}``."""
        async with self._turn:
            process = await self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            done = False
            try:
                async with asyncio.timeout(self._timeout):
                    process.stdin.write(question + b"\n")
                    await process.stdin.drain()
                    while not done:
                        line = await process.stdout.readline()
                        if not line:
                            raise ConnectionError
                        done = line.startswith(b'{"answer":')
                        yield line
            except TimeoutError:
                yield _refused(f"took longer than {self._timeout:g} s", "ask for less, or start zeroplan ui --timeout 300")
            except ConnectionError:
                yield _refused("ended the process that plans: it may have run out of memory", "ask for less")
            finally:
                if not done:  # or the page has gone: what comes late belongs to no question
                    self.close()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "zeroplan.ui.worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, HUB: "1" if self._hub else "0"},
                limit=_MOST_LINE,
            )
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None


def _refused(what: str, remedy: str) -> bytes:
    error = {"text": f"the question {what}; {remedy}", "what": what, "where": "the question", "remedy": remedy}
    return json.dumps({"answer": {"error": error}}).encode() + b"\n"


class _Headers:
    """Middleware that gives every answer the headers above."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
            await send(message)

        await self._app(scope, receive, with_headers)


class _Prompt(H11Protocol):  # type: ignore[misc]
    """Ends a connection on which a request's head has begun, or should have, and does not end in time."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._late is not None:
            self._late.cancel()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # the head has come
            if self._late is not None:
                self._late.cancel()
            self._late = None
        elif self._late is None:  # what trickles in does not begin anew
            self._late = self.loop.call_later(REQUEST_SECONDS, self.transport.close)


def application(token: str, *, timeout: float = 60.0, hub: bool = False) -> Starlette:
    """Return the ASGI application.

    Args:
        token: what a question must carry.
        timeout: seconds that a question may take.
        hub: whether a model that is not shipped may be asked of the hub.
    """
    answerer = Answerer(timeout, hub=hub)

    def unauthorized(request: Request) -> Response | None:
        given = request.headers.get("x-zeroplan-token", "")
        if secrets.compare_digest(given.encode(), token.encode()):
            return None
        return _error(403, "open the address that zeroplan ui prints in its terminal: it ends in this server's token")

    async def ask(request: Request) -> Response:
        if (refused := unauthorized(request)) is not None:
            return refused
        if request.headers.get("origin") != f"http://{request.headers['host']}":
            return _error(403, "a question of another page is not answered")
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return _error(415, "a question is application/json")
        body = b""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > MOST_BYTES:
                        return _error(413, f"a question has at most {MOST_BYTES >> 20} MiB, files included")
        except TimeoutError:
            return _error(408, f"a question must have come within {REQUEST_SECONDS:g} s")
        question = b" ".join(body.split(b"\n"))  # in JSON a line break stands between values only
        return StreamingResponse(answerer.ask(question), media_type="application/x-ndjson")

    async def list_names(request: Request) -> Response:
        if (refused := unauthorized(request)) is not None:
            return refused
        return JSONResponse(names(hub=hub))

    async def style(request: Request) -> Response:
        return Response(look(), media_type="text/css")

    async def plot(request: Request) -> Response:
        return Response(asset("plot.js"), media_type="text/javascript")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        answerer.close()

    mimetypes.add_type("text/javascript", ".js")  # some systems say text/plain, which no browser runs as a module
    folder = str(files("zeroplan.ui").joinpath("static"))
    return Starlette(
        routes=[
            Route("/api/ask", ask, methods=["POST"]),
            Route("/api/names", list_names),
            Route("/look.css", style),
            Route("/plot.js", plot),
            Mount("/", StaticFiles(directory=folder, html=True)),
        ],
        middleware=[Middleware(_Headers), Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])],
        lifespan=lifespan,
    )


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": {"text": text, "what": text, "where": "", "remedy": ""}}, status)


def listen(port: int) -> socket.socket:
    """Return a socket on 127.0.0.1; port 0 takes any that is free. Raises BadInput: a port that is taken or not allowed."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen()  # whoever reads the address can connect from now on
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"{port} cannot be used ({reason})", where="--port", remedy="give another, or 0 for any") from None
    return listening


def serve(listening: socket.socket, token: str, *, timeout: float, hub: bool) -> None:
    """Serve the page on a socket, for those who have the token, until the process is interrupted."""
    with contextlib.suppress(KeyboardInterrupt):
        server_of(application(token, timeout=timeout, hub=hub)).run(sockets=[listening])


def server_of(app: Starlette) -> uvicorn.Server:
    """Return the server of an application; it waits for no request that does not come."""
    config = uvicorn.Config(app, http=_Prompt, log_level="warning", access_log=False, server_header=False, lifespan="on")
    return uvicorn.Server(config)
