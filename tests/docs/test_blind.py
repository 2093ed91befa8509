"""First predictions stay beside the runs that they were made for."""

from __future__ import annotations

from benchmarks.blind import RIGHT, Blindness, blind_runs


def test_first_predictions_are_kept_with_their_misses() -> None:
    runs = blind_runs()
    by_id = {run.id: run for run in runs if run.campaign != runs[0].campaign}
    assert len(runs) >= 144
    assert -0.41 < by_id["B06"].peak_allocated < -0.39  # mended since, and still a miss
    assert abs(by_id["X08"].peak_allocated) < RIGHT  # the run of that name, not a later prediction that nobody has measured


def test_the_worst_keeps_its_sign() -> None:
    assert Blindness.of([0.001, -0.2, 0.1]) == Blindness(runs=3, right=1, median=0.1, worst=-0.2)
