"""The cache of traced tapes: keyed by what matters, never half a file, never an error for what it holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zeroplan.tape.expanded import TapeModule, TapeParam
from zeroplan.tape.format import Piece, Segment, Tape, TapeProgram
from zeroplan.tape.options import Arithmetic, TraceOptions
from zeroplan.tapes import cache

CONFIG = {"model_type": "llama", "hidden_size": 64}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _tape() -> Tape:
    program = TapeProgram((1, 0), (1, 0), [], [], [Piece(-1, False, [Segment()])])
    return Tape([TapeModule("", "Model", -1)], [TapeParam("w", (2, 3), True, 2)], [0], [0], [], [program], [12])


def test_what_is_written_is_read() -> None:
    assert cache.read(CONFIG, TraceOptions()) is None
    assert cache.write(CONFIG, TraceOptions(), _tape()) is not None
    read = cache.read(CONFIG, TraceOptions())
    assert read is not None
    assert (read.params, read.held) == (_tape().params, [12])
    assert [name for name in os.listdir(cache.folder()) if name.endswith(".part")] == []


def test_config_and_options_tell_tapes_apart_and_noise_does_not() -> None:
    path = cache.path_of(CONFIG, TraceOptions())
    assert cache.path_of({**CONFIG, "hidden_size": 65}, TraceOptions()) != path
    assert cache.path_of(CONFIG, TraceOptions(arithmetic=Arithmetic.FP32)) != path
    assert cache.path_of(CONFIG, TraceOptions(zero3=True)) != path
    assert cache.path_of({**CONFIG, "torch_dtype": "bfloat16", "_name_or_path": "x"}, TraceOptions()) == path


@pytest.mark.parametrize("content", [b"", b"not xz", b"\xfd7zXZ\x00"])
def test_a_broken_file_is_as_none(content: bytes) -> None:
    path = cache.path_of(CONFIG, TraceOptions())
    os.makedirs(os.path.dirname(path))
    Path(path).write_bytes(content)
    assert cache.read(CONFIG, TraceOptions()) is None


def test_a_folder_that_cannot_be_made_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert cache.write(CONFIG, TraceOptions(), _tape()) is None
