"""The two clocks of a micro batch, by hand, and what they say of measured runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rows import request_of
from zeroplan.core.gpus import find_gpu
from zeroplan.core.rates import rates_of
from zeroplan.core.sizes import GIB
from zeroplan.engines.compute_traffic import PASSES
from zeroplan.engines.deepspeed import simulation
from zeroplan.engines.deepspeed.coordinator import _Trace
from zeroplan.engines.deepspeed.simulation import device_lag_of
from zeroplan.planner.estimate import estimate_runs
from zeroplan.run.ask import Ask
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op, TapeModule, TapeParam

#: 1 µs for a fetch, nothing else on the host; 10 elements a µs and token, 1 byte a µs and pass.
RATES = replace(
    rates_of(find_gpu("H100")),
    gather_hook_us=1.0,
    release_hook_us=0.0,
    launch_us=0.0,
    autograd_us=0.0,
    matmul_tflops=2 * 10 * 1e-6,
    hbm_gbs=PASSES * 1e-3,
)


def _stream(*numel: int, trained: bool = True, wrote: int = 0) -> ExpandedTape:
    """Layers of so many elements, forward and backward; the last forward writes some bytes."""
    params = tuple(TapeParam(f"{i}.weight", (1, count), trained, 2) for i, count in enumerate(numel))
    stream = ExpandedTape(tuple(TapeModule(str(i), "Linear", -1, (i,)) for i in range(len(numel))), params)

    def add(op: Op, arg: int, aux: int = 0) -> None:
        for column, value in zip(
            (stream.op, stream.arg, stream.aux, stream.kind, stream.module), (op, arg, aux, Kind.TEMP, -1), strict=True
        ):
            column.append(value)

    for i in range(len(numel)):
        add(Op.ENTER, i)
        if wrote and i == len(numel) - 1:
            add(Op.ALLOC, 0, wrote)
        add(Op.EXIT, i)
    add(Op.MARK, Mark.BACKWARD_BEGIN)
    for i in reversed(range(len(numel))):
        add(Op.BWD_ENTER, i)
        add(Op.BWD_EXIT, i)
    return stream


def test_a_device_that_waits_for_the_host_is_back_by_the_next_fetch() -> None:
    """Products of half a fetch's time: done at 1.5, 2.5, 3.5 µs; the backward's, of a whole one, at 5, 6, 7."""
    found = device_lag_of(_stream(5, 5, 5), 1, RATES, fp32=False, unhooked=[False] * 3)
    assert found.back == (1, 2, 3, 4, 5, 6)
    assert found.furthest == 1
    assert not found.device_bound


def test_a_device_that_needs_longer_falls_behind_all_the_way() -> None:
    """Products of two fetches' time, four in the backward: done at 3, 5, 7 µs, then 11, 15, 19; fetches begin at 1 to 6 µs."""
    found = device_lag_of(_stream(20, 20, 20), 1, RATES, fp32=False, unhooked=[False] * 3)
    assert found.back == (2, 4, 6, 6, 6, 6)
    assert found.device_bound
    frozen = device_lag_of(_stream(20, 20, 20, trained=False), 1, RATES, fp32=False, unhooked=[False] * 3)
    assert frozen.back == (2, 4, 6, 6, 6, 6)
    assert device_lag_of(_stream(5, 5, 5), 4, RATES, fp32=False, unhooked=[False] * 3) == found  # four times the tokens


def test_what_the_head_writes_keeps_the_device_busy() -> None:
    """Three bytes of logits, three µs: what is freed at the head is back three fetches later."""
    found = device_lag_of(_stream(5, 5, 5, wrote=3), 1, RATES, fp32=False, unhooked=[False] * 3)
    assert found.back[2] == 2 + 1 + 3
    assert found.back[1] == 2


def test_the_search_for_what_returns_asks_the_released_module_whether_it_is_a_leaf() -> None:
    """W13, whose leaf modules are mixtures: it kept 55 MB of its attention's weights for the backward."""
    trace = _Trace([0, 1, 0], [[0], [1]], numel=[10, 1000], own={1: ()})
    assert trace.returns_within(0, 1, 500)
    assert not _Trace([0, 1, 0], [[0], [1]], numel=[10, 1000], own={}).returns_within(0, 1, 500)
    assert trace.returns_below(1, 500, {0: (0,), 1: (1,)}.__getitem__) == {1}


def test_modules_inside_a_leaf_fetch_nothing() -> None:
    found = device_lag_of(_stream(5, 5, 5), 1, RATES, fp32=False, unhooked=[False, True, False])
    assert len(found.back) == 4


def test_a_full_queue_holds_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one kernel the host issues the third fetch's when the second is done: never further than two behind."""
    free = device_lag_of(_stream(*[20] * 9), 1, RATES, fp32=False, unhooked=[False] * 9)
    monkeypatch.setattr(simulation, "QUEUE", 1)
    held = device_lag_of(_stream(*[20] * 9), 1, RATES, fp32=False, unhooked=[False] * 9)
    assert free.furthest > 4
    assert held.furthest <= 2


def test_both_measured_runs_of_one_config_lie_between_its_paces() -> None:
    """Llama-3.2-3B, stage 3 on 4 ranks, micro batch 8, checkpointing: 37.04 GiB reserved at full speed, and 35.97 with a host
    that recorded the stack of every allocation and took 1.6 times as long for a step.
    """
    request = Ask(
        model="meta-llama/Llama-3.2-3B",
        seq_len=1024,
        stage=3,
        gpus=4,
        gpu="H200",
        micro_batch=8,
        gradient_checkpointing=True,
    )
    run = estimate_runs(request).runs[0]
    assert run is not None
    gpu = run.plan.gpu
    assert gpu.peak_reserved is not None
    assert gpu.interval is not None
    assert gpu.outside_torch is not None
    assert gpu.peak_reserved / GIB == pytest.approx(37.04, rel=0.015)
    (close,) = run.simulation.other_lags
    assert close.peak_reserved / GIB == pytest.approx(35.97, rel=0.02)
    low, high = gpu.interval
    for measured in (37.04, 35.97):
        assert low < measured * GIB + gpu.outside_torch < high


def test_a_run_that_the_host_holds_up_counts_at_the_closer_pace() -> None:
    """Micro batch 4 without checkpointing: 41.95 GiB measured; the head alone lets the device fall behind."""
    options = {"model": "meta-llama/Llama-3.2-3B", "seq_len": 1024, "stage": 3, "gpus": 4, "gpu": "H200"}
    run = estimate_runs(Ask(**options, micro_batch=4)).runs[0]  # type: ignore[arg-type]
    assert run is not None
    assert run.plan.gpu.peak_reserved is not None
    assert run.plan.gpu.peak_reserved / GIB == pytest.approx(41.95, rel=0.01)
    assert len(run.simulation.other_lags) == 1
    assert run.simulation.other_lags[0].peak_allocated == run.simulation.peak_allocated


def _host_lead() -> list[dict[str, Any]]:
    results = Path(__file__).parents[3] / "benchmarks" / "results"
    return [row for row in map(json.loads, (results / "host_lead_measured.jsonl").read_text().splitlines()) if row["ok"]]


@pytest.mark.parametrize("row", _host_lead(), ids=lambda row: str(row["id"]))
def test_a_measured_run_with_and_without_offload_lies_between_the_ends_of_the_lag(row: dict[str, Any]) -> None:
    """Two H200, predicted before the runs: what NVML saw of each, and what was allocated to the byte or nearly."""
    (run,) = estimate_runs(request_of(row, depth="simulated")).runs
    assert run is not None
    gpu = run.plan.gpu
    assert gpu.interval is not None
    assert gpu.peak_allocated == pytest.approx(row["peak_allocated"], rel=1e-4)
    if row.get("cap"):  # the allocator gave its cached memory back to stay beneath: HL4 seven times
        paces = (run.simulation.timeline, *run.simulation.other_lags)
        capped = [one.under(row["cap"], AllocatorConfig.parse(row["alloc_conf"])).peak_reserved for one in paces]
        assert 0.98 * min(capped) <= row["peak_reserved"] <= 1.02 * max(capped)
        return
    assert gpu.interval[0] <= row["nvml_used"] <= gpu.interval[1]
    if row["id"] in ("HL1", "HL7"):  # a host that waited at every fetch would reserve less than was measured
        assert row["peak_reserved"] > 1.03 * run.simulation.timeline.peak_reserved


def test_the_reach_of_the_interval_is_the_lag_of_pinned_buffers_alone() -> None:
    (row,) = (one for one in _host_lead() if one["id"] == "HL1")
    device = {"device": "cpu", "pin_memory": False}
    (run,) = estimate_runs(request_of({**row, "zero_overrides": {"offload_optimizer": device}}, depth="simulated")).runs
    assert run is not None
    assert run.simulation.other_lags == ()
