"""The page's server: it answers its own page, and nobody else; a question has bounds of size and time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.patience import PATIENCE
from zeroplan.ui.answers import answer

Cli = Callable[..., tuple[int, str, str]]
QUESTION = {"model": "openai-community/gpt2", "gpus": 2, "gpu": "T4"}


def _ask(port: int, body: bytes, **headers: str) -> tuple[int, list[Any]]:
    """Send a question as the page does, with other headers where given; returns the status and the messages."""
    sent = {"Origin": f"http://127.0.0.1:{port}", "Content-Type": "application/json"}
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


def _get(port: int, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("GET", path, headers=headers)
    got = connection.getresponse()
    found = got.status, {name.lower(): value for name, value in got.getheaders()}, got.read()
    connection.close()
    return found


def test_it_answers_as_the_function_does(port: int) -> None:
    status, messages = _ask(port, json.dumps(QUESTION, indent=2).encode())
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
    ],
    ids=str,
)
def test_other_pages_are_refused(headers: dict[str, str], status: int, port: int) -> None:
    assert _ask(port, json.dumps(QUESTION).encode(), **headers)[0] == status


def test_another_name_of_this_machine_is_served_by_that_name_only(port: int) -> None:
    local = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}
    assert _ask(port, b"{}", **local)[0] == 200
    assert _ask(port, b"{}", Host=local["Host"])[0] == 403
    assert _get(port, "/", Host="example.org")[0] == 400


def test_bounds_of_size(port: int) -> None:
    status, messages = _ask(port, json.dumps({"model": "x" * (1 << 20)}).encode())
    assert status == 413
    assert messages == [{"error": {**messages[0]["error"], "text": "a question has at most 1 MiB, files included"}}]
    for body, says in ((b"", "is not JSON"), (b"\xff\n", "UTF-8"), (b"[" * 5000, "levels"), (b"[1]", "is no object")):
        status, messages = _ask(port, body)
        assert status == 200
        assert says in messages[-1]["answer"]["error"]["text"], body
    assert "answer" in _ask(port, json.dumps(QUESTION).encode())[1][-1]


def test_a_question_that_takes_too_long_is_ended(serve: Callable[..., int]) -> None:
    port = serve("--timeout", "0.01")
    for _ in range(2):  # its process is gone, and another takes the next question
        message = _ask(port, json.dumps(QUESTION).encode())[1][-1]  # after what it may have said before
        assert message["answer"]["error"]["text"].startswith("the question took longer than 0.01 s; ")


def test_the_files_are_the_pages_alone(port: int) -> None:
    status, headers, body = _get(port, "/")
    assert status == 200
    assert b"<title>zeroplan" in body
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "http" not in policy
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert _get(port, "/main.js")[1]["content-type"].startswith("text/javascript")
    for path in ("/../server.py", "/%2e%2e/server.py", "/../../../../etc/passwd", "/server.py", "/api/"):
        assert _get(port, path)[0] == 404, path
    offered = json.loads(_get(port, "/api/names")[2])
    assert offered["hub"] is False
    assert "openai-community/gpt2" in {one["model"] for one in offered["models"]}


def test_the_verb_refuses_what_it_cannot_do(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "zeroplan.ui.server", raising=False)
    code, _, err = cli("ui", "--no-browser")
    assert (code, err) == (2, 'zeroplan: zeroplan ui: needs uvicorn; pip install "zeroplan[ui]"\n')


def test_bad_options_are_one_line(cli: Cli, port: int) -> None:
    for words, where in ((("--port", str(port)), "--port"), (("--port", "99999"), "--port"), (("--timeout", "0"), "--timeout")):
        code, _, err = cli("ui", "--no-browser", *words)
        assert code == 2
        assert err.startswith(f"zeroplan: {where}: ")
        assert err.count("\n") == 1
