"""Groups a flat list of named shapes into units, by the block index in their names.

Note [Grouping]
    The first whole number in a dotted name is the index of a block (``model.layers.3.mlp…``); numbers further in (experts,
    sequences) belong to the block. A tensor outside every stack goes to the shallowest module that holds no stack: with
    a stack at ``bert.encoder.layer``, ``bert.embeddings.word_embeddings.weight`` belongs to ``bert.embeddings``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby

from zeroplan.models.spec import SpecUnit, Tensor

_NATURAL = re.compile(r"(\d{1,18})")


def group_units(shapes: Mapping[str, tuple[int, ...]]) -> tuple[SpecUnit, ...]:
    """Units of the tensors of a checkpoint, whose own order says nothing: they are put in natural order of their names.

    Linear layers are recognised by their shape and name, since a checkpoint names no module types.
    """
    names = sorted(shapes, key=_natural)
    return units_of_tensors(Tensor(name, shapes[name], kind=_kind(name, shapes[name])) for name in names)


def units_of_tensors(tensors: Iterable[Tensor]) -> tuple[SpecUnit, ...]:
    """Group tensors with full names into units, in the order given.

    Blocks whose tensors are equal and whose indices follow one another become one unit with a count.
    """
    listed = list(tensors)
    split = [tensor.name.split(".") for tensor in listed]
    stacks = {".".join(parts[:i]) for parts in split if (i := _index_at(parts)) is not None}
    inner = {stack[:i] for stack in stacks for i in [*(j for j, ch in enumerate(stack) if ch == "."), len(stack)]}
    placed = [(_place(parts, inner), tensor) for parts, tensor in zip(split, listed, strict=True)]
    found: list[SpecUnit] = []
    for (stack, index, prefix), run in groupby(placed, key=lambda pair: pair[0]):
        own = tuple(replace(tensor, name=tensor.name[len(prefix) :].removeprefix(".")) for _, tensor in run)
        if index is None:
            found.append(SpecUnit(prefix, own))
            continue
        name = f"{stack}.{{}}" if stack else "{}"
        last = found[-1] if found else None
        if last is not None and last.name == name and last.first + last.count == index and _equal(last, own, index):
            found[-1] = replace(last, count=last.count + 1)
        else:
            block = sum(len(tensor.shape) >= 2 for tensor in own) >= 2
            found.append(SpecUnit(name, own, first=index, block=block))
    return tuple(found)


def _equal(unit: SpecUnit, tensors: tuple[Tensor, ...], index: int) -> bool:
    """Return whether a block has the unit's tensors; ties between blocks are kept apart, since they name one block each."""
    return unit.tensors == tensors and all(tensor.tied_to is None for tensor in tensors)


def _index_at(parts: list[str]) -> int | None:
    """Return the position of the block index in a name; a number at the very end is a parameter of a list, not a block."""
    for i, part in enumerate(parts[:-1]):
        if part.isascii() and part.isdigit() and len(part) <= 6:
            return i
    return None


def _place(parts: list[str], inner: set[str]) -> tuple[str, int | None, str]:
    """The stack and the index of a tensor's block (or "" and None), and the part of its name that is the unit's."""
    at = _index_at(parts)
    if at is not None:
        return ".".join(parts[:at]), int(parts[at]), ".".join(parts[: at + 1])
    for depth in range(1, len(parts)):
        prefix = ".".join(parts[:depth])
        if prefix not in inner:
            return "", None, prefix
    return "", None, ".".join(parts[:-1])


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in _NATURAL.split(name) if part]


def _kind(name: str, shape: tuple[int, ...]) -> str:
    """Return the kind of a checkpoint's tensor in its module, as far as its name and shape tell."""
    if len(shape) != 2 or not name.endswith(".weight"):
        return ""
    module = name[: -len(".weight")]
    leaf = module.rpartition(".")[2].lower()
    if "emb" in leaf or leaf in ("wte", "wpe", "shared", "relative_attention_bias"):
        return "embedding"
    if leaf in ("lm_head", "embed_out", "output", "decoder") and ".layer" not in module and ".h." not in module:
        return "head"
    return "conv1d" if leaf in ("c_attn", "c_fc") else "linear"
