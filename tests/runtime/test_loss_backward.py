"""``loss.backward()`` under the names of DeepSpeed: equal to plain torch to the last bit, or one line."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroplan_runtime.compat.deepspeed as deepspeed
from tests.runtime.ranks import RankPool
from zeroplan.core.errors import BadInput

pytestmark = pytest.mark.torch


class Model(nn.Module):
    """Blocks between two layers; gives logits, or the loss and the logits that it is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)])

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.last(x)
        return logits if y is None else ((logits - y).square().mean(), logits)


def engines(stage: int, accum: int = 1, **more: Any) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    """An engine, and the same model in plain torch with its optimizer."""
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    params = {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accum}
    config |= {"optimizer": {"type": "AdamW", "params": params}, "zero_optimization": {"stage": stage}} | more
    engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    return engine, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)


def loss_of(model: Any, kind: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss of a forward, in one of the ways that scripts form it."""
    if kind == "logits too":
        loss, logits = model(x, y)
        return loss + logits.square().mean()
    logits = model(x)
    if kind == "in place":
        logits /= 2
    return (logits - y).square().mean()


@pytest.mark.parametrize("kind", ["logits", "logits too", "in place"])
@pytest.mark.parametrize(("stage", "accum"), [(0, 2), (1, 1), (2, 2), (3, 2)])
def test_steps_are_those_of_plain_torch(stage: int, accum: int, kind: str) -> None:
    engine, plain, optimizer = engines(stage, accum)
    for micro in range(3 * accum):
        x, y = torch.randn(4, 6), torch.randn(4, 3)
        ours, theirs = loss_of(engine, kind, x, y), loss_of(plain, kind, x, y)
        assert torch.equal(ours, theirs)
        ours.backward()
        engine.step()
        (theirs / accum).backward()
        if (micro + 1) % accum == 0:
            optimizer.step()
            optimizer.zero_grad()
    engine.destroy()


def on_ranks(group: dist.ProcessGroup, stage: int) -> tuple[list[float], list[float]]:
    """The losses of ``loss.backward()``, and of ``engine.backward(loss)``, of each rank's own data."""
    mpu = SimpleNamespace(
        get_model_parallel_world_size=lambda: 1,
        get_data_parallel_world_size=group.size,
        get_data_parallel_group=lambda: group,
    )
    found = []
    for own in (True, False):
        torch.manual_seed(0)
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
        config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
        engine = deepspeed.initialize(model=Model(), config=config, mpu=mpu)[0]
        torch.manual_seed(engine.comm.rank)
        losses = []
        for _ in range(4):
            loss = loss_of(engine, "logits", torch.randn(4, 6), torch.randn(4, 3))
            if own:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append(losses)
        engine.destroy()
    return found[0], found[1]


@pytest.mark.parametrize("stage", [1, 3])
def test_on_ranks_it_is_the_engines_own(pool: RankPool, stage: int) -> None:
    for own, engines in pool.run(2, on_ranks, stage):
        assert own == engines
        assert len(set(own)) == 4


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_no_backward_of_the_parameters_leaves_nothing(stage: int) -> None:
    engine, plain, _ = engines(stage)
    x, y = torch.randn(4, 6), torch.randn(4, 3)
    given = x.clone().requires_grad_()
    found = torch.autograd.grad(loss_of(engine, "logits", given, y), given)[0]
    torch.testing.assert_close(found, torch.autograd.grad(loss_of(plain, "logits", given, y), given)[0])
    with pytest.raises(BadInput, match=r"there are no gradients of engine\.backward"):
        engine.step()
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_that_raised_must_be_dropped(stage: int) -> None:
    engine, plain, optimizer = engines(stage)
    x, y = torch.randn(4, 6), torch.randn(4, 3)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("mine")

    hook = engine.module.first.weight.register_hook(fail)
    with pytest.raises(ValueError, match="mine"):
        loss_of(engine, "logits", x, y).backward()
    hook.remove()
    with pytest.raises(BadInput, match=r"the last backward failed .*loss\.backward\(\) raised.* call engine\.zero_grad"):
        engine.step()
    engine.zero_grad()
    for _ in range(2):
        ours, theirs = loss_of(engine, "logits", x, y), loss_of(plain, "logits", x, y)
        assert torch.equal(ours, theirs)
        ours.backward()
        engine.step()
        theirs.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.destroy()


def test_two_engines_of_one_loss() -> None:
    (one, plain, optimizer), (two, other, another) = engines(1), engines(3)
    x, y = torch.randn(4, 6), torch.randn(4, 3)
    for _ in range(2):
        ours = loss_of(one, "logits", x, y) * loss_of(two, "logits", x, y)
        theirs = loss_of(plain, "logits", x, y) * loss_of(other, "logits", x, y)
        assert torch.equal(ours, theirs)
        ours.backward()
        theirs.backward()
        for engine, adam in ((one, optimizer), (two, another)):
            engine.step()
            adam.step()
            adam.zero_grad()
    one.destroy()
    two.destroy()


def test_a_loss_scale_and_second_gradients_are_one_line() -> None:
    engine, *_ = engines(2, fp16={"enabled": True, "initial_scale_power": 4})
    x, y = torch.randn(4, 6).half(), torch.randn(4, 3).half()
    with pytest.raises(BadInput, match=r"the loss scale is 16.*engine\.scale\(loss\)\.backward"):
        loss_of(engine, "logits", x, y).float().backward()
    before = engine.module.last.weight.clone()
    engine.scale(loss_of(engine, "logits", x, y).float()).backward()
    engine.step()
    assert (engine.module.last.weight - before).abs().max() < 0.02  # one step of the learning rate: scaled once
    assert not torch.equal(engine.module.last.weight, before)
    with pytest.raises(BadInput, match="create_graph=True is not supported"):
        engine.scale(loss_of(engine, "logits", x, y)).backward(create_graph=True)
    engine.destroy()
