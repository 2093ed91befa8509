"""Modules that use their parameters, buffers, inputs and outputs in odd ways."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Blocks(nn.Module):
    """Blocks of a kind, in a list, so that each is a unit, between two layers of the root."""

    def __init__(self, block: Callable[[], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def blocks(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Blocks(block)


class Scaled(torch.autograd.Function):
    """x @ w.T, which saves both."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class Kept(torch.autograd.Function):
    """The same, with an alias of w as an attribute of the context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.w = x, w.t()
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ ctx.w.t(), grad.t() @ ctx.x


class OwnFunction(nn.Module):
    function: Any = Scaled

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.function.apply(x, self.weight)
        return found.tanh()


class OwnKeptFunction(OwnFunction):
    function = Kept


class Recomputing(nn.Module):
    """A part of its forward is recomputed in the backward, as its own method and not as a module."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.up, self.down, self.reentrant = linear(), linear(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.hidden, x, use_reentrant=self.reentrant)
        return y * self.up.bias

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh()) @ self.up.weight


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Twice(nn.Module):
    """Calls its layer with and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.layer(x).sigmoid()
        return self.layer(self.layer(x).tanh()) * target


class Teacher(nn.Module):
    """Its blocks run once as a teacher, without gradients, and once with."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(linear() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x
            for block in self.blocks:
                y = block(y).tanh()
        for block in self.blocks:
            x = block(x).sigmoid()
        return x - y


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = linear(), nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.layer(x))
        return found


class Counting(nn.Module):
    """Makes buffers anew in each forward, by assignment and by arithmetic on its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = 0.9 * self.seen + self.layer.weight.detach().mean(0)
        return self.layer(x) + self.seen


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH, batch_first=True, **options) for _ in range(2))
        self.leave = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer.flatten_parameters()
            x = layer(x)[0]
            if x.shape[-1] > WIDTH:
                x = x[..., :WIDTH] + x[..., WIDTH:]
        found: torch.Tensor = self.leave(x.repeat(1, 1, self.leave.in_features // WIDTH))
        return found


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, proj_size=4), nn.RNN(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(x.transpose(0, 1), torch.tensor([5, 4, 2, 1]))
        for layer in self.layers:
            packed, _ = layer(packed)
        return packed.data


class Words(nn.Module):
    """Embeddings of several kinds; two heads that are the embedding."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, **options)
        self.bag = nn.EmbeddingBag(11, WIDTH, mode="max")
        self.block = linear()
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.other = nn.Linear(WIDTH, 11)
        if not options:
            self.head.weight = self.other.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x * 3).long() % 11
        y = self.block(self.embed(words).sum(1) + self.bag(words))
        return self.head(y) + self.other(y) + functional.linear(y, self.embed.weight)


class Odd(nn.Module):
    """Parameters of no dimension, of no element, column-major, and in lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.several = nn.ParameterList([torch.randn(WIDTH), torch.randn(1, WIDTH)])
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH, WIDTH).t()})
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x) * self.scale + self.none.sum()
        return (x * self.several[0] + self.several[1]) @ self.named["a"]


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(WIDTH), requires_grad=False)
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.table


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(2, 4, 2, 2).to(memory_format=torch.channels_last)
        for block in self.blocks:
            x = block(x).relu_()
        return x


class Growing(nn.Module):
    """Makes a parameter in its first forward, which no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.full((WIDTH,), 0.5, device=x.device))
        found: torch.Tensor = self.layer(x) * self.late
        return found


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclass
class Found:
    value: torch.Tensor
    note: str = ""


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, *, given: Any) -> Any:
        return Found(self.layer(given.first)), {"pair": Pair(given.first, None), "more": [1, "a"]}


class Structures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Structured() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = Pair(x, None)
        for block in self.blocks:
            found, rest = block(given=pair)
            pair = Pair(found.value + rest["pair"].first, found)
        return pair.first


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(linear() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            y.mul_(0.5)
            y[:, 0] = 0
            x = y + x
            x.relu_()
        return x


class Shared(nn.Module):
    """One block under two names, called from a third."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(linear(), nn.Tanh())
        self.other = self.one
        self.blocks = nn.ModuleList([self.one, linear(), self.one])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.one, *self.blocks, self.other):
            x = block(x)
        return x


class Choosing(nn.Module):
    """Another block in each step, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: linear() for name in "abc"})
        self.turn = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = "abcba"[next(self.turn) % 5]
        found: torch.Tensor = self.blocks[chosen](x) + self.blocks["a"](x)
        return found


class Peeking(nn.Module):
    """The root looks at a block's weight, without gradients, after that block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(linear() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            size = self.blocks[0].weight.norm()
        return x / size


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.data) + functional.linear(x, self.weight).sigmoid() * self.weight.detach()[0]


class Momentum(nn.Module):
    """A teacher that follows its student by a moving average, at the head of the forward (as in MoCo and BYOL)."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.student, self.teacher = (nn.ModuleList(linear() for _ in range(2)) for _ in range(2))
        self.teacher.requires_grad_(False)
        self.where = where

    @torch.no_grad()
    def follow(self) -> None:
        for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.mul_(0.9).add_(theirs, alpha=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            self.follow()
        y = x
        for block in self.student:
            x = block(x).tanh()
        for block in self.teacher:
            y = block(y).tanh()
        return x - y.detach()


class Remembering(nn.Module):
    """Carries a state from batch to batch, whose graph it drops."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(2))
        self.states: list[Any] = [None, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, cell in enumerate(self.cells):
            for _ in range(3):
                state = self.states[i]
                self.states[i] = cell(x, None if state is None else state)
            x = self.states[i]
        self.states = [state.detach() for state in self.states]
        return x


class Varying(nn.Module):
    """Blocks that use their weight another number of times in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.turn = linear(), itertools.count(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(next(self.turn) % 4 + 1):
            x = (x @ self.layer.weight.t()).tanh() + self.layer.weight[0]
        return x
