"""Regenerating the shipped tapes: in shards, resumed where it ended, and judged complete by what is there."""

from __future__ import annotations

import json
import lzma
import os
from pathlib import Path

import pytest

from tests.workloads import flat_workload
from zeroplan.core.workload import Attention, DType, Precision
from zeroplan.models import catalog
from zeroplan.tape.codec import to_json
from zeroplan.tape.expanded import TapeModule, TapeParam
from zeroplan.tape.format import Piece, Segment, Tape, TapeProgram
from zeroplan.tape.options import options_for
from zeroplan.tapes import ship, shipped
from zeroplan.tapes.regenerate import TapeFolder, pack, units
from zeroplan.tapes.variants import variants, variants_of

MODEL = "distilbert/distilgpt2"


def _tape(width: int) -> dict[str, object]:
    program = TapeProgram((1, 0), (1, 0), [], [], [Piece(-1, False, [Segment()])])
    return to_json(Tape([TapeModule("", "Model", -1)], [TapeParam("w", (2, width), True, 2)], [0], [0], [], [program], 0))


def _part(folder: TapeFolder, key: str, content: object, ending: str = "json") -> None:
    path = Path(folder.part(MODEL, key, ending))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_every_flag_that_is_documented_has_its_variant() -> None:
    keys = [v.key for v in variants()]
    assert len(set(keys)) == len(keys)
    for attn in Attention:
        for again in (False, True):
            half = flat_workload(attn=attn, gradient_checkpointing=again)
            assert options_for(half).key in keys
            assert options_for(half, zero3=True).key in keys
    for precision in (Precision.FP32, Precision.AUTOCAST):
        for rank in (None, 8):
            assert options_for(flat_workload(precision=precision, dtype=DType.FP32, lora_rank=rank)).key in keys
    selective = flat_workload(gradient_checkpointing=True, checkpoint_policy="selective")
    assert options_for(selective, zero3=True).key in keys


def test_units_hold_each_tape_once_and_like_models_together() -> None:
    entries, wanted = tuple(catalog.entries()), variants()[:3]
    shared, ranks = "meta-llama/Llama-3.1-8B", variants_of("meta-llama/Llama-3.1-8B")[-1:]
    assert ranks[0].mesh.tp > 1
    work = units(entries, {e.id: wanted + ranks * (e.id == shared) for e in entries}, lambda model, key: True)
    tapes = [(model, unit.options.key) for unit in work for model in unit.models]
    assert sorted(tapes) == sorted([(shared, ranks[0].key), *((e.id, v.key) for e in entries for v in wanted)])
    family = {e.id: e.config["model_type"] for e in entries}
    assert all(len({family[m] for m in unit.models}) == 1 for unit in work)
    assert len(work[0].models) >= len(work[-1].models)


def test_what_is_traced_is_packed_and_not_asked_for_again(tmp_path: Path) -> None:
    folder = TapeFolder(str(tmp_path))
    _part(folder, "one", _tape(3))
    _part(folder, "two", "ValueError: no", "failed")
    assert folder.done(MODEL) == {"one", "two"}
    assert pack(MODEL, folder, "torch 9") == 1
    assert list(folder.parts(MODEL)) == []
    _part(folder, "two", _tape(4))  # it can be traced now
    assert pack(MODEL, folder, "torch 10") == 2
    content = shipped.read_file(shipped.path_of(MODEL, str(tmp_path)))
    assert content == {
        "one": json.loads(json.dumps(_tape(3))),
        "two": json.loads(json.dumps(_tape(4))),
        "software": {"one": "torch 9", "two": "torch 10"},
        "failed": {},
    }
    assert {"one", "two"} <= folder.done(MODEL)


def test_known_failures_are_traced_again_by_their_reason(tmp_path: Path) -> None:
    folder = TapeFolder(str(tmp_path))
    _part(folder, "one", _tape(3))
    _part(folder, "two", "not traced again since", "failed")
    _part(folder, "three", "ValueError: no", "failed")
    pack(MODEL, folder, "torch 9")
    assert {"one", "two", "three"} <= folder.done(MODEL)
    again = folder.done(MODEL, again="not traced again")
    assert "two" not in again
    assert {"one", "three"} <= again


def test_status_tells_missing_from_impossible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = TapeFolder(str(tmp_path))
    arguments = ["--into", str(tmp_path), "--only", MODEL, "--variants", "sdpa_none_half_zero3"]
    assert ship.main([*arguments, "--status"]) == 1
    assert f"missing: {MODEL} sdpa_none_half_zero3_lora" in capsys.readouterr().out
    _part(folder, "sdpa_none_half_zero3", _tape(3))
    _part(folder, "sdpa_none_half_zero3_lora", "TypeError: because", "failed")
    pack(MODEL, folder, "torch 9")
    assert ship.main([*arguments, "--status"]) == 0
    out = capsys.readouterr().out
    assert "1 cannot be traced" in out
    assert "TypeError: because" in out
    assert "1 of 2 tapes, 1 known to fail, 0 missing" in out


def test_compare_names_the_tapes_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, size in (("one", 3), ("two", 4)):
        folder = TapeFolder(str(tmp_path / name))
        program = TapeProgram((1, 0), (1, 0), [], [], [Piece(-1, False, [_marks(size)])])
        _part(folder, "sdpa_none_half", to_json(Tape([TapeModule("", "Model", -1)], [], [0], [], [], [program], 0)))
        pack(MODEL, folder, "")
    both = ["--only", MODEL, "--into", str(tmp_path / "one"), "--compare"]
    assert ship.main([*both, str(tmp_path / "one")]) == 0
    assert ship.main([*both, str(tmp_path / "two")]) == 1
    assert f"{MODEL} sdpa_none_half: 3 and 4 events" in capsys.readouterr().out


def _marks(count: int) -> Segment:
    """Events that allocate nothing: the marks of a micro batch, from the first on."""
    segment = Segment()
    for mark in range(count):
        for column, value in zip(
            (segment.op, segment.anchor, segment.offset, segment.aux_anchor, segment.aux, segment.kind),
            (7, -1, mark, -1, 0, 0),
            strict=True,
        ):
            column.append(value)
    return segment


@pytest.mark.long
def test_the_shipped_set_is_complete():
    """Every catalog model has every variant, or the reason why it cannot be traced (``--status`` says so, more slowly)."""
    missing = []
    for entry in catalog.entries():
        keys = [variant.key for variant in variants_of(entry.id)]
        text = lzma.decompress(Path(shipped.file_of(entry.id)).read_bytes()).replace(b'": ', b'":')
        missing += [f"{entry.id} {key}" for key in keys if f'"{key}":'.encode() not in text]
    assert not missing


def test_equal_tapes_have_one_file(tmp_path: Path) -> None:
    """The first model keeps it; a model that differs later has a file of its own again, and nobody loses tapes."""
    folder = str(tmp_path)
    models = ["a/one", "b/two", "c/three", "d/none"]
    for model, content in zip(models, ({"k": 1}, {"k": 1}, {"k": 2}), strict=False):
        shipped.write_file(shipped.path_of(model, folder), content)
    shipped.share_equal(models, folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a--one.json.xz", "c--three.json.xz", "same.json"]
    assert [shipped.read_file(shipped.file_of(model, folder)) for model in models] == [{"k": 1}, {"k": 1}, {"k": 2}, {}]
    shipped.write_file(shipped.path_of("b/two", folder), {"k": 2})
    shipped.share_equal(models, folder)
    assert [shipped.read_file(shipped.file_of(model, folder)) for model in models] == [{"k": 1}, {"k": 2}, {"k": 2}, {}]
    os.unlink(shipped.path_of("a/one", folder))
    shipped.share_equal(["b/two", "c/three"], folder)
    assert shipped.read_file(shipped.file_of("c/three", folder)) == {"k": 2}


def test_no_two_shipped_files_are_equal() -> None:
    files = [path.read_bytes() for path in Path(shipped.DATA).glob("*.json.xz")]
    assert len(set(files)) == len(files)
    assert all(os.path.exists(shipped.file_of(entry.id)) for entry in catalog.entries())
