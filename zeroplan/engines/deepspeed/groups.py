"""DeepSpeed's flat parameter groups, divided among ranks (stages 1 and 2) and into sub-groups (stage 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

#: A flat group is padded so that each rank's part starts on 4 bytes: two 16-bit elements.
#: Source: runtime/zero/stage_1_and_2.py, nccl_start_alignment_factor.
START_ALIGNMENT = 2


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one parameter that one rank owns. `start` counts from the parameter's first element."""

    rank: int
    start: int
    count: int


#: What stages 1 and 2 reduce together: (elements, the flat tensor whose part they are if this rank keeps them apart), and all
#: elements.
Batch = tuple[list[tuple[int, int | None]], int]


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Parameter groups as flat tensors, one each, cut into equal parts.

    Attributes:
        order: the parameters as they lie in the flat tensor.
        padding: elements of padding between them, where `parameter_alignment` asks for any.
        numel: elements of the flat tensor, padding included.
        partitions: elements of one rank's part of each parameter group that is in it.
        slices: by parameter, the parts that ranks own, in order.
        ranks: among which it is divided.
        made_of: the flat tensors of its parameter groups, where they are several.
        batches: by bucket what is reduced together, which every rank and step asks for anew; filled by stage12.py.
    """

    order: tuple[int, ...]
    padding: int
    numel: int
    partitions: tuple[int, ...]
    slices: dict[int, tuple[Slice, ...]]
    ranks: int = 1
    made_of: tuple[FlatGroup, ...] = ()
    batches: dict[object, list[Batch]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def partition(self) -> int:
        """Elements of one rank's part."""
        return sum(self.partitions)

    @property
    def each(self) -> tuple[FlatGroup, ...]:
        """The flat tensors, one a parameter group."""
        return self.made_of or (self,)

    def place(self, rank: int, ranks: int) -> int:
        """Return the part that data-parallel rank `rank` of `ranks` owns: neighbours hold other experts, and have the same."""
        return rank * self.ranks // ranks

    def owned(self, rank: int) -> list[tuple[int, Slice]]:
        """Return the parameters that touch `rank`'s part, in order, with the slices that it owns of them."""
        return [
            (p, part)
            for group in self.each
            for p in group.order
            for part in group.slices[p]
            if part.rank == group.place(rank, self.ranks)
        ]


def flat_group(
    params: Sequence[int], numel: Sequence[int], ranks: int, *, width: int, round_robin: bool = False, aligned: bool = False
) -> FlatGroup:
    """Flattens `params` (indices into `numel`) for `ranks` ranks; every rank of a job and its host ask for the same.

    Source: runtime/zero/stage_1_and_2.py, __init__, _round_robin_reorder, initialize_gradient_partition

    Args:
        params: the group's parameters in the optimizer's order.
        numel: elements of every parameter of the model.
        ranks: data-parallel ranks.
        width: bytes an element, on which `aligned` depends.
        round_robin: deal the parameters to the ranks in turn (``round_robin_gradients``).
        aligned: start every parameter on 16 bytes (``parameter_alignment``).
    """
    return _flat_group(tuple(params), tuple(numel), ranks, width, round_robin, aligned)


@lru_cache(maxsize=16)
def _flat_group(
    params: tuple[int, ...], numel: tuple[int, ...], ranks: int, width: int, round_robin: bool, aligned: bool
) -> FlatGroup:
    order = [p for first in range(ranks) for p in params[first::ranks]] if round_robin else list(params)
    unit = 16 // math.gcd(16, width) if aligned else 1
    offsets, at, padding = [], 0, 0
    for p in order:
        offsets.append(at)
        at += numel[p]
        if unit > 1 and p != order[-1]:
            gap = -at % unit
            padding += gap
            at += gap
    total = padded(at, ranks)
    part = total // ranks
    slices = {}
    for p, offset in zip(order, offsets, strict=True):
        end = offset + numel[p]
        first, last = offset // part, (end - 1) // part
        slices[p] = tuple(
            Slice(rank, max(offset, rank * part) - offset, min(end, (rank + 1) * part) - max(offset, rank * part))
            for rank in range(first, last + 1)
        )
    return FlatGroup(tuple(order), padding, total, (part,), slices, ranks)


@lru_cache(maxsize=16)
def flat_groups(
    groups: tuple[tuple[int, ...], ...],
    numel: tuple[int, ...],
    ranks: tuple[int, ...],
    *,
    width: int,
    round_robin: bool,
    aligned: bool,
) -> FlatGroup:
    """Several parameter groups, each flattened and divided by itself, as one: a rank's part is its parts of all of them.

    `ranks` are those of each group; the first has the most.
    """
    made = [
        flat_group(group, numel, count, width=width, round_robin=round_robin, aligned=aligned)
        for group, count in zip(groups, ranks, strict=True)
    ]
    if len(made) == 1:
        return made[0]
    return FlatGroup(
        order=tuple(p for one in made for p in one.order),
        padding=sum(one.padding for one in made),
        numel=sum(one.numel for one in made),
        partitions=tuple(one.partition for one in made),
        slices={p: parts for one in made for p, parts in one.slices.items()},
        ranks=max(ranks, default=1),
        made_of=tuple(made),
    )


def padded(numel: int, ranks: int) -> int:
    """Elements of a flat tensor of `numel` elements once it is padded for `ranks` equal parts."""
    whole = START_ALIGNMENT * ranks
    return -(-numel // whole) * whole


def sub_groups(params: Sequence[int], shards: Sequence[int], size: int) -> list[list[int]]:
    """Return the parameters of each sub-group that stage 3 steps at once.

    A sub-group closes with the parameter that reaches `size`, so it may exceed it by one parameter's part.
    Source: runtime/zero/stage3.py, _create_fp16_sub_groups
    """
    if sum(shards[p] for p in params) <= size:
        return [list(params)] if params else []
    groups: list[list[int]] = [[]]
    filled = 0
    for p in params:
        if filled >= size:
            groups.append([])
            filled = 0
        groups[-1].append(p)
        filled += shards[p]
    return groups


def persistent(numel: Sequence[int], threshold: int, model_threshold: int) -> list[int]:
    """Return the parameters that stage 3 keeps gathered: small ones, while all of them fit the model's threshold.

    Source: runtime/zero/parameter_offload.py, mark_persistent_parameters
    """
    kept, total = [], 0
    for p, count in enumerate(numel):
        if count <= threshold and count + total <= model_threshold:
            kept.append(p)
            total += count
    return kept
