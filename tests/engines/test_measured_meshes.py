"""Rank 0 of meshes of fake ranks on an H200 (benchmarks/mesh), held against what zeroplan says today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.mesh.cases import CASES, TWO_GPUS
from benchmarks.mesh.compare import MEASURED
from benchmarks.mesh.predict import PREDICTED, figures, plan_of
from zeroplan.tapes import can_trace

#: One trace serves all pipelines without tensor parallelism, another the split tokens.
HELD = (
    "P00",
    "P03",
    "R00",
    "R06",
    "R07",
    *(
        pytest.param(n, marks=pytest.mark.long)
        for n in (
            "P01",
            "P02",
            "P04",
            "P05",
            "T04",
            "C00",
            "C01",
            "E00",
            "E02",
            "H00",
            "R04",
            "R05",
            "R08",
            "R09",
            "R10",
            "V01",
            "M01",
            "M02",
            "R18",
            "R25",
            "R16",
        )
    ),
)


@pytest.fixture(scope="module")
def traced_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@pytest.mark.skipif(not can_trace(), reason="tracing needs torch and transformers")
@pytest.mark.parametrize("number", HELD)
def test_allocated_and_reserved(number: str, traced_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(traced_here))
    rows = {row["id"]: row for row in map(json.loads, MEASURED.read_text().splitlines())}
    case = next(case for case in (*CASES, *TWO_GPUS) if case.id == number)
    told, row = figures(plan_of(case), case), rows[number]
    assert told["allocated"] == pytest.approx(row["allocated"], rel=0.002)
    assert told["reserved"] == pytest.approx(row["reserved"], rel=0.03)


@pytest.mark.long
@pytest.mark.skipif(not can_trace(), reason="tracing needs torch and transformers")
def test_the_interval_of_interleaved_stages_holds_what_was_measured(traced_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(traced_here))
    rows = {row["id"]: row for row in map(json.loads, MEASURED.read_text().splitlines())}
    case = next(case for case in CASES if case.id == "V00")
    gpu = plan_of(case).gpu
    assert gpu.interval is not None
    assert gpu.peak_reserved is not None
    assert gpu.total is not None
    assert rows["V00"]["reserved"] <= gpu.interval[1] - (gpu.total - gpu.peak_reserved)


@pytest.mark.long
@pytest.mark.skipif(not can_trace(), reason="tracing needs torch and transformers")
@pytest.mark.parametrize("number", ["Z00", "Z02", "F02", "F13"])
def test_halved_backwards_need_what_was_measured(number: str, traced_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(traced_here))
    rows = {row["id"]: row for row in map(json.loads, MEASURED.read_text().splitlines())}
    case = next(case for case in CASES if case.id == number)
    told = figures(plan_of(case), case)
    assert told["allocated"] == pytest.approx(rows[number]["allocated"], rel=0.002)
    assert told["reserved"] == pytest.approx(rows[number]["reserved"], rel=0.002)


#: Predicted, and not measured yet.
_WAITING = {"R27", "R28", *(f"R{number}" for number in range(29, 36))}


def test_every_case_ran() -> None:
    rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    assert {row["id"] for row in rows} == {case.id for case in (*CASES, *TWO_GPUS)} - _WAITING
    assert set(json.loads(PREDICTED.read_text())["predictions"]) >= _WAITING
    assert all(row["ok"] for row in rows)
