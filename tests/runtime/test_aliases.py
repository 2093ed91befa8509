"""Aliases of parameters that a forward takes after the first micro batch: found at the step, or guarded when taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput
from zeroplan_runtime import parameter_aliases
from zeroplan_runtime.parameter_aliases import ParameterAliases, _address

CPU = {"offload_optimizer": {"device": "cpu"}}
CONFIGS = [
    ds_config(1, "bf16", gradient_accumulation_steps=2),
    ds_config(2, zero_optimization=CPU),
    ds_config(3, "bf16", optimizer={"type": "Lamb", "params": {}}),
    ds_config(3, zero_optimization={**CPU, "offload_param": {"device": "cpu"}}),
]


def ordinary(group: dist.ProcessGroup, config: dict[str, Any]) -> tuple[int, int]:
    """How often a training without aliases searched for some, and how many it would have found."""
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=config, group=group, device="cpu")
    losses = []
    with mock.patch.object(ParameterAliases, "_search", return_value=[]) as search:
        for number in range(3):
            for micro in range(engine.gradient_accumulation_steps()):
                losses.append(engine(models.batch(number, micro, 0)))
                engine.backward(losses[-1])
                engine.step()
            with torch.no_grad():
                losses.append(engine(models.batch(number, 9, 0)))
        searches = search.call_count
    found = len(engine.first_batches.aliases._search())
    engine.destroy()
    return searches, found


def test_a_training_without_aliases_never_searches(pool: RankPool) -> None:
    for config in CONFIGS:
        assert pool.run(2, ordinary, config) == [(0, 0)] * 2, config


def lingering(group: dist.ProcessGroup, during: str) -> tuple[int, bool]:
    """The searches that a use makes which ends while the engine waits or searches, and whether an alias is found after it."""
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=ds_config(3), group=group, device="cpu")
    held: list[Any] = []
    real = ParameterAliases._search

    def search(aliases: ParameterAliases) -> list[torch.Tensor]:
        held.clear()  # before it is listed, like the storage that only a thread of the transport holds
        return real(aliases)

    def wait(_: float) -> None:
        if during == "wait":
            held.clear()

    def step() -> None:
        engine.backward(engine(models.batch(0, 0, 0)))
        engine.step()

    def hold() -> None:
        held.append(engine.first_batches.aliases._model_states.units[-1].param_slot.tensor.view(-1))

    step()
    with (
        mock.patch.object(ParameterAliases, "_search", autospec=True, side_effect=search) as searches,
        mock.patch.object(parameter_aliases, "time", SimpleNamespace(sleep=wait)),
    ):
        hold()
        step()
    counted = searches.call_count
    hold()
    try:
        step()
    except BadInput:
        return counted, True
    finally:
        held.clear()
        engine.destroy()
    return counted, False


def test_a_collective_that_its_transport_holds_a_moment_longer_hides_no_alias(pool: RankPool) -> None:
    assert pool.run(2, lingering, "wait") == [(0, True)] * 2
    assert pool.run(2, lingering, "search") == [(2, True)] * 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.WIDTH, models.WIDTH)
        self.gives = False

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return (y, self.linear.weight.t()) if self.gives else (y, None)


class Giving(nn.Module):
    """Blocks that later give the root a view of their weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, weight = block(x)
            if weight is not None:
                x = x + x @ weight
        return x.square().mean()


def give(group: dist.ProcessGroup) -> str:
    engine, *_ = zeroplan_runtime.initialize(model=Giving(), config=ds_config(3), group=group, device="cpu")
    x = torch.ones(2, models.WIDTH)
    engine.backward(engine(x))
    engine.step()
    for block in engine.module.blocks:
        block.gives = True
    try:
        engine(x)
    except BadInput as fault:
        return str(fault)
    finally:
        engine.destroy()
    return ""


def test_an_alias_that_a_forward_returns_is_guarded(pool: RankPool) -> None:
    for said in pool.run(2, give):
        assert "parameter 'blocks.0.linear.weight' is read while its unit 'blocks.0' is not gathered" in said


def numpys(group: dist.ProcessGroup, stage: int, zero: dict[str, Any]) -> str:
    """What the step says of an array that was taken before it."""
    engine, *_ = zeroplan_runtime.initialize(
        model=models.make(), config=ds_config(stage, zero_optimization=zero), group=group, device="cpu"
    )
    try:
        with engine.gathered("blocks.1"):
            array = engine.module.blocks[1].up.bias.detach().cpu().numpy()
            copied = array.copy()
        view = array[1:]
        del array
        engine.backward(engine(models.batch(0, 0, 0)))
        engine.step()
        assert (view == engine.module.blocks[1].up.bias.detach().numpy()[1:]).all()
        assert (view != copied[1:]).any()
    except BadInput as fault:
        return str(fault)
    finally:
        engine.destroy()
    return ""


@pytest.mark.parametrize(
    ("stage", "zero", "said"), [(1, {}, ""), (2, CPU, "an array of numpy's"), (3, {}, "an array of numpy's")]
)
def test_arrays_of_numpy(pool: RankPool, stage: int, zero: dict[str, Any], said: str) -> None:
    for found in pool.run(2, numpys, stage, zero):
        assert said in found
        assert bool(found) == bool(said)


class Peeking(nn.Module):
    """Blocks of which one later keeps a view of its weight, which the root reads and drops in the same forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(4))
        self.keeps = False
        self.kept: list[torch.Tensor] = []
        self.blocks[0].register_forward_hook(self._keep)

    def _keep(self, block: Any, _args: Any, _output: Any) -> None:
        if self.keeps:
            self.kept.append(block.weight[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        while self.kept:
            x = x * self.kept.pop()
        return x.square().mean()


def peek(group: dist.ProcessGroup, grads: bool) -> tuple[str, int]:
    """What is said of the read, and the searches before it."""
    engine, *_ = zeroplan_runtime.initialize(model=Peeking(), config=ds_config(3), group=group, device="cpu")
    x = torch.ones(2, models.WIDTH)
    with mock.patch.object(ParameterAliases, "_search", autospec=True, side_effect=ParameterAliases._search) as search:
        for _ in range(2):
            engine.backward(engine(x))
            engine.step()
            with torch.no_grad():
                engine(x)
        searches = search.call_count
        engine.module.keeps = True
        try:
            with torch.set_grad_enabled(grads):
                engine(x)
        except BadInput as fault:
            return str(fault), searches
        finally:
            engine.destroy()
    return "", searches


def test_a_view_that_is_read_and_dropped_before_the_step_is_refused(pool: RankPool) -> None:
    for grads in (True, False):
        for said, searches in pool.run(2, peek, grads):
            assert "parameter 'blocks.0.weight' is read while its unit 'blocks.0' is not gathered" in said, grads
            assert not searches


def test_tensors_that_a_compiler_made_without_memory_are_no_aliases() -> None:
    """torch refuses to tell where their memory begins; the search for aliases sees them among all objects."""
    hollow = torch.empty(0).set_(torch._C._construct_storage_from_data_pointer(0, torch.device("cpu"), 64))
    with pytest.raises(RuntimeError, match="invalid python storage"):
        hollow.untyped_storage().data_ptr()
    assert _address(hollow) == 0
    assert _address(torch.ones(3)) > 0
