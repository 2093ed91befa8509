"""Mixture of quantization: the published schedule and rounding, trainings with exact weights, keys and plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroplan
import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core import quantize_training
from zeroplan.core.arena.owned_buffers import runtime_buffers
from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan.core.quantize_training import QuantizeTraining
from zeroplan_runtime.config import read_config
from zeroplan_runtime.full_tensors import full_params
from zeroplan_runtime.parameter_states import ParameterStates

pytestmark = [pytest.mark.torch]


class Published:
    """Bits and share by the rule of DeepSpeed's quantiser, step after step."""

    def __init__(self, rule: QuantizeTraining) -> None:
        self.bits, self.target, self.period = rule.start_bits, rule.target_bits, rule.quantize_period
        self.offset, self.change = rule.schedule_offset, rule.quantize_change_ratio
        self.steps, self.real = 0, 1.0

    def step(self) -> tuple[int, float] | None:
        self.steps += 1
        if self.change is not None:
            self.real = max(self.real - self.change, 0.0)
        if self.offset > 0:
            if self.steps < self.offset:
                return None
            self.offset = self.steps = 0
        if self.bits != self.target and self.steps >= self.period:
            self.real, self.bits, self.period = 1.0, self.bits - 1, 2 * self.period
        return self.bits, self.real if self.change is not None else 0.0


@pytest.mark.parametrize(
    "rule",
    [
        QuantizeTraining(12, 8, 10, 0),
        QuantizeTraining(16, 4, 3, 7),
        QuantizeTraining(8, 8, 5, 1),
        QuantizeTraining(10, 6, 8, 12, quantize_change_ratio=0.05),
        QuantizeTraining(10, 9, 40, 0, quantize_change_ratio=0.25),
    ],
    ids=str,
)
def test_bits_and_shares_are_the_published_ones_at_every_step(rule: QuantizeTraining) -> None:
    theirs = Published(rule)
    assert rule.at(0) is None
    for step in range(1, 200):
        wanted, found = theirs.step(), rule.at(step)
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert found.bits == wanted[0]
            assert found.real == pytest.approx(wanted[1], abs=1e-9)


def rounded(weight: torch.Tensor, rule: QuantizeTraining, step: int) -> torch.Tensor:
    """The weight as `step` steps leave it to the model, with nearest rounding."""
    rounding = rule.at(step)
    if rounding is None or weight.dim() < 2:
        return weight
    groups = weight.float().reshape(rule.quantize_groups, -1)
    low, high, levels = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True), 2**rounding.bits
    if rule.symmetric:
        scale = 2 * torch.maximum(low.abs(), high.abs()) / levels
        found = (groups / scale).round().clamp(-levels // 2, levels // 2 - 1) * scale
    else:
        scale = (high - low) / levels
        zero = (low / scale).round() * scale
        found = ((groups - zero) / scale).round().clamp(0, levels - 1) * scale + zero
    found = torch.where(scale == 0, groups, found)
    mixed = torch.add(found * (1 - rounding.real), groups, alpha=rounding.real) if rounding.real else found
    return mixed.reshape(weight.shape).to(weight.dtype)


STEPS = 8


def section(rule: QuantizeTraining) -> dict[str, Any]:
    return {"quantize_training": rule.as_section()}


def engine_of(group: dist.ProcessGroup, rule: QuantizeTraining, stage: int, **more: Any) -> zeroplan_runtime.Engine:
    config = ds_config(stage, "bf16", **section(rule), **more)
    return zeroplan_runtime.initialize(model=models.make(0, odd=False), config=config, group=group, device="cpu")[0]


def steps(engine: zeroplan_runtime.Engine, first: int, last: int, rank: int) -> list[float]:
    losses = []
    for number in range(first, last):
        losses.append(engine.backward(engine(models.batch(number, 0, rank))).item())
        engine.step()
    return losses


def worst(engine: zeroplan_runtime.Engine, rule: QuantizeTraining, step: int) -> float:
    """The largest difference of a weight from its master, rounded. Every rank must call it."""
    states, seen, worst = ParameterStates(engine), _weights(engine), 0.0
    for name, param in engine.module.named_parameters():
        wanted = rounded(states.whole(param).view(param.shape).to(seen[name].dtype), rule, step)
        worst = max(worst, (seen[name].float() - wanted.float()).abs().max().item())
    return worst


def _weights(engine: zeroplan_runtime.Engine) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, _, values in full_params(engine.schedule)}


def train(group: dist.ProcessGroup, stage: int, rule: QuantizeTraining, more: dict[str, Any], folder: str) -> dict[str, Any]:
    rank = dist.get_rank(group)
    engine = engine_of(group, rule, stage, **more)
    found: dict[str, Any] = {"losses": [], "distances": []}
    for number in range(STEPS):
        if number == 4:
            engine.save_checkpoint(folder)
        found["losses"] += steps(engine, number, number + 1, rank)
        found["distances"].append(worst(engine, rule, number + 1))
    found["levels"] = {name: len(value.unique()) for name, value in _weights(engine).items() if value.dim() > 1}
    made, planned = engine.arena.measurement(), runtime_buffers(engine.model_states.layout)
    found["rows"] = [row for row in planned if row.buffer is Buffer.PARAM_TEMP]
    found["made"] = [row for row in made if row["buffer"] == Buffer.PARAM_TEMP]
    engine.destroy()
    resumed = engine_of(group, rule, stage, **more)
    resumed.load_checkpoint(folder)
    found["resumed"] = (worst(resumed, rule, 4), steps(resumed, 4, STEPS, rank))
    resumed.destroy()
    return found


RULES = {
    "symmetric": QuantizeTraining(8, 4, 2, 1, 4),
    "asymmetric": QuantizeTraining(6, 4, 3, 0, 2, "asymmetric"),
    "mixed": QuantizeTraining(8, 6, 3, 0, 1, quantize_change_ratio=0.2),
}


@pytest.mark.parametrize(
    ("ranks", "stage", "kind", "more"),
    [
        (1, 0, "symmetric", {}),
        (2, 1, "asymmetric", {}),
        (2, 3, "symmetric", {}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((2, 0, "asymmetric", {}), (2, 2, "symmetric", {"gradient_accumulation_steps": 1}))
        ),
        (1, 3, "asymmetric", {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}),
        (
            2,
            3,
            "mixed",
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}},
        ),
    ],
)
def test_weights_are_the_masters_rounded_after_every_step_and_after_a_restart(
    pool: RankPool, tmp_path: Path, ranks: int, stage: int, kind: str, more: dict[str, Any]
) -> None:
    rule = RULES[kind]
    for found in pool.run(ranks, train, stage, rule, more, str(tmp_path)):
        assert max(found["distances"]) == 0.0
        distance, losses = found["resumed"]
        assert distance == 0.0
        assert losses == found["losses"][4:]
        final = rule.at(STEPS)
        assert final is not None
        if kind != "mixed":
            assert max(found["levels"].values()) <= rule.quantize_groups << final.bits
        assert [row["bytes"] for row in found["made"]] == [row.bytes for row in found["rows"]] != []


def test_large_weights_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits whether a weight is rounded at once, some groups at a time, or each group in pieces."""
    rule, results = QuantizeTraining(5, 5, 1, 0, 4), []
    for chunk in (1 << 22, 500, 37):
        monkeypatch.setattr("zeroplan_runtime.techniques.quantize_training.CHUNK", chunk)
        monkeypatch.setattr(quantize_training, "CHUNK", chunk)
        config = ds_config(1, "bf16", **section(rule))
        engine, *_ = zeroplan_runtime.initialize(model=models.make(0, odd=False), config=config, device="cpu")
        steps(engine, 0, 2, 0)
        assert worst(engine, rule, 2) == 0.0
        results.append(_weights(engine))
        engine.destroy()
    for other in results[1:]:
        assert all(torch.equal(value, results[0][name]) for name, value in other.items())


def test_stochastic_rounding_is_alike_on_all_ranks_and_within_a_step() -> None:
    rule = QuantizeTraining(4, 4, 1, 0, 2, rounding="stochastic")
    engine, *_ = zeroplan_runtime.initialize(
        model=models.make(0, odd=False), config=ds_config(3, "bf16", **section(rule)), device="cpu"
    )
    steps(engine, 0, 2, 0)
    first, again, nearest = _weights(engine), _weights(engine), QuantizeTraining(4, 4, 1, 0, 2)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    states, moved, total = ParameterStates(engine), 0, 0
    for name, param in engine.module.named_parameters():
        master = states.whole(param).view(param.shape).bfloat16()
        wanted, scale = rounded(master, nearest, 2).float(), 2 * master.float().abs().max() / 16
        assert (first[name].float() - wanted).abs().max() <= scale * 1.05
        if param.dim() > 1:
            moved, total = moved + int((first[name] != wanted.bfloat16()).sum()), total + param.numel()
    assert 0.1 < moved / total < 0.5
    steps(engine, 2, 3, 0)
    other = _weights(engine)
    assert not torch.equal(other["embed.weight"], first["embed.weight"])


@pytest.mark.parametrize("stage", [1, 3])
def test_a_skipped_step_rounds_nothing_twice(stage: int) -> None:
    rule = QuantizeTraining(5, 5, 1, 0)
    config = ds_config(stage, "fp16", **section(rule))
    config["fp16"] = {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}
    engine, *_ = zeroplan_runtime.initialize(model=models.make(0, odd=False), config=config, device="cpu")
    for number in range(20):
        steps(engine, number, number + 1, 0)
        assert worst(engine, rule, number + 1) == 0.0
    assert 0 < engine.skipped_steps < 20


def test_what_is_refused() -> None:
    for given, said in (
        ({"quantize_bits": {"target_bits": 2}}, "quantize_bits.target_bits: 2 is no whole number of 3 to 16"),
        ({"quantize_bits": {"start_bits": 6, "target_bits": 8}}, "8 is more than the 6 bits of the start"),
        ({"quantize_schedule": {"quantize_period": 0}}, "quantize_schedule.quantize_period: 0"),
        ({"quantize_algo": {"q_type": "ternary"}}, "quantize_algo.q_type: 'ternary' is not known"),
        ({"quantize_algo": {"rounding": "up"}}, "use nearest or stochastic"),
        ({"quantize_type": "asymmetric", "quantize_algo": {"q_type": "symmetric"}}, "remove one of the two"),
        ({"eigenvalue": {"enabled": True, "max_iter": 5}}, "eigenvalue: periods by the eigenvalues of layers"),
        ({"quantize_bitz": {}}, "did you mean 'quantize_bits'"),
    ):
        with pytest.raises(BadInput) as fault:
            read_config({"quantize_training": {"enabled": True, **given}}, 1)
        assert said in str(fault.value)
    assert read_config({"quantize_training": {"enabled": False}}, 1).quantize_training is None
    tutorial = {"enabled": True, "quantize_verbose": True, "quantizer_kernel": True, "quantize_type": "asymmetric"}
    found = read_config({"quantize_training": {**tutorial, "eigenvalue": {"enabled": False}}}, 1)
    assert found.quantize_training == QuantizeTraining(q_type="asymmetric")
    assert set(found.without_effect) >= {"quantize_training.quantize_verbose", "quantize_training.quantizer_kernel"}
    for rule in RULES.values():
        assert read_config({"quantize_training": rule.as_section()}, 1).quantize_training == rule
    rule = QuantizeTraining(8, 8, 1, 0, 3)
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    for dtype, more, said in (
        ("fp32", {}, "weights in fp32 are their own masters"),
        ("bf16", offload, "below stage 3 the masters of an offloaded optimizer"),
        ("bf16", {}, "do not divide into 3 groups"),
    ):
        config = ds_config(2, dtype, **section(rule), **more)
        with pytest.raises(BadInput, match=said):
            zeroplan_runtime.initialize(model=models.make(0), config=config, device="cpu")


def test_writes_to_rounded_weights_are_refused() -> None:
    config = ds_config(1, "bf16", **section(RULES["symmetric"]))
    engine, *_ = zeroplan_runtime.initialize(model=models.make(0, odd=False), config=config, device="cpu")
    weight = engine.module.get_parameter("embed.weight")
    with pytest.raises(BadInput, match="rounded anew from the masters"):
        ParameterStates(engine).set_whole(weight, torch.zeros(weight.shape))
    with torch.no_grad():
        weight.zero_()
    with pytest.raises(BadInput, match="was written to, but its weights are rounded anew"):
        steps(engine, 0, 1, 0)


LLAMA = "meta-llama/Llama-3.2-1B"
FILE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}


def test_a_plan_counts_the_memory_in_which_weights_are_rounded() -> None:
    def plan(stage: int, **more: Any) -> Any:
        config = {**FILE, "zero_optimization": {"stage": stage}, **more.pop("given", {})}
        return zeroplan.estimate(LLAMA, ds_config=config, engine="zeroplan", vram="80G", **more)[0]

    rule = QuantizeTraining(quantize_groups=8, rounding="stochastic")
    for stage in (2, 3):
        found, without = plan(stage, given=section(rule), gpus=2), plan(stage, gpus=2)
        (line,) = [line for line in found.lines if line.buffer == Buffer.PARAM_TEMP]
        assert line.bytes == 4 * (2 * quantize_training.CHUNK + 24)
        assert found.gpu.peak_allocated == pytest.approx(without.gpu.peak_allocated + line.bytes, abs=4096)
        assert (found.fits, without.fits) == (True, True)
    with pytest.raises(BadInput, match="quantize_training: it is not supported with tp"):
        plan(2, given=section(rule), gpus=2, tp=2)
    with pytest.raises(BadInput, match="zeroplan's runtime has mixture-of-quantization"):
        zeroplan.estimate(LLAMA, ds_config={**FILE, **section(rule)}, engine="deepspeed")
