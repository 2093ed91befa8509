"""The tensors and events of one unit, on the device and, where its optimizer is offloaded, on the host.

A unit is the grain of everything: one flat padded shard a rank, one all-gather, one reduction, one optimizer launch for each
parameter group in it. Its tensors are carved from the Arena by :class:`zeroplan_runtime.model_states.ModelStates`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from zeroplan.core.arena.layout import Flat, UnitKind, UnitLayout
from zeroplan.core.buffers import Buffer, Place
from zeroplan_runtime.arena import ResizableBuffer
from zeroplan_runtime.kernels import TensorSegments
from zeroplan_runtime.local_tensors import local_of
from zeroplan_runtime.offload.host_worker import HostTask
from zeroplan_runtime.streams import Event


@dataclass(slots=True, eq=False)
class ParamSlot:
    """Memory for unsharded parameters, which units share in turn or which one unit has for itself.

    Attributes:
        tensor: the memory, 1-D, in the model's dtype.
        last_use: recorded after the last computation that reads the slot; the next unshard waits for it.
        ready: recorded after the last unshard; computation waits for it.
        holder: the unit whose parameters are in the slot.
        is_current: the slot holds the parameters as the last update left them.
        in_use: the holder's forward or backward is under way, so no other unit may take the slot.
        is_rounded: the holder was gathered in 8 bits.
    """

    name: str
    tensor: torch.Tensor
    last_use: Event
    ready: Event
    holder: UnitState | None = None
    is_current: bool = False
    in_use: bool = False
    is_rounded: bool = False


@dataclass(slots=True, eq=False)
class GradSlot:
    """Memory for unsharded gradients, which units share in turn. Allocated from a backward's first gradient to its end.

    Attributes:
        last_use: recorded after the last reduction that reads the slot.
        holder: the unit whose gradients are in the slot and not reduced yet.
    """

    buffer: ResizableBuffer
    last_use: Event
    holder: UnitState | None = None


@dataclass(slots=True, eq=False)
class AccumSlot:
    """Device memory in which an offloaded unit's gradients are accumulated: the sum so far is copied in from the host, the
    new gradients are added, the sum is copied out. Allocated as long as a :class:`GradSlot`.

    Attributes:
        last_use: recorded after the copy of the sum to the host.
        ready: recorded after the copy of the sum from the host.
    """

    buffer: ResizableBuffer
    last_use: Event
    ready: Event


@dataclass(slots=True, eq=False)
class FlatParam:
    """Parameters of a unit laid out one after another with padding, as FSDP1's ``FlatParameter``: the trainable or the frozen.

    Attributes:
        params: the parameters, each a view of `full`.
        full: the unsharded parameters, 1-D: permanent memory, or a part of the unit's :class:`ParamSlot`.
        shard: this rank's shard, 1-D. Separate memory (on the device or the host) where the unit shares its slot and the
            shard is kept; otherwise, and where the parameters rest in a file, a view of `full`.
        part: this rank's part of `full`, 1-D.
    """

    layout: Flat
    params: list[nn.Parameter]
    full: torch.Tensor
    shard: torch.Tensor
    part: torch.Tensor

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of `flat`, a 1-D tensor as long as `full`, in the shapes of the parameters, or of this rank's parts."""
        return [
            flat[offset : offset + numel].view(local_of(param).shape)
            for offset, numel, param in zip(self.layout.offsets, self.layout.numels, self.params, strict=True)
        ]


class PlacedParam(NamedTuple):
    """A parameter, its full name, and its place in a unit: a flat and the position there."""

    param: nn.Parameter
    name: str
    flat: FlatParam
    position: int


@dataclass(slots=True, eq=False)
class ExchangedMomentum:
    """What a rank keeps of a unit to exchange its momentum: Note [Momentum in one bit] in core/layout.

    Attributes:
        momentum: fp32 [flat], the ranks' mean; in the warm-up at stage 1 only this rank's shard is current.
        worker_error: fp32 [flat], what this rank's messages have left out.
        server_error: fp32 [shard], what the compressed mean of this rank's shard has left out.
        anchor: fp32 [flat], the masters of the last step that synchronised; None unless ranks step alone.
        padding: views of the three where no parameter is. One bit has no zero, so they are set to zero after each exchange:
            a checkpoint does not hold them.
    """

    momentum: torch.Tensor
    worker_error: torch.Tensor
    server_error: torch.Tensor
    padding: list[torch.Tensor]
    anchor: torch.Tensor | None = None

    def forget_errors(self) -> None:
        """Lets both errors begin at zero again."""
        self.worker_error.zero_()
        self.server_error.zero_()


@dataclass(slots=True, eq=False)
class UnitGradients:
    """The unsharded gradients of a unit, and how far they are.

    Attributes:
        slot: where they are from stage 2 on.
        buffer: the memory of the gradients that live until the step: of the unit's `grad` where `slot` is set, else of `full`.
            None where the optimizer is offloaded.
        full: the gradients, 1-D; None until they are first needed.
        views: views of `full` in the parameters' shapes.
        gaps: the padding of `full`.
        received: for each parameter, whether `full` holds a gradient of it (see RECEIVED_NOW in gradient_reduction).
        arrived: for each parameter, whether this step has had a gradient of it on this rank.
        reduced: those of this micro batch have been reduced.
        accumulated: the unit's `grad` holds the sum of earlier micro batches.
        averaged: `full`, where it lives until the step (stages 0 and 1), holds the mean over the ranks.
        reduces_late: some have arrived after the unit's backward, so they are reduced at the backward's end.
    """

    slot: GradSlot | None = None
    buffer: ResizableBuffer | None = None
    full: torch.Tensor | None = None
    views: list[torch.Tensor] = field(default_factory=list)
    gaps: list[torch.Tensor] = field(default_factory=list)
    received: bytearray = field(default_factory=bytearray)
    arrived: bytearray = field(default_factory=bytearray)
    reduced: bool = False
    accumulated: bool = False
    averaged: bool = False
    reduces_late: bool = False


@dataclass(slots=True, eq=False)
class UnitState:
    """The tensors of one unit. `grad`, `master` and `optim_states` cover the part of the trainable flat that this rank's
    optimizer owns: the shard from stage 1 on, all of it at stage 0.

    Attributes:
        gathers_in_backward: its backward reads the parameters.
        updated: recorded after the optimizer has written the shards; the next unshard waits for it.
        grads: its unsharded gradients.
        grad: this rank's part of the averaged gradients, 1-D; None until it is first needed.
        forward_count: forwards of the unit in this micro batch.
        guarded: its parameters are guarded (see Note [Guarded parameters] in parameter_guard).
        master: the fp32 masters, or the parameters themselves where the model is fp32; None where they are in a file.
        param_16bit: the 16-bit shard that the update refreshes from `master`; None where no shard is kept.
        offloaded: the host's side of the unit, where its optimizer is offloaded.
        exchanged: what its momentum is exchanged with; None unless the optimizer compresses.
        lamb_workspace: memory for LAMB's tables of tensors and norms.
        experts: the unit of the module's experts, where ranks share them: Note [Experts] in core/layout.
    """

    index: int
    layout: UnitLayout
    module: nn.Module
    trainable: FlatParam | None
    frozen: FlatParam | None
    param_slot: ParamSlot
    gathers_in_backward: bool
    updated: Event
    grads: UnitGradients = field(default_factory=UnitGradients)
    grad: torch.Tensor | None = None
    forward_count: int = 0
    guarded: bool = False
    master: torch.Tensor | None = None
    param_16bit: torch.Tensor | None = None
    offloaded: OffloadedUnit | None = None
    optim_states: dict[Buffer, torch.Tensor] = field(default_factory=dict)
    lamb_workspace: torch.Tensor | None = None
    exchanged: ExchangedMomentum | None = None
    experts: UnitState | None = None

    @property
    def has_pending_update(self) -> bool:
        """Whether its update on the host is not done."""
        return self.offloaded is not None and self.offloaded.update_pending

    @property
    def can_use_slot(self) -> bool:
        """Whether no other unit computes in its slot."""
        return not self.param_slot.in_use or self.param_slot.holder is self

    @property
    def parts(self) -> tuple[UnitState, ...]:
        """This unit and that of its module's experts: what is gathered and resharded around the module's forward."""
        return (self,) if self.experts is None else (self, self.experts)

    @property
    def name(self) -> str:
        """The module's full name, or ``root``."""
        return self.layout.shape.name

    def name_of(self, position: int) -> str:
        """Returns the full name of the trained parameter at `position` of its flat."""
        assert self.trainable is not None
        return self.layout.shape.params[self.trainable.layout.params[position]].name

    @property
    def is_root(self) -> bool:
        """Whether this is the root unit, which is not resharded between forward and backward."""
        return self.layout.shape.kind is UnitKind.ROOT

    @property
    def in_files(self) -> bool:
        """Whether its parameters rest in a file."""
        return self.layout.param_place is Place.NVME

    def placed(self) -> Iterator[PlacedParam]:
        """Yields the parameters, the trained ones first."""
        for flat in self.flats():
            for position, (i, param) in enumerate(zip(flat.layout.params, flat.params, strict=True)):
                yield PlacedParam(param, self.layout.shape.params[i].name, flat, position)

    def owner_of(self, alias: torch.Tensor) -> tuple[int, str]:
        """Returns the address and the name of the parameter whose memory `alias` begins in; (0, "") for none."""
        begins = ((local_of(placed.param).data_ptr(), placed.name) for placed in self.placed())
        return max((one for one in begins if one[0] <= alias.data_ptr()), default=(0, ""))

    def flats(self) -> Iterator[FlatParam]:
        """Returns the trainable and the frozen flat parameter, where they exist."""
        return (flat for _, flat in self.flats_by_buffer())

    def flats_by_buffer(self) -> Iterator[tuple[Buffer, FlatParam]]:
        """Yields the trainable and the frozen flat parameter, where they exist, each with the Buffer name of its shard."""
        if self.trainable is not None:
            yield Buffer.PARAM_SHARD, self.trainable
        if self.frozen is not None:
            yield Buffer.PARAM_FROZEN, self.frozen


@dataclass(slots=True)
class GroupSlice:
    """The part of a unit's share that belongs to one parameter group: 1-D views of equal length, one update each.

    Attributes:
        group: the index of the parameter group.
        master: fp32 values that the update reads and writes.
        param: parameters that the update refreshes from `master`, in the model's dtype; None where there are none.
        part: the slice's place in the unit's share, in elements.
        states: the optimizer's states, in the order of the kernels' arguments.
        tensors: the bounds of the parameters within, for LAMB.
        grad: the gradients; None until the first step.
        coefficients: fp32 [2, tensors] that the optimizer keeps; None where it keeps none.
        missed: applied steps that its parameters have missed while they were frozen; None where this step passes over them.
    """

    unit: UnitState
    group: int
    master: torch.Tensor
    param: torch.Tensor | None
    part: slice
    states: list[torch.Tensor]
    tensors: TensorSegments | None
    grad: torch.Tensor | None = None
    coefficients: torch.Tensor | None = None
    missed: int | None = 0


@dataclass(slots=True, eq=False)
class PinnedBuffers:
    """The host memory through which a unit's gradients and parameters pass: Note [Pinned buffers] in offload.host_optimizer.

    Attributes:
        grad: receives the gradients.
        param: what is copied to the device after the update: 16-bit parameters, or the fp32 masters; None where the updated
            parameters stay on the host.
        refreshed: parameters that the update refreshes from the masters; None where there are none.
        slices: the update's work, by parameter group.
        grad_ready: recorded after the copy of the gradients into `grad`.
        param_sent: recorded after the last copy of `param` to the device.
        sends_master: the masters are fp32 parameters in files, copied to the device chunk by chunk as they are updated.
        skipped: the last update was skipped, because gradients were not finite.
    """

    grad: torch.Tensor
    param: torch.Tensor | None
    refreshed: torch.Tensor | None
    slices: list[GroupSlice]
    grad_ready: Event
    param_sent: Event
    sends_master: bool = False
    skipped: bool = False


@dataclass(slots=True, eq=False)
class OffloadedUnit:
    """The host's side of a unit whose optimizer is offloaded.

    Attributes:
        buffers: one set of pinned buffers; two that take turns where updates are delayed.
        turn: the index of the set that receives this step's gradients.
        has_grads: that set holds gradients of this step.
        update_requested: the work that this step's last gradients allow has been given to the worker.
        update_task: done when the parameters that the next forward needs are on their way to the device.
        unsent_update: the buffers of a delayed update whose parameters have not been copied to the device.
    """

    unit: UnitState
    buffers: tuple[PinnedBuffers, ...]
    turn: int = 0
    has_grads: bool = False
    update_requested: bool = False
    update_task: HostTask | None = None
    unsent_update: PinnedBuffers | None = None

    @property
    def is_swapped(self) -> bool:
        """Whether its update reads or writes files."""
        return self.unit.layout.streamed

    @property
    def update_pending(self) -> bool:
        """Whether updated parameters are to come that :meth:`wait_for_update` has not been called for."""
        return self.update_task is not None

    @property
    def current(self) -> PinnedBuffers:
        """The buffers that receive this step's gradients."""
        return self.buffers[self.turn]

    def wait_for_update(self) -> None:
        """Blocks until the updated parameters are on their way to the device; that copy ends at ``unit.updated``.

        Raises:
            RuntimeError: when the update failed.
        """
        task, self.update_task = self.update_task, None
        if task is not None:
            task.wait()
