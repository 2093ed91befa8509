"""Predicted step times against measured ones: the order must hold, and most must be near. Nothing is fitted to a row."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from benchmarks.recommend import driver
from benchmarks.recommend.measure import compare, overall, ranked
from benchmarks.recommend.setups import SETUPS, specs
from benchmarks.recommend.speeds import COUNTS, halves, kendall, predictions, samples, within
from benchmarks.recommend.trial import Job
from benchmarks.rows import GRID, MEASURED, load_rows
from tests.patience import PATIENCE
from zeroplan.core.cluster import Cluster
from zeroplan.core.rates import rates_of
from zeroplan.core.workload import DType, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.registry import find_engine
from zeroplan.models.load import load_model
from zeroplan.search.cost import CostModel
from zeroplan.search.memory import Memory
from zeroplan.search.space import Candidate


def test_measured_steps_are_ranked_and_most_are_near() -> None:
    """Runs that shared their host and waited for the device at three marks a step: rough, and many."""
    assert COUNTS.exists()
    rows = samples(load_rows(MEASURED))
    assert len(rows) >= 40
    pairs = predictions(rows)
    assert kendall(pairs) >= 0.78
    assert within(pairs, 0.25) >= 0.75


def test_grids_that_rates_were_not_fitted_to_are_near() -> None:
    fitted, held_out = halves(samples(load_rows(GRID)))
    assert within(predictions(fitted), 0.15) >= 0.9
    assert within(predictions(held_out), 0.15) >= 0.9
    for name in {one.id.rsplit("-", 1)[0] for one in fitted}:
        grid = [one for one in (*fitted, *held_out) if one.id.startswith(name)]
        rates = [
            (one.tokens / predicted, one.tokens / measured)
            for one, (predicted, measured) in zip(grid, predictions(grid), strict=True)
        ]
        assert kendall(rates) >= 0.8, name


STEPS = sorted((Path(__file__).parents[2] / "benchmarks" / "results" / "step").glob("h200_x[124].jsonl"))
MODELS = {"llama-1b": "meta-llama/Llama-3.2-1B", "llama-8b": "meta-llama/Llama-3.1-8B"}


def test_the_included_runtimes_steps_are_near() -> None:
    """On 1 to 4 H200s. Reductions are of 16-bit gradients, or of fp32 ones where the case ends in ``+r32``."""
    parts: dict[tuple[str, str, int], tuple[Memory, CostModel]] = {}
    ratios = []
    for row in [json.loads(line) for path in STEPS for line in path.read_text().splitlines()]:
        engine, _, case = row["case"].partition(":")
        if engine != "zeroplan":
            continue
        key = (engine, row["shape"], row["ranks"])
        if key not in parts:
            found, spec = find_engine(engine), load_model(MODELS[row["shape"]])
            cluster = Cluster.of(gpus=row["ranks"], gpu="H200")
            parts[key] = Memory(found, spec, cluster), CostModel(found, spec, cluster, rates_of(cluster.gpu))
        memory, cost = parts[key]
        wide = {"communication_data_type": DType.FP32} if case.endswith("+r32") else {}
        zero = ZeroConfig.of(int(case[0]), **wide)
        work = Workload.of(micro_batch=row["micro"], seq_len=row["seq"])
        predicted = cost.step_time(work, zero, memory.counts(Candidate(zero, work))).total
        ratios.append(1000 * predicted / row["step_ms"])
    assert len(ratios) == 26
    assert all(1 / 1.2 < ratio < 1.2 for ratio in ratios), sorted(ratios)
    assert 0.9 < sorted(ratios)[len(ratios) // 2] < 1.1


def test_kendall_by_hand() -> None:
    assert kendall([(1, 1), (2, 2), (3, 3)]) == 1
    assert kendall([(1, 3), (2, 2), (3, 1)]) == -1
    assert kendall([(1, 1), (2, 3), (3, 2)]) == pytest.approx(1 / 3)


def test_each_stage_is_near_on_the_whole() -> None:
    rows = samples(load_rows(MEASURED))
    for stage in (0, 1, 2, 3):
        chosen = [row for row in rows if row.case.zero.stage == stage and not row.case.zero.offload_optimizer]
        ratios = sorted(p / m for p, m in predictions(chosen))
        assert 0.75 < ratios[len(ratios) // 2] < 1.3, stage


@pytest.mark.torch
def test_the_grid_is_specified_and_compared() -> None:
    name = "llama1b_4x24"
    setup = SETUPS[name]
    written = list(specs(name, setup))
    assert [spec.id for spec in written] == [f"{name}-{i:02d}" for i in range(len(setup.grid))]
    assert all(spec.cap is not None and spec.cap < 24 << 30 for spec in written)
    rows = []
    for one in ranked(name, setup, "H200").ranking:
        row = {"id": f"{name}-{one.index:02d}", "gpu": "NVIDIA H200", "ok": one.fits, "error": "out of memory"}
        speed = {"step_seconds": one.step_seconds * 1.1, "tokens_per_s": one.tokens_per_second / 1.1}
        rows.append(row | speed | {"peak_reserved": one.plan.gpu.peak_reserved})
    rows[-1] |= {"ok": False, "error": "failed"}  # says nothing of whether it fits
    found = compare(name, setup, rows)
    assert (found["kendall_tau"], found["within_15_percent"], found["reached_of_best"]) == (1.0, 1.0, 1.0)
    assert found["measured"] == len(setup.grid) - 1
    assert found["said_to_fit_and_died"] == []
    assert found["of_those_died"] == found["said_not_to_fit"]
    assert overall([found])["said_not_to_fit_and_died"] == 1.0


def _one_rank_fails(job: Job, rank: int, port: int, folder: str) -> None:
    if rank == 0:
        time.sleep(10 * PATIENCE)  # as a rank does that waits in a collective for the one that failed
    Path(folder, f"{rank}.json").write_text(json.dumps({"error": "out of memory", "detail": "", "phase": "backward"}))
    os._exit(1)


def test_a_rank_that_fails_ends_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "trial", _one_rank_fails)
    job = Job.from_dict({"id": "x", "model": "tiny/llama", "world": 2, "threads": 3})
    row = driver.Driver(tmp_path / "rows.jsonl", method="fork", port=29900).run(job, limit=PATIENCE)
    assert (row["ok"], row["error"], row["phase"], job.threads) == (False, "out of memory", "backward", 3)
    assert row["whole_seconds"] < PATIENCE
    assert json.loads((tmp_path / "rows.jsonl").read_text())["id"] == "x"
