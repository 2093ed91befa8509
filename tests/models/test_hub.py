"""The hub, played by a small server: what it serves, and each way in which it refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.patience import PATIENCE
from zeroplan.core.errors import BadInput
from zeroplan.models import hub
from zeroplan.models.load import load_model

pytest.importorskip("huggingface_hub")

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _safetensors() -> bytes:
    entries = {"h.0.w.weight": [4, 8], "h.0.v.weight": [8, 4], "h.1.w.weight": [4, 8], "h.1.v.weight": [8, 4]}
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [i * 128, i * 128 + 128]}
        for i, (name, shape) in enumerate(entries.items())
    }
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + b"\0" * 512


FILES: dict[str, dict[str, bytes]] = {
    "good/llama": {"config.json": json.dumps(LLAMA).encode()},
    "private/llama": {"config.json": json.dumps(LLAMA).encode()},
    "good/weights": {"model.safetensors": _safetensors()},
    "good/unknown": {"config.json": b'{"model_type": "from_the_future"}', "model.safetensors": _safetensors()},
    "bad/json": {"config.json": b"{"},
    "bad/list": {"config.json": b"[]"},
    "bad/empty": {},
}


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    tokens: ClassVar[list[str | None]] = []
    slow: ClassVar[threading.Event] = threading.Event()

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps the test's output clean."""

    def _refuse(self, status: int, code: str) -> None:
        body = json.dumps({"error": code}).encode()
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        token = self.headers.get("Authorization")
        Hub.tokens.append(token)
        parts = self.path.strip("/").split("/")
        repository = "/".join(parts[:2])
        if repository == "slow/llama":
            Hub.slow.wait()
            return self._refuse(500, "Slow")
        if repository == "gated/llama":
            return self._refuse(403, "GatedRepo")
        if repository == "broken/llama":
            return self._refuse(500, "Broken")
        if repository not in FILES or (repository == "private/llama" and token != "Bearer hf_good"):
            return self._refuse(401, "RepoNotFound")
        if len(parts) < 5 or parts[2] != "resolve":
            return self._refuse(404, "EntryNotFound")
        if parts[3] not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        data = FILES[repository].get("/".join(parts[4:]))
        if data is None:
            return self._refuse(404, "EntryNotFound")
        begin, end = 0, len(data)
        if self.headers.get("Range"):
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1 if last else end, end)
        self.send_response(206 if self.headers.get("Range") else 200)
        self.send_header("ETag", '"abc"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[begin:end])
        return None

    do_HEAD = do_GET


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _endpoint(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", address)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "PATIENCE", float(PATIENCE))  # on a slow machine its imports alone may take the usual one
    Hub.tokens.clear()


def test_config_from_the_hub() -> None:
    spec = load_model("good/llama")
    assert (spec.source, spec.name) == ("hub", "good/llama")
    assert spec.units == load_model(LLAMA).units


def test_token_and_revision_are_passed_on() -> None:
    assert load_model("private/llama", token="hf_good", revision="main").params == load_model(LLAMA).params
    assert Hub.tokens[0] == "Bearer hf_good"


def test_safetensors_metadata_where_there_is_no_config() -> None:
    spec = load_model("good/weights")
    assert spec.source == "hub"
    assert [(unit.name, unit.count) for unit in spec.units] == [("h.{}", 2)]
    assert spec.params == 4 * 32


def test_safetensors_metadata_where_the_config_is_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroplan.models.from_config._transformers_installed", lambda: False)
    spec = load_model("good/unknown")
    assert (spec.params, spec.model_type) == (128, "from_the_future")


def test_offline_reads_the_cache() -> None:
    load_model("good/llama")
    Hub.tokens.clear()
    assert load_model("good/llama", offline=True).params == load_model(LLAMA).params
    assert Hub.tokens == []


def test_a_hub_that_went_away_leaves_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    load_model("good/llama")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert load_model("good/llama").params == load_model(LLAMA).params


@pytest.mark.parametrize(
    ("repository", "options", "message"),
    [
        ("nobody/nothing", {}, "no model 'nobody/nothing' in the catalog or on the hub"),
        ("meta-lama/Llama-3.2-1B", {}, "did you mean 'meta-llama/Llama-3.2-1B'"),
        ("private/thing", {}, "check the id, or give --token if it is private"),
        ("private/llama", {}, "no model 'private/llama'"),
        ("private/llama", {"token": "hf_wrong"}, "no model 'private/llama'"),
        ("gated/llama", {}, "'gated/llama' is gated; ask for access at http://127.0.0.1"),
        ("good/llama", {"revision": "v9"}, "'good/llama' has no revision 'v9'"),
        ("broken/llama", {}, "the hub answered 500 for 'broken/llama'"),
        ("bad/json", {}, "is not JSON"),
        ("bad/list", {}, "config.json holds no object"),
        ("bad/empty", {}, "holds neither a config.json nor safetensors files"),
        ("not a name!", {}, "'not a name!' is no model id"),
        ("good/llama", {"offline": True}, "is not in the catalog, and offline, the local cache does not hold it"),
        ("good/unknown", {"offline": True}, "offline, the local cache does not hold it"),
    ],
)
def test_refusals(repository: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_model(repository, where="MODEL", **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_else_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    load_model("good/llama")
    for repository in ("nobody/nothing", "broken/llama"):
        with pytest.raises(BadInput):
            load_model(repository)
    assert capfd.readouterr() == ("", "")


def test_offline_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BadInput, match="offline, the local cache does not hold it"):
        load_model("good/llama")
    assert Hub.tokens == []


def test_network_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        BadInput, match="'nobody/nothing' is not in the catalog, and the hub cannot be reached; check the network"
    ):
        load_model("nobody/nothing")


def test_a_slow_hub_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "PATIENCE", 1.2)
    try:
        with pytest.raises(BadInput, match="the hub did not answer within 1 s"):
            load_model("slow/llama")
    finally:
        Hub.slow.set()
