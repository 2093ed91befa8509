"""What lives between two steps, against every measured DeepSpeed row."""

from __future__ import annotations

from typing import Any

from benchmarks.rows import request_of
from zeroplan.planner.estimate import estimate_report


def _applied(row: dict[str, Any]) -> bool:
    return row["engine"] == "deepspeed" and row["ok"]


def test_live_after_step_is_within_one_per_cent_for_95_per_cent_of_rows(measured_rows: list[dict[str, Any]]) -> None:
    errors = {}
    for row in filter(_applied, measured_rows):
        (plan,) = estimate_report(request_of(row, depth="formula")).plans
        measured = [mark["alloc"] for mark in row["marks"] if mark["at"].startswith("step")][-1]
        errors[row["id"]] = plan.gpu.live_after_step / measured - 1
    assert len(errors) >= 38
    off = {name: f"{error:+.2%}" for name, error in errors.items() if abs(error) > 0.01}
    assert len(off) <= 0.05 * len(errors), off


def test_stage_3_can_need_more_than_stage_2(measured_rows: list[dict[str, Any]]) -> None:
    """No law says that an engine's memory falls with the stage: these runs are counter-examples, and so are their plans."""
    rows = {row["id"]: row for row in measured_rows}
    for pair in (("D10", "D11"), ("D03", "D04")):
        measured = [rows[name]["peak_allocated"] for name in pair]
        planned = [estimate_report(request_of(rows[name])).plans[0].gpu.peak_allocated for name in pair]
        assert measured[1] > measured[0]
        assert planned[1] > planned[0]
