"""Sets up the offload of an engine: the host's optimizer with its pinned buffers, and the swap files."""

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
from zeroplan_runtime.kernels import native_backend
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
    """Makes the host update the offloaded units.

    Args:
        optimizer_step: the engine's step, whose offloaded units the host takes over.
        zero: the offload's settings.
        delayed_from: the first step whose update is delayed; 0 for none.

    Returns:
        The host's optimizer; None where no unit is offloaded.

    Raises:
        BadInput: for an optimizer that cannot run on the host.
    """
    model_states = optimizer_step.model_states
    if not any(unit.layout.offloaded for unit in model_states.units if unit.trainable is not None):
        return None
    require_offloadable(optimizer_step.optimizer.kind, zero)
    if native_backend.library() is None:
        logger.warning("libzeroplan_cpu was not built or does not load: updates on the host take ten times as long")
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
    """A function that makes the swap files of a rank's model states; it returns None where the layout has none.

    Args:
        zero: the folders of the files and the options of the I/O engine.
        in_memory: accept an ``nvme_path`` on a file system in host memory.
    """

    def make(model_states: ModelStates) -> NvmeOffload | None:
        layout = model_states.layout
        if said := remark(layout):
            logger.warning(said)
        if not (layout.swapped_tensors or layout.param_buffer):
            return None
        memory = {unit: tensor for (buffer, unit), tensor in model_states.host_tensors.items() if buffer is Buffer.SWAP_BUFFER}
        rank, device = model_states.ranks.world.rank, model_states.arena.device
        return NvmeOffload(layout, zero, memory, rank=rank, device=device, in_memory=in_memory)

    return make


def _with_copies(update: Update) -> Update:
    """Returns `update`, which also refreshes fp32 parameters; the kernels refresh only 16-bit ones."""

    def with_copy(part: GroupSlice, hyper: dict[str, Any], step: int, scalars: torch.Tensor | None) -> None:
        if part.param is None or part.param.dtype is not torch.float32:
            update(part, hyper, step, scalars)
        else:
            update(replace(part, param=None), hyper, step, scalars)
            part.param.copy_(part.master)

    return with_copy


def _pinned_buffers(unit: UnitState, model_states: ModelStates, optimizer_step: OptimizerStep) -> tuple[PinnedBuffers, ...]:
    setup, device = model_states.setup, model_states.arena.device
    assert unit.trainable is not None
    made = []
    buffers = (Buffer.GRAD_SHARD, Buffer.STAGE_D2H) if setup.delayed_update else (Buffer.GRAD_SHARD,)
    for turn, buffer in enumerate(buffers):
        grad = model_states.host_tensors[buffer, unit.name]
        refreshed: torch.Tensor | None
        sent: torch.Tensor | None
        if setup.offloads_params:
            in_memory = unit.layout.param_place is Place.PINNED
            refreshed, sent = unit.trainable.shard if setup.has_masters and in_memory else None, None
        elif not setup.has_masters:
            refreshed, sent = None, unit.master  # None if in files
        elif setup.separate_upload:
            refreshed = sent = model_states.host_tensors[Buffer.STAGE_H2D, unit.name].view(len(buffers), -1)[turn]
        else:
            refreshed = sent = grad.view(DTYPES[setup.param_dtype])
        slices = optimizer_step.group_slices(unit, refreshed, grad)
        sends_master = unit.master is None and not setup.has_masters
        made.append(PinnedBuffers(grad, sent, refreshed, slices, Event(device), Event(device), sends_master))
    return tuple(made)
