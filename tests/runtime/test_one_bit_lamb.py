"""1-bit LAMB: its warm-up is LAMB, its compression stage a plain simulation of the algorithm, and a checkpoint resumes it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroplan
import zeroplan_runtime
from tests.runtime import models
from tests.runtime.gpu_ranks import run_on_gpus
from tests.runtime.ranks import RankPool
from tests.runtime.test_one_bit import Simulation, compress, learn, run, start
from tests.runtime.train import ds_config, train
from zeroplan.core.arena.owned_buffers import OwnedBuffer, runtime_buffers
from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan_runtime.engine import Engine

FREEZE, STEPS = 4, 9
LR, DECAY, BETA1, BETA2, EPS = 1e-2, 0.1, 0.9, 0.999, 1e-8
KEEP = 0.7
LIMITS = {"factor_min": 0.6, "factor_max": 3.0, "factor_threshold": 0.05}


def config_of(stage: int, dtype: str = "fp32", freeze_step: int = FREEZE, **changes: Any) -> dict[str, Any]:
    own = {"lr": LR, "weight_decay": DECAY, "freeze_step": freeze_step, "coeff_beta": KEEP, "max_coeff": 0.3, **LIMITS}
    params = {**own, "cuda_aware": False, "comm_backend_name": "nccl", **changes.pop("params", {})}
    return ds_config(stage, dtype, optimizer={"type": "OneBitLamb", "params": params}, **changes)


def states_of(engine: Engine) -> list[dict[str, torch.Tensor]]:
    return [
        {
            "master": unit.master.clone(),
            **{buffer.value: tensor.clone() for buffer, tensor in unit.optim_states.items()},
            "momentum": unit.exchanged.momentum.clone(),
            "worker": unit.exchanged.worker_error.clone(),
            "server": unit.exchanged.server_error.clone(),
        }
        for unit in engine.model_states.units
        if unit.exchanged is not None and unit.master is not None
    ]


def coefficients(engine: Engine) -> dict[str, list[float]]:
    assert engine.optimizer_step is not None
    return engine.optimizer_step.coefficient_state()


def trust(weight: torch.Tensor, update: torch.Tensor) -> float:
    p, u = weight.double().norm().item(), update.double().norm().item()
    return min(max(p / u, 0.01), 0.3) if p and u else 1.0


class LambSimulation(Simulation):
    """1-bit LAMB's compression stage (Li et al. 2021, algorithm 1) of all ranks in one process, over the engine's flats."""

    def __init__(self, ranks: int, layout: Any, states: list[dict[str, torch.Tensor]], means: dict[str, list[float]]) -> None:
        super().__init__(ranks, layout, states)
        self.means = {name: values[0] for name, values in means.items()}
        self.factors = dict.fromkeys(means, 1.0)
        sizes = {name: state["momentum"][part].double().square().mean().sqrt().item() for name, state, part in self.tensors()}
        united = math.fsum(sizes.values()) / len(sizes)
        self.scales = {name: united / size if size else 1.0 for name, size in sizes.items()}
        for state in states:
            state["fresh"] = state["optim.exp_avg_sq"].clone()

    def tensors(self) -> Iterator[tuple[str, dict[str, torch.Tensor], slice]]:
        for names, flat, state in zip(self.names, self.flats, self.states, strict=True):
            for name, begin, numel in zip(names, flat.offsets, flat.numels, strict=True):
                yield name, state, slice(begin, begin + numel)

    def scale_of(self, u: int) -> torch.Tensor:
        made = torch.ones(self.flats[u].full)
        for name, begin, numel in zip(self.names[u], self.flats[u].offsets, self.flats[u].numels, strict=True):
            made[begin : begin + numel] = self.scales[name]
        return made

    @torch.no_grad()
    def step(self, number: int) -> None:
        with torch.enable_grad():
            grads = [self.gradients(number, rank) for rank in range(self.ranks)]
        for u, (flat, state) in enumerate(zip(self.flats, self.states, strict=True)):
            used, scale = self.used(u), self.scale_of(u)
            before = state["momentum"] * scale * BETA1
            sent = []
            for rank in range(self.ranks):
                c = before + (self.worker[u][rank] + grads[rank][u] * scale * (1 - BETA1))
                sent.append(torch.cat([compress(chunk) for chunk in c.split(flat.shard)]))
                self.worker[u][rank] = (c - sent[-1]) * used
            found = []
            for rank in range(self.ranks):
                part = slice(rank * flat.shard, (rank + 1) * flat.shard)
                c = torch.stack([other[part] for other in sent]).sum(0) * (1 / self.ranks) + self.server[u][rank]
                found.append(compress(c))
                self.server[u][rank] = (c - found[-1]) * used[part]
            momentum = torch.cat(found) * used
            gradient = (momentum - before) / ((1 - BETA1) * scale)
            state["fresh"] = state["fresh"] * BETA2 + (1 - BETA2) * gradient * gradient
            state["momentum"] = momentum / scale
        rate = LR * math.sqrt(1 - BETA2**FREEZE) / (1 - BETA1 ** (number + 1))
        for name, state, part in self.tensors():
            m, v, fresh, p = (state[key][part] for key in ("momentum", "optim.exp_avg_sq", "fresh", "master"))
            direction = torch.where(v == 0, 0.0, m / (v.sqrt() + EPS))
            update = direction + DECAY * p
            share = min(1.0, (direction.norm() / update.norm()).item()) if update.any() else 1.0
            factor = torch.where(v == 0, 0.0, (v.sqrt() + EPS) / (fresh.sqrt() + EPS)).max().item() * share + 1 - share
            factor = min(max(factor, LIMITS["factor_min"]), LIMITS["factor_max"])
            last, most = self.factors[name], LIMITS["factor_threshold"]
            self.factors[name] = factor = max(min(factor, last * (1 + most)), last * (1 - most))
            state["master"][part] = p - rate * self.means[name] * factor * update


def train_twice(group: dist.ProcessGroup, config: dict[str, Any]) -> dict[str, Any]:
    engine = start(group, config)
    means: dict[str, list[float]] = {}
    before: list[dict[str, torch.Tensor]] = []
    for number in range(FREEZE):
        run(engine, group, range(number, number + 1))
        before = states_of(engine)
        means = coefficients(engine)
    run(engine, group, range(FREEZE, STEPS))
    layout = engine.model_states.layout
    return {"warm": before, "means": means, "last": states_of(engine), "layout": layout, "kept": coefficients(engine)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_compression_stage_equals_a_simulation(pool: RankPool, ranks: int) -> None:
    results = pool.run(ranks, train_twice, config_of(0, zeroplan={"wide_numel": 500}))
    first = results[0]
    plain = LambSimulation(ranks, first["layout"], [dict(state) for state in first["warm"]], first["means"])
    for number in range(FREEZE, STEPS):
        plain.step(number)
    for name, (mean, factor, scale) in first["kept"].items():
        assert mean == first["means"][name][0] > 0
        assert factor == pytest.approx(plain.factors[name], rel=1e-4)
        assert scale == pytest.approx(plain.scales[name], rel=1e-6)
    assert len(set(plain.factors.values())) > 3  # or the limits decide alone
    for u, state in enumerate(plain.states):
        for rank, result in enumerate(results):
            found = result["last"][u]
            torch.testing.assert_close(found["master"], state["master"], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found["momentum"], state["momentum"], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(found["optim.exp_avg_sq_fresh"], state["fresh"], rtol=1e-3, atol=1e-7)
            assert torch.equal(found["optim.exp_avg_sq"], first["warm"][u]["optim.exp_avg_sq"])
            torch.testing.assert_close(found["worker"], plain.worker[u][rank], rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(found["server"], plain.server[u][rank], rtol=1e-3, atol=1e-5)
            assert torch.equal(found["master"], first["last"][u]["master"])
            assert found["worker"].any()


def warm_up(group: dist.ProcessGroup, stage: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """The engine's mean ratios after the warm-up, and those that its masters and moments give."""
    engine = start(group, config_of(stage, freeze_step=100))
    whole: dict[str, float] = {}
    for number in range(FREEZE):
        old = [unit.master.clone() for unit in engine.model_states.units if unit.master is not None]
        run(engine, group, range(number, number + 1))
        for unit, before in zip(engine.model_states.units, old, strict=True):
            m, v = (unit.optim_states[b] for b in (Buffer.OPTIM_EXP_AVG, Buffer.OPTIM_EXP_AVG_SQ))
            assert unit.trainable is not None
            flat = unit.trainable.layout
            for position, (begin, numel) in enumerate(zip(flat.offsets, flat.numels, strict=True)):
                part, name = slice(begin, begin + numel), unit.name_of(position)
                ratio = trust(before[part], m[part] / (v[part].sqrt() + EPS) + DECAY * before[part])
                whole[name] = whole.get(name, 0.0) * KEEP + (1 - KEEP) * ratio
    return coefficients(engine), whole


def test_the_warm_up_is_lamb_and_remembers_its_ratios(pool: RankPool) -> None:
    params = {"lr": LR, "weight_decay": DECAY, "max_coeff": 0.3}
    lamb = ds_config(0, optimizer={"type": "Lamb", "params": params})
    mine, plain = (pool.run(2, train, config, None, FREEZE) for config in (config_of(0), lamb))
    assert [rank["losses"] for rank in mine] == [rank["losses"] for rank in plain]
    assert all(torch.equal(value, plain[0]["params"][name]) for name, value in mine[0]["params"].items())
    for found, wanted in pool.run(2, warm_up, 0):
        assert {name: values[0] for name, values in found.items()} == pytest.approx(wanted, rel=1e-5)
        assert {tuple(values[1:]) for values in found.values()} == {(1.0, 1.0)}
    (alone,) = pool.run(1, train, config_of(1, freeze_step=2), None, STEPS)  # which has nothing to compress
    assert alone["losses"] == pool.run(1, train, lamb, None, STEPS)[0]["losses"]


def test_stage_1_equals_stage_0(pool: RankPool) -> None:
    both: tuple[dict[str, Any], ...] = ({}, {"gradient_accumulation_steps": 2})
    for changes in both:
        zero, one = (pool.run(2, train, config_of(stage, **changes), None, STEPS) for stage in (0, 1))
        for rank in range(2):
            assert zero[rank]["losses"] == pytest.approx(one[rank]["losses"], rel=1e-4)


@pytest.mark.long
def test_learns_as_well_as_lamb(pool: RankPool) -> None:
    """With the paper's share of warm-up, of enough steps for the weights' norms to settle (docs/low_bit_optimizers.md)."""
    steps = 960
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 80, "warmup_max_lr": 2e-2, "total_num_steps": steps}}
    params = {"lr": 2e-2, "weight_decay": 0.0, "max_coeff": 10.0}
    plain = ds_config(0, scheduler=schedule, optimizer={"type": "Lamb", "params": params})
    lamb = pool.run(2, learn, plain, steps)[0]
    more: dict[str, Any] = {
        "params": {**params, "coeff_beta": 0.9, "factor_min": 0.5, "factor_max": 4.0, "factor_threshold": 0.1}
    }
    mine = pool.run(2, learn, config_of(0, freeze_step=144, scheduler=schedule, **more), steps)[0]
    untrained = pool.run(2, learn, plain, 0)[0]
    assert lamb < 0.85 * untrained
    assert mine < 1.01 * lamb


def skip_one(group: dist.ProcessGroup, stage: int) -> tuple[int, bool, bool]:
    engine = start(group, config_of(stage, "fp16"))
    run(engine, group, range(FREEZE + 2))
    before = (states_of(engine), coefficients(engine))
    run(engine, group, range(FREEZE + 2, FREEZE + 3), math.inf if dist.get_rank(group) == 1 else 1.0)
    after = (states_of(engine), coefficients(engine))
    same = before[1] == after[1] and all(
        torch.equal(value, new[key]) for old, new in zip(before[0], after[0], strict=True) for key, value in old.items()
    )
    run(engine, group, range(FREEZE + 3, FREEZE + 4))
    return engine.skipped_steps, same, not torch.equal(states_of(engine)[0]["master"], after[0][0]["master"])


def resume(group: dist.ProcessGroup, folder: Path, stage: int, at: int) -> tuple[list[bool], bool]:
    engine = start(group, config_of(stage))
    run(engine, group, range(at))
    engine.save_checkpoint(folder, tag="middle")
    run(engine, group, range(at, STEPS))
    other = start(group, config_of(stage), models.make(seed=1))
    other.load_checkpoint(folder)
    run(other, group, range(at, STEPS))
    pairs = zip(states_of(engine), states_of(other), strict=True)
    return [torch.equal(a[key], b[key]) for a, b in pairs for key in a], coefficients(engine) == coefficients(other)


@pytest.mark.long
def test_overflows_change_nothing_and_checkpoints_resume_all(pool: RankPool, tmp_path: Path) -> None:
    for stage in (0, 1):
        assert pool.run(2, skip_one, stage) == [(1, True, True)] * 2
    for stage, at in ((0, FREEZE + 2), (1, FREEZE + 2), (1, FREEZE - 1)):
        for same, kept in pool.run(2, resume, tmp_path / f"{stage}_{at}", stage, at):
            assert all(same)
            assert kept


def rows_of(group: dist.ProcessGroup, stage: int) -> tuple[list[dict[str, Any]], list[OwnedBuffer]]:
    engine = start(group, config_of(stage))
    run(engine, group, range(FREEZE + 1))
    return engine.arena.measurement(), runtime_buffers(engine.model_states.layout)


def test_the_arena_is_as_planned(pool: RankPool) -> None:
    for rows, planned in pool.run(2, rows_of, 1):
        made = {(row["buffer"], row["unit"]): row["peak"] for row in rows}
        assert {(str(row.buffer), row.unit): row.bytes for row in planned} == made
        tensors = len(list(models.make().parameters()))
        (kept,) = [row for row in rows if row["unit"] == "coefficients"]
        assert kept["bytes"] == 4 * 2 * tensors
        fresh = sum(row["bytes"] for row in rows if row["buffer"] == "optim.exp_avg_sq_fresh")
        assert fresh == sum(row["bytes"] for row in rows if row["buffer"] == "optim.exp_avg_sq")


LLAMA = "meta-llama/Llama-3.2-1B"


def test_a_plan_has_its_lines_and_what_is_refused_is() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}
    config["optimizer"] = {"type": "OneBitLamb", "params": {"lr": 1e-3, "freeze_step": 100}}
    plan = zeroplan.estimate(LLAMA, ds_config=config, engine="zeroplan", gpus=2, vram="80G")[0]
    by_buffer = {line.buffer: line.bytes for line in plan.lines}
    assert by_buffer["optim.exp_avg_sq_fresh"] == by_buffer["optim.exp_avg_sq"] == by_buffer["optim.error_feedback"]
    for changes, said in (
        ({"zero_optimization": {"stage": 2}}, "from stage 2 on no rank keeps gradients of its own"),
        ({"optimizer": {"type": "OneBitLamb", "params": {"factor_maximum": 1}}}, "did you mean 'factor_max'"),
        ({"optimizer": {"type": "OneBitLamb", "params": {"coeff_beta": -1}}}, "coeff_beta"),
    ):
        with pytest.raises(BadInput, match=said):
            zeroplan_runtime.initialize(model=models.make(), config={**config_of(0), **changes}, device="cpu")


# ---------------------------------------------------------------------- GPUs

TWO_GPUS = """
params = {"lr": 1e-2, "weight_decay": 0.1}
kinds = {
    "OneBitLamb": {"freeze_step": 3, "max_coeff": 0.3},
    "ZeroOneAdam": {"var_freeze_step": 3, "local_step_scaler": 2, "local_step_clipper": 4},
}
for kind, more in kinds.items():
    found = []
    for path, stage in (("", 0), ("torch", 0), ("", 1)):
        if kind == "ZeroOneAdam" and stage:
            continue
        os.environ["ZEROPLAN_KERNELS"] = path
        config = ds_config(stage, "bf16", optimizer={"type": kind, "params": {**params, **more}})
        engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=config)
        losses = []
        for number in range(8):
            losses.append(engine.backward(engine(models.batch(number, 0, dist.get_rank()).to(device))).item())
            engine.step()
        engine.finish_step()
        first = engine.model_states.units[1].master.clone()
        if not stage:  # step 8 is one after which all ranks have the same
            other = first.clone()
            dist.broadcast(other, 0)
            assert torch.equal(first, other), kind
        found.append(losses)
        engine.destroy()
    for losses in found[1:]:
        assert max(abs(a - b) for a, b in zip(losses, found[0], strict=True)) < 0.02, (kind, found)
"""


@pytest.mark.gpu
def test_kernels_and_stages_agree_over_nccl(tmp_path: Path) -> None:
    """Norms add up in another order in each, so losses agree to the rounding of bf16 weights; ranks have the same bits."""
    run_on_gpus(TWO_GPUS, tmp_path, ranks=2, timeout=600)
