"""The buffers through which DeepSpeed's Muon gathers whole matrices: those that it caches, and its temporaries.

Newton-Schulz itself is compiled; the temporaries within, a few times the largest matrix, are in no figure.
``stage_1_and_2.py`` and ``stage3.py`` are files of DeepSpeed 0.19.8's runtime/zero.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from zeroplan.core.optimizer_row import Domain
from zeroplan.core.sizes import MIB
from zeroplan.engines.deepspeed.stepped_groups import SteppedGroups

#: Gather buffers that stay from step to step, the most recently used ones (_muon_allgather_max_cached_bytes).
_MOST_CACHED = 256 * MIB
#: Buffers of one gather, and the matrices gathered one after another (_muon_allgather_max_buffer_bytes).
_MOST_AT_ONCE = 64 * MIB


@dataclass(frozen=True, slots=True)
class MatrixGathers:
    """Bytes on the GPU: `kept` in the cache between steps, `passing` for each group of matrices while it is updated."""

    kept: int = 0
    passing: tuple[int, ...] = ()


def matrix_gathers(rank: SteppedGroups) -> MatrixGathers:
    """Return the memory that updating this rank's matrices takes; nothing for another optimizer than Muon."""
    matrices = next((group for domain, group in rank.param_groups if domain is Domain.MATRIX), ())
    if not matrices or rank.stages_momentum:
        return MatrixGathers()  # what stages 1 and 2 orthogonalise, they have whole
    if rank.stage == 3:
        return _stage3_offloaded(rank) if rank.offloads_optimizer else _stage3(rank)
    if rank.offloads_optimizer:
        return _stage12_offloaded(rank, matrices)
    # Stage 0 makes one matrix's update; BF16_Optimizer also puts its momentum together.
    return MatrixGathers(0, ((1 + rank.stage) * rank.master_bytes * max(rank.numel[p] for p in matrices),))


def _stage3(rank: SteppedGroups) -> MatrixGathers:
    """Gather matrices at stage 3 (stage3.py, _apply_muon_to_accumulated_grads, _muon_update_sub_group,
    _partitioned_buffers_all_gather).

    A sub-group's matrices are gathered by as many as a bucket holds: gradients, then copies of their momentum.
    """
    width, ranks = rank.comm_bytes, rank.ranks
    uses: list[tuple[Hashable, int]] = []
    passing = []
    for part in (chunk for group in _matrix_sub_groups(rank) for chunk in _chunks(rank, group)):
        local = sum(rank.shards[p] for p in part)
        scratch = width * local * (1 + ranks)
        if ranks > 1:
            uses += [(local, scratch)] * 2
            passing.append(width * local * (2 * ranks + 1) + (scratch if scratch > _MOST_CACHED else 0))
        else:
            passing.append(width * local * (1 if rank.accum_bytes == width else 2))
    return MatrixGathers(_cached(uses * 2), tuple(passing))


def _stage3_offloaded(rank: SteppedGroups) -> MatrixGathers:
    """Move a sub-group's gradients and momentum to the GPU and gather them together (stage3.py,
    _apply_muon_updates_cpu_offload).
    """
    width, ranks = rank.accum_bytes, rank.ranks
    uses: list[tuple[Hashable, int]] = []
    passing = []
    for group in _matrix_sub_groups(rank):
        local = sum(rank.shards[p] for p in group)
        own = (rank.master_bytes + rank.momentum_bytes) * local
        scratch = width * 2 * local * (1 + ranks)
        if ranks > 1:
            uses.append((local, scratch))
            passing.append(own + width * 2 * local * ranks + (scratch if scratch > _MOST_CACHED else 0))
        else:
            copied = (rank.master_bytes != width) + (rank.momentum_bytes != width)
            passing.append(own + copied * width * local)
    return MatrixGathers(_cached(uses), tuple(passing))


def _stage12_offloaded(rank: SteppedGroups, matrices: Sequence[int]) -> MatrixGathers:
    """Gather batches of matrices, their gradients and momentum in chunks (stage_1_and_2.py, _apply_muon_updates_cpu_offload).

    In the first step momentum is zero everywhere and is not gathered, so that step has gather buffers of its own.
    """
    width, ranks = rank.master_bytes, rank.ranks
    batches = list(_batches(rank, matrices, _MOST_AT_ONCE // (2 * width)))
    uses: list[tuple[Hashable, int]] = []
    for buffers in (1, 2, 2) if ranks > 1 else ():
        for batch in batches:
            owned = [0] * ranks
            for p in batch:
                for part in rank.flat.slices[p]:
                    owned[part.rank] += part.count
            chunk = min(max(owned), max(1, _MOST_AT_ONCE // ((ranks + 1) * buffers * width)))
            uses.append(((chunk, buffers), width * chunk * buffers * (1 + ranks)))
    return MatrixGathers(_cached(uses), tuple(2 * width * sum(rank.numel[p] for p in batch) for batch in batches))


def _matrix_sub_groups(rank: SteppedGroups) -> list[list[int]]:
    return [group for group, domain in zip(rank.sub_groups, rank.domains, strict=True) if domain is Domain.MATRIX]


def _chunks(rank: SteppedGroups, group: Sequence[int]) -> Iterator[list[int]]:
    return _batches(rank, group, rank.zero.buckets.reduce_bucket_size)


def _batches(rank: SteppedGroups, params: Sequence[int], most: int) -> Iterator[list[int]]:
    """`params` in runs of at most `most` elements; a larger one is alone."""
    batch: list[int] = []
    filled = 0
    for p in params:
        if batch and filled + rank.numel[p] > most:
            yield batch
            batch, filled = [], 0
        batch.append(p)
        filled += rank.numel[p]
    if batch:
        yield batch


def _cached(uses: Iterable[tuple[Hashable, int]]) -> int:
    """Bytes in the cache after all uses: the least recently used go where there is no room, what is too large is not kept."""
    cache: OrderedDict[Hashable, int] = OrderedDict()
    for key, nbytes in uses:
        if key in cache:
            cache.move_to_end(key)
        elif nbytes <= _MOST_CACHED:
            while cache and sum(cache.values()) + nbytes > _MOST_CACHED:
                cache.popitem(last=False)
            cache[key] = nbytes
    return sum(cache.values())
