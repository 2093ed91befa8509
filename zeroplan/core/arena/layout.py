"""The included runtime's layout: shapes, ranks and stage in; padded shards and rings of buffers out. Integers only.

Note [Layout]
    A *unit* is one transformer block, one large embedding or head, or the root (everything else, tied parameters
    included). Its trainable parameters lie one after another in one *flat*, its frozen ones in another; each parameter
    begins on a multiple of :data:`ALIGN` elements, and the flat is padded so that every rank's *shard* is equal and
    aligned. One flat is gathered by one all-gather, reduced by one reduce-scatter and updated by one launch. Where the
    optimizer's states are quantised in blocks, parameters and shards begin on multiples of a block instead: a block then
    holds elements of one parameter on one rank, and the same ones at any number of ranks.

    Where a buffer is needed only while its unit computes (gathered parameters at stage 3, whole gradients from stage 2
    on), units share *slots*: blocks take turns in a small ring, large embeddings and heads share one more, the root has
    its own. A unit always uses the same slot, so its parameters always have the same address.

    At stage 3 a rank's share of trained 16-bit parameters exists once, as fp32 masters: a gather begins by casting them into
    the rank's part of the slot. Gradients that are reduced in fp32 are fp32 in the blocks' slots, but 16 bits in those of
    embeddings, heads and the root, whose gradients come while the logits are there; these are cast piece by piece, in a
    *staging* buffer, as they are reduced.

    One rank alone has nothing to shard: whole and shard are the same bytes at every stage.

Note [Experts]
    Where ranks share experts, a block's experts are a unit beside the block's: their flats are sharded over the ranks that
    hold the same experts, by collectives of their own. They are gathered, reduced and updated with the block, and take turns
    in a ring of their own. Also where one rank alone holds them they pass through it, as a cast or a copy.

Note [Lifetimes]
    Parameters, masters and states stand from the initialisation on. Gradients come and go, so that none lies beside the
    logits, where a step's memory peaks. What the optimizer reads (a unit's shard, or its whole gradients where they are kept)
    comes when the unit's first gradient lands or is reduced, and goes once the step has used it. Slots of whole gradients
    come when a backward first needs them and go at its end; between the micro batches of an accumulation they go in the
    next forward, behind the first block, so that the last reduction has work to hide under (as with the delayed update of
    offloaded states, whose next forward need not wait for the last gradients to leave). What is kept until the step is all
    there at the end of a backward, so the allocator is given a segment of that size at the start.

Note [Offload]
    The optimizer of a unit may lie on the host or in files (its :attr:`UnitLayout.place`); the units that the forward needs
    first stay on the device as far as the ratio leaves some there, since theirs are the gradients that come last and the
    parameters that are wanted first. The gradients of an offloaded unit pass through slots at every stage and number of
    ranks, and rest in pinned memory, from where the updated parameters go up again: in the same bytes where gradients and
    parameters are equally wide. Masters and states, which the CPU alone touches, are pageable. Parameters on the host are
    pinned, and pass through slots like sharded ones. See zeroplan_runtime/offload/host_optimizer.py.

    What is in files streams through pinned buffers: in the update as many tensors of a *run* (a part of a unit's share) as
    have their place there, and parameters on their way to the slots a unit's shard at a time. Of parameters in files the
    units that the forward needs first may stay in host memory (their :attr:`UnitLayout.param_place`).

Note [Momentum in one bit]
    After the warm-up of 1-bit Adam no gradient is reduced. Each rank keeps its own whole until the step, adds it to the
    momentum, and exchanges that in one bit an element (:mod:`zeroplan.core.one_bit`), so momentum and the error of what a
    rank sends are whole on every rank at stages 0 and 1; the error of the mean belongs to the rank's shard at both. Masters,
    second moment and parameters are as with any other optimizer: stage 1 shards the first two. One rank has nothing to
    exchange and steps as in the warm-up.

Note [Gathers in 8 bits]
    At stage 3 blocks' matrices may be gathered in 8 bits (``float8_gathers``). A rank's message is the power of two by which
    its shard is scaled, the shard in e4m3, and in 16 bits those parameters of the unit that are no matrices, the rank's own
    elements among zeros. Received messages are widened into the slot. Messages of all units pass through one buffer.

The rows of buffers that follow from a layout stand in owned_buffers.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from zeroplan.core.arena.layout_setup import Feature, RuntimeSetup
from zeroplan.core.arena.segments import SegmentTable
from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.one_bit import message_words
from zeroplan.core.workload import DType
from zeroplan.core.zero_config import OffloadDevice

#: Parameters and shards begin on multiples of this many elements: 128 bytes in 16 bits, a line of the GPU's L2 cache.
ALIGN = 64

#: An embedding or head outside the blocks with at least this many elements is a unit of its own.
WIDE_NUMEL = 1 << 20

#: Bytes in front of a rank's 8-bit elements, of which the first four are their scale; messages are multiples of as many.
FLOAT8_HEAD = 16

#: Elements that an update without a kernel works on at once, at most.
UPDATE_CHUNK = 1 << 20
#: Scalars of one step on the device: sum of squares, norm, factor, skip flag; the rest keeps the line whole. Each unit's sum
#: of squares follows.
STEP_SCALARS = 16

#: The norm's partial sums (fp64, one a thread block), and its workspace in words of 4 bytes: those and a line for a ticket.
NORM_PARTS = 2048
NORM_WORKSPACE = (NORM_PARTS * 8 + 64) // 4

#: Elements that the staging buffer casts and reduces at once, at most.
STAGING_NUMEL = 1 << 26

#: Elements of one of the pinned buffers that states in files pass through, at most.
SWAP_NUMEL = 1 << 26

#: Bytes of a page: what is pinned, what is in files and what is read or written at once are whole multiples of it. And its
#: elements in 16 bits; in 32 they are two pages.
PAGE = 4096
PAGE_NUMEL = PAGE // 2

#: Checkpointed inputs of fewer bytes stay on the device: torch's allocator gives no tensor less than this.
LEAST_MOVED_BYTES = 512

#: Groups of states that are in the pinned buffers at once: one is read, one worked on, one written.
SWAP_SLOTS = 3


#: What the name of a block's unit of experts ends with.
EXPERTS_SUFFIX = ".experts"


class UnitKind(StrEnum):
    """Kinds of units; the kind decides which slots a unit uses."""

    BLOCK = "block"  # takes turns in the ring
    WIDE = "wide"  # a large embedding or head; all of them share one slot
    EXPERTS = "experts"  # a block's experts that ranks share; take turns in a ring of their own: Note [Experts]
    ROOT = "root"  # everything else; gathered from the forward's begin to the backward's end


@dataclass(frozen=True, slots=True)
class ParamShape:
    """One parameter: full name, elements, whether it is trained, and its optimizer group (groups lie together).

    `narrow`: it is a matrix that 8-bit products take (:func:`is_narrow`).
    """

    name: str
    numel: int
    trainable: bool = True
    group: int = 0
    narrow: bool = False


def is_narrow(shape: Sequence[int]) -> bool:
    """Return whether a parameter of this shape is a matrix whose sizes are multiples of 16."""
    return len(shape) == 2 and all(size and size % 16 == 0 for size in shape)


@dataclass(frozen=True, slots=True)
class UnitShape:
    """A unit and its own parameters, tied ones in one unit only."""

    name: str
    kind: UnitKind
    params: tuple[ParamShape, ...]

    @property
    def in_ring(self) -> bool:
        """Whether it takes turns with others of its kind, so that gradients in its slot are in the reduction's dtype."""
        return self.kind in (UnitKind.BLOCK, UnitKind.EXPERTS)


@dataclass(frozen=True, slots=True)
class Flat:
    """Parameters lying one after another. `offsets` and `numels` are elements; `used` is the aligned end of the last.

    `params` index into the unit's. Padding, between parameters and at the end, holds zeros.
    """

    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    used: int
    shard: int
    ranks: int

    @property
    def full(self) -> int:
        """Elements of the whole, padding included: ``shard × ranks``."""
        return self.shard * self.ranks

    def gaps(self) -> list[tuple[int, int]]:
        """Return ``(start, end)`` of each run of padding."""
        ends = [offset + numel for offset, numel in zip(self.offsets, self.numels, strict=True)]
        starts = [*self.offsets[1:], self.full]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def overlap(self, position: int, rank: int) -> tuple[int, int]:
        """Return ``(start, end)`` of parameter `position` within `rank`'s shard, in the parameter's own elements."""
        first = rank * self.shard - self.offsets[position]
        numel = self.numels[position]
        return min(max(first, 0), numel), min(max(first + self.shard, 0), numel)


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """One unit: its flats and the names of the slots that its parameters and gradients use (None when it needs none)."""

    shape: UnitShape
    trainable: Flat | None
    frozen: Flat | None
    param_slot: str | None
    grad_slot: str | None
    place: Place = Place.HBM  # of the optimizer's masters and states
    param_place: Place = Place.HBM  # of what stands of the parameters
    in_bf16: bool = False  # a block at an end of the model that 8-bit products leave out

    @property
    def offloaded(self) -> bool:
        """Whether its optimizer is not on the device."""
        return self.place is not Place.HBM

    @property
    def full(self) -> int:
        """Elements gathered for this unit."""
        return sum(flat.full for flat in (self.trainable, self.frozen) if flat)

    @property
    def multiplies_in_float8(self) -> bool:
        """Whether its linear layers may multiply in 8 bits."""
        return self.shape.kind is UnitKind.BLOCK and not self.in_bf16

    @property
    def narrow(self) -> bool:
        """Whether its matrices may be gathered in 8 bits: see Note [Gathers in 8 bits]."""
        flat = self.trainable
        return flat is not None and self.multiplies_in_float8 and any(self.shape.params[i].narrow for i in flat.params)

    @property
    def wide(self) -> tuple[int, ...]:
        """Which of the trainable flat's parameters are not gathered in 8 bits, by their place in it."""
        flat = self.trainable
        return () if flat is None else tuple(n for n, i in enumerate(flat.params) if not self.shape.params[i].narrow)

    @property
    def float8_message(self) -> int:
        """Bytes that one rank sends of a unit gathered in 8 bits; 0 where it has no matrix."""
        if not self.narrow:
            return 0
        assert self.trainable is not None
        wide = sum(self.trainable.numels[n] for n in self.wide)
        return align(FLOAT8_HEAD + self.trainable.shard + 2 * wide, FLOAT8_HEAD)

    @property
    def streamed(self) -> bool:
        """Whether its update streams through files: states come and go, or parameters go."""
        return self.trainable is not None and self.offloaded and Place.NVME in (self.place, self.param_place)


@dataclass(frozen=True)
class ArenaLayout:
    """The whole model's layout under one setup. See Note [Layout]."""

    setup: RuntimeSetup
    units: tuple[UnitLayout, ...]

    @cached_property
    def param_slots(self) -> dict[str, int]:
        """Elements of each slot for gathered parameters."""
        return _slot_sizes((u.param_slot, u.full) for u in self.units)

    @cached_property
    def grad_slots(self) -> dict[str, int]:
        """Elements of each slot for whole gradients."""
        return _slot_sizes((u.grad_slot, u.trainable.full) for u in self.units if u.trainable)

    def grad_slot_dtype(self, shape: UnitShape) -> DType:
        """Return the dtype that whole gradients have in the slot of a unit."""
        return self.setup.reduce_dtype if shape.in_ring else self.setup.wide_grad_dtype

    @cached_property
    def piece(self) -> int:
        """Elements of a shard that are cast and reduced at once where a slot is not in the reduction's dtype; 0 if all are."""
        shards = [
            u.trainable.shard
            for u in self.units
            if u.trainable and u.grad_slot and self.grad_slot_dtype(u.shape) is not self.setup.reduce_dtype
        ]
        return min(max(shards, default=0), align(STAGING_NUMEL // self.setup.ranks))

    @cached_property
    def sum_slots(self) -> dict[str, int]:
        """Elements of each slot on the device in which offloaded gradients are summed or cast; none where they never are."""
        direct = self.setup.grad_accum == 1 and self.setup.accum_dtype is self.setup.reduce_dtype
        return {} if direct else self.sum_slot_sizes

    @cached_property
    def sum_slot_sizes(self) -> dict[str, int]:
        """Elements of each slot of :attr:`sum_slots`, whether this run needs it or not."""
        return _slot_sizes((u.grad_slot, self.share(u)) for u in self.units if u.trainable and u.offloaded)

    @cached_property
    def swapped_tensors(self) -> int:
        """Tensors that the update streams for each run of elements: the states and separate masters of an optimizer in files,
        and the updated parameters of parameters in files.
        """
        streamed = [unit for unit in self.units if unit.streamed]
        states = len(self.setup.states) + self.setup.separate_masters if self.states_in_files else 0
        return states + any(unit.param_place is Place.NVME for unit in streamed)

    @property
    def states_in_files(self) -> bool:
        """Whether any unit's optimizer is in files."""
        return any(unit.place is Place.NVME for unit in self.units if unit.trainable)

    @property
    def swap_dtype(self) -> DType:
        """Dtype of the widest tensor that is streamed in the update."""
        return DType.FP32 if self.states_in_files else self.setup.param_dtype

    @cached_property
    def swap_numel(self) -> int:
        """Elements of one swapped tensor that are streamed at once: the buffers asked for, cut into equal pieces."""
        if not self.swapped_tensors:
            return 0
        largest = max(self.share(unit) for unit in self.units if unit.streamed)
        told = self.setup.swap_buffers * min(largest, SWAP_NUMEL)
        piece = max(1, told // (SWAP_SLOTS * self.swapped_tensors * PAGE_NUMEL)) * PAGE_NUMEL
        return min(piece, align(largest, PAGE_NUMEL), self.param_buffer or piece)

    @cached_property
    def param_buffer(self) -> int:
        """Elements of one of the pinned buffers that parameters in files come through: the largest unit's shard, or as much
        of it as was told; 0 where there are none.
        """
        away = [unit for unit in self.units if unit.param_place is Place.NVME]
        shards = [sum(align(flat.shard, PAGE_NUMEL) for flat in (u.trainable, u.frozen) if flat) for u in away]
        return min(max(shards, default=0), self.setup.param_buffer_numel // PAGE_NUMEL * PAGE_NUMEL)

    def segments(self, unit: UnitLayout) -> SegmentTable:
        """Return the segment tables of a unit's share, for optimizers that look at whole tensors."""
        params = [unit.shape.params[i] for i in unit.trainable.params] if unit.trainable else []
        return SegmentTable.of(self.share(unit), len(params), len({param.group for param in params}))

    def state_numel(self, unit: UnitLayout, state: Buffer) -> int:
        """Return the elements of one of the optimizer's states that this rank keeps of a unit."""
        assert unit.trainable is not None
        whole = self.setup.compresses and state is Buffer.OPTIM_EXP_AVG
        return unit.trainable.full if whole else self.share(unit)

    @cached_property
    def snapshot(self) -> int:
        """Bytes of pinned memory to which this rank's masters and states are copied for a checkpoint that is written while
        training goes on: the part of each parameter and state begins on a multiple of 64.
        """
        if Feature.ASYNC_CHECKPOINTS not in self.setup.features:
            return 0
        total = 0
        for unit in self.units:
            if unit.trainable is not None:
                sizes = [self.setup.state_elements(state, unit.trainable.shard) for state in self.setup.states]
                sizes.append((unit.trainable.shard, DType.FP32))
                total += sum(numel * dtype.bytes for numel, dtype in sizes) + len(sizes) * 64 * len(unit.trainable.params)
        return total

    @cached_property
    def float8_gather(self) -> int:
        """Bytes of the messages of all ranks by which the largest unit is gathered in 8 bits; 0 without."""
        largest = max((unit.float8_message for unit in self.units), default=0)
        return self.setup.ranks * largest if self.setup.gathers_float8 else 0

    @cached_property
    def message_words(self) -> int:
        """Words of the messages that one unit's momentum is exchanged in, one a rank, for the largest unit; 0 without."""
        shards = [unit.trainable.shard for unit in self.units if unit.trainable]
        return self.setup.ranks * message_words(max(shards, default=0)) if self.setup.compresses else 0

    def share(self, unit: UnitLayout) -> int:
        """Return the number of elements of a unit's trained parameters that this rank's optimizer steps."""
        assert unit.trainable is not None
        return unit.trainable.shard if self.setup.shards_states else unit.trainable.full


def _slot_sizes(uses: Iterable[tuple[str | None, int]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for slot, numel in uses:
        if slot is not None:
            sizes[slot] = max(sizes.get(slot, 0), numel)
    return sizes


def align(numel: int, to: int = ALIGN) -> int:
    """Round `numel` up to a multiple of `to`."""
    return -(-numel // to) * to


def flat_of(shape: UnitShape, ranks: int, *, trainable: bool, to: int = ALIGN) -> Flat | None:
    """The flat of a unit's trainable or frozen parameters, optimizer groups together; None when there are none.

    Parameters and shards begin on multiples of `to` elements.
    """
    chosen = [i for i, p in enumerate(shape.params) if p.trainable is trainable and p.numel]
    if not chosen:
        return None
    chosen.sort(key=lambda i: shape.params[i].group)
    offsets, end = [], 0
    for i in chosen:
        offsets.append(end)
        end += align(shape.params[i].numel, to)
    shard = align(-(-end // ranks), to)
    return Flat(tuple(chosen), tuple(offsets), tuple(shape.params[i].numel for i in chosen), end, shard, ranks)


def plan_layout(shapes: Sequence[UnitShape], setup: RuntimeSetup) -> ArenaLayout:
    """Flats, shards and slots for `shapes`, which stand in the order of the forward."""
    units, turn = [], 0
    ranks = [setup.expert_ranks if shape.kind is UnitKind.EXPERTS else setup.ranks for shape in shapes]
    flats = [flat_of(s, n, trainable=True, to=max(ALIGN, setup.block)) for s, n in zip(shapes, ranks, strict=True)]
    fixed = [flat_of(shape, n, trainable=False) for shape, n in zip(shapes, ranks, strict=True)]
    places = _optimizer_places([flat.used if flat else 0 for flat in flats], setup)
    rests = _param_places([sum(flat.shard for flat in pair if flat) for pair in zip(flats, fixed, strict=True)], setup)
    blocks = [shape.name for shape in shapes if shape.kind is UnitKind.BLOCK]
    others = setup.bf16_layers.others(len(blocks)) if setup.bf16_layers is not None else range(len(blocks))
    in_bf16 = {name for number, name in enumerate(blocks) if number not in others}
    for shape, trainable, frozen, place, rest in zip(shapes, flats, fixed, places, rests, strict=True):
        slot = str(shape.kind)
        if shape.kind is UnitKind.BLOCK:
            slot, turn = f"ring.{turn % setup.block_slots}", turn + 1
        elif shape.kind is UnitKind.EXPERTS:  # it follows its block
            slot = f"experts.{(turn - 1) % setup.block_slots}"
        units.append(
            UnitLayout(
                shape,
                trainable,
                frozen,
                slot if setup.shards_params and (trainable or frozen) else None,
                slot if trainable and (setup.shards_grads or place is not Place.HBM) else None,
                place,
                rest,
                shape.name in in_bf16,
            )
        )
    return ArenaLayout(setup, tuple(units))


def _optimizer_places(numels: Sequence[int], setup: RuntimeSetup) -> list[Place]:
    """Decide in which memory each unit's optimizer states lie; see Note [Offload]."""
    away = {OffloadDevice.NONE: Place.HBM, OffloadDevice.CPU: Place.DRAM, OffloadDevice.NVME: Place.NVME}[
        setup.offload_optimizer
    ]
    stays = (1.0 - setup.offload_ratio) * sum(numels)
    places, end = [], 0
    for numel in numels:
        end += numel
        places.append(away if end > stays else Place.HBM)
    return places


def _param_places(numels: Sequence[int], setup: RuntimeSetup) -> list[Place]:
    """Decide in which memory each unit's shard of parameters rests; see Note [Offload]."""
    away = {OffloadDevice.NONE: Place.HBM, OffloadDevice.CPU: Place.PINNED, OffloadDevice.NVME: Place.NVME}[setup.offload_param]
    places, end = [], 0
    for numel in numels:
        end += numel
        places.append(Place.PINNED if away is Place.NVME and end <= setup.params_in_host else away)
    return places
