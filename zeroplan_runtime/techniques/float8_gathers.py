"""Blocks' matrices pass between ranks in 8 bits: Note [Gathers in 8 bits] in core/layout.

A rank's message is made by torch's operations in memory of the Arena, and read by one kernel: as a copy and a product of mixed
dtypes, torch took 1.8 ms for a block of an 8B on an H200, of the bytes of 0.2 ms (benchmarks/results/limit). A shard has one
scale, a power of two, so that products with scales of their own lose nothing more by it but values 2¹⁵ times smaller than the
shard's largest. The parameters that a forward and a backward see are then rounded; whoever reads them elsewhere
(:meth:`Schedule.unsharded`) has them gathered as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroplan.core.arena.layout import FLOAT8_HEAD
from zeroplan_runtime.comm import Communicator
from zeroplan_runtime.kernels.float8 import widen_messages
from zeroplan_runtime.unit_state import UnitState

_LEAST, _MOST = 2.0**-100, torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class _WidePart:
    """Elements ``[begin, end)`` of a flat that are no matrix's, in one rank's shard; `at` is the first's place in messages."""

    rank: int
    begin: int
    end: int
    at: int


class Float8Gathers:
    """Gathers units in 8 bits.

    Args:
        units: of a model; those with matrices are gathered so.
        buffer: uint8, of :attr:`Layout.float8_gather` elements.
        comm: the ranks that share the units.
    """

    def __init__(self, units: list[UnitState], buffer: torch.Tensor, comm: Communicator) -> None:
        self._buffer, self._comm = buffer, comm
        self._pieces = {unit: _pieces(unit) for unit in units if unit.layout.narrow}

    def takes(self, unit: UnitState) -> bool:
        """Returns whether `unit` is gathered in 8 bits."""
        return unit in self._pieces

    @torch.no_grad()
    def gather(self, unit: UnitState) -> None:
        """Fills the unit's whole trainable flat, rounded, from the ranks' shards, whose present values stand in it."""
        trainable, ranks = unit.trainable, self._comm.world_size
        assert trainable is not None
        count, size = trainable.layout.shard, unit.layout.float8_message
        messages = self._buffer[: ranks * size].view(ranks, size)
        bits = messages[:, FLOAT8_HEAD : FLOAT8_HEAD + count].view(torch.float8_e4m3fn)
        wide = messages[:, FLOAT8_HEAD + count :].view(torch.bfloat16)
        rank, shard = self._comm.rank, trainable.shard
        first = rank * count
        wide[rank].zero_()
        for piece in self._pieces[unit]:
            if piece.rank == rank:
                own = shard[piece.begin - first : piece.end - first]
                wide[rank, piece.at : piece.at + own.numel()].copy_(own)
                own.zero_()  # the matrices alone decide the scale
        self._scale(shard, messages[rank, :FLOAT8_HEAD])
        bits[rank].copy_(shard)
        self._comm.all_gather(messages.view(-1), messages[rank])
        widen_messages(messages, trainable.full)
        for piece in self._pieces[unit]:
            trainable.full[piece.begin : piece.end].copy_(wide[piece.rank, piece.at : piece.at + piece.end - piece.begin])

    def _scale(self, shard: torch.Tensor, head: torch.Tensor) -> None:
        """Divides `shard` by the least power of two that lets it fit, which is left in `head`; nothing is allocated."""
        scale, inverse = head[:4].view(torch.float32), head[4:8].view(torch.float32)
        largest = head[8:10].view(torch.bfloat16)
        torch.linalg.vector_norm(shard, float("inf"), dim=0, keepdim=True, out=largest)
        scale.copy_(largest).clamp_(min=_LEAST).div_(_MOST)
        scale.view(torch.int32).add_(0x7FFFFF).bitwise_and_(0x7F800000)  # the exponent alone, rounded up
        torch.reciprocal(scale, out=inverse)
        shard.mul_(largest.copy_(inverse))  # exact in bf16; of mixed dtypes torch takes half as long again


def _pieces(unit: UnitState) -> list[_WidePart]:
    assert unit.trainable is not None
    flat, found, at = unit.trainable.layout, [], 0
    for position in unit.layout.wide:
        begin, end = flat.offsets[position], flat.offsets[position] + flat.numels[position]
        while begin < end:
            rank = begin // flat.shard
            until = min(end, (rank + 1) * flat.shard)
            found.append(_WidePart(rank, begin, until, at))
            begin, at = until, at + until - begin
    return found
