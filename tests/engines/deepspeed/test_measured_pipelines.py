"""DeepSpeed on two H200s, mostly its PipelineModule (benchmarks/mesh/deepspeed_ranks.py), against what zeroplan says today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.mesh.deepspeed_ranks import CASES, PREDICTED, figures
from zeroplan.tapes import can_trace

ROWS = {row["id"]: row for row in map(json.loads, PREDICTED.with_name("mesh_deepspeed.jsonl").read_text().splitlines())}


@pytest.mark.slow
@pytest.mark.skipif(not can_trace(), reason="tracing needs torch and transformers")
@pytest.mark.parametrize(
    "number", ["P01", *(pytest.param(name, marks=pytest.mark.long) for name in ("P00", "P02", "U04", "K00", "K01", "K03"))]
)
def test_allocated_reserved_and_total(number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told, row = figures(next(case for case in CASES if case.id == number)), ROWS[number]
    assert told["allocated"] == pytest.approx(row["allocated"], rel=0.002)
    assert told["reserved"] == pytest.approx(row["reserved"], rel=0.03)
    assert told["total"] == pytest.approx(row.get("total", told["total"]), rel=0.02)
