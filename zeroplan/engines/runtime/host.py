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

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise

from zeroplan.core.arena.layout import ArenaLayout, Flat, UnitLayout
from zeroplan.core.arena.owned_buffers import runtime_buffers
from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.engines.simulation import CheckpointPhase, HostPhase

_FP32_BYTES = 4


def host_phases(layout: ArenaLayout, model: int, moved: Mapping[str, int] | None = None) -> tuple[HostPhase, ...]:
    """Return the host's peaks by phase. See Note [Passing through].

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
    layout: ArenaLayout, host: tuple[HostPhase, ...], *, after_init: int, after_step: int
) -> tuple[CheckpointPhase, ...]:
    """Return the peaks of ``save_checkpoint`` and ``load_checkpoint``. See Note [Passing through].

    Args:
        layout: what the Arena allocates by.
        after_init: bytes allocated on the GPU after initialisation.
        after_step: bytes allocated on the GPU between two steps.
    """
    held = {one.phase: sum(one.kept.values()) for one in host}
    states, width = layout.setup.states, layout.setup.param_dtype.bytes
    written = read = 0
    for unit in layout.units:
        together = pair = 0
        if unit.trainable:
            one, two = (_FP32_BYTES * numel for numel in _pieces(unit.trainable, 1 + len(states)))
            written, pair = max(written, one), two
            together += _FP32_BYTES * len(_streamed(layout)) * layout.share(unit) if unit.place is Place.NVME else 0
        if unit.frozen:
            one, two = (width * numel for numel in _pieces(unit.frozen, 1))
            written, pair = max(written, one), max(pair, two)
            together += width * unit.frozen.shard if unit.param_place is Place.NVME else 0
        read = max(read, together + pair)
    return (
        CheckpointPhase(Phase.SAVE, after_step, held[Phase.STEP] + written),
        CheckpointPhase(Phase.RESUME, after_init, held[Phase.INIT] + read),
    )


def _kept(layout: ArenaLayout) -> dict[tuple[Buffer, Place], int]:
    found: dict[tuple[Buffer, Place], int] = {}
    for row in runtime_buffers(layout):
        if row.persistent and row.place in (Place.PINNED, Place.DRAM):
            found[row.buffer, row.place] = found.get((row.buffer, row.place), 0) + row.bytes
    return found


def _master_in_file(layout: ArenaLayout, unit: UnitLayout) -> bool:
    return unit.place is Place.NVME and layout.setup.separate_masters


def _streamed(layout: ArenaLayout) -> list[Buffer]:
    """The buffers of a unit whose states are in a file that lie in that file."""
    masters = [Buffer.PARAM_MASTER] if layout.setup.separate_masters else []
    return [*masters, *layout.setup.states]


@lru_cache(maxsize=256)
def _pieces(flat: Flat, kinds: int) -> tuple[int, int]:
    """Return the elements of the largest piece of a flat on any rank, and of the two largest that follow each other.

    Args:
        flat: units alike have equal ones.
        kinds: tensors laid out like it, which are written and read one after another.
    """
    by_rank: dict[int, list[int]] = {}
    for position, (offset, numel) in enumerate(zip(flat.offsets, flat.numels, strict=True)):
        for rank in range(offset // flat.shard, (offset + numel - 1) // flat.shard + 1):
            begin, end = flat.overlap(position, rank)
            by_rank.setdefault(rank, []).append(end - begin)
    pairs = (pairwise(sizes * min(kinds, 2)) for sizes in by_rank.values())
    one = max(max(sizes) for sizes in by_rank.values())
    return one, max((a + b for following in pairs for a, b in following), default=one)
