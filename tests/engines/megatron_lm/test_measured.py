"""Megatron-Core's own model, buffers and schedules on H200s (benchmarks/megatron), held against what zeroplan says today."""

from __future__ import annotations

import json

import pytest

from benchmarks.megatron.cases import CASES, TWO_GPUS, Case
from benchmarks.megatron.compare import MEASURED, figures

ROWS = {row["id"]: row for row in map(json.loads, MEASURED.read_text().splitlines())}
#: What the plans of compiled losses on tp ranks and of GPT recomputed do not have.
MISSED = {"M11": 0.01, "M16": 0.01}
#: These ran without `deallocate_pipeline_outputs`, which Megatron-LM sets: a stage kept what it had sent.
KEPT_OUTPUTS = {"M17": 0.002, "M19": 0.005, "M20": 0.003, "N03": 0.002}
#: Not measured: time ran out.
LEFT = {"E02", "N04"}


@pytest.mark.parametrize("case", [case for case in (*CASES, *TWO_GPUS) if case.id in ROWS], ids=lambda case: case.id)
def test_allocated_and_reserved(case: Case) -> None:
    told, row = figures(case), ROWS[case.id]
    assert row["ok"]
    allowed = MISSED.get(case.id) or KEPT_OUTPUTS.get(case.id) or 0.0005
    assert told["allocated"] == pytest.approx(row["allocated"], rel=allowed)
    assert told["reserved"] == pytest.approx(row["reserved"], rel=0.03)


def test_every_other_case_was_measured() -> None:
    assert ROWS.keys() | LEFT == {case.id for case in (*CASES, *TWO_GPUS)}
