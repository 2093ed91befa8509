"""Makes the host's side of an engine: its units, their exchanges, the thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.rules_runtime import remark, require_offloadable
from zeroplan_runtime.arena import DTYPES
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.offload.host_optimizer import HostOptimizer
from zeroplan_runtime.offload.host_worker import Worker, host_threads
from zeroplan_runtime.offload.nvme import NvmeOffload
from zeroplan_runtime.offload.update_request import Update
from zeroplan_runtime.optim.step import OptimizerStep
from zeroplan_runtime.streams import Event
from zeroplan_runtime.unit_state import GroupSlice, OffloadedUnit, PinnedBuffers, UnitState

logger = logging.getLogger("zeroplan_runtime")


def offload_optimizer(optimizer_step: OptimizerStep, zero: ZeroConfig, *, delayed_from: int) -> HostOptimizer | None:
    """Hands the offloaded units' updates to the host; None where no unit is offloaded.

    `delayed_from` is the first step whose update is delayed (0: none).

    Raises:
        BadInput: for an optimizer that cannot be.
    """
    model_states = optimizer_step.model_states
    if not any(unit.layout.offloaded for unit in model_states.units if unit.trainable is not None):
        return None
    require_offloadable(optimizer_step.optimizer.kind)
    for unit in model_states.units:
        if unit.layout.offloaded and unit.trainable is not None:
            unit.offloaded = OffloadedUnit(unit, _pinned_buffers(unit, model_states, optimizer_step))
    host = HostOptimizer(
        units=[unit.offloaded for unit in model_states.units if unit.offloaded is not None],
        update=_with_copies(optimizer_step.update),
        worker=Worker(model_states.arena.device, host_threads(zero.offload_optimizer.cpuadam_cores_perc)),
        device=model_states.arena.device,
        sends_grads_directly=not model_states.layout.sum_slots,
        accum_slot=model_states.accum_slot,
        delayed_from=delayed_from,
        swapper=model_states.nvme.optimizer_swapper if model_states.nvme is not None else None,
    )
    optimizer_step.offload(host)
    optimizer_step.schedule.grads.host = host
    return host


def make_nvme_offload(zero: ZeroConfig, *, in_memory: bool) -> Callable[[ModelStates], NvmeOffload | None]:
    """Makes a store's files, where the layout says that there are any.

    `in_memory` accepts an ``nvme_path`` on a file system in host memory.
    """

    def make(model_states: ModelStates) -> NvmeOffload | None:
        layout = model_states.layout
        if said := remark(layout):
            logger.warning(said)
        if not (layout.swap_lanes or layout.param_buffer):
            return None
        rings = {unit: tensor for (buffer, unit), tensor in model_states.host_tensors.items() if buffer is Buffer.SWAP_BUFFER}
        rank, device = model_states.comm.rank, model_states.arena.device
        return NvmeOffload(layout, zero, rings, rank=rank, device=device, in_memory=in_memory)

    return make


def _with_copies(update: Update) -> Update:
    """The update, which refreshes fp32 parameters beside their masters, too; its kernels write 16 bits."""

    def both(segment: GroupSlice, hyper: dict[str, Any], number: int, scalars: torch.Tensor | None) -> None:
        if segment.param is None or segment.param.dtype is not torch.float32:
            update(segment, hyper, number, scalars)
        else:
            update(replace(segment, param=None), hyper, number, scalars)
            segment.param.copy_(segment.master)

    return both


def _pinned_buffers(unit: UnitState, model_states: ModelStates, optimizer_step: OptimizerStep) -> tuple[PinnedBuffers, ...]:
    setup, device = model_states.setup, model_states.arena.device
    assert unit.trainable is not None
    made = []
    buffers = (Buffer.GRAD_SHARD, Buffer.STAGE_D2H) if setup.delayed_update else (Buffer.GRAD_SHARD,)
    for turn, buffer in enumerate(buffers):
        grad = model_states.host_tensors[buffer, unit.name]
        out: torch.Tensor | None
        goes_up: torch.Tensor | None
        if setup.offloads_params:
            in_memory = unit.layout.param_place is Place.PINNED
            out, goes_up = unit.trainable.shard if setup.has_masters and in_memory else None, None
        elif not setup.has_masters:
            out, goes_up = None, unit.master  # None if in files
        elif setup.sends_apart:
            out = goes_up = model_states.host_tensors[Buffer.STAGE_H2D, unit.name].view(len(buffers), -1)[turn]
        else:
            out = goes_up = grad.view(DTYPES[setup.param_dtype])
        segments = optimizer_step.group_slices(unit, out, grad)
        sends_master = unit.master is None and not setup.has_masters
        made.append(PinnedBuffers(grad, goes_up, segments, Event(device), Event(device), sends_master))
    return tuple(made)
