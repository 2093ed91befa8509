"""What hostile scripts do with parameters, gradients and optimizers: the numbers equal plain torch's, or one line refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroplan_runtime
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput

WIDTH = 16


class Net(nn.Module):
    """Three blocks between two layers of the root. `reads` lets the root use the last block's weight before that block."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.leave = nn.Linear(WIDTH, 1)
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        if self.reads:
            x = nn.functional.linear(x, self.blocks[2][0].weight)
        for block in self.blocks:
            x = block(x)
        return self.leave(x).square().mean()


def inner(model: nn.Module) -> nn.Module:
    return getattr(model, "module", model)


def l2(model: nn.Module) -> torch.Tensor:
    return sum((p.square().sum() for p in inner(model).parameters()), torch.zeros(()))


def penalty_before(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    penalty = l2(model)
    return model(x) + 0.1 * penalty


def penalty_after(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x) + 0.1 * l2(model)


def one_weight(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    penalty = inner(model).blocks[1][0].weight.square().sum()
    return model(x) + 0.1 * penalty


def usual(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


USES: dict[str, tuple[dict[str, Any], Callable[[nn.Module, torch.Tensor], torch.Tensor]]] = {
    "penalty before": ({}, penalty_before),
    "penalty after": ({}, penalty_after),
    "one weight": ({}, one_weight),
    "root reads": ({"reads": True}, usual),
}


def data(number: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def sgd(stage: int, **changes: Any) -> dict[str, Any]:
    """Clipping that never clips, so that offloaded updates wait for the step."""
    return ds_config(stage, **{"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 1e9, **changes})


def against_plain(group: dist.ProcessGroup, use: str, config: dict[str, Any]) -> Any:
    """The largest difference from plain torch after three steps, of parameters and of an EMA of them; or the refusal.

    Between the steps the parameters are read: into an EMA, and as a norm.
    """
    options, call = USES[use]
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    accum = config.get("gradient_accumulation_steps", 1)
    torch.manual_seed(0)
    plain = Net(**options)
    model = copy.deepcopy(plain)
    shadows = [[p.detach().clone() for p in one.parameters()] for one in (plain, model)]
    engine, *_ = zeroplan_runtime.initialize(model=model, config=config, group=group, device="cpu")
    worst = 0.0
    try:
        for number in range(3):
            for micro in range(accum):
                for each in range(ranks):
                    (call(plain, data(10 * number + micro, each)) / ranks / accum).backward()
                engine.backward(call(engine, data(10 * number + micro, rank)))
                engine.step()
            with torch.no_grad():
                for p in plain.parameters():
                    p.sub_(p.grad, alpha=0.1)
                    p.grad = None
                if config["zero_optimization"]["stage"] < 3:
                    for one, shadow in zip((plain, engine.module), shadows, strict=True):
                        for s, p in zip(shadow, one.parameters(), strict=True):
                            s.lerp_(p, 0.5)
                    worst = max(worst, *((a - b).abs().max().item() for a, b in zip(*shadows, strict=True)))
        state = engine.module_state_dict()
    except BadInput as fault:
        return str(fault)
    finally:
        engine.destroy()
    if state is not None:
        worst = max(worst, *((state[name] - value).abs().max().item() for name, value in plain.state_dict().items()))
    return worst


CONFIGS = {
    "0": sgd(0),
    "1": sgd(1),
    "1, accumulated": sgd(1, gradient_accumulation_steps=2),
    "2": sgd(2),
    "2, accumulated": sgd(2, gradient_accumulation_steps=2),
    "3": sgd(3),
}


def all_configs(group: dist.ProcessGroup, use: str) -> dict[str, Any]:
    return {name: against_plain(group, use, config) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("use", USES)
def test_parameters_used_outside_their_forward(pool: RankPool, use: str) -> None:
    for found in pool.run(2, all_configs, use):
        refused = {name: said for name, said in found.items() if isinstance(said, str)}
        assert all(name == "3" and "while its unit" in said for name, said in refused.items()), found
        assert all(found[name] < 1e-6 for name in CONFIGS if name not in refused), found
