"""What scripts of strangers do, on two ranks at every stage: numbers equal plain torch's, or one line refuses it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters
from torch.utils.checkpoint import checkpoint

import zeroplan_runtime
from tests.runtime.ranks import RankPool
from zeroplan.core.errors import BadInput

WIDTH = 8
Seen = list[torch.Tensor]


class Net(nn.Module):
    """Three blocks between two layers; the blocks are units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for i, block in enumerate(self.blocks):
            if self.fails and i == 2:
                raise ValueError("the data is bad")
            x = x + block(x)
        return self.leave(x)


class Plain:
    """Plain torch with the calls of an engine."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.module(x)
        return found

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def data(number: int) -> torch.Tensor:
    """The same on all ranks, so that their mean is each one's own gradient."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


def loss_of(t: Any, number: int) -> torch.Tensor:
    torch.manual_seed(number)
    found: torch.Tensor = t(data(number)).square().mean()
    return found


def steps(t: Any, first: int, last: int) -> None:
    for number in range(first, last):
        t.backward(loss_of(t, number))
        t.step()


def ties(t: Any) -> None:
    t.module.leave.weight = t.module.enter.weight


def replaces(t: Any) -> None:
    t.module.leave.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


def swaps_data(t: Any) -> None:
    t.module.blocks[1][0].weight.data = torch.ones(WIDTH, WIDTH)


def deletes(t: Any) -> None:
    del t.module.blocks[2]


def adds_a_layer(t: Any) -> None:
    t.module.leave = nn.Sequential(t.module.leave, nn.Linear(WIDTH, WIDTH))


def parametrizes(t: Any) -> None:
    parametrize.register_parametrization(t.module.leave, "weight", nn.Tanh())


def freezes(t: Any) -> None:
    t.module.blocks[0].requires_grad_(False)


def casts(t: Any) -> None:
    t.module.double()
    t.module.float()


def copies(t: Any) -> Seen:
    copied = copy.deepcopy(t.module)
    return [p.detach() for p in copied.parameters()]


def pickles(t: Any) -> Seen:
    return [p.detach() for p in pickle.loads(pickle.dumps(t.module)).parameters()]


def saves_a_state_dict(t: Any) -> Seen:
    file = io.BytesIO()
    torch.save(t.module.state_dict(), file)
    file.seek(0)
    return list(torch.load(file, weights_only=True).values())


def loads_a_state_dict(t: Any) -> None:
    torch.manual_seed(7)
    t.module.load_state_dict(Net().state_dict())


def assigns_a_state_dict(t: Any) -> None:
    torch.manual_seed(7)
    t.module.load_state_dict(Net().state_dict(), assign=True)


def through_a_vector(t: Any) -> None:
    with torch.no_grad():
        vector_to_parameters(parameters_to_vector(t.module.parameters()) * 0.5, t.module.parameters())


def averages_weights(t: Any) -> Seen:
    averaged = torch.optim.swa_utils.AveragedModel(t.module)
    averaged.update_parameters(t.module)
    return [p.detach() for p in averaged.parameters()]


def initialises_again(t: Any) -> None:
    torch.manual_seed(3)
    for module in t.module.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def inputs_with_gradients(t: Any) -> Seen:
    x = data(50).requires_grad_()
    y = x * 2
    y.retain_grad()
    torch.manual_seed(0)
    t.backward(t(y).square().mean())
    t.step()
    assert x.grad is not None
    assert y.grad is not None
    return [x.grad, y.grad]


def hooks_on_activations(t: Any) -> Seen:
    seen: Seen = []
    handle = t.module.blocks[1].register_forward_hook(
        lambda module, args, output: output.register_hook(lambda grad: seen.append(grad.clone())) and None
    )
    steps(t, 50, 52)
    handle.remove()
    return seen


def backward_hooks(t: Any) -> Seen:
    seen: Seen = []
    handle = t.module.blocks[1].register_full_backward_hook(lambda module, before, after: seen.append(after[0].clone()))
    steps(t, 50, 52)
    handle.remove()
    return seen


def hooks_on_gradients(t: Any) -> Seen:
    seen: Seen = []

    def clip(grad: torch.Tensor) -> torch.Tensor:
        seen.append(grad.clone())
        return grad.clamp(-1e-3, 1e-3)

    handle = t.module.blocks[1][0].weight.register_hook(clip)
    steps(t, 50, 52)
    handle.remove()
    return seen


def hooks_after_gradients(t: Any) -> Seen:
    seen: Seen = []
    handle = t.module.enter.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    steps(t, 50, 52)
    handle.remove()
    return seen


def gradients_of_the_loss(t: Any) -> Seen:
    loss = loss_of(t, 50)
    found = torch.autograd.grad(loss, [t.module.enter.weight, t.module.leave.bias], retain_graph=True)
    t.backward(loss)
    t.step()
    return list(found)


def second_derivatives(t: Any) -> Seen:
    x = data(50).requires_grad_()
    torch.manual_seed(0)
    loss = t(x).square().mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    t.backward(loss + grad.square().sum())
    t.step()
    return [grad.detach()]


def two_losses(t: Any) -> None:
    for number in range(50, 52):
        torch.manual_seed(number)
        y = t(data(number))
        t.backward(y.square().mean(), retain_graph=True)
        t.backward(y.abs().mean())
        t.step()


def blocks_alone(t: Any) -> None:
    for number in range(50, 52):
        torch.manual_seed(number)
        t.backward(t.module.blocks[1](data(number)).square().mean() + loss_of(t, number))
        t.step()


def module_not_engine(t: Any) -> None:
    for number in range(50, 52):
        torch.manual_seed(number)
        t.backward(t.module(data(number)).square().mean())
        t.step()


def forwards_without_gradients(t: Any) -> Seen:
    seen: Seen = []
    for number in range(50, 52):
        with torch.no_grad():
            seen.append(loss_of(t, 60))
        loss = loss_of(t, number)
        t.module.eval()
        with torch.inference_mode():
            seen.append(loss_of(t, 61).clone())
        t.module.train()
        t.backward(loss)
        t.step()
    return seen


def functional_calls(t: Any) -> Seen:
    halved = {name: p.detach() * 0.5 for name, p in t.module.named_parameters()}
    torch.manual_seed(0)
    return [torch.func.functional_call(t.module, halved, (data(50),)).detach()]


def fails_in_the_forward(t: Any) -> None:
    t.module.fails = True
    with pytest.raises(ValueError, match="the data is bad"):
        loss_of(t, 50)
    t.module.fails = False


def checkpoints_the_model(t: Any) -> None:
    for number in range(50, 52):
        x = data(number).requires_grad_()
        torch.manual_seed(number)
        t.backward(checkpoint(t, x, use_reentrant=False).square().mean())
        t.step()


def changes_rates(t: Any) -> None:
    for group in t.optimizer.param_groups:
        group["lr"], group["weight_decay"], group["momentum"] = 0.01, 0.1, 0.5


def an_optimizer_of_its_own(t: Any) -> None:
    own = torch.optim.SGD(t.module.parameters(), lr=0.05)
    t.backward(loss_of(t, 50))
    own.step()
    own.zero_grad()


def sums_losses_over_ranks(t: Any) -> Seen:
    loss = loss_of(t, 50)
    told = loss.detach().clone()
    if isinstance(t, zeroplan_runtime.engine.Engine):
        dist.all_reduce(told, group=t.comm.group)
        told /= t.comm.world_size
    t.backward(loss)
    t.step()
    return [told]


def adds_noise(t: Any) -> None:
    with torch.no_grad():
        for p in t.module.parameters():
            p.add_(torch.full_like(p, 0.01))


def another_backward(t: Any) -> None:
    loss_of(t, 50).backward()  # type: ignore[no-untyped-call]
    t.step()


def unused_for_a_step(t: Any) -> None:
    for number in range(50, 52):
        x = t.module.enter(data(number)) if number % 2 else None
        t.backward(loss_of(t, number) + (0 if x is None else x.mean()))
        t.step()


SCRIPTS: dict[Callable[[Any], Any], tuple[int, ...]] = {
    # The stages at which each is refused; at the others numbers are equal.
    ties: (),
    replaces: (),
    swaps_data: (0, 1, 2, 3),
    deletes: (),
    adds_a_layer: (),
    parametrizes: (),
    freezes: (),
    casts: (0, 1, 2, 3),
    copies: (3,),
    pickles: (0, 1, 2, 3),
    saves_a_state_dict: (3,),
    loads_a_state_dict: (3,),
    assigns_a_state_dict: (0, 1, 2, 3),
    through_a_vector: (0, 1, 2, 3),
    averages_weights: (3,),
    initialises_again: (3,),
    inputs_with_gradients: (),
    hooks_on_activations: (),
    backward_hooks: (),
    hooks_on_gradients: (),
    hooks_after_gradients: (0, 1, 2, 3),
    gradients_of_the_loss: (),
    second_derivatives: (3,),
    two_losses: (),
    blocks_alone: (),
    module_not_engine: (),
    forwards_without_gradients: (),
    functional_calls: (3,),
    fails_in_the_forward: (),
    checkpoints_the_model: (0, 1, 2, 3),
    changes_rates: (),
    an_optimizer_of_its_own: (0, 1, 2, 3),
    sums_losses_over_ranks: (),
    adds_noise: (3,),
    another_backward: (0, 1, 2, 3),
    unused_for_a_step: (),
}


def run(t: Any, script: Callable[[Any], Any]) -> Seen:
    """Two steps, the script, two steps; what the script saw, and losses."""
    steps(t, 0, 2)
    seen = script(t) or []
    steps(t, 2, 4)
    with torch.no_grad():
        return [*seen, loss_of(t, 99)]


def outcomes(group: dist.ProcessGroup, stage: int) -> dict[str, str]:
    """By script ``equal``, ``different``, or the line that refuses it."""
    found = {}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    for script in SCRIPTS:
        torch.manual_seed(0)
        model = Net()
        plain = copy.deepcopy(model)
        engine, *_ = zeroplan_runtime.initialize(model=model, config=config, group=group, device="cpu")
        try:
            seen = run(engine, script)
        except BadInput as fault:
            found[script.__name__] = str(fault)
            continue
        except Exception as fault:
            found[script.__name__] = f"crash: {type(fault).__name__}: {fault}"
            continue
        finally:
            engine.destroy()
        try:
            expected = run(Plain(plain), script)
        except Exception as fault:
            found[script.__name__] = f"plain: {fault}"
            continue
        close = len(seen) == len(expected) and all(
            torch.allclose(a, b, 1e-5, 1e-6) for a, b in zip(seen, expected, strict=True)
        )
        found[script.__name__] = "equal" if close else "different"
    return found


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 2)), 3])
def test_what_strangers_do(pool: RankPool, stage: int) -> None:
    for found in pool.run(2, outcomes, stage):
        for script, stages in SCRIPTS.items():
            said = found[script.__name__]
            if stage in stages:
                assert said not in ("equal", "different"), script
                assert not said.startswith(("crash", "plain")), said
                assert "\n" not in said
            else:
                assert said == "equal", (script, said)
