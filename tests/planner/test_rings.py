"""What the first ranks that share a sample keep beyond the last: as two GPUs measured it, and in the interval that decides."""

from __future__ import annotations

import json

import pytest

from benchmarks.mesh.cases import TWO_GPUS
from benchmarks.mesh.compare import MEASURED
from benchmarks.mesh.predict import request_of
from zeroplan.planner.resolve import resolve
from zeroplan.planner.simulated import beyond_last_rank


@pytest.mark.parametrize("number", ["R04", "R05", "R25", "R00"])
def test_the_first_rank_has_what_was_measured(number: str) -> None:
    case = next(case for case in TWO_GPUS if case.id == number)
    row = next(row for row in map(json.loads, MEASURED.read_text().splitlines()) if row["id"] == number)
    first, last = (rank["allocated"] for rank in row["per_rank"])
    assert beyond_last_rank(resolve(request_of(case)).cases[0]) == first - last
