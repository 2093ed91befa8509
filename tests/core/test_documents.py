"""Files that people name: plain objects within limits, one clear line for all else, in time and memory that are bounded."""

from __future__ import annotations

import json
import os
import socket
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.documents import (
    CONFIG,
    parse_relaxed_json,
    parse_toml,
    parse_yaml,
    plain_copy,
    read_document,
    without_comments,
)
from zeroplan.core.plumbing.files import file_kind, read_bytes, read_head

#: Bytes that refusing any file may take.
ROOM = 300 << 20


def refusal(call: Callable[[], Any]) -> str:
    """The one line that the call raises, within the limit of memory."""
    tracemalloc.start()
    try:
        with pytest.raises(BadInput) as caught:
            call()
        assert tracemalloc.get_traced_memory()[1] < ROOM
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestFiles:
    def test_what_is_no_file(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "link").symlink_to(tmp_path / "pipe")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(tmp_path / "socket"))
        for name, what in {
            "pipe": "is a pipe, not a file",
            "link": "is a pipe, not a file",
            "socket": "is a socket, not a file",
            "/dev/zero": "is a device, not a file",
            "": "is a folder, not a file",
            "missing": "no such file",
            "a\0b": "cannot be read (",
        }.items():
            assert what in refusal(lambda name=name: read_bytes(str(tmp_path / name), 10))  # type: ignore[misc]

    def test_limits(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"x" * 2048)
        assert read_bytes(str(path), 2048) == b"x" * 2048
        assert "is larger than 1 KiB" in refusal(lambda: read_bytes(str(path), 1024))
        assert read_head(str(path), 3) == (b"xxx", 2048)
        assert (file_kind(str(path)), file_kind(str(tmp_path))) == ("file", "folder")

    def test_where_names_the_flag(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match=rf"^MODEL: {tmp_path}/x does not exist; look$"):
            read_bytes(str(tmp_path / "x"), 1, where="MODEL", remedy="look")


def bomb(merge: bool) -> str:
    """Each line uses the one above nine times, as an alias or by merging its keys."""
    names = "abcdefghijklmnopqrst"
    lines = ["a: &a {k: 1}" if merge else "a: &a [1]"]
    for old, new in pairwise(names):
        uses = ", ".join([f"*{old}"] * 3)
        lines.append(f"{new}: &{new}\n  <<: [{uses}]\n  k{new}: 1" if merge else f"{new}: &{new} [{uses}]")
    return "\n".join(lines)


HOSTILE: dict[str, tuple[str, str, str]] = {
    "unterminated strings": ("json", '{"a": "' + 'x"' * 300_000, "is not JSON"),
    "unterminated comments": ("json", "{" + "/*" * 300_000, "is not JSON"),
    "half comments": ("json", "{" + "/" * 900_000, "is not JSON"),
    "commas in space": ("json", '{"a": 1' + ",   " * 150_000 + "x", "is not JSON"),
    "one long space": ("json", '{"a": 1,' + " " * 900_000 + "x", "is not JSON"),
    "backslashes": ("json", '{"a": "' + "\\" * 900_001, "is not JSON"),
    "many values": ("json", "[" + "[]," * 300_000 + "[]]", "holds more than 200,000 values"),
    "deep lists": ("json", "[" * 150_000, "is nested deeper than 32 levels"),
    "a number of many digits": ("json", '{"a": ' + "9" * 5_000 + "}", "is not usable JSON"),
    "a large number": ("json", '{"a": ' + "9" * 1_000 + "}", "more than 1,024 bits"),
    "no finite number": ("json", '{"a": 1e999}', "holds inf"),
    "keys that stand twice": ("json", '{"a": 1, "a": 2}', "the key 'a' stands twice"),
    "aliases": ("yaml", bomb(merge=False), "holds more than 20,000 values"),
    "merge keys": ("yaml", bomb(merge=True), "merges more than 10,000 keys"),
    "many aliases": ("yaml", "a: &a 1\nb: [" + "*a, " * 100 + "]", "uses more than 64 aliases"),
    "itself": ("yaml", "a: &a [*a]", "is nested deeper than 32 levels"),
    "deep YAML": ("yaml", "[" * 20_000, "is nested deeper than 32 levels"),
    "many YAML values": ("yaml", "[" + "1," * 25_000 + "]", "holds more than 20,000 values"),
    "a hexadecimal number": ("yaml", "a: 0x" + "f" * 40_000, "a number of more than 64 characters"),
    "a sexagesimal number": ("yaml", "a: 1" + ":1" * 20_000, "a number of more than 64 characters"),
    "a sexagesimal fraction": ("yaml", "a: 1" + ":1" * 20_000 + ".5", "a number of more than 64 characters"),
    "python objects": ("yaml", "a: !!python/object/apply:os.system [ls]", "is not YAML"),
    "a list as a key": ("yaml", "? [a]\n: b", "is not YAML"),
    "no number": ("yaml", "a: !!int x", "is not usable YAML"),
    "no date": ("yaml", "a: 2024-13-45", "is not usable YAML"),
    "control characters": ("yaml", "a: \x01", "is not YAML"),
    "much YAML": ("yaml", "a: " + "x " * 200_000, "is larger than 256 KiB"),
    "deep TOML": ("toml", "a = " + "[" * 20_000, "is not usable TOML"),
    "dotted TOML": ("toml", ".".join("a" * 100_000) + " = 1", "is nested deeper than 32 levels"),
    "a dotted TOML header": ("toml", "[" + ".".join("a" * 100) + "]" + "\nb = 1" * 10_000, "is nested deeper than 32 levels"),
    "many TOML values": ("toml", "a = 1\n" * 30_000, "holds more than 20,000 values"),
    "TOML that is none": ("toml", "a = ", "is not TOML"),
    "a list": ("json", "[1]", "holds a list, not an object"),
    "nothing": ("yaml", "", "holds null, not an object"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_one_line(name: str, tmp_path: Path) -> None:
    ending, text, holds = HOSTILE[name]
    path = tmp_path / f"file.{ending}"
    path.write_text(text)
    said = refusal(lambda: read_document(str(path)))
    assert holds in said
    assert said.startswith(str(path))


def test_endings_say_what_a_file_is(tmp_path: Path) -> None:
    for ending, text in {
        "json": '{"a": {"b": [1, 2.5, true, null, "x"]}}  // and a comment',
        "yaml": "a:\n  b: [1, 2.5, true, null, x]",
        "YML": "{a: {b: [1, 2.5, true, null, x]}}",
        "cfg": '{"a": {"b": [1, 2.5, true, null, "x"],},}',
    }.items():
        path = tmp_path / f"file.{ending}"
        path.write_text(text)
        assert read_document(str(path)) == {"a": {"b": [1, 2.5, True, None, "x"]}}
    path = tmp_path / "file.toml"
    path.write_text("[a]\nb = [1, 2.5, true]\nd = 1979-05-27")
    assert read_document(str(path)) == {"a": {"b": [1, 2.5, True], "d": "1979-05-27"}}


def test_honest_yaml_reads() -> None:
    text = "base: &base {lr: 1.0e-4, size: 0x10}\nrun:\n  <<: *base\n  time: 1:30\n  day: 2024-01-02\n  1: one\n"
    assert parse_yaml(text, "file") == {
        "base": {"lr": 1e-4, "size": 16},
        "run": {"lr": 1e-4, "size": 16, "time": 90, "day": "2024-01-02", "1": "one"},
    }
    assert parse_toml("a.b = 1", "file") == {"a": {"b": 1}}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None)
@given(JSON)
def test_json_is_read_as_it_is(value: Any) -> None:
    text = json.dumps(value)
    assert parse_relaxed_json(text, "file") == (value, True)
    assert without_comments(text) == text
    assert plain_copy(value, "file") == value


@settings(deadline=None)
@given(JSON, st.sampled_from(['// "x,}\n', "/* , ] */", "# {\n", "/***/", " "]))
def test_comments_and_trailing_commas_change_nothing(value: Any, comment: str) -> None:
    text = json.dumps({"a": value, "b": [value]}, indent=1).replace("\n", f"{comment}\n")
    if "\n" not in json.dumps(value):
        text = text[:-1] + f",{comment}\n}}"
        assert parse_relaxed_json(text, "file")[0] == {"a": value, "b": [value]}


def test_objects_are_copied_and_held_to_json() -> None:
    config = {"a": [1, {"b": 2}], "c": (1, 2)}
    copied = plain_copy(config, "ds_config")
    assert copied == {"a": [1, {"b": 2}], "c": [1, 2]}
    assert copied["a"] is not config["a"]
    for bad, what in (({1: 2}, "the key '1' is not a string"), ({"a": {1}}, "holds a set"), ({"a": float("nan")}, "holds nan")):
        with pytest.raises(BadInput, match=what):
            plain_copy(bad, "ds_config")
    cycle: dict[str, Any] = {}
    cycle["a"] = cycle
    assert f"nested deeper than {CONFIG.depth}" in refusal(lambda: plain_copy(cycle, "ds_config"))
