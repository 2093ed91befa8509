"""FSDP2 with several micro batches a step, of which only the last reduces: a measured run, mark by mark."""

from __future__ import annotations

import pytest

from benchmarks.rows import HERE, load_rows, request_of
from zeroplan.core.buffers import Buffer
from zeroplan.planner.estimate import estimate_runs


def test_whole_gradients_wait_in_the_reductions_dtype_as_measured() -> None:
    (row,) = (row for row in load_rows(HERE / "results" / "blind_4gpu.jsonl") if row["id"] == "L21")
    (run,) = estimate_runs(request_of(row, depth="simulated")).runs
    assert run is not None
    assert run.plan.gpu.peak_allocated == pytest.approx(row["peak_allocated"], rel=0.002)
    assert run.plan.gpu.peak_reserved == pytest.approx(row["peak_reserved"], rel=0.02)
    for mark, measured in zip(run.simulation.timeline.marks, row["marks"], strict=False):
        assert mark.name.startswith(measured["at"])
        assert mark.allocated == pytest.approx(measured["alloc"], rel=0.002), mark.name
    lines = [line.bytes for line in run.plan.lines if line.buffer == Buffer.GRAD_FULL.value]
    assert lines == [4 * row["trainable"]]
