"""Host memory of measured runs whose peak hangs on one thing that DeepSpeed's source says."""

from __future__ import annotations

import pytest

from benchmarks.rows import EXTRA, MEASURED, load_rows, request_of
from zeroplan.planner.estimate import estimate_runs


@pytest.mark.parametrize(
    ("row_id", "within"),
    [
        ("K01", 0.002),  # ratio 0.5: a sub-group's gradient is pinned on the host before it goes to the GPU
        ("K25", 0.002),  # torch_adam: a square root and a quotient of the whole partition
        ("D35", 0.002),  # two sub-groups: the second step casts the larger one beside all states
        ("K09", 0.005),  # the optimizer on the host: its kernels are never loaded
        ("F17", 0.005),  # experts: grouped matrix products
        ("E21", 0.010),  # no rotary embedding, no norms of slices
    ],
)
def test_peak_resident_memory(row_id: str, within: float) -> None:
    (row,) = (row for row in load_rows(MEASURED, EXTRA) if row["id"] == row_id)
    (run,) = estimate_runs(request_of(row, depth="simulated")).runs
    assert run is not None
    assert run.plan.cpu.per_node == pytest.approx(row["host_rss_peak_all_ranks"], rel=within)
