"""Loss scales and learning rates follow DeepSpeed's rules; infinite gradients skip the step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput
from zeroplan_runtime.optim.scaler import LossScaler


@pytest.mark.parametrize("seed", range(6))
def test_the_loss_scaler_is_deepspeeds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    monkeypatch.setattr(theirs.dist, "get_rank", lambda: 1)  # not the rank that logs
    draw = random.Random(seed)
    options = {
        "scale_window": draw.randint(1, 6),
        "min_scale": 1.0,
        "delayed_shift": draw.randint(1, 3),
        "consecutive_hysteresis": draw.random() < 0.5,
    }
    oracle = theirs.DynamicLossScaler(2.0**12, raise_error_at_min_scale=False, **options)
    mine = LossScaler(
        scale=2.0**12,
        dynamic=True,
        window=options["scale_window"],
        hysteresis=options["delayed_shift"],
        consecutive_hysteresis=options["consecutive_hysteresis"],
    )
    for _ in range(200):
        overflow = draw.random() < 0.2 and mine.scale > 2
        oracle.update_scale(overflow)
        mine.update(overflow)
        assert mine.scale == oracle.cur_scale


def test_overflow_at_the_least_scale_ends_the_run() -> None:
    scaler = LossScaler(scale=1.0, dynamic=True, hysteresis=1)
    with pytest.raises(BadInput, match="least loss scale"):
        scaler.update(True)


def overflow(group: dist.ProcessGroup, stage: int) -> dict[str, Any]:
    """fp16 from a loss scale that is too high: first steps overflow, on one rank only."""
    config = ds_config(
        stage,
        "fp16",
        fp16={"loss_scale": 0, "initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 2},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 50, "warmup_min_lr": 0.001, "warmup_max_lr": 0.01}},
    )
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=config, group=group, device="cpu")
    told = []
    for number in range(12):
        before = engine.model_states.units[1].master.clone()
        rank = dist.get_rank(group)
        loss = engine(models.batch(number, 0, rank)) * (8.0 if rank == 1 and number < 4 else 1.0)
        engine.backward(loss)
        scale = engine.loss_scale
        engine.step()
        moved = bool((engine.model_states.units[1].master != before).any())
        told.append((scale, engine.skipped_steps, moved, engine.get_lr()[0]))
    return {"told": told, "steps": engine.global_steps, "params": engine.module_state_dict()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overflow_skips_the_step_on_every_rank(pool: RankPool, stage: int) -> None:
    results = pool.run(2, overflow, stage)
    told = results[0]["told"]
    assert told == results[1]["told"]
    skips = [after[1] > before[1] for before, after in zip([(0, 0, 0, 0), *told], told, strict=False)]
    assert skips[0]
    assert 1 < sum(skips) < 11
    for number, (scale, _, moved, lr) in enumerate(told):
        assert moved is not skips[number]
        if number + 1 < len(told) and skips[number]:
            assert told[number + 1][0] == scale / 2
            assert lr == (told[number - 1][3] if number else 0.001)  # a skipped step does not move the schedule
    assert results[0]["steps"] == 12
    assert all(torch.isfinite(p).all() for p in results[0]["params"].values())


def poisoned(group: dist.ProcessGroup, check: bool) -> tuple[int, bool]:
    config = ds_config(2, "bf16", bf16={"check_grad_overflow": check})
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=config, group=group, device="cpu")
    engine.backward(engine(models.batch(0, 0, 0)) * float("nan"))
    engine.step()
    params = engine.module_state_dict()
    return engine.skipped_steps, params is None or all(bool(torch.isfinite(p).all()) for p in params.values())


def test_bf16_checks_unless_told_not_to(pool: RankPool) -> None:
    assert pool.run(2, poisoned, True)[0] == (1, True)
    assert pool.run(2, poisoned, False)[0] == (0, False)
