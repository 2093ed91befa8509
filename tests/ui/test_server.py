"""The page's server: it answers its own page, and nobody else; a question has bounds of size and time."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.patience import PATIENCE
from tests.ui.conftest import Serve, Served
from zeroplan.ui.answers import answer

Cli = Callable[..., tuple[int, str, str]]
QUESTION = {"model": "openai-community/gpt2", "gpus": 2, "gpu": "T4"}


def _ask(served: Served, body: bytes, **headers: str) -> tuple[int, list[Any]]:
    """Send a question as the page does, with other headers where given; returns the status and the messages."""
    port = served.port
    sent = {"Origin": f"http://127.0.0.1:{port}", "Content-Type": "application/json", "X-Zeroplan-Token": served.token}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("POST", "/api/ask", body, {name: value for name, value in sent.items() if value})
    got = connection.getresponse()
    text = got.read().decode()
    connection.close()
    try:
        return got.status, [json.loads(line) for line in text.splitlines()]
    except ValueError:
        return got.status, [text]


def _get(served: Served, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    got = connection.getresponse()
    found = got.status, {name.lower(): value for name, value in got.getheaders()}, got.read()
    connection.close()
    return found


def test_it_answers_as_the_function_does(served: Served) -> None:
    status, messages = _ask(served, json.dumps(QUESTION, indent=2).encode())
    assert status == 200
    assert messages[-1]["answer"] == json.loads(json.dumps(answer(QUESTION)))
    kinds = [next(iter(message)) for message in messages]
    assert kinds[-1] == "answer"
    assert kinds[:-1].count("so_far") == 1
    assert set(kinds[:-1]) == {"plan", "so_far"}
    assert kinds.count("plan") == 2 * len(messages[-1]["answer"]["report"]["plans"])  # by its formulas, then simulated


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://example.org"}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Host": "example.org", "Origin": "http://example.org"}, 400),
        ({"Content_Type": "text/plain"}, 415),
        ({"X_Zeroplan_Token": ""}, 403),
        ({"X_Zeroplan_Token": "a" * 32}, 403),
        ({"X_Zeroplan_Token": "ü"}, 403),
    ],
    ids=str,
)
def test_other_pages_are_refused(headers: dict[str, str], status: int, served: Served) -> None:
    assert _ask(served, json.dumps(QUESTION).encode(), **headers)[0] == status


def test_another_user_of_this_machine_reads_nothing(served: Served, tmp_path: Path) -> None:
    """Who reaches the port without the token gets the page's own files, and no answer from a file of the owner's."""
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "gpt2", "n_embd": 96}')
    stranger = Served(served.port, "")
    status, messages = _ask(stranger, json.dumps({"model": str(config), "gpu": "T4"}).encode())
    assert status == 403
    assert "open the address that zeroplan ui prints" in messages[0]["error"]["text"]
    assert _get(stranger, "/api/names")[0] == 403
    assert _get(stranger, "/")[0] == 200


def test_a_browser_is_opened_by_a_file_of_ones_own(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line, and so an address in it, can be read by every user."""
    opened: list[tuple[str, int, str]] = []

    def look(address: str) -> None:
        path = Path(urlsplit(address).path)
        opened.append((address, path.parent.stat().st_mode & 0o777, path.read_text()))

    monkeypatch.setattr("webbrowser.open", look)
    monkeypatch.setattr("zeroplan.ui.server.serve", lambda listening, *args, **options: listening.close())
    code, out, _ = cli("ui", "--port", "0")
    ((address, mode, text),) = opened
    assert (code, mode) == (0, 0o700)
    found = re.search(r"http://127\.0\.0\.1:\d+/\?token=(\S{32})", out)
    assert found is not None
    assert found[0] in text
    assert found[1] not in address
    assert not Path(urlsplit(address).path).exists()  # it goes with the server


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHo", b"POST /api/ask HTTP/1.1\r\nContent-Length: 9\r\n"])
def test_a_request_that_never_ends_is_ended(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    server = pytest.importorskip("zeroplan.ui.server")
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.01)

    async def ended() -> bytes:
        running = server.server_of(server.application("token"))
        task = asyncio.create_task(running.serve(sockets=[listening]))
        reader, writer = await asyncio.open_connection("127.0.0.1", listening.getsockname()[1])
        writer.write(sent)
        got: bytes = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
        running.should_exit = True
        await task
        return got

    listening = server.listen(0)
    assert asyncio.run(ended()) == b""


def test_another_name_of_this_machine_is_served_by_that_name_only(served: Served) -> None:
    local = {"Host": f"localhost:{served.port}", "Origin": f"http://localhost:{served.port}"}
    assert _ask(served, b"{}", **local)[0] == 200
    assert _ask(served, b"{}", Host=local["Host"])[0] == 403
    assert _get(served, "/", Host="example.org")[0] == 400


def test_bounds_of_size(served: Served) -> None:
    status, messages = _ask(served, json.dumps({"model": "x" * (8 << 20)}).encode())
    assert status == 413
    assert messages == [{"error": {**messages[0]["error"], "text": "a question has at most 8 MiB, files included"}}]
    for body, says in ((b"", "is not JSON"), (b"\xff\n", "UTF-8"), (b"[" * 5000, "levels"), (b"[1]", "is no object")):
        status, messages = _ask(served, body)
        assert status == 200
        assert says in messages[-1]["answer"]["error"]["text"], body
    assert "answer" in _ask(served, json.dumps(QUESTION).encode())[1][-1]


def test_a_question_that_takes_too_long_is_ended(serve: Serve) -> None:
    served = serve("--timeout", "0.01")
    for _ in range(2):  # its process is gone, and another takes the next question
        message = _ask(served, json.dumps(QUESTION).encode())[1][-1]  # after what it may have said before
        assert message["answer"]["error"]["text"].startswith("the question took longer than 0.01 s; ")


def test_the_files_are_the_pages_alone(served: Served) -> None:
    status, headers, body = _get(served, "/")
    assert status == 200
    assert b"<title>zeroplan" in body
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "http" not in policy
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert _get(served, "/main.js")[1]["content-type"].startswith("text/javascript")
    for path in ("/../server.py", "/%2e%2e/server.py", "/../../../../etc/passwd", "/server.py", "/api/"):
        assert _get(served, path)[0] == 404, path
    offered = json.loads(_get(served, "/api/names", X_Zeroplan_Token=served.token)[2])
    assert offered["hub"] is False
    assert "openai-community/gpt2" in {one["model"] for one in offered["models"]}


def test_the_verb_refuses_what_it_cannot_do(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "zeroplan.ui.server", raising=False)
    code, _, err = cli("ui", "--no-browser")
    assert (code, err) == (2, 'zeroplan: zeroplan ui: needs uvicorn; pip install "zeroplan[ui]"\n')


def test_bad_options_are_one_line(cli: Cli, served: Served) -> None:
    taken = str(served.port)
    for words, where in ((("--port", taken), "--port"), (("--port", "99999"), "--port"), (("--timeout", "0"), "--timeout")):
        code, _, err = cli("ui", "--no-browser", *words)
        assert code == 2
        assert err.startswith(f"zeroplan: {where}: ")
        assert err.count("\n") == 1
