"""Checkpoints hold what is on the host, and resume with and without offload, on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.test_checkpoint import go_on
from tests.runtime.train import ds_config

CPU = {"device": "cpu"}
RESIDENT: dict[str, Any] = {"stage": 2}
HOST = {"stage": 2, "offload_optimizer": CPU}
HALF = {"stage": 1, "offload_optimizer": {**CPU, "ratio": 0.5}}
PARAMS = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}


def start(group: dist.ProcessGroup, zero: dict[str, Any], dtype: str, delayed: int, seed: int) -> zeroplan_runtime.Engine:
    config = {**ds_config(0, dtype), "zero_optimization": zero}
    config["zeroplan"] = {**config["zeroplan"], "nvme_in_memory": True}
    if delayed:
        config["zeroplan"] = {**config["zeroplan"], "delayed_update": delayed}
    engine, *_ = zeroplan_runtime.initialize(model=models.make(seed), config=config, group=group, device="cpu")
    return engine


def save(group: dist.ProcessGroup, folder: str, zero: dict[str, Any], dtype: str, delayed: int) -> list[float]:
    engine = start(group, zero, dtype, delayed, 0)
    go_on(engine, 0, 4)
    engine.save_checkpoint(folder)
    return go_on(engine, 4, 8)


def resume(group: dist.ProcessGroup, folder: str, zero: dict[str, Any], dtype: str, delayed: int) -> list[float]:
    engine = start(group, zero, dtype, delayed, 9)
    go_on(engine, 0, 2)  # what was there before must leave no trace
    engine.load_checkpoint(folder)
    return go_on(engine, 4, 8)


@pytest.mark.parametrize(
    ("ranks", "zero", "dtype"), [(2, PARAMS, "bf16"), (1, HALF, "bf16"), pytest.param(2, HOST, "fp32", marks=pytest.mark.long)]
)
def test_resume_with_and_without_offload(pool: RankPool, tmp_path: Path, ranks: int, zero: dict[str, Any], dtype: str) -> None:
    expected = pool.run(ranks, save, str(tmp_path), zero, dtype, 0)[0]
    for others, another in ((1, PARAMS), (2, HOST), (2, RESIDENT), (2, HALF), (1, RESIDENT)):
        assert pool.run(others, resume, str(tmp_path), another, dtype, 0)[0] == expected, (others, another)


def test_a_checkpoint_under_the_delayed_update_is_of_a_whole_step(pool: RankPool, tmp_path: Path) -> None:
    expected = pool.run(2, save, str(tmp_path), HOST, "bf16", 2)[0]
    assert pool.run(2, resume, str(tmp_path), HOST, "bf16", 2)[0] == expected
    assert pool.run(1, resume, str(tmp_path), HOST, "bf16", 2)[0] == expected
    prompt = pool.run(2, resume, str(tmp_path), RESIDENT, "bf16", 0)[0]
    assert [a == b for a, b in zip(prompt, expected, strict=True)] == [True, False, False, False]
