"""Models and uses that are out of the ordinary: each equals plain torch at every stage, or is refused with the remedy."""

from __future__ import annotations

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
from zeroplan_runtime import model_states
from zeroplan_runtime.engine import Engine

WIDTH = 16


class Net(nn.Module):
    """Three blocks between two linear layers; `make` makes a block."""

    def __init__(self, make: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList((make or (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())))() for _ in range(3))
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, number: int = 0) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x).square().mean()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDTH, sparse=True)
        self.net = Net()

    def forward(self, x: torch.Tensor, number: int = 0) -> torch.Tensor:
        return self.net(self.table((x[:, 0].abs() * 10).long() % 40))


class Alternating(Net):
    """Leaves out other blocks at each step, and drops what one of them returns."""

    def forward(self, x: torch.Tensor, number: int = 0) -> torch.Tensor:
        x = self.enter(x)
        for i, block in enumerate(self.blocks):
            if (i + number) % 3 == 0:
                block(x)
            elif (i + number) % 3 == 1:
                x = block(x)
        return self.leave(x).square().mean()


def hooked() -> Net:
    """A user's hooks on gradients: halved on the way, and looked at when complete."""
    model = Net()
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 0.5)
    model.enter.weight.register_post_accumulate_grad_hook(_triple)
    return model


def _triple(param: torch.Tensor) -> None:
    param.grad.mul_(3.0)


def input_gradients(model: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
    """An adversarial example: gradients of the input alone, of which no parameter's may remain."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x), x)
    return model(x.detach() + 0.1 * grad.sign())


def penalty(model: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
    """A gradient penalty, whose backward goes through a backward."""
    x = x.clone().requires_grad_()
    loss = model(x)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.square().sum()


def own_gradients(model: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
    """Asks autograd for a weight's gradient itself."""
    loss = model(x)
    inner = getattr(model, "module", model)
    (grad,) = torch.autograd.grad(loss, inner.enter.weight, retain_graph=True)
    return loss * (1.0 + grad.detach().norm())


def fails_first(model: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
    """A hook raises in the middle of the forward, which is then done again."""
    if isinstance(model, Engine):
        hook = model.module.blocks[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        hook.remove()
    return model(x, number)


def usual(model: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
    return model(x, number)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, torch.Tensor, int], torch.Tensor]]] = {
    "sparse": (Sparse, usual),
    "alternating": (Alternating, usual),
    "hooked": (hooked, usual),
    "input_gradients": (Net, input_gradients),
    "penalty": (Net, penalty),
    "own_gradients": (Net, own_gradients),
    "fails_first": (Net, fails_first),
}


def data(number: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def distance(group: dist.ProcessGroup, case: str, stage: int) -> float:
    """The largest difference of any parameter from plain torch's, after three steps."""
    make, call = CASES[case]
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    config = ds_config(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    engine, *_ = zeroplan_runtime.initialize(model=make(), config=config, group=group, device="cpu")
    for number in range(3):
        grads = []
        for each in range(ranks):  # one after another, as hooks see each rank's own
            plain.zero_grad()
            call(plain, data(number, each), number).backward()
            grads.append([torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in plain.parameters()])
        with torch.no_grad():
            for p, *found in zip(plain.parameters(), *grads, strict=True):
                p.sub_(sum(found) / ranks, alpha=0.1)
        engine.backward(call(engine, data(number, rank), number))
        engine.step()
    state = engine.module_state_dict()
    engine.destroy()
    return 0.0 if state is None else max((state[name] - value).abs().max().item() for name, value in plain.state_dict().items())


@pytest.mark.parametrize("case", CASES)
def test_equals_plain_torch(pool: RankPool, case: str) -> None:
    for ranks, stage in ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3)):
        if (case, stage) != ("penalty", 3):
            assert pool.run(ranks, distance, case, stage)[0] < 1e-6, (ranks, stage)


class Box:
    """Hides a tensor from whoever looks for outputs."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, box: Any) -> Any:
        return Box(torch.tanh(self.layer(box.x)))


class Boxed(Net):
    def __init__(self) -> None:
        super().__init__(Hiding)

    def forward(self, x: torch.Tensor, number: int = 0) -> torch.Tensor:
        box = Box(self.enter(x))
        for block in self.blocks:
            box = block(box)
        return self.leave(box.x).square().mean()


def refused(group: dist.ProcessGroup, make: Callable[[], nn.Module], call: Any) -> str:
    engine, *_ = zeroplan_runtime.initialize(model=make(), config=ds_config(3), group=group, device="cpu")
    try:
        engine.backward(call(engine, data(0, 0), 0))
    except BadInput as fault:
        return str(fault)
    return ""


UNSEEN = "is not gathered; its backward is seen by the gradients of its outputs: return tensors"
TWICE = "gradients of gradients would use the parameters of unit 'blocks.2' when they are gone; take create_graph=True back"


@pytest.mark.parametrize(("make", "call", "reason"), [(Boxed, usual, UNSEEN), (Net, penalty, TWICE)])
def test_backwards_that_cannot_be_followed_are_named_at_stage_3(pool: RankPool, make: Any, call: Any, reason: str) -> None:
    for said in pool.run(2, refused, make, call):
        assert reason in said


class Choosing(Net):
    """Which block runs is decided by the data."""

    def forward(self, x: torch.Tensor, number: int = 0) -> torch.Tensor:
        chosen = int(x[0, 0] > 0)
        return self.leave(self.blocks[chosen](self.enter(x))).square().mean()


class Seeded(Net):
    """Each rank makes another table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(WIDTH, 2).t())
        self.register_buffer("mask", torch.rand(3) > 0.5, persistent=False)


def choose(group: dist.ProcessGroup, stage: int, alike: bool) -> str:
    rank = dist.get_rank(group)
    config = ds_config(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    engine, *_ = zeroplan_runtime.initialize(model=Choosing(), config=config, group=group, device="cpu")
    sign = 1.0 if alike or rank == 0 else -1.0
    try:
        for number in range(2):
            x = data(number, rank)
            x[0, 0] = sign
            engine.backward(engine(x))
            engine.step()
    except BadInput as fault:
        with pytest.raises(BadInput, match="the last step failed half-way"):
            engine(x)
        return str(fault)
    return ""


def test_ranks_that_choose_other_units_are_told(pool: RankPool) -> None:
    for stage in range(3):  # at stage 3 a gather waits for the other rank's, and the watchdog speaks
        assert pool.run(2, choose, stage, True) == ["", ""]
        for said in pool.run(2, choose, stage, False):
            assert "the ranks went through different units" in said
            assert "with an empty input" in said


def tables(group: dist.ProcessGroup) -> list[torch.Tensor]:
    torch.manual_seed(dist.get_rank(group))
    model = Seeded()
    engine, *_ = zeroplan_runtime.initialize(model=model, config=ds_config(1), group=group, device="cpu")
    assert model.table.stride() == (1, 2)
    engine.destroy()
    return [model.table, model.mask]


def test_buffers_are_the_first_ranks(pool: RankPool) -> None:
    first, second = pool.run(2, tables)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_model_without_anything_to_train() -> None:
    for model in (nn.Identity(), Net().requires_grad_(False)):
        engine, *_ = zeroplan_runtime.initialize(model=model, config=ds_config(2), device="cpu")
        engine(data(0, 0))
        with pytest.raises(BadInput, match="the model has no parameter to train"):
            engine.step()


def test_masters_filled_by_pieces_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece ends within a parameter, and where one ends."""
    monkeypatch.setattr(model_states, "_COPY_NUMEL", WIDTH * WIDTH // 3)
    model = Net()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    engine, *_ = zeroplan_runtime.initialize(model=model, config={**ds_config(2), "bf16": {"enabled": True}}, device="cpu")
    found = {}
    for unit in engine.model_states.units:
        assert unit.trainable is not None
        for place, begin, numel in zip(
            unit.trainable.layout.params, unit.trainable.layout.offsets, unit.trainable.layout.numels, strict=True
        ):
            found[unit.layout.shape.params[place].name] = unit.master[begin : begin + numel]
    assert {name: value.flatten().tolist() for name, value in wanted.items()} == {n: v.tolist() for n, v in found.items()}
