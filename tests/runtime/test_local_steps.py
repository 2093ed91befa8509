"""0/1 Adam's local steps: a plain simulation of the algorithm, what is sent, saving, restarts and plans."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroplan
import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.test_one_bit import Simulation, compress, learn, run, start, states_of
from tests.runtime.train import ds_config
from zeroplan.core.arena.owned_buffers import runtime_buffers
from zeroplan.core.errors import BadInput
from zeroplan_runtime.techniques.one_bit.compression_schedule import SCHEDULES, Exchanged

FREEZE, STEPS = 2, 13
LR, DECAY, BETA1, BETA2, EPS = 1e-2, 0.1, 0.9, 0.999, 1e-8
#: Local from step 5 on, every second synchronises; from step 7 on every fourth does.
SYNCHRONISES = (3, 4, 6, 8, 12)


def config_of(stage: int, dtype: str = "fp32", **changes: Any) -> dict[str, Any]:
    params = {"lr": LR, "weight_decay": DECAY, "var_freeze_step": FREEZE, "var_update_scaler": 16}
    params |= {"local_step_scaler": 2, "local_step_clipper": 4, **changes.pop("params", {})}
    return ds_config(stage, dtype, optimizer={"type": "ZeroOneAdam", "params": params}, **changes)


def test_the_interval_grows_as_published() -> None:
    """DeepSpeed's counters, step after step."""
    for scaler, clipper, freeze in ((2, 4, 2), (3, 16, 5), (1, 6, 1)):
        hyper = {
            "var_freeze_step": freeze,
            "var_update_scaler": 16,
            "local_step_scaler": scaler,
            "local_step_clipper": clipper,
        }
        interval, counter = 1, 0
        for step in range(freeze + 1, 80):
            found = SCHEDULES["var_freeze_step"](step, hyper)
            assert found.begins == (step == freeze + 1)
            assert found.second_step == freeze
            assert found.exchanged is (Exchanged.NOTHING if step % interval else Exchanged.SIGNS_OF_CHANGE)
            counter += 1
            if counter == scaler:
                counter, interval = 0, min(clipper, 2 * interval)


class LocalSimulation(Simulation):
    """Local steps of all ranks in one process: every rank has masters and momentum of its own."""

    def __init__(self, ranks: int, layout: Any, states: list[dict[str, torch.Tensor]]) -> None:
        super().__init__(ranks, layout, states)
        self.of_rank = [[{k: v.clone() for k, v in state.items()} for state in states] for _ in range(ranks)]
        self.anchors = [state["master"].clone() for state in states]
        self.rates, self.kept = 0.0, 1.0

    def gradients(self, number: int, rank: int) -> list[torch.Tensor]:
        self.states = self.of_rank[rank]
        return super().gradients(number, rank)

    def below(self, u: int) -> torch.Tensor:
        return self.of_rank[0][u]["optim.exp_avg_sq"].sqrt() / math.sqrt(1 - BETA2**FREEZE) + EPS

    def step(self, number: int) -> None:
        rate = LR / (1 - BETA1 ** (number + 1))
        self.rates, self.kept = self.rates + rate, self.kept * (1 - LR * DECAY)
        for rank in range(self.ranks):
            grads = self.gradients(number, rank)
            for u, state in enumerate(self.of_rank[rank]):
                state["momentum"] = state["momentum"] * BETA1 + grads[u] * (1 - BETA1)
                seen = state["optim.exp_avg_sq"] != 0
                state["master"] = state["master"] - torch.where(seen, state["momentum"] / self.below(u), 0.0) * rate
        if number + 1 in SYNCHRONISES:
            self.synchronise()

    def synchronise(self) -> None:
        for u, flat in enumerate(self.flats):
            used, below = self.used(u), self.below(u)
            sent = []
            for rank in range(self.ranks):
                c = (self.of_rank[rank][u]["master"] - self.anchors[u]) * below + self.worker[u][rank]
                sent.append(torch.cat([compress(chunk) for chunk in c.split(flat.shard)]))
                self.worker[u][rank] = (c - sent[-1]) * used
            means = []
            for rank in range(self.ranks):
                part = slice(rank * flat.shard, (rank + 1) * flat.shard)
                c = sum(other[part] for other in sent) / self.ranks + self.server[u][rank]
                means.append(compress(c))
                self.server[u][rank] = (c - means[-1]) * used[part]
            seen = self.of_rank[0][u]["optim.exp_avg_sq"] != 0
            mean = torch.where(seen, torch.cat(means) * used, 0.0)
            self.anchors[u] = self.anchors[u] * self.kept + mean / below
            for rank in range(self.ranks):
                self.of_rank[rank][u]["master"] = self.anchors[u].clone()
                self.of_rank[rank][u]["momentum"] = -mean / self.rates
        self.rates, self.kept = 0.0, 1.0


def train_twice(group: dist.ProcessGroup, config: dict[str, Any]) -> dict[str, Any]:
    engine = start(group, config)
    run(engine, group, range(FREEZE))
    warm, by_step, sent = states_of(engine), [], []
    for number in range(FREEZE, STEPS):
        before = engine.comm.sent_bytes
        run(engine, group, range(number, number + 1))
        sent.append(engine.comm.sent_bytes - before)
        by_step.append([state["master"] for state in states_of(engine)])
    layout = engine.model_states.layout
    return {"warm": warm, "last": states_of(engine), "masters": by_step, "sent": sent, "layout": layout}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_local_steps_equal_a_simulation(pool: RankPool, ranks: int) -> None:
    results = pool.run(ranks, train_twice, config_of(0, zeroplan={"wide_numel": 500}))
    plain = LocalSimulation(ranks, results[0]["layout"], [dict(state) for state in results[0]["warm"]])
    for index, number in enumerate(range(FREEZE, STEPS)):
        plain.step(number)
        common = number + 1 in SYNCHRONISES
        for rank, found in enumerate(results):
            for u, master in enumerate(found["masters"][index]):
                wanted = plain.of_rank[rank][u]["master"]
                torch.testing.assert_close(master, wanted, rtol=1e-4, atol=2e-5, msg=f"{number} {rank} {u}")
                assert torch.equal(master, results[0]["masters"][index][u]) or not (common or rank == 0)
            assert (found["sent"][index] > 1000) == common
        last = [torch.equal(a, b) for a, b in zip(results[0]["masters"][index], results[1]["masters"][index], strict=True)]
        assert all(last) == common
    for u in range(len(plain.flats)):
        for rank, found in enumerate(results):
            torch.testing.assert_close(found["last"][u]["worker"], plain.worker[u][rank], rtol=1e-3, atol=1e-5)


def saved(group: dist.ProcessGroup, folder: Path) -> tuple[list[str], list[bool], bool]:
    engine = start(group, config_of(0))
    refused = []
    for number in range(9):
        run(engine, group, range(number, number + 1))
        if number + 1 == 8:
            engine.save_checkpoint(folder, tag="eight")
        if number + 1 in (7, 9):
            try:
                engine.save_checkpoint(folder, tag="never")
            except BadInput as fault:
                refused.append(str(fault))
    run(engine, group, range(9, STEPS))
    other = start(group, config_of(0), models.make(seed=1))
    other.load_checkpoint(folder)
    run(other, group, range(8, STEPS))
    pairs = zip(states_of(engine), states_of(other), strict=True)
    made = {(row["buffer"], row["unit"]): row["peak"] for row in engine.arena.measurement()}
    planned = {(str(row.buffer), row.unit): row.bytes for row in runtime_buffers(engine.model_states.layout)}
    return refused, [torch.equal(a[key], b[key]) for a, b in pairs for key in a], made == planned


def test_saving_waits_for_common_masters_and_a_restart_is_exact(pool: RankPool, tmp_path: Path) -> None:
    for refused, same, as_planned in pool.run(2, saved, tmp_path):
        assert len(refused) == 2
        assert all("each rank has masters of its own" in said for said in refused)
        assert all(same)
        assert as_planned


def skip_one(group: dist.ProcessGroup) -> tuple[int, bool]:
    engine = start(group, config_of(0, "fp16"))
    run(engine, group, range(9))
    before = states_of(engine)
    run(engine, group, range(9, 10), math.inf if dist.get_rank(group) == 1 else 1.0)
    same = [torch.equal(a[key], b[key]) for a, b in zip(before, states_of(engine), strict=True) for key in a]
    run(engine, group, range(10, 13))
    first = [state["master"].clone() for state in states_of(engine)]
    for master in first:
        dist.broadcast(master, group_src=0, group=group)
    equal = all(torch.equal(a, state["master"]) for a, state in zip(first, states_of(engine), strict=True))
    return engine.skipped_steps, all(same) and equal


def test_an_overflow_changes_nothing_and_ranks_meet_again(pool: RankPool) -> None:
    assert pool.run(2, skip_one) == [(1, True)] * 2


@pytest.mark.long
def test_learns_as_well_as_adam(pool: RankPool) -> None:
    steps = 240
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 1e-2, "total_num_steps": steps}}
    adam = pool.run(2, learn, ds_config(0, scheduler=schedule), steps)[0]
    params = {"var_freeze_step": 120, "local_step_scaler": 30, "local_step_clipper": 4}
    mine = pool.run(2, learn, config_of(0, scheduler=schedule, params=params), steps)[0]
    assert mine < 1.02 * adam


LLAMA = "meta-llama/Llama-3.2-1B"


def test_plans_and_refusals() -> None:
    def plan(stage: int, clipper: int) -> Any:
        params = {"lr": 1e-3, "var_freeze_step": 100, "local_step_clipper": clipper}
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
        config |= {"zero_optimization": {"stage": stage}, "optimizer": {"type": "ZeroOneAdam", "params": params}}
        return zeroplan.estimate(LLAMA, ds_config=config, engine="zeroplan", gpus=2, vram="80G")[0]

    alone, together = plan(0, 16), plan(0, 1)
    lines = {line.buffer: line.bytes for line in alone.lines}
    assert lines["optim.anchor"] == lines["optim.exp_avg"]
    assert "optim.anchor" not in {line.buffer for line in together.lines if line.bytes}
    assert alone.gpu.model_states - together.gpu.model_states == lines["optim.anchor"]
    with pytest.raises(BadInput, match="local steps let each rank have other parameters"):
        plan(1, 16)
    with pytest.raises(BadInput, match="local steps let each rank have other parameters"):
        zeroplan_runtime.initialize(model=models.make(), config=config_of(1), device="cpu")
