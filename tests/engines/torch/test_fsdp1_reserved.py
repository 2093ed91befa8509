"""FSDP 1's reserved memory, mark by mark, against measured runs: flattening, the first forward, gradients, reductions."""

from __future__ import annotations

import pytest

from benchmarks.rows import TASKS, load_rows, request_of
from zeroplan.planner.estimate import estimate_runs


@pytest.mark.parametrize(
    "row, closest",
    [
        pytest.param("X02", 0.0005, id="SHARD_GRAD_OP"),
        pytest.param("X03", 0.01, id="NO_SHARD"),
        pytest.param("X06", 0.0005, id="three micro batches"),
    ],
)
def test_reserved_is_as_measured(row: str, closest: float) -> None:
    (measured,) = (one for one in load_rows(TASKS) if one.get("id") == row)
    (run,) = estimate_runs(request_of(measured, depth="simulated")).runs
    assert run is not None
    assert run.plan.fits is not None
    for mark, seen in zip(run.simulation.timeline.marks, measured["marks"], strict=False):
        assert mark.name.startswith(seen["at"])
        assert mark.reserved == pytest.approx(seen["reserved"], rel=closest), mark.name
