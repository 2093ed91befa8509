"""Checkpointed inputs leave for the host and return: same gradients, and the memory that the note promises."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.runtime import models
from zeroplan_runtime.arena import Arena
from zeroplan_runtime.offload.activations import ActivationOffload, PinnedPool
from zeroplan_runtime.streams import Event

CPU = torch.device("cpu")
INPUT_BYTES = models.BATCH * models.LENGTH * models.WIDTH * 4


def gradients(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(tokens).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def offloaded(model: models.Tiny, least_bytes: int = 1) -> tuple[ActivationOffload, Arena]:
    arena = Arena(CPU)
    return ActivationOffload(list(model.blocks), arena, least_bytes=least_bytes), arena


@pytest.mark.parametrize("remat", ["plain", "reentrant"])
def test_gradients_are_the_same_bits_and_every_input_but_the_newest_leaves(remat: str) -> None:
    model = models.make(remat=remat)
    tokens = models.batch(0, 0, 0)
    expected = gradients(copy.deepcopy(model), tokens)
    offload, arena = offloaded(model)
    for _ in range(2):  # the second step reuses the first one's buffers
        with offload.saving():
            loss = model(tokens)
        model.zero_grad()
        loss.backward()
        del loss
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        rows = arena.measurement()
        assert [row["bytes"] for row in rows] == [INPUT_BYTES] * (len(model.blocks) - 1)
        assert {(row["buffer"], row["place"]) for row in rows} == {("activation.checkpoint", "pinned")}


def test_what_came_back_for_a_backward_that_ended_before_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is free with the graph, and the copy may still be writing there."""
    model = models.make(remat="plain")
    offload, _ = offloaded(model)
    inputs: list[torch.Tensor] = []
    model.blocks[-1].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with offload.saving():
        loss = model(models.batch(0, 0, 0))
    torch.autograd.grad(loss, inputs[0])
    waits: list[Event] = []
    monkeypatch.setattr(Event, "wait", lambda event, _: waits.append(event))
    inputs.clear()
    del loss
    assert len(waits) == 1


def test_inputs_are_given_up_as_the_forward_goes() -> None:
    """Storages of block inputs alive at each block's entry: this block's, and the one that is leaving."""
    model = models.make(remat="plain")
    offload, _ = offloaded(model)
    alive: list[int] = []
    seen: list[Any] = []

    def note(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(weakref.ref(args[0].untyped_storage()))
        alive.append(sum(ref() is not None for ref in seen))

    hooks = [block.register_forward_pre_hook(note) for block in model.blocks]
    with offload.saving():
        loss = model(models.batch(0, 0, 0))
    for hook in hooks:  # not in the backward, which runs the blocks again
        hook.remove()
    assert alive == [1, 2, 2, 2, 2]
    assert sum(ref() is not None for ref in seen) == 1  # the newest waits for the backward
    loss.backward()


def test_nothing_moves_without_checkpointing_or_for_small_tensors() -> None:
    for model, least in ((models.make(), 1), (models.make(remat="plain"), INPUT_BYTES + 1)):
        expected = gradients(copy.deepcopy(model), models.batch(0, 0, 0))
        offload, arena = offloaded(model, least)
        with offload.saving():
            loss = model(models.batch(0, 0, 0))
        loss.backward()
        assert arena.rows() == []
        assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())


def test_two_forwards_before_one_backward_and_evaluation_between() -> None:
    model = models.make(remat="plain")
    plain = copy.deepcopy(model)
    (plain(models.batch(0, 0, 0)) + plain(models.batch(0, 1, 0))).backward()
    offload, arena = offloaded(model)
    with offload.saving():
        first = model(models.batch(0, 0, 0))
    with torch.no_grad(), offload.saving():
        model(models.batch(9, 0, 0))
    with offload.saving():
        second = model(models.batch(0, 1, 0))
    (first + second).backward()
    assert len(arena.rows()) == 2 * (len(model.blocks) - 1)
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True) if b.grad is not None
    )


def test_an_input_changed_in_place_is_refused() -> None:
    blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    offload = ActivationOffload(list(blocks), Arena(CPU), least_bytes=1)
    x = torch.randn(2, 4, requires_grad=True) * 1
    with offload.saving():
        y = checkpoint(blocks[0], x, use_reentrant=False)
        x.add_(1)
        with pytest.raises(RuntimeError, match="changed in place"):
            checkpoint(blocks[1], y, use_reentrant=False)


def test_pool_holds_no_more_buffers_than_are_in_use_at_once() -> None:
    arena = Arena(CPU)
    pool = PinnedPool(arena)
    for length in (3, 5, 4, 9):
        taken = [pool.take(length, torch.bfloat16) for _ in range(2)]
        assert all(one.memory.numel() >= 2 * length for one in taken)
        for one in taken:
            pool.give_back(one)
    assert [row["unit"] for row in arena.measurement()] == ["checkpoint.0", "checkpoint.1"]
    assert [row["bytes"] for row in arena.measurement()] == [18, 18]


class Crossed(nn.Module):
    """A block that also reads a state that all blocks share, as a decoder's reads the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.own(x) + self.shared(state))


@pytest.mark.parametrize("leaf", [False, True])
def test_what_would_not_leave_the_device_is_not_copied(leaf: bool) -> None:
    """Four blocks: the inputs of the second and the third leave; the first's does unless it is a leaf; the state never."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Crossed() for _ in range(4))
    begin, state = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

    def loss() -> torch.Tensor:
        x, shared = begin if leaf else begin * 1, state * 1
        for block in blocks:
            x = checkpoint(block, x, shared, use_reentrant=False)
        return x.sum()

    expected = torch.autograd.grad(loss(), [begin, state, *blocks.parameters()])
    arena = Arena(CPU)
    offload = ActivationOffload(list(blocks), arena, least_bytes=1)
    with offload.saving():
        value = loss()
    found = torch.autograd.grad(value, [begin, state, *blocks.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [row["bytes"] for row in arena.measurement()] == [3 * 4 * 4] * (2 if leaf else 3)


def test_what_a_stack_shares_stays_when_another_follows() -> None:
    """Two stacks of two blocks, each with a state of its own: of both, the states stay; all inputs but the last leave."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Crossed() for _ in range(4))
    begin, states = torch.randn(3, 4, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    arena = Arena(CPU)
    with ActivationOffload(list(blocks), arena, least_bytes=1).saving():
        x, shared = begin * 1, [state * 1 for state in states]
        for index, block in enumerate(blocks):
            x = checkpoint(block, x, shared[index // 2], use_reentrant=False)
    assert [row["bytes"] for row in arena.measurement()] == [3 * 4 * 4] * 3
