"""The verdict on plan and measurement: what must be equal, what may differ and by how much, and runs that end early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.validate.small import CONFIG
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.gpus import GPUS
from zeroplan.core.plan import GpuMemory
from zeroplan.core.sizes import GIB, MIB
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.runtime.engine import Runtime
from zeroplan.engines.verification import OwnedBuffers
from zeroplan.models.load import load_model
from zeroplan.planner.formula import formula_plan
from zeroplan.validate.compare import compare
from zeroplan.validate.machine import VerifyMachine, ranks_to_use
from zeroplan.validate.measured import measurement_of
from zeroplan.validate.planned import Planned
from zeroplan.validate.results import Measurement

CONTEXT = 600 * MIB


def planned(*, peak: int = 2 * GIB, reserved: int = 3 * GIB, total: int = 4 * GIB, fits: bool | None = None) -> Planned:
    engine = Runtime()
    case = Case(load_model(CONFIG), Workload.of(seq_len=16), Cluster(gpus=2, gpu=GPUS["h100"]), ZeroConfig.of(3))
    plan = formula_plan(engine, case)
    gpu: GpuMemory = plan.gpu.model_copy(update={"peak_allocated": peak, "peak_reserved": reserved, "total": total})
    owned = OwnedBuffers(engine.owned_buffers(case, None).rows)  # as if all of them stood
    return Planned(case, plan.model_copy(update={"gpu": gpu, "fits": fits}), owned, CONTEXT, peak, peak // 2)


def result(plan: Planned, rank: int = 0, **changes: Any) -> dict[str, Any]:
    assert plan.owned is not None
    return {
        "rank": rank,
        "rows": [[*key, count] for key, count in plan.owned.rows.items()],
        "owned": True,
        "live_after_step": GIB,
        "peak_allocated": 2 * GIB,
        "peak_reserved": 3 * GIB,
        "phases": {"forward": GIB, "backward": 2 * GIB},
        "context": CONTEXT,
        "total": 4 * GIB,
        "total_source": "NVML, by process",
        "host": 5 * GIB,
        "host_before": GIB,
        **changes,
    }


def measured(*results: dict[str, Any], ranks: int = 1, device: str = "cuda") -> Measurement:
    return measurement_of(results, device=device, ranks=ranks)


def test_equal_is_within_and_every_byte_is_accounted_for() -> None:
    plan = planned()
    found = compare(plan, measured(result(plan)), 0.02)
    assert found.within
    assert not found.mismatches
    assert all(row.within for row in found.rows if row.judged)
    total = next(row for row in found.totals if row.name == "total")
    assert (total.planned, total.measured, total.difference, total.within) == (4 * GIB, 4 * GIB, 0, True)
    attributed = sum(row.measured or 0 for row in found.rows if row.place == "hbm")
    assert attributed + (found.unattributed or 0) == 4 * GIB
    assert found.unattributed == 4 * GIB - 3 * GIB - CONTEXT


def test_one_byte_too_many_in_one_unit_is_outside_and_named() -> None:
    plan = planned()
    rows = result(plan)["rows"]
    at = next(i for i, row in enumerate(rows) if row[:2] == ["param.master", "model.layers.1"])
    rows[at] = [*rows[at][:3], rows[at][3] + 1]
    found = compare(plan, measured(result(plan, rows=rows)), 0.02)
    assert not found.within
    assert len(found.mismatches) == 1
    assert "param.master of model.layers.1" in found.verdict
    row = next(row for row in found.rows if row.name == "param.master")
    assert (row.within, row.difference) == (False, 1)


def test_a_buffer_without_a_plan_and_one_never_made_are_outside() -> None:
    plan = planned()
    rows = [*result(plan)["rows"][1:], ["comm.bucket", "extra", "hbm", 512]]
    found = compare(plan, measured(result(plan, rows=rows)), 0.02)
    assert not found.within
    assert len(found.mismatches) == 2


@pytest.mark.parametrize(("total", "within"), [(1.0199, True), (1.0201, False), (0.9801, True), (0.9799, False)])
def test_the_total_must_lie_within_the_tolerance(total: float, within: bool) -> None:
    plan = planned()
    found = compare(plan, measured(result(plan, total=round(total * 4 * GIB))), 0.02)
    assert found.within is within
    assert within or "total is off by" in found.verdict


def test_without_nvml_reserved_is_judged() -> None:
    plan = planned()
    found = compare(plan, measured(result(plan, total=None, peak_reserved=round(3.1 * GIB))), 0.02)
    assert not found.within
    assert "peak reserved is off by +3.3%" in found.verdict
    assert found.unattributed is None


def test_the_worst_rank_counts() -> None:
    plan = planned()
    found = measured(result(plan), result(plan, rank=1, total=5 * GIB, host=7 * GIB), ranks=2)
    assert (found.total, found.host) == (5 * GIB, 12 * GIB)


@pytest.mark.parametrize(("fits", "within"), [(False, True), (True, False), (None, False)])
def test_out_of_memory_is_a_result(fits: bool | None, within: bool) -> None:
    plan = planned(fits=fits)
    out = {
        "phase": "backward",
        "buffer": "activation (backward of model.layers.2)",
        "requested": 512 * MIB,
        "allocated": GIB,
        "message": "CUDA out of memory.",
    }
    found = compare(plan, measured(result(plan, out_of_memory=out), ranks=2), 0.02)
    assert found.within is within
    assert found.verdict.startswith(
        "out of memory in backward on rank 0: activation (backward of model.layers.2) wanted 512.00 MiB"
    )
    assert "the plan's peak is 2.00 GiB, 512.00 MiB more than it would have had" in found.verdict
    assert found.totals == ()


def test_a_rank_without_result_is_a_failure_and_its_reason_the_verdict() -> None:
    plan = planned()
    lost = measurement_of([result(plan)], device="cuda", ranks=2, failure="rank 1 ended with signal SIGKILL")
    found = compare(plan, lost, 0.02)
    assert (found.within, found.verdict) == (False, "rank 1 ended with signal SIGKILL")
    told = measurement_of([{"rank": 0, "error": "ValueError: odd"}], device="cuda", ranks=2)
    assert compare(plan, told, 0.02).verdict == "rank 0 failed: ValueError: odd"
    gone = measurement_of([{"rank": 0, "error": "RuntimeError: Connection reset by peer"}], device="cpu", ranks=2)
    assert gone.failure.startswith("rank 1 ended or hung without a result; rank 0 failed: RuntimeError: Connection reset")


def test_on_a_cpu_tensors_are_judged_only_where_its_kernels_are_cudas() -> None:
    plan = planned()
    tensors = {"tensors_counted": True, "phases": {"init": 9 * GIB, "backward": 2 * GIB + 80 * MIB}, "live_after_step": GIB}
    same = compare(plan, measured(result(plan, **tensors), device="cpu"), 0.02)
    assert not same.within
    assert "peak of tensors is off by +3.9%" in same.verdict
    assert compare(replace(plan, cpu_differs=True), measured(result(plan, **tensors), device="cpu"), 0.02).within


@pytest.mark.parametrize(
    ("device", "asked", "least", "found"),
    [("cpu", None, 1, 2), ("cpu", None, 8, 8), ("cpu", 3, 1, 3), ("cuda", None, 4, 8), ("cuda", 4, 4, 4)],
)
def test_as_many_ranks_run_as_the_degrees_need(device: str, asked: int | None, least: int, found: int) -> None:
    here = VerifyMachine(device, 2 if device == "cpu" else 8, device, None, (0, 0))
    assert ranks_to_use(here, asked, least) == found


def test_too_few_gpus_for_the_degrees_are_told() -> None:
    with pytest.raises(BadInput, match="these degrees need 4 ranks, and 2 GPUs are here"):
        ranks_to_use(VerifyMachine("cuda", 2, "H200", None, (9, 0)), None, 4)
    with pytest.raises(BadInput, match="these degrees need 4 ranks, and 2 are asked for"):
        ranks_to_use(VerifyMachine("cpu", 2, "cpu", None, (0, 0)), 2, 4)


def test_what_the_first_ranks_of_a_ring_keep_beyond_the_plan_is_allowed_and_told() -> None:
    plan = replace(planned(), beyond=GIB)
    over = 4 * GIB + GIB // 2
    row = next(row for row in compare(plan, measured(result(plan, total=over)), 0.02).totals if row.name == "total")
    assert row.within
    assert "1.00 GiB more on the first ranks" in row.note
    assert not compare(replace(plan, beyond=0), measured(result(plan, total=over)), 0.02).within
    assert not compare(plan, measured(result(plan, total=over + GIB)), 0.02).within
