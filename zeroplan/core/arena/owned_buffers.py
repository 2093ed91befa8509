"""Every buffer of the included runtime, row by row, from its :class:`~zeroplan.core.arena.layout.ArenaLayout`.

The Arena allocates by :func:`runtime_buffers` and the predictor reads it; neither computes a size of its own. Notes that the
rows refer to stand in layout.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.arena.layout import NORM_WORKSPACE, STEP_SCALARS, SWAP_SLOTS, UPDATE_CHUNK, ArenaLayout, UnitLayout, align
from zeroplan.core.arena.layout_setup import Feature, StateDType
from zeroplan.core.buffers import ALWAYS, Buffer, Phase, Place
from zeroplan.core.workload import DType


@dataclass(frozen=True, slots=True)
class OwnedBuffer:
    """One buffer that the runtime allocates: a row of the plan and of the Arena's measurement.

    `phases` are those in which it lives for a while at least; see Note [Lifetimes].
    """

    buffer: Buffer
    unit: str
    numel: int
    dtype: DType | StateDType
    place: Place = Place.HBM
    phases: tuple[Phase, ...] = ALWAYS

    @property
    def bytes(self) -> int:
        """``numel × bytes an element``."""
        return self.numel * self.dtype.bytes

    @property
    def persistent(self) -> bool:
        """Whether the buffer is there from the initialisation to the end of the run; others come and go."""
        return Phase.INIT in self.phases


def spaced(row: OwnedBuffer) -> int:
    """Return the elements from a row's beginning to that of the next row of its kind, in the one block of memory of all.

    Rows begin on multiples of :data:`ALIGN` elements; scales, which are read two at a time, lie without gaps.
    """
    return row.numel if row.buffer is Buffer.OPTIM_SCALE else align(row.numel)


def runtime_buffers(layout: ArenaLayout) -> list[OwnedBuffer]:
    """List every buffer that one rank's runtime allocates, those of one kind and place together. All ranks are equal."""
    passing = (*_param_rows(layout), *_grad_rows(layout), *_exchange_rows(layout))
    return [*passing, *_state_rows(layout), *_one_bit_rows(layout), *_step_rows(layout)]


def _state_rows(layout: ArenaLayout) -> list[OwnedBuffer]:
    """Return the rows of masters and of the optimizer's states."""
    setup, rows = layout.setup, []
    units = [unit for unit in layout.units if unit.trainable]
    for unit in units:
        if setup.has_masters or (unit.place is not Place.HBM and setup.separate_masters):
            pinned = unit.place is Place.DRAM and not setup.has_masters  # what goes up is the master itself
            where = Place.PINNED if pinned else unit.place
            rows.append(OwnedBuffer(Buffer.PARAM_MASTER, unit.shape.name, layout.share(unit), DType.FP32, where))
    for state in setup.states:
        rows += [
            OwnedBuffer(state, u.shape.name, *setup.state_elements(state, layout.state_numel(u, state)), u.place) for u in units
        ]
    if setup.map_words and any(unit.place is Place.HBM for unit in units):  # the host's are no part of a rank
        rows.append(OwnedBuffer(Buffer.OPTIM_SCALE, "maps", setup.map_words, DType.FP32))
    return rows


def _one_bit_rows(layout: ArenaLayout) -> list[OwnedBuffer]:
    """Return the rows of what momentum in one bit keeps and sends; see Note [Momentum in one bit]."""
    setup = layout.setup
    if not setup.compresses:
        return []
    flats = [(unit.shape.name, unit.trainable) for unit in layout.units if unit.trainable]
    rows = [OwnedBuffer(Buffer.OPTIM_ERROR_FEEDBACK, name, flat.full, DType.FP32) for name, flat in flats]
    rows += [OwnedBuffer(Buffer.OPTIM_SERVER_ERROR, name, flat.shard, DType.FP32) for name, flat in flats]
    if Feature.LOCAL_STEPS in setup.features:
        rows += [OwnedBuffer(Buffer.OPTIM_ANCHOR, name, flat.full, DType.FP32) for name, flat in flats]
    words = layout.message_words
    return rows + [OwnedBuffer(Buffer.COMM_ALL_REDUCE, what, words, DType.FP32) for what in ("sent", "received")]


def _step_rows(layout: ArenaLayout) -> list[OwnedBuffer]:
    """Return the rows of what a step works on beside parameters, gradients and states."""
    setup, rows = layout.setup, []
    units = [unit for unit in layout.units if unit.trainable]
    if setup.quantize_training is not None and units:
        words = setup.quantize_training.words(max(unit.shape.params[i].numel for unit in units for i in _trained(unit)))
        rows.append(OwnedBuffer(Buffer.PARAM_TEMP, "quantize_training", words, DType.FP32))
    if layout.snapshot:
        rows.append(OwnedBuffer(Buffer.HOST_CHECKPOINT, "snapshot", layout.snapshot, StateDType.UINT8, Place.PINNED))
    if layout.float8_gather:
        rows.append(OwnedBuffer(Buffer.COMM_ALL_GATHER, "float8", layout.float8_gather, StateDType.UINT8))
    if setup.takes_norms:
        rows += [OwnedBuffer(Buffer.OPTIM_TRUST, u.shape.name, layout.segments(u).words, DType.FP32) for u in units]
    if setup.coefficients and units:
        numel = setup.coefficients * sum(len(_trained(unit)) for unit in units)
        rows.append(OwnedBuffer(Buffer.OPTIM_TRUST, "coefficients", numel, DType.FP32))
    for owner, place in (("device", Place.HBM), ("host", Place.DRAM)):
        shares = (layout.share(unit) for unit in units if (unit.place is Place.HBM) == (place is Place.HBM))
        longest = max(shares, default=0)
        if setup.update_temporaries and longest:
            numel = setup.update_temporaries * min(UPDATE_CHUNK, longest)
            rows.append(OwnedBuffer(Buffer.OPTIM_TEMP, owner, numel, DType.FP32, place))
    rows.append(OwnedBuffer(Buffer.OPTIM_NORM, "step", STEP_SCALARS + len(layout.units), DType.FP32))
    rows.append(OwnedBuffer(Buffer.OPTIM_NORM, "workspace", NORM_WORKSPACE, DType.FP32))
    return rows


def _trained(unit: UnitLayout) -> tuple[int, ...]:
    """The trained parameters of a unit, by their place among all of it."""
    return unit.trainable.params if unit.trainable is not None else ()


def _param_rows(layout: ArenaLayout) -> list[OwnedBuffer]:
    setup, dtype = layout.setup, layout.setup.param_dtype
    size = "shard" if setup.shards_params else "full"
    own = Buffer.PARAM_SHARD if setup.stage >= 3 else Buffer.PARAM_FULL
    kinds = [(Buffer.PARAM_FROZEN, "frozen")]
    if not setup.casts_masters:
        kinds.insert(0, (own, "trainable"))
    rows = [
        OwnedBuffer(buffer, unit.shape.name, getattr(getattr(unit, flat), size), dtype, unit.param_place)
        for buffer, flat in kinds
        for unit in layout.units
        if getattr(unit, flat)
    ]
    rows += [OwnedBuffer(Buffer.PARAM_FULL, slot, numel, dtype) for slot, numel in layout.param_slots.items()]
    return rows


def _grad_rows(layout: ArenaLayout) -> list[OwnedBuffer]:
    """Return the rows of the gradients on the device."""
    setup = layout.setup
    between = (Phase.FORWARD,) if setup.grad_accum > 1 else ()  # what later micro batches find there
    late = (Phase.FORWARD,) if setup.delayed_update else between
    kept, passing = (*between, Phase.BACKWARD, Phase.STEP), (*late, Phase.BACKWARD)
    stay = [(u.shape.name, u.trainable) for u in layout.units if u.trainable and not u.offloaded]
    slots = layout.grad_slots.items()
    if setup.shards_grads:
        rows = [OwnedBuffer(Buffer.GRAD_SHARD, name, flat.shard, setup.accum_dtype, phases=kept) for name, flat in stay]
    else:
        whole = setup.whole_grad_dtype
        rows = [OwnedBuffer(setup.kept_grad, name, flat.full, whole, phases=kept) for name, flat in stay]
    dtypes = {u.grad_slot: layout.grad_slot_dtype(u.shape) for u in layout.units}
    rows += [OwnedBuffer(Buffer.GRAD_FULL, slot, numel, dtypes[slot], phases=passing) for slot, numel in slots]
    if layout.piece:
        staging = layout.piece * setup.ranks
        rows.append(OwnedBuffer(Buffer.COMM_REDUCE_SCATTER, "staging", staging, setup.reduce_dtype, phases=passing))
    rows += [
        OwnedBuffer(Buffer.STAGE_D2H, slot, numel, setup.accum_dtype, phases=passing)
        for slot, numel in layout.sum_slots.items()
    ]
    return rows


def _exchange_rows(layout: ArenaLayout) -> list[OwnedBuffer]:
    """Return the rows of the pinned buffers through which offloaded gradients go down and updated parameters come up; see Note
    [Offload].
    """
    setup = layout.setup
    away = [(u.shape.name, layout.share(u)) for u in layout.units if u.trainable and u.offloaded]
    rows = [OwnedBuffer(Buffer.GRAD_SHARD, name, numel, setup.accum_dtype, Place.PINNED) for name, numel in away]
    if setup.delayed_update:  # a second one, to take turns with
        rows += [OwnedBuffer(Buffer.STAGE_D2H, name, numel, setup.accum_dtype, Place.PINNED) for name, numel in away]
    if setup.separate_upload:
        turns = 2 if setup.delayed_update else 1
        rows += [OwnedBuffer(Buffer.STAGE_H2D, name, turns * numel, setup.param_dtype, Place.PINNED) for name, numel in away]
    if layout.swapped_tensors:
        numel = SWAP_SLOTS * layout.swapped_tensors * layout.swap_numel
        rows.append(OwnedBuffer(Buffer.SWAP_BUFFER, "optimizer", numel, layout.swap_dtype, Place.PINNED))
    if layout.param_buffer:
        numel = setup.param_buffers * layout.param_buffer
        rows.append(OwnedBuffer(Buffer.SWAP_BUFFER, "parameters", numel, setup.param_dtype, Place.PINNED))
    return rows
