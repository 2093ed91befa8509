"""Megatron-Core's own model, buffers and schedules on H200s (benchmarks/megatron), held against what zeroplan says today."""

from __future__ import annotations

import json

import pytest

from benchmarks.megatron.cases import CASES, TWO_GPUS, Case
from benchmarks.megatron.compare import MEASURED, figures

ROWS = {row["id"]: row for row in map(json.loads, MEASURED.read_text().splitlines())}
#: What the plans of compiled losses on tp ranks do not have.
MISSED = {"M11": 0.01}
#: Reserved is planned too large where experts' buffers of changing sizes find room that the plan does not.
RESERVED = {"E02": 0.07}
#: What lies outside torch's allocator is the same to so many bytes: NCCL's communicators, kernels and the context.
OUTSIDE = 24 << 20


@pytest.mark.parametrize("case", [case for case in (*CASES, *TWO_GPUS) if case.id in ROWS], ids=lambda case: case.id)
def test_allocated_and_reserved(case: Case) -> None:
    told, row = figures(case), ROWS[case.id]
    assert row["ok"]
    assert told["allocated"] == pytest.approx(row["allocated"], rel=MISSED.get(case.id, 0.0005))
    assert told["reserved"] == pytest.approx(row["reserved"], rel=RESERVED.get(case.id, 0.03))


@pytest.mark.parametrize("case", TWO_GPUS, ids=lambda case: case.id)
def test_memory_outside_torch_is_that_of_the_communicators_that_are_made(case: Case) -> None:
    told, row = figures(case), ROWS[case.id]
    most = max(rank["total"] - rank["reserved"] for rank in row["per_rank"])
    assert told["total"] - told["reserved"] == pytest.approx(most, abs=OUTSIDE)


def test_every_other_case_was_measured() -> None:
    assert ROWS.keys() == {case.id for case in (*CASES, *TWO_GPUS)}
