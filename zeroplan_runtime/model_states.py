"""The model states of one rank: every unit's parameters, gradients and optimizer states, allocated by the Arena.

Note [Addresses]
    A parameter's ``data`` is set once, to a view of permanent memory or, at stage 3, of its unit's slot, and never moves.
    What autograd saved in the forward (the weight, or a transposed view of it) is therefore valid in the backward as soon as
    the unit is unsharded into the same slot again: no saved tensor needs a hook and no storage is resized. The price is that
    the memory of a parameter whose unit is sharded holds another unit's bytes. :mod:`zeroplan_runtime.parameter_guard` keeps
    Python code from them; what autograd's own C++ code reads, :mod:`zeroplan_runtime.first_batches` checks.

Note [Places]
    Where a buffer lies (device, host or file) is a column of the layout's rows, and the Arena follows it. A unit's gradients
    go to another place on the reduce stream, in :meth:`zeroplan_runtime.gradient_reduction.GradientReduction.reduce`;
    :class:`zeroplan_runtime.offload.host_optimizer.HostOptimizer` updates its masters and states where they are. Parameters
    that rest on the host or in files come to the device in :meth:`zeroplan_runtime.schedule.Schedule.unshard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from zeroplan.core.arena.layout import STEP_SCALARS, ArenaLayout, Flat, UnitKind, plan_layout
from zeroplan.core.arena.layout_setup import RuntimeSetup as Setup
from zeroplan.core.arena.owned_buffers import OwnedBuffer, runtime_buffers
from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import OPTIMIZERS
from zeroplan_runtime.arena import Allocator, Arena
from zeroplan_runtime.comm import Communicator
from zeroplan_runtime.copy_engines import SymmetricMemory
from zeroplan_runtime.kernels import map_words
from zeroplan_runtime.local_tensors import local_of, put_values
from zeroplan_runtime.mesh import MeshRanks
from zeroplan_runtime.offload.nvme import NvmeOffload
from zeroplan_runtime.offload.optimizer_swapper import OptimizerSwapper
from zeroplan_runtime.offload.param_swapper import ParamSwapper
from zeroplan_runtime.streams import Event, Stream
from zeroplan_runtime.techniques.float8_gathers import Float8Gathers
from zeroplan_runtime.techniques.quantize_training import WeightQuantiser
from zeroplan_runtime.unit_state import AccumSlot, ExchangedMomentum, FlatParam, GradSlot, ParamSlot, UnitState
from zeroplan_runtime.units import Unit, reads_params_in_backward

_Carved = dict[tuple[Buffer, str], torch.Tensor]


class PendingSave(Protocol):
    """A checkpoint on its way to the disk."""

    def protect(self, stream: Stream) -> None:
        """Makes `stream` wait until what the checkpoint holds may change."""

    def wait(self, engine: Any) -> None:
        """Blocks until the checkpoint is complete on every rank."""


class ModelStates:
    """The units of one model on one rank. The constructor moves the parameters into the Arena, one after another.

    Args:
        units: the model's units, the root first.
        setup: stage, ranks, dtypes, optimizer and offload.
        ranks: the ranks of the run; every rank must make its ModelStates.
        arena: the allocator.
        make_nvme: makes the swap files once the layout is known; None where there are none.

    Attributes:
        units: all units, a block's experts behind it.
        leaders: those that the order of a step is made of: all but the experts, which follow their block.
        comm: those of them that hold the same part of the model, over which it is sharded.
        scalars: fp32, the step's scalars (see ``kernels.SQUARES`` and the following names).
        squares: fp32 [units], the sum of squares of each unit's gradients.
        norm_workspace: scratch of the norm's kernel.
        update_workspaces: where an update without a kernel works, on the ``device`` and, for offloaded units, on the ``host``.
        maps: the tables on the device by which states are quantised in blocks; None where they are not, or all offloaded.
        quantiser: rounds the weights where they are unsharded; None where the setup asks for none.
        float8_gathers: gathers blocks in 8 bits; None where the setup asks for none.
        snapshot: pinned memory to which a checkpoint is copied before it is written; None where it is written at once.
        pending_save: the checkpoint that is being written from it; None for none.
        coefficients: what the optimizer keeps of each tensor, all in one; None where it keeps nothing.
        messages: what is sent and what is received of a unit's momentum, fp32 words; none unless the optimizer compresses.
        staging: memory in which parts of large gradients are cast before their reduction.
        host_tensors: the pinned buffers of offload, by Buffer and unit.

    Raises:
        BadInput: for a parameter without values or of an integer dtype, and when memory or disk space cannot be had.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        setup: Setup,
        ranks: MeshRanks,
        arena: Arena,
        make_nvme: Callable[[ModelStates], NvmeOffload | None] | None = None,
    ) -> None:
        self.setup, self.ranks, self.comm, self.arena = setup, ranks, ranks.shard, arena
        self.layout: ArenaLayout = plan_layout([unit.shape for unit in units], setup)
        rows = runtime_buffers(self.layout)
        self._symmetric = self._allocators()  # kept: the memory lives as long
        carved, resizable = arena.allocate(rows, self._symmetric), arena.resizable(rows)
        self.param_slots = {n: self._slot(n, carved[Buffer.PARAM_FULL, n]) for n in self.layout.param_slots}
        self.grad_slots = {n: GradSlot(resizable[Buffer.GRAD_FULL, n], Event(arena.device)) for n in self.layout.grad_slots}
        self.accum_slots: dict[str, AccumSlot] = {}
        self.host_tensors = {key: tensor for key, tensor in carved.items() if key[0] in _PINNED_BUFFERS}
        self.staging = resizable.get((Buffer.COMM_REDUCE_SCATTER, "staging"))
        self.update_workspaces = {where: carved[buffer, where] for buffer, where in carved if buffer is Buffer.OPTIM_TEMP}
        self.quantiser: WeightQuantiser | None = None
        self.maps = carved.get((Buffer.OPTIM_SCALE, "maps"))
        if self.maps is not None:
            kernel = OPTIMIZERS[setup.optimizer].runtime
            assert kernel is not None
            self.maps = self.maps.view(torch.int32).copy_(map_words(kernel.bits, kernel.block, torch.device("cpu")))
        self.coefficients = carved.get((Buffer.OPTIM_TRUST, "coefficients"))
        self.messages = [carved[key] for key in carved if key[0] is Buffer.COMM_ALL_REDUCE]
        self.norm_workspace = carved[Buffer.OPTIM_NORM, "workspace"]
        norms = carved[Buffer.OPTIM_NORM, "step"]
        self.scalars, self.squares = norms[:STEP_SCALARS], norms[STEP_SCALARS:]
        self.units = [self._unit(i, unit, carved) for i, unit in enumerate(units)]
        if setup.quantize_training is not None:
            workspace = carved.get((Buffer.PARAM_TEMP, "quantize_training"))
            if workspace is not None:
                self.quantiser = WeightQuantiser(setup.quantize_training, self.units, workspace)
        self.snapshot = carved.get((Buffer.HOST_CHECKPOINT, "snapshot"))
        self.pending_save: PendingSave | None = None
        self.float8_gathers: Float8Gathers | None = None
        if (messages := carved.get((Buffer.COMM_ALL_GATHER, "float8"))) is not None:
            self.float8_gathers = Float8Gathers(self.units, messages, self.comm)
        for block, experts in pairwise(self.units):
            if experts.layout.shape.kind is UnitKind.EXPERTS:
                block.experts = experts
        self.leaders = [unit for unit in self.units if unit.layout.shape.kind is not UnitKind.EXPERTS]
        for state in self.units:
            if state.layout.grad_slot is not None:
                state.grads.slot = self.grad_slots[state.layout.grad_slot]
            if not state.layout.offloaded:
                state.grads.buffer = resizable.get((setup.kept_grad, state.name))
        self.nvme = make_nvme(self) if make_nvme is not None else None
        for state in self.units:
            self._init_params(state)

    @property
    def param_swapper(self) -> ParamSwapper:
        """Reader and writer of the parameters in files; only where there are any."""
        assert self.nvme is not None
        assert self.nvme.param_swapper is not None
        return self.nvme.param_swapper

    @property
    def optimizer_swapper(self) -> OptimizerSwapper:
        """Updater of the optimizer states in files; only where there are any."""
        assert self.nvme is not None
        assert self.nvme.optimizer_swapper is not None
        return self.nvme.optimizer_swapper

    def swapper_of(self, buffer: Buffer) -> ParamSwapper | OptimizerSwapper:
        """Returns what reads and writes `buffer` where it is in files."""
        return self.param_swapper if buffer in (Buffer.PARAM_SHARD, Buffer.PARAM_FROZEN) else self.optimizer_swapper

    @contextmanager
    def share_in_file(self, unit: UnitState, buffer: Buffer) -> Iterator[torch.Tensor]:
        """A context that gives this rank's share of `buffer`, read from its file, and writes it back."""
        swapper, flat = self.swapper_of(buffer), unit.frozen if buffer is Buffer.PARAM_FROZEN else unit.trainable
        assert flat is not None
        begin, end = self.owned_range(flat.layout)
        share = swapper.read(unit.name, buffer, 0, end - begin)
        yield share
        swapper.write(unit.name, buffer, share)

    def _slot(self, name: str, tensor: torch.Tensor) -> ParamSlot:
        return ParamSlot(name, tensor, Event(self.arena.device), Event(self.arena.device))

    def _unit(self, index: int, unit: Unit, carved: _Carved) -> UnitState:
        layout, setup = self.layout.units[index], self.setup
        name = layout.shape.name
        begin = 0
        flats: list[FlatParam | None] = []
        for flat, own in ((layout.trainable, _own_buffer(setup)), (layout.frozen, Buffer.PARAM_FROZEN)):
            if flat is None:
                flats.append(None)
                continue
            if layout.param_slot is not None:
                full = self.param_slots[layout.param_slot].tensor[begin : begin + flat.full]
                shard = carved[own, name] if (own, name) in carved else self.local_shard(full, flat)
                begin += flat.full
            else:
                full = carved[own, name]
                shard = self.local_shard(full, flat) if setup.shards_states else full
            flats.append(FlatParam(flat, [unit.params[i] for i in flat.params], full, shard, self.local_shard(full, flat)))
        trainable, frozen = flats
        if layout.param_slot is not None:
            slot = self.param_slots[layout.param_slot]
        else:
            slot = self._slot(name, next(flat.full for flat in flats if flat is not None))
        gathers, updated = reads_params_in_backward(unit.module), Event(self.arena.device)
        state = UnitState(index, layout, unit.module, trainable, frozen, slot, gathers, updated)
        if trainable is not None:
            self._add_training(state, trainable, carved)
        return state

    def _add_training(self, state: UnitState, trainable: FlatParam, carved: _Carved) -> None:
        name = state.name
        state.grads.received, state.grads.arrived = (bytearray(len(trainable.layout.params)) for _ in range(2))
        in_files = state.layout.place is Place.NVME and self.setup.separate_masters
        state.master = None if in_files else carved.get((Buffer.PARAM_MASTER, name), trainable.shard)
        beside = self.setup.has_masters and not self.setup.casts_masters and not state.in_files
        state.param_16bit = trainable.shard if beside else None
        state.lamb_workspace = carved.get((Buffer.OPTIM_TRUST, name))
        state.optim_states = {
            buffer: tensor for (buffer, unit), tensor in carved.items() if unit == name and buffer in self.setup.states
        }
        if self.setup.compresses:
            whole = state.optim_states[Buffer.OPTIM_EXP_AVG]
            worker, server = (carved[buffer, name] for buffer in (Buffer.OPTIM_ERROR_FEEDBACK, Buffer.OPTIM_SERVER_ERROR))
            first = self.comm.rank * trainable.layout.shard
            gaps = trainable.layout.gaps()
            padding = [tensor[begin:end] for tensor in (whole, worker) for begin, end in gaps]
            padding += [server[max(begin - first, 0) : end - first] for begin, end in gaps if end > first]
            anchor = carved.get((Buffer.OPTIM_ANCHOR, name))
            state.exchanged = ExchangedMomentum(whole, worker, server, [part for part in padding if part.numel()], anchor)
            if self.setup.shards_states:
                state.optim_states[Buffer.OPTIM_EXP_AVG] = self.local_shard(whole, trainable.layout)

    def state_slice(self, unit: UnitState, buffer: Buffer, part: slice) -> torch.Tensor:
        """Returns the part of a state in memory for elements `part` of the unit's share: whole blocks where it is quantised."""
        if self.setup.block == 1:
            return unit.optim_states[buffer][part]
        begin, end = (self.setup.state_elements(buffer, at)[0] for at in (part.start, part.stop))
        return unit.optim_states[buffer][begin:end]

    @property
    def blocks(self) -> list[nn.Module]:
        """The modules that are repeated, each a unit."""
        return [unit.module for unit in self.units if unit.layout.shape.kind is UnitKind.BLOCK]

    def reserve_gradients(self) -> None:
        """Makes the allocator cache a segment for the gradients that are kept until the step, but for those that are there."""
        kept = [unit.grads.buffer for unit in self.units if unit.grads.buffer is not None]
        self.arena.reserve_segment(buffer for buffer in kept if not buffer.is_allocated)

    def release_cache(self) -> None:
        """Gives back what the allocator caches, and has it cache the gradients' segment anew. The host waits for the device."""
        self.arena.empty_cache()
        self.reserve_gradients()

    def alloc_grad(self, unit: UnitState) -> None:
        """Allocates the gradients of `unit` that live until the step, unless they are there or on the host."""
        buffer, trainable = unit.grads.buffer, unit.trainable
        if buffer is None:
            return
        buffer.alloc()
        if unit.grad is not None:
            return
        assert trainable is not None
        if unit.grads.slot is not None:
            unit.grad = buffer.tensor
        else:
            self._view_gradients(unit, trainable, buffer.tensor)
            unit.grad = self.local_shard(buffer.tensor, trainable.layout) if self.setup.shards_states else buffer.tensor

    def alloc_grad_slot(self, unit: UnitState) -> None:
        """Allocates `unit`'s slot of unsharded gradients, unless it is allocated."""
        slot, trainable = unit.grads.slot, unit.trainable
        assert slot is not None
        assert trainable is not None
        slot.buffer.alloc()
        if unit.grads.full is None:
            self._view_gradients(unit, trainable, slot.buffer.tensor[: trainable.layout.full])

    def accum_slot(self, unit: UnitState) -> AccumSlot:
        """The slot in which `unit`'s offloaded gradients are accumulated, allocated.

        A unit that is called several times in a micro batch needs one even where the layout plans none.
        """
        name = unit.layout.grad_slot
        assert name is not None
        slot = self.accum_slots.get(name)
        if slot is None:
            size, dtype = self.layout.sum_slot_sizes[name], self.setup.accum_dtype
            row = OwnedBuffer(Buffer.STAGE_D2H, name, size, dtype, phases=(Phase.BACKWARD,))
            device = self.arena.device
            slot = self.accum_slots[name] = AccumSlot(
                self.arena.resizable([row])[row.buffer, name], Event(device), Event(device)
            )
        if not slot.buffer.is_allocated:
            slot.buffer.alloc()
            slot.last_use.record(Stream.current(self.arena.device))  # what had the memory before may still be at work there
        return slot

    def _view_gradients(self, unit: UnitState, trainable: FlatParam, full: torch.Tensor) -> None:
        """Makes the views of `full` once; they stay valid when the memory is freed and allocated again."""
        unit.grads.full = full
        unit.grads.views = trainable.views(full)
        unit.grads.gaps = [full[a:b] for a, b in trainable.layout.gaps()]

    def _allocators(self) -> dict[Buffer, Allocator]:
        """What allocates the buffers into which units are gathered, where torch does not."""
        if not self.setup.gathers_by_copy_engines or self.arena.device.type != "cuda":
            return {}
        allocator = SymmetricMemory(self.comm.group)
        return {Buffer.PARAM_FULL: allocator, Buffer.COMM_ALL_GATHER: allocator}

    def free(self, kept: Mapping[int, torch.Tensor]) -> None:
        """Drops every tensor, so that the memory is freed even while something refers to the units.

        The gradients must have been freed before. Parameters are empty then, but for those whose values `kept` has by their
        identity.
        """
        nothing = torch.empty(0, device=self.arena.device)
        for unit in self.units:
            for param, *_ in unit.placed():
                value = kept.get(id(param))
                put_values(param, torch.empty(0, dtype=param.dtype, device=self.arena.device) if value is None else value)
            unit.grads.full = unit.grad = unit.master = unit.param_16bit = unit.lamb_workspace = unit.exchanged = None
            unit.grads.views, unit.grads.gaps, unit.optim_states, unit.offloaded = [], [], {}, None
            unit.param_slot.tensor = nothing
            for flat in unit.flats():
                flat.full = flat.shard = flat.part = nothing
        for slot in self.param_slots.values():
            slot.tensor = nothing
        self.scalars = self.squares = self.norm_workspace = nothing
        self.maps = self.quantiser = self.coefficients = None
        self.update_workspaces.clear()
        self.messages.clear()
        if self.nvme is not None:
            self.nvme.close()
        self.host_tensors.clear()

    def forget_errors(self) -> None:
        """Lets the errors of compressed momentum begin at zero again."""
        for unit in self.units:
            if unit.exchanged is not None:
                unit.exchanged.forget_errors()

    def comm_of(self, flat: Flat) -> Communicator:
        """Returns the ranks over which `flat` is sharded: those that hold the same part of the model, or the same experts."""
        return self.comm if flat.ranks == self.comm.world_size else self.ranks.experts

    def grad_scale(self, unit: UnitState) -> float:
        """Returns the factor on each gradient of `unit`: see Note [Mesh] in mesh."""
        return self.setup.across / self.setup.ep if unit.layout.shape.kind is UnitKind.EXPERTS else 1.0

    def part_of(self, unit: UnitState) -> str:
        """Returns the name of the part that this rank's shard group has of the parameters of `unit`; see :class:`MeshRanks`."""
        return self.ranks.expert_part if unit.layout.shape.kind is UnitKind.EXPERTS else self.ranks.part

    def local_shard(self, full: torch.Tensor, flat: Flat) -> torch.Tensor:
        """Returns this rank's shard of `full`, an unsharded flat."""
        rank = self.comm_of(flat).rank
        return full[rank * flat.shard : (rank + 1) * flat.shard]

    def owned_range(self, flat: Flat) -> tuple[int, int]:
        """Returns ``(start, end)``, in elements, of the part of a trainable flat that this rank's optimizer owns."""
        if not self.setup.shards_states:
            return 0, flat.full
        rank = self.comm_of(flat).rank
        return rank * flat.shard, (rank + 1) * flat.shard

    @torch.no_grad()
    def _init_params(self, unit: UnitState) -> None:
        """Broadcasts the parameters' values from the first rank and makes the parameters views of the unit's flats."""
        master = unit.master
        if master is None and unit.trainable is not None:  # on its way to a file
            master = torch.zeros(self.layout.share(unit.layout), device="cpu")
        for buffer, flat in unit.flats_by_buffer():
            flat.full.zero_()
            for i, (param, view) in enumerate(zip(flat.params, flat.views(flat.full), strict=True)):
                name = unit.layout.shape.params[flat.layout.params[i]].name
                if param.is_meta:
                    raise BadInput(f"parameter {name!r} has no values (meta device)", remedy="initialise the model first")
                if not param.is_floating_point():
                    raise BadInput(
                        f"parameter {name!r} holds {str(param.dtype).removeprefix('torch.')}, which is not trained or divided",
                        where="model",
                        remedy="keep quantised weights as buffers, or train them under FSDP2",
                    )
                value = local_of(param).detach().to(self.arena.device)
                comm = self.comm_of(flat.layout)
                if comm.world_size > 1:
                    value = value.contiguous()
                    comm.broadcast(value)
                view.copy_(value)
                if flat is unit.trainable and master is not None and master is not flat.shard:
                    self.fill_shard(master, flat.layout, i, value)
                put_values(param, view)
                param.grad = None
            if unit.in_files:
                self.param_swapper.write(unit.name, buffer, flat.shard)
            elif flat.shard.untyped_storage().data_ptr() != flat.full.untyped_storage().data_ptr():
                flat.shard.copy_(self.local_shard(flat.full, flat.layout))
        if not self.setup.shards_params:
            unit.param_slot.holder, unit.param_slot.is_current = unit, True
        if unit.layout.place is Place.NVME and unit.trainable is not None:
            for state in self.optimizer_swapper.state_buffers:
                self.optimizer_swapper.write(unit.name, state, master if state is Buffer.PARAM_MASTER else None)

    def fill_shard(
        self, master: torch.Tensor, flat: Flat, position: int, value: torch.Tensor, *, changed: bool = False
    ) -> None:
        """Copies this rank's part of a parameter's `value` to where it lies in `master`, a shard of `flat` in any dtype.

        Masters begin at the model's original precision, not at that of its 16-bit copy.

        Args:
            master: the shard.
            flat: its layout.
            position: the parameter's index in the layout.
            value: the whole parameter's values.
            changed: copy those elements only that differ from the master's in the precision of `value`; the others keep theirs.
        """
        start, end = self.owned_range(flat)
        offset, numel = flat.offsets[position], flat.numels[position]
        first, last = max(start, offset), min(end, offset + numel)
        values = value.reshape(-1)
        # A copy to the host that also casts allocates a second host tensor of the same size; so copy in parts.
        for begin in range(first, last, _COPY_NUMEL):
            stop = min(begin + _COPY_NUMEL, last)
            target, part = master[begin - start : stop - start], values[begin - offset : stop - offset]
            if changed:
                part = torch.where(target.to(part.dtype) == part, target, part.to(target.dtype))
            target.copy_(part)


#: Elements of a master that are copied at once.
_COPY_NUMEL = 1 << 22
#: Pinned memory that offload copies gradients to and parameters from.
_PINNED_BUFFERS = (Buffer.GRAD_SHARD, Buffer.STAGE_D2H, Buffer.STAGE_H2D, Buffer.SWAP_BUFFER)


def _own_buffer(setup: Setup) -> Buffer:
    return Buffer.PARAM_SHARD if setup.stage >= 3 else Buffer.PARAM_FULL
