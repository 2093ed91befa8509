"""DeepSpeed's names that programs touch: activation checkpointing, leaf modules, gradients by a function, reductions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import zeroplan_runtime.compat.deepspeed as deepspeed
from zeroplan.core.errors import BadInput
from zeroplan_runtime.compat.deepspeed import checkpointing, leaf_modules, utils
from zeroplan_runtime.compat.deepspeed.leniency import as_deepspeed_reads

pytestmark = pytest.mark.torch


class Dropping(nn.Module):
    """Two layers with dropout, recomputed or not."""

    def __init__(self, *, recomputed: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.recomputed = recomputed

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.first(x).tanh(), 0.5, training=self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = deepspeed.checkpointing.checkpoint(self.block, x) if self.recomputed else self.block(x)
        return self.second(hidden).square().mean()


def start(model: nn.Module, stage: int, **more: Any) -> Any:
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    config |= {"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}} | more
    return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpointing_gives_the_losses_of_the_model_without_it(stage: int) -> None:
    checkpointing.configure(None, num_checkpoints=2)
    assert checkpointing.is_configured()
    torch.manual_seed(1)
    model = Dropping(recomputed=False)
    losses = []
    for recomputed in (False, True):
        other = copy.deepcopy(model)
        other.recomputed = recomputed
        engine = start(other, stage)
        torch.manual_seed(2)
        losses.append([])
        for _ in range(3):
            loss = engine(torch.randn(2, 4))
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
        engine.destroy()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["partition_activations", "checkpoint_in_cpu"])
def test_divided_inputs_are_asked_of_the_config(name: str) -> None:
    with pytest.raises(BadInput, match="in the ds_config's section activation_checkpointing"):
        checkpointing.configure(None, **{name: True})


def test_the_tracker_draws_by_its_own_state() -> None:
    checkpointing.model_parallel_cuda_manual_seed(7)
    tracker = checkpointing.get_cuda_rng_tracker()
    with tracker.fork():
        first = torch.rand(2)
    outside = torch.rand(2)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(2), outside)
    torch.manual_seed(7 + 2718)
    assert torch.equal(torch.rand(2), first)
    with tracker.fork():
        assert not torch.equal(torch.rand(2), first)
    with pytest.raises(BadInput, match="call reset"):
        tracker.add("other", 7 + 2718)
    with pytest.raises(BadInput, match="there is no state 'missing'"), tracker.fork("missing"):
        pass


def test_leaf_modules_are_marked_by_class_name_and_suffix() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.GELU(), nn.Linear(2, 2)))
    assert utils.set_z3_leaf_modules(model, [nn.GELU, "torch.nn.modules.linear.Linear"]) == [model[0], model[1][0], model[1][1]]
    assert utils.get_z3_leaf_modules(model) == [model[0], model[1][0], model[1][1]]
    assert utils.unset_z3_leaf_modules(model, ["Linear"]) == [model[0], model[1][1]]
    assert utils.get_z3_leaf_modules(model) == [model[1][0]]
    assert leaf_modules.set_z3_leaf_modules_by_name(model, ["1.1", "2"], raise_if_not_found=False) == ([model[1][1]], ["2"])
    assert leaf_modules.set_z3_leaf_modules_by_suffix(model, ["1"]) == ([model[1], model[1][1]], [])
    with pytest.raises(ValueError, match="No modules of type"):
        utils.set_z3_leaf_modules(model, ["Conv2d"])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_by_a_function_and_several_backwards(stage: int) -> None:
    torch.manual_seed(1)
    model = Dropping(recomputed=False).eval()
    plain = copy.deepcopy(model)
    engine = start(model, stage, gradient_accumulation_steps=2)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    engine.eval()
    batches = [torch.randn(2, 4) for _ in range(3)]
    with engine.coalesce_grad_reduction():
        for x in batches:
            engine.backward(engine(x))
            (plain(x) / 2).backward()
        with pytest.raises(BadInput, match="illegal to call"):
            engine.step()
    utils.safe_update_full_grad_vectorized(list(model.parameters()), lambda grad, _: grad * 0.25)
    for param in plain.parameters():
        param.grad *= 0.25
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(utils.safe_get_full_fp32_param(ours), theirs)
    assert engine.global_samples == 4
    engine.destroy()


def test_a_key_with_dots_is_left_out_and_its_section_stays() -> None:
    """TRL writes such keys for a reference model at stage 3; DeepSpeed ignores them."""
    found = as_deepspeed_reads(
        {"zero_optimization.reduce_bucket_size": 5, "zero_optimization": {"stage": 3, "reduce_bucket_size": 7}}, trains=False
    )
    assert found == {"zero_optimization": {"stage": 3, "reduce_bucket_size": 7}}
