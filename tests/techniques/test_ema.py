"""Averages of weights: their line, their blocks in a run, their host memory, and how Lightning's files say them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan
from zeroplan.planner.estimate import estimate_report, estimate_runs
from zeroplan.run.ask import Ask

SMALL = {"model": "openai-community/gpt2", "gpus": 2, "micro_batch": 1, "seq_len": 128}
#: Of GPT-2's elements those of its largest parameter, and those of rank 0's chunks under FSDP2.
ALL, LARGEST, SHARD, LARGEST_SHARD = 124_439_808, 50_257 * 768, 62_220_288, 25_129 * 768


def plan_of(**said: Any) -> MemoryPlan:
    return estimate_report(Ask(**{**SMALL, **said})).plans[0]


@pytest.mark.parametrize(("engine", "held", "largest"), [("ddp", ALL, LARGEST), ("fsdp2", SHARD, LARGEST_SHARD)])
def test_on_the_gpu_it_is_a_line_and_blocks_of_the_run(engine: str, held: int, largest: int) -> None:
    found = estimate_runs(Ask(**SMALL, engine=engine, ema="gpu"), relief=False)
    averaged, run = found.report.plans[0], found.runs[0]
    (line,) = (one for one in averaged.lines if one.buffer == Buffer.OPTIM_AVERAGE)
    assert (line.bytes, line.place) == (4 * held, Place.HBM)
    mixed = 3 if engine == "ddp" else 1  # both scaled, and their sum
    assert [one.bytes for one in averaged.lines if one.buffer == Buffer.OPTIM_TEMP][-1] == mixed * 4 * largest
    assert run is not None
    assert run.simulation.timeline.alive_by_buffer()[Buffer.OPTIM_AVERAGE] == pytest.approx(4 * held, rel=0.03)  # whole blocks
    assert averaged.gpu.peak_allocated - plan_of(engine=engine).gpu.peak_allocated == pytest.approx(4 * held, rel=0.04)


def test_on_the_host_it_stands_beside_the_process_of_every_rank() -> None:
    plain, averaged = plan_of(engine="ddp"), plan_of(engine="ddp", ema="cpu")
    assert averaged.gpu.peak_reserved == plain.gpu.peak_reserved
    more = {phase: count - plain.cpu.phases[phase] for phase, count in averaged.cpu.phases.items()}
    assert more[Phase.FORWARD] == 2 * 4 * ALL
    assert more[Phase.STEP] == 2 * 2 * 4 * ALL  # the model is brought there for each update


def test_formulas_and_the_search_count_it() -> None:
    plain, averaged = (plan_of(engine="ddp", depth="formula", ema=device) for device in (None, "gpu"))
    assert averaged.gpu.live_after_step - plain.gpu.live_after_step == 4 * ALL


@pytest.mark.parametrize(
    ("said", "where"),
    [
        ({"engine": "deepspeed"}, "--ema"),
        ({"engine": "fsdp2", "tp": 2}, "--tp"),
        ({"engine": "fsdp2", "stage": 3, "offload_param": "cpu"}, "--ema"),
        ({"engine": "ddp", "lora_rank": 8}, "--lora-rank"),
        ({"engine": "ddp", "ema": "disk"}, "--ema"),
    ],
)
def test_what_is_not_modelled_is_refused(said: dict[str, Any], where: str) -> None:
    with pytest.raises(BadInput) as refused:
        estimate_report(Ask(**{**SMALL, "ema": "gpu", **said}))
    assert refused.value.where == where


def of_callback(name: str, strategy: str, **arguments: Any) -> dict[str, Any]:
    callback = {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": arguments}
    trainer = {"strategy": strategy, "devices": 2, "callbacks": [callback]}
    data = {"class_path": "my.Data", "init_args": {"batch_size": 1, "max_length": 128}}
    return {"trainer": trainer, "data": data, "model": {"class_path": "my.Module", "init_args": {"model_id": SMALL["model"]}}}


@pytest.mark.parametrize(
    ("callback", "arguments", "device"),
    [
        ("EMAWeightAveraging", {"decay": 0.99}, "cpu"),
        ("EMAWeightAveraging", {"device": "cuda"}, "gpu"),
        ("WeightAveraging", {"device": "cuda:0"}, "gpu"),
    ],
)
def test_lightnings_callback_says_it(callback: str, arguments: dict[str, Any], device: str) -> None:
    report = estimate_report(Ask(depth="formula", files=(of_callback(callback, "ddp", **arguments),)))
    assert report.workload["ema"] == device


def test_beside_shards_it_is_left_out() -> None:
    report = estimate_report(Ask(depth="formula", files=(of_callback("EMAWeightAveraging", "fsdp"),)))
    assert "trainer.callbacks.EMAWeightAveraging" in {one.key for one in report.plans[0].unmodelled}


def test_lightning_calls_setup_before_it_moves_the_module() -> None:
    """So that an average without a device is one of the host."""
    found = find_spec("lightning")
    if found is None or found.origin is None:
        pytest.skip("Lightning is not installed")
    text = (Path(found.origin).parent / "pytorch" / "trainer" / "trainer.py").read_text(encoding="utf-8")
    run = text[text.index("def _run(") : text.index("def _run_stage(")]
    assert 0 < run.index("_call_setup_hook(self)") < run.index("self.strategy.setup(self)")
