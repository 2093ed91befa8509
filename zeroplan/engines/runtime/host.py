"""One rank's host memory by phase: the model that is handed over, what the Arena keeps there, and what passes through.

Note [Passing through]
    The Arena takes all that stands on the host before the first parameter moves, so the model lies beside it, and of a unit
    whose states go to a file its fp32 masters. The parameters then leave one by one.

    A checkpoint is written piece by piece, a piece being what a rank owns of one parameter or of one of its states: each is
    copied to a tensor of its own and gone before the next (zeroplan_runtime/checkpoint/writer.py). It is read the same way,
    but there the next piece is in memory before the last is dropped (torch/distributed/checkpoint/filesystem.py, read_data);
    a unit's states and frozen parameters that go to files are put together in memory first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.layout import Flat, Layout, UnitLayout, runtime_buffers
from zeroplan.core.layout_setup import OPTIMIZER_STATES
from zeroplan.engines.simulation import CheckpointPhase, HostPhase

_FP32_BYTES = 4


def host_phases(layout: Layout, model: int, moved: Mapping[str, int] | None = None) -> tuple[HostPhase, ...]:
    """The host's peaks. See Note [Passing through].

    Args:
        layout: what the Arena allocates by.
        model: bytes of the model in host memory, as the user makes it.
        moved: bytes of the pinned buffers for checkpointed inputs, by name.
    """
    kept = _kept(layout)
    loaded = {(Buffer.HOST_MODEL, Place.DRAM): model}
    rest, most = model, dict(loaded)
    for unit in layout.units:
        masters = _FP32_BYTES * layout.share(unit) if unit.trainable and _master_in_file(layout, unit) else 0
        if rest + masters > sum(most.values()):
            most = {(Buffer.HOST_MODEL, Place.DRAM): rest, (Buffer.INIT_TEMP, Place.DRAM): masters}
        rest -= layout.setup.param_dtype.bytes * sum(param.numel for param in unit.shape.params)
    inputs = sum((moved or {}).values())
    training = kept | ({(Buffer.ACTIVATION_CHECKPOINT, Place.PINNED): inputs} if inputs else {})
    return (
        HostPhase.of(Phase.LOAD, {}, loaded),
        HostPhase.of(Phase.INIT, kept, most),
        *(HostPhase.of(phase, training) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)),
    )


def checkpoint_phases(
    layout: Layout, host: tuple[HostPhase, ...], *, after_init: int, after_step: int
) -> tuple[CheckpointPhase, ...]:
    """``save_checkpoint`` after a step and ``load_checkpoint`` after initialisation. See Note [Passing through].

    Args:
        layout: what the Arena allocates by.
        host: the host's phases.
        after_init: bytes allocated on the GPU after initialisation.
        after_step: bytes allocated on the GPU between two steps.
    """
    held = {one.phase: sum(one.kept.values()) for one in host}
    in_memory, in_files = _pieces(layout)
    written = max((size for _, sizes in (*in_memory, *in_files) for size in sizes), default=0)
    read = _two([size for _, sizes in in_memory for size in sizes])
    for unit, sizes in in_files:
        whole = _FP32_BYTES * layout.share(unit) * len(_streamed(layout)) if _states_in_file(unit) else 0
        frozen = unit.frozen.shard if unit.frozen and unit.param_place is Place.NVME else 0
        read = max(read, whole + layout.setup.param_dtype.bytes * frozen + _two(sizes))
    return (
        CheckpointPhase(Phase.SAVE, after_step, held[Phase.STEP] + written),
        CheckpointPhase(Phase.RESUME, after_init, held[Phase.INIT] + read),
    )


def _kept(layout: Layout) -> dict[tuple[Buffer, Place], int]:
    found: dict[tuple[Buffer, Place], int] = {}
    for row in runtime_buffers(layout):
        if row.stands and row.place in (Place.PINNED, Place.DRAM):
            found[row.buffer, row.place] = found.get((row.buffer, row.place), 0) + row.bytes
    return found


def _states_in_file(unit: UnitLayout) -> bool:
    return unit.trainable is not None and unit.place is Place.NVME


def _master_in_file(layout: Layout, unit: UnitLayout) -> bool:
    return unit.place is Place.NVME and layout.setup.masters_apart


def _streamed(layout: Layout) -> list[Buffer]:
    """What of a unit in files is in its file."""
    masters = [Buffer.PARAM_MASTER] if layout.setup.masters_apart else []
    return [*masters, *OPTIMIZER_STATES[layout.setup.optimizer]]


#: A unit and the bytes of its pieces, in the order in which they are written and read.
_Pieces = tuple[UnitLayout, list[int]]


def _pieces(layout: Layout) -> tuple[list[_Pieces], list[_Pieces]]:
    """The pieces of the rank with the largest, of units in memory and of those in files."""
    kinds = 1 + len(OPTIMIZER_STATES[layout.setup.optimizer])  # masters, and what the optimizer has
    in_memory: list[_Pieces] = []
    in_files: list[_Pieces] = []
    for unit in layout.units:
        inside: list[int] = []
        if unit.trainable:
            sizes = kinds * [_FP32_BYTES * numel for numel in _largest_overlaps(unit.trainable)]
            if _states_in_file(unit):
                inside += sizes
            else:
                in_memory.append((unit, sizes))
        if unit.frozen:
            width = layout.setup.param_dtype.bytes
            sizes = [width * numel for numel in _largest_overlaps(unit.frozen)]
            if unit.param_place is Place.NVME:
                inside += sizes
            else:
                in_memory.append((unit, sizes))
        if inside:
            in_files.append((unit, inside))
    return in_memory, in_files


def _largest_overlaps(flat: Flat) -> Iterator[int]:
    """Elements of the largest part that any rank owns of each parameter: of a rank in between, or at either end."""
    for position, (offset, numel) in enumerate(zip(flat.offsets, flat.numels, strict=True)):
        first, last = offset // flat.shard, (offset + numel - 1) // flat.shard
        parts = [flat.overlap(position, rank) for rank in {first, min(first + 1, last), last}]
        yield max(end - begin for begin, end in parts)


def _two(sizes: list[int]) -> int:
    """The most of two that follow each other."""
    return max((a + b for a, b in pairwise(sizes)), default=sum(sizes))
