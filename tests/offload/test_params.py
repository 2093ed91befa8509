"""Parameters on the host: frozen ones too, blocks used several times, evaluation between, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.test_options import Shared, freeze
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput

CPU = {"device": "cpu"}
WAYS: list[dict[str, Any]] = [
    {"stage": 3},
    {"stage": 3, "offload_optimizer": CPU},
    {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
]


def config(zero: dict[str, Any], dtype: str = "bf16", **changes: Any) -> dict[str, Any]:
    return {**ds_config(3, dtype, **changes), "zero_optimization": zero}


def train_frozen(group: dist.ProcessGroup, zero: dict[str, Any]) -> dict[str, Any]:
    """Four steps of a model with frozen parts, an evaluation between forward and backward, and one after each step."""
    engine, *_ = zeroplan_runtime.initialize(model=freeze(models.make()), config=config(zero), group=group, device="cpu")
    losses = []
    for number in range(4):
        loss = engine(models.batch(number, 0, dist.get_rank(group)))
        with torch.no_grad():
            engine(models.batch(99, 0, 0))
        losses.append(engine.backward(loss).item())
        engine.step()
        with torch.no_grad():
            losses.append(engine(models.batch(98, 0, 0)).item())
    return {"losses": losses, "params": engine.module_state_dict(), "rows": engine.arena.measurement()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_parameters_and_evaluation(pool: RankPool, ranks: int) -> None:
    found = [pool.run(ranks, train_frozen, zero)[0] for zero in WAYS]
    assert found[0]["losses"] == found[1]["losses"] == found[2]["losses"]
    assert all(torch.equal(p, found[2]["params"][name]) for name, p in found[0]["params"].items())
    places = {row["place"] for row in found[2]["rows"] if row["buffer"] in ("param.frozen", "param.shard")}
    assert places == {"pinned"}


def train_shared(group: dist.ProcessGroup, zero: dict[str, Any], free: bool) -> dict[str, torch.Tensor] | None:
    """Blocks that are used three times each; `free`: nothing clips or checks, so that updates begin in the backward."""
    torch.manual_seed(0)
    more: dict[str, Any] = {"bf16": {"check_grad_overflow": False}} if free else {"gradient_clipping": 0.5}
    engine, *_ = zeroplan_runtime.initialize(model=Shared(), config=config(zero, "fp32", **more), group=group, device="cpu")
    for number in range(4):
        torch.manual_seed(10 * number + dist.get_rank(group))
        engine.backward(engine(torch.randn(2, 5, 8)))
        engine.step()
    return engine.module_state_dict()


@pytest.mark.parametrize("free", [False, True])
def test_blocks_used_several_times(pool: RankPool, free: bool) -> None:
    resident, *offloaded = [pool.run(2, train_shared, zero, free)[0] for zero in WAYS]
    for found in offloaded:
        assert all(torch.equal(resident[name], p) for name, p in found.items())


class Thief(models.Tiny):
    """Reads a block's weight outside the block's forward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.blocks[0].up.weight.square().sum()


def steal(zero: dict[str, Any]) -> str:
    engine, *_ = zeroplan_runtime.initialize(model=Thief(), config=config(zero, "fp32"), device="cpu")
    try:
        engine(models.batch(0, 0, 0))
    except BadInput as fault:
        return str(fault)
    return ""


def test_alone_too_a_parameter_read_outside_its_unit_is_named() -> None:
    assert steal(WAYS[1]) == ""  # whole on the device
    assert "'blocks.0.up.weight' is read while its unit" in steal(WAYS[2])


@pytest.mark.parametrize(
    ("zero", "more", "said"),
    [
        (WAYS[1], {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}, "LAMB cannot be offloaded"),
        ({"stage": 3, "offload_param": CPU}, {}, "only where their whole optimizer does"),
        ({**WAYS[2], "offload_optimizer": {**CPU, "ratio": 0.5}}, {}, "add offload_optimizer with ratio 1"),
        ({**WAYS[1], "offload_optimizer": {**CPU, "super_offload": True}}, {}, "'super_offload' is not supported"),
        ({"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}}, {}, "nvme_path"),
    ],
)
def test_what_is_refused(zero: dict[str, Any], more: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as fault:
        zeroplan_runtime.initialize(model=models.make(), config=config(zero, "bf16", **more), device="cpu")
    assert said in str(fault.value)
