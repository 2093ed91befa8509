"""Odd models and odd uses of them, on two ranks at every stage: numbers equal plain torch's, or one line refuses."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune, rnn
from torch.utils.checkpoint import checkpoint

import zeroplan_runtime
from tests.runtime.ranks import RankPool
from tests.runtime.test_strangers import Plain, Seen, data
from zeroplan.core.errors import BadInput

WIDTH = 8


class Zeros(Plain):
    """Plain torch where a parameter without a gradient has one of zeros, as in the runtime."""

    def step(self) -> None:
        for p in self.module.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        super().step()


#: What a script does with its trainer; the trainer's model is what it was given.
Use = Callable[[Any], Any]
SCRIPTS: dict[str, tuple[Callable[[], nn.Module], Use, str]] = {}
STAGES = (0, 1, 2, 3)


def script(build: Callable[[], nn.Module], refused: str = "") -> Callable[[Use], Use]:
    """Adds a script; `refused` are the stages at which one line refuses it."""

    def add(use: Use) -> Use:
        SCRIPTS[use.__name__] = (build, use, refused)
        return use

    return add


def steps(t: Any, count: int = 4, loss: Callable[[Any, int], torch.Tensor] | None = None) -> Seen:
    seen: Seen = []
    for number in range(count):
        torch.manual_seed(number)
        value = t(data(number)).square().mean() if loss is None else loss(t, number)
        seen.append(value.detach().clone())
        t.backward(value)
        t.step()
    return seen


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


@script(blocks(OwnFunction))
def a_function_of_its_own(t: Any) -> Any:
    return steps(t)


@script(blocks(OwnKeptFunction), refused="3")
def a_function_that_keeps_an_alias(t: Any) -> Any:
    return steps(t)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


@script(blocks(lambda: parametrizations.weight_norm(linear())))
def weight_norm(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: nn.utils.weight_norm(linear())))
def weight_norm_of_old(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: parametrizations.spectral_norm(linear())))
def spectral_norm(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: nn.utils.spectral_norm(linear())))
def spectral_norm_of_old(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: parametrizations.orthogonal(linear())))
def orthogonal(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: prune.random_unstructured(linear(), "weight", amount=0.3)))
def pruned(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: parametrizations.weight_norm(linear())))
def cached_parametrizations(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        with parametrize.cached():
            return (t(data(number)) + t(data(number + 20))).square().mean()

    return steps(t, loss=loss)


class Twice(nn.Module):
    """Calls its layer with and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.layer(x).sigmoid()
        return self.layer(self.layer(x).tanh()) * target


@script(blocks(Twice))
def called_twice_with_and_without_gradients(t: Any) -> Any:
    return steps(t)


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


@script(Teacher)
def a_pass_without_gradients_before(t: Any) -> Any:
    return steps(t)


@script(blocks(linear))
def functional_call_of_the_parameters(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        named = dict(t.module.named_parameters())
        found: torch.Tensor = torch.func.functional_call(t.module, named, (data(number),)).square().mean()
        return found + t(data(number)).mean()

    return steps(t, loss=loss)


@script(blocks(linear), refused="3")
def vmapped(t: Any) -> Any:
    return steps(t, loss=lambda t, number: torch.func.vmap(t.module)(data(number)).square().mean())


@script(blocks(lambda: nn.Sequential(linear(), nn.Tanh())), refused="3")
def forward_mode(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        _, tangent = torch.func.jvp(t.module, (data(number),), (data(number + 9),))
        found: torch.Tensor = t(data(number)).square().mean() + tangent.detach().mean()
        return found

    return steps(t, loss=loss)


@script(blocks(lambda: nn.Sequential(linear(), nn.Tanh())), refused="3")
def a_loss_of_tangents(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        value, tangent = torch.func.jvp(t.module, (data(number),), (data(number + 9),))
        found: torch.Tensor = value.square().mean() + tangent.square().mean()
        return found

    return steps(t, loss=loss)


@script(blocks(lambda: nn.Sequential(linear(), nn.Tanh())), refused="3")
def dual_numbers(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(data(number), data(number + 9))
            value, tangent = torch.autograd.forward_ad.unpack_dual(t(x))
            return value.square().mean() + tangent.square().mean()

    return steps(t, loss=loss)


@script(blocks(lambda: nn.Sequential(linear(), nn.Tanh())), refused="3")
def gradients_by_torch_func(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        grad = torch.func.grad(lambda x: t.module(x).square().sum())(data(number))
        found: torch.Tensor = t(data(number)).square().mean() + grad.square().mean()
        return found

    return steps(t, loss=loss)


@script(blocks(lambda: nn.Sequential(linear(), nn.Tanh())), refused="3")
def an_ensemble(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        params = {name: torch.stack([p, 0.5 * p]) for name, p in t.module.named_parameters()}
        x = data(number)
        found = torch.func.vmap(lambda p: torch.func.functional_call(t.module, p, (x,)))(params)
        value: torch.Tensor = t(data(number)).mean() + found.square().mean()
        return value

    return steps(t, loss=loss)


@script(blocks(lambda: nn.Sequential(linear(), nn.Tanh())), refused="3")
def a_penalty_on_gradients_of_weights(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        value = t(data(number)).square().mean()
        weights = [t.module.enter.weight, t.module.blocks[1][0].weight]
        grads = torch.autograd.grad(value, weights, create_graph=True)
        return value + sum((grad.square().sum() for grad in grads), torch.zeros(()))

    return steps(t, loss=loss)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = linear(), nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.layer(x))
        return found


@script(blocks(Normed))
def batch_norm(t: Any) -> Any:
    seen = steps(t)
    t.module.eval()
    with torch.no_grad():
        seen.append(t(data(77)))
    t.module.train()
    return [*seen, *(b.float().clone() for b in t.module.buffers())]


class Counting(nn.Module):
    """Makes buffers anew in each forward, by assignment and by arithmetic on its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = 0.9 * self.seen + self.layer.weight.detach().mean(0)
        return self.layer(x) + self.seen


@script(blocks(Counting))
def buffers_made_anew(t: Any) -> Any:
    return steps(t)


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


def sequence(number: int) -> torch.Tensor:
    return data(number).unsqueeze(1).repeat(1, 5, 1)


@script(lambda: Recurrent(nn.LSTM, num_layers=2))
def lstm(t: Any) -> Any:
    return steps(t, loss=lambda t, number: t(sequence(number)).square().mean())


@script(lambda: Recurrent(nn.GRU, bidirectional=True))
def gru(t: Any) -> Any:
    return steps(t, loss=lambda t, number: t(sequence(number)).square().mean())


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, proj_size=4), nn.RNN(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(x.transpose(0, 1), torch.tensor([5, 4, 2, 1]))
        for layer in self.layers:
            packed, _ = layer(packed)
        return packed.data


@script(Packed)
def packed_sequences(t: Any) -> Any:
    return steps(t, loss=lambda t, number: t(sequence(number)).square().mean())


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


@script(Words)
def tied_three_ways(t: Any) -> Any:
    return steps(t)


@script(lambda: Words(padding_idx=3, scale_grad_by_freq=True))
def embeddings_with_padding(t: Any) -> Any:
    return steps(t)


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


@script(blocks(Odd))
def odd_parameters(t: Any) -> Any:
    return steps(t)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(WIDTH), requires_grad=False)
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.table


@script(blocks(Counted), refused="0123")
def parameters_of_integers(t: Any) -> Any:
    return steps(t)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


@script(blocks(Complex), refused="0123")
def complex_parameters(t: Any) -> Any:
    return steps(t)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(2, 4, 2, 2).to(memory_format=torch.channels_last)
        for block in self.blocks:
            x = block(x).relu_()
        return x


@script(lambda: Images().to(memory_format=torch.channels_last))
def channels_last(t: Any) -> Any:
    return steps(t)


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


@script(blocks(Growing))
def parameters_of_the_first_forward(t: Any) -> Any:
    return steps(t)


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


@script(Structures)
def structured_inputs_and_outputs(t: Any) -> Any:
    return steps(t)


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


@script(InPlace)
def outputs_changed_in_place(t: Any) -> Any:
    return steps(t)


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


@script(Shared)
def one_block_under_several_names(t: Any) -> Any:
    return steps(t)


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


@script(Choosing)
def another_block_in_each_step(t: Any) -> Any:
    return steps(t, 6)


@script(blocks(lambda: torch.jit.script(linear())), refused="0123")
def scripted_blocks(t: Any) -> Any:
    return steps(t)


@script(blocks(linear))
def saved_on_the_cpu(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return t(data(number)).square().mean()

    return steps(t, loss=loss)


@script(blocks(linear))
def saved_as_copies(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            return t(data(number)).square().mean()

    return steps(t, loss=loss)


@script(blocks(linear))
def autocast_by_hand(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return t(data(number)).float().square().mean()

    return steps(t, loss=loss)


@script(blocks(linear), refused="0123")
def a_grad_scaler_by_hand(t: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number in range(3):
        t.backward(scaler.scale(t(data(number)).square().mean()))
        scaler.step(t.optimizer)
        scaler.update()
        t.optimizer.zero_grad()


@script(blocks(linear), refused="0123")
def a_closure(t: Any) -> Any:
    t.optimizer.step(lambda: t(data(0)).square().mean())


@script(blocks(linear), refused="0123")
def groups_added_later(t: Any) -> Any:
    t.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    return steps(t)


@script(blocks(linear), refused="0123")
def an_optimizers_state_loaded(t: Any) -> Any:
    steps(t, 2)
    t.optimizer.load_state_dict(t.optimizer.state_dict())
    return steps(t)


def _schedules(optimizer: Any) -> Iterator[Any]:
    lr = torch.optim.lr_scheduler
    yield lr.LambdaLR(optimizer, lambda i: 1 / (i + 1))
    yield lr.CosineAnnealingWarmRestarts(optimizer, 2)
    yield lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer, 0.3, 2), lr.ExponentialLR(optimizer, 0.5)], [2])
    yield lr.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2)
    yield torch.optim.swa_utils.SWALR(optimizer, 0.02, 2)


@script(blocks(linear))
def schedules_by_hand(t: Any) -> Any:
    seen: Seen = []
    for schedule in _schedules(t.optimizer):
        for number in range(3):
            seen += steps(t, 1, lambda t, _, n=number: t(data(n)).square().mean())
            schedule.step()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(t.optimizer, patience=0, factor=0.5)
    for number in range(4):
        seen += steps(t, 1, lambda t, _, n=number: t(data(n)).square().mean())
        plateau.step(1.0)
    return seen


@script(blocks(linear))
def losses_of_parameters_alone(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        return t(data(number)).square().mean() if number % 2 else t.module.enter.weight.square().sum()

    return steps(t, loss=loss)


@script(blocks(linear))
def siamese(t: Any) -> Any:
    return steps(t, loss=lambda t, number: (t(data(number)) - t(data(number + 30))).abs().mean())


@script(blocks(linear), refused="0123")
def a_copy_of_the_engine(t: Any) -> Any:
    copy.deepcopy(t)
    if isinstance(t, Plain):
        raise BadInput("plain torch can")


@script(blocks(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)))
def transformers_of_torch(t: Any) -> Any:
    seen = steps(t, loss=lambda t, number: t(sequence(number)).square().mean())
    t.module.eval()
    with torch.no_grad():
        seen.append(t(sequence(50)))
    t.module.train()
    return seen + steps(t, loss=lambda t, number: t(sequence(number)).square().mean())


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


@script(Peeking, refused="3")
def a_norm_of_a_weight_in_the_forward(t: Any) -> Any:
    return steps(t)


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.data) + functional.linear(x, self.weight).sigmoid() * self.weight.detach()[0]


@script(blocks(Detached))
def detached_uses(t: Any) -> Any:
    return steps(t)


@script(blocks(linear))
def pre_hooks(t: Any) -> Any:
    seen: Seen = []
    block = t.module.blocks[1]
    handles = [
        block.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        block.register_full_backward_pre_hook(lambda module, grad: (grad[0] * 0.5,)),
        block.register_forward_hook(lambda module, args, output: output + 1),
        nn.modules.module.register_module_forward_hook(lambda module, args, output: None),
    ]
    seen += steps(t)
    for handle in handles:
        handle.remove()
    return seen + steps(t)


@script(blocks(linear))
def an_average_by_hand(t: Any) -> Any:
    average: dict[str, torch.Tensor] = {}
    for number in range(3):
        steps(t, 1, lambda t, _, n=number: t(data(n)).square().mean())
        for name, p in t.module.named_parameters():
            average[name] = average.get(name, 0) + (p.detach().clone() if isinstance(t, Plain) else whole(t, name, p))
    return list(average.values())


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


@script(lambda: Momentum("forward"), refused="3")
def a_teacher_that_follows_in_the_forward(t: Any) -> Any:
    return steps(t)


@script(lambda: Momentum("loop"), refused="3")
def a_teacher_that_follows_in_the_loop(t: Any) -> Any:
    seen: Seen = []
    for number in range(4):
        seen += steps(t, 1, lambda t, _, n=number: t(data(n)).square().mean())
        t.module.follow()
    return seen


@script(blocks(linear))
def frozen_for_a_backward(t: Any) -> Any:
    seen: Seen = []
    for number in range(4):
        t.module.blocks[0].requires_grad_(number % 2 == 0)
        value = t(data(number)).square().mean()
        t.backward(value)
        t.module.blocks[0].requires_grad_(True)
        t.step()
        seen.append(value.detach())
    return seen


@script(blocks(linear))
def anomaly_detection(t: Any) -> Any:
    with torch.autograd.set_detect_anomaly(True):
        return steps(t)


@script(blocks(lambda: nn.Sequential(linear(), nn.Tanh())), refused="3")
def a_jacobian(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        found = torch.autograd.functional.jacobian(t.module, data(number)[:1], create_graph=True)
        value: torch.Tensor = t(data(number)).square().mean() + found.square().mean()
        return value

    return steps(t, loss=loss)


@script(blocks(linear))
def a_hook_that_raises_once(t: Any) -> Any:
    def fail(grad: torch.Tensor) -> None:
        raise ValueError("once")

    seen = steps(t, 2)
    y = t(data(5))
    y.register_hook(fail)
    with pytest.raises(ValueError, match="once"):
        t.backward(y.square().mean())
    (t.optimizer if isinstance(t, Plain) else t).zero_grad()
    return seen + steps(t, 2)


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


@script(Remembering)
def a_state_that_is_carried_on(t: Any) -> Any:
    return steps(t)


class Varying(nn.Module):
    """Blocks that use their weight another number of times in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.turn = linear(), itertools.count(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(next(self.turn) % 4 + 1):
            x = (x @ self.layer.weight.t()).tanh() + self.layer.weight[0]
        return x


@script(blocks(Varying))
def weights_used_another_number_of_times(t: Any) -> Any:
    return steps(t, 6)


@script(blocks(lambda: nn.Sequential(linear(), nn.Tanh())))
def checkpoints_of_closures(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        x = data(number)
        inner = checkpoint(lambda y: t.module.blocks[1](y).sigmoid(), x, use_reentrant=False)
        value: torch.Tensor = t(x).square().mean() + inner.mean()
        return value

    return steps(t, loss=loss)


@script(blocks(linear))
def evaluated_within_an_accumulation(t: Any) -> Any:
    seen: Seen = []
    for number in range(3):
        first = t(data(number)).square().mean()
        with torch.no_grad():
            seen.append(t(data(60)))
        t.backward(first)
        with torch.no_grad():
            seen.append(t(data(61)))
        t.step()
    return seen


@script(blocks(linear))
def training_of_another_model_between(t: Any) -> Any:
    torch.manual_seed(5)
    critic = linear()
    other = torch.optim.Adam(critic.parameters(), lr=0.01)
    seen: Seen = []
    for number in range(3):
        loss = (critic(t(data(number)).detach()).mean() - 1).square()
        other.zero_grad()
        loss.backward()
        other.step()
        seen += steps(t, 1, lambda t, _, n=number: critic(t(data(n))).square().mean())
    return [*seen, critic.weight.detach().clone()]


def whole(engine: Any, name: str, param: torch.Tensor) -> torch.Tensor:
    units = [unit for unit in engine.unit_names() if name.startswith(f"{unit}.")]
    if not units:
        return param.detach().clone()
    with engine.gathered(units[0]):
        return param.detach().clone()


def outcomes(group: dist.ProcessGroup, stage: int) -> dict[str, str]:
    """By script ``equal``, ``different``, or the line that refuses it."""
    found = {}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "zeroplan": {"wide_numel": 500},
    }
    for name, (build, use, _) in SCRIPTS.items():
        torch.manual_seed(0)
        model = build()
        torch.manual_seed(0)
        plain = Zeros(build())
        engine = None
        try:
            engine, *_ = zeroplan_runtime.initialize(model=model, config=config, group=group, device="cpu")
            seen = use(engine) or []
        except BadInput as fault:
            found[name] = str(fault)
            continue
        except Exception as fault:
            import traceback

            found[name] = f"crash: {type(fault).__name__}: {fault} {traceback.format_exc()[-600:]}"
            continue
        finally:
            if engine is not None:
                engine.destroy()
        try:
            expected = use(plain) or []
        except Exception as fault:
            found[name] = f"plain: {type(fault).__name__}: {fault}"
            continue
        pairs = list(zip(seen, expected, strict=True))
        far = max((((a - b).abs().max() / (b.abs().max() + 1e-3)).item() for a, b in pairs if b.numel()), default=0.0)
        found[name] = "equal" if far < 1e-4 else f"different: {far:.3g}"
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_odd_scripts(pool: RankPool, stage: int) -> None:
    for found in pool.run(2, outcomes, stage):
        for name, (_, _, stages) in SCRIPTS.items():
            said = found[name]
            if str(stage) in stages:
                assert said != "equal", name
                assert not said.startswith(("crash", "plain", "different")), said
                assert "\n" not in said
            else:
                assert said == "equal", (name, said)


def adversaries(group: dist.ProcessGroup, stage: int, freezes: bool) -> str:
    """Two engines that train against each other: what refuses it, or what differs from plain torch; empty if nothing.

    The maker's loss goes through the judge, whose gradients nobody wants; `freezes` says so by ``requires_grad_``.
    """
    torch.manual_seed(0)
    models = (Blocks(linear, 2), Blocks(linear, 2))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    plain = [Plain(copy.deepcopy(model)) for model in models]
    engines = [zeroplan_runtime.initialize(model=m, config=config, group=group, device="cpu")[0] for m in models]
    try:
        for maker, judge in (plain, engines):
            for number in range(4):
                made = maker(data(number))
                judge.backward(judge(made.detach()).mean() - judge(data(number + 40)).mean())
                judge.step()
                judge.module.requires_grad_(not freezes)
                maker.backward(made.square().mean() - judge(made).mean())
                judge.module.requires_grad_(True)
                (judge.optimizer if isinstance(judge, Plain) else judge).zero_grad()
                maker.step()
        for engine, other in zip(engines, plain, strict=True):
            found = engine.module_state_dict() or {}
            for name, value in found.items():
                if not torch.allclose(value, other.module.state_dict()[name], 1e-5, 1e-6):
                    return f"{name} differs"
    except BadInput as fault:
        return str(fault)
    finally:
        for engine in engines:
            engine.destroy()
    return ""


@pytest.mark.parametrize("stage", STAGES)
def test_two_engines_against_each_other(pool: RankPool, stage: int) -> None:
    for said in pool.run(2, adversaries, stage, False):
        assert "came by another backward than the engine's" in said
    assert pool.run(2, adversaries, stage, True) == ["", ""]


def test_a_schedule_that_wants_a_metric_is_refused() -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {}}}
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    with pytest.raises(BadInput, match="ReduceLROnPlateau"):
        zeroplan_runtime.initialize(model=linear(), config=config, lr_scheduler=plateau, device="cpu")
