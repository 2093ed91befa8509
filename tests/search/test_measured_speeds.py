"""Predicted step times against measured ones: the order must hold, and most must be near. Nothing is fitted to a row."""

from __future__ import annotations

import pytest

from benchmarks.recommend.speeds import COUNTS, kendall, predictions, prepared, within
from benchmarks.rows import MEASURED, load_rows


def test_measured_steps_are_ranked_and_most_are_near() -> None:
    assert COUNTS.exists()
    rows = prepared(load_rows(MEASURED))
    assert len(rows) >= 40
    pairs = predictions(rows)
    assert kendall(pairs) >= 0.75  # speeds of these rows are rough: several runs shared their host
    assert within(pairs, 0.15) >= 0.55
    assert within(pairs, 0.50) >= 0.90


def test_kendall_by_hand() -> None:
    assert kendall([(1, 1), (2, 2), (3, 3)]) == 1
    assert kendall([(1, 3), (2, 2), (3, 1)]) == -1
    assert kendall([(1, 1), (2, 3), (3, 2)]) == pytest.approx(1 / 3)


def test_each_stage_is_near_on_the_whole() -> None:
    rows = prepared(load_rows(MEASURED))
    for stage in (0, 1, 2, 3):
        chosen = [row for row in rows if row[0]["stage"] == stage and "offload" not in str(row[0]["zero_overrides"])]
        ratios = sorted(p / m for p, m in predictions(chosen))
        assert 0.75 < ratios[len(ratios) // 2] < 1.3, stage


@pytest.mark.torch
def test_the_grid_is_specified_and_compared() -> None:
    from benchmarks.recommend.measure import SETUPS, compare, ranked, specs

    name = "llama1b_4x24"
    setup = SETUPS[name]
    written = list(specs(name, setup))
    assert [spec.id for spec in written] == [f"{name}-{i:02d}" for i in range(len(setup.grid))]
    assert all(spec.cap is not None and spec.cap < 24 << 30 for spec in written)
    rows = []
    for one in ranked(name, setup).ranking:
        row = {"id": f"{name}-{one.index:02d}", "ok": True, "tokens_per_s": one.tokens_per_second}
        if one.fits is False:
            row |= {"ok": False, "error": "out of memory"}
        rows.append(row | {"step_seconds": one.step_seconds * 1.1})
    found = compare(name, setup, rows)
    assert (found["kendall_tau"], found["within_15_percent"], found["reached_of_best"]) == (1.0, 1.0, 1.0)
    assert found["said_to_fit_and_died"] == []
    assert found["of_those_died"] == found["said_not_to_fit"]
