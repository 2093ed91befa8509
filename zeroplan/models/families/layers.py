"""The words in which families are described: linear, norm, embedding, stack.

Each returns a tuple of tensors, so that a block reads as the table of its modules in registration order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from zeroplan.models.spec import SpecUnit, Tensor

Tensors = tuple[Tensor, ...]


def _leaf(module: str, name: str) -> str:
    """The parameter's name; an empty module is one that is a unit of its own."""
    return f"{module}.{name}" if module else name


def linear(name: str, inputs: int, outputs: int, bias: bool = False) -> Tensors:
    """``nn.Linear``: weight ``(outputs, inputs)`` and, if asked for, bias ``(outputs,)``."""
    weight = Tensor(_leaf(name, "weight"), (outputs, inputs), kind="linear")
    return (weight, Tensor(_leaf(name, "bias"), (outputs,))) if bias else (weight,)


def conv1d(name: str, inputs: int, outputs: int) -> Tensors:
    """GPT-2's ``Conv1D``, a linear layer kept transposed: weight ``(inputs, outputs)``, bias ``(outputs,)``."""
    return (Tensor(f"{name}.weight", (inputs, outputs), kind="conv1d"), Tensor(f"{name}.bias", (outputs,)))


def norm(name: str, width: int, bias: bool = False) -> Tensors:
    """RMSNorm (no bias) or LayerNorm: weight ``(width,)``."""
    weight = Tensor(_leaf(name, "weight"), (width,))
    return (weight, Tensor(_leaf(name, "bias"), (width,))) if bias else (weight,)


def embedding(name: str, rows: int, width: int, *, trainable: bool = True, tied_to: str | None = None) -> Tensors:
    """``nn.Embedding``: weight ``(rows, width)``."""
    return (Tensor(_leaf(name, "weight"), (rows, width), trainable, tied_to, "embedding"),)


def param(name: str, *shape: int, tied_to: str | None = None) -> Tensors:
    """A bare ``nn.Parameter``."""
    return (Tensor(name, shape, tied_to=tied_to),)


def flat(*parts: Tensors) -> Tensors:
    """The parts' tensors, one after another."""
    return tuple(tensor for part in parts for tensor in part)


def unit(name: str, *parts: Tensors) -> tuple[SpecUnit, ...]:
    """Describe one module that occurs once."""
    return (SpecUnit(name, flat(*parts)),)


def table(name: str, rows: int, width: int, *, trainable: bool = True, tied_to: str | None = None) -> tuple[SpecUnit, ...]:
    """An embedding that is a unit of its own."""
    return (SpecUnit(name, embedding("", rows, width, trainable=trainable, tied_to=tied_to)),)


def lm_head(name: str, width: int, vocab: int, *, tied_to: str | None, bias: bool = False) -> tuple[SpecUnit, ...]:
    """The output projection (kind ``"head"``), whose weight may be the embedding's."""
    weight = Tensor("weight", (vocab, width), tied_to=tied_to, kind="head")
    return (SpecUnit(name, (weight, Tensor("bias", (vocab,))) if bias else (weight,)),)


def blocks(name: str, count: int, *parts: Tensors) -> tuple[SpecUnit, ...]:
    """`count` equal blocks; `name` holds ``{}`` where the index goes."""
    return (SpecUnit(name, flat(*parts), count=count, block=True),)


def stack(name: str, layers: Sequence[Tensors]) -> tuple[SpecUnit, ...]:
    """Blocks that differ: consecutive equal ones become one unit."""
    units: list[SpecUnit] = []
    for tensors, run in groupby(layers):
        first = units[-1].first + units[-1].count if units else 0
        units.append(SpecUnit(name, tensors, count=sum(1 for _ in run), first=first, block=True))
    return tuple(units)


def units(*parts: Iterable[SpecUnit]) -> tuple[SpecUnit, ...]:
    """The parts' units, one after another."""
    return tuple(one for part in parts for one in part)
