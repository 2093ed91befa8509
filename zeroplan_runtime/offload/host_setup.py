"""Makes the host's side of an engine: its units, their exchanges, the thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from zeroplan.core.buffers import Buffer, Place
from zeroplan.ds_config.runtime_offload import Offload
from zeroplan.ds_config.runtime_offload_rules import remark, require_offloadable
from zeroplan_runtime.arena import DTYPES
from zeroplan_runtime.comm import Mark
from zeroplan_runtime.model_states import Store, UnitState
from zeroplan_runtime.offload.host_optimizer import Exchange, HostOptimizer, HostUnit, Update
from zeroplan_runtime.offload.host_worker import Worker, host_threads
from zeroplan_runtime.offload.nvme import Swap
from zeroplan_runtime.optim.step import Segment, Stepper

logger = logging.getLogger("zeroplan_runtime")


def offload_optimizer(stepper: Stepper, settings: Offload) -> HostOptimizer | None:
    """Hands the offloaded units' updates to the host; None where no unit is offloaded.

    Raises:
        BadInput: for an optimizer that cannot be.
    """
    store = stepper.store
    if not any(unit.layout.offloaded for unit in store.units if unit.trainable is not None):
        return None
    require_offloadable(stepper.optimizer.kind)
    for unit in store.units:
        if unit.layout.offloaded and unit.trainable is not None:
            unit.host = HostUnit(unit, _exchanges(unit, store, stepper))
    host = HostOptimizer(
        units=[unit.host for unit in store.units if unit.host is not None],
        update=_with_copies(stepper.update),
        worker=Worker(store.arena.device, host_threads(settings.optimizer.cpuadam_cores_perc)),
        device=store.arena.device,
        direct=not store.layout.sum_slots,
        sum_slot=store.sum_slot,
        delayed_from=settings.delayed_from,
        files=store.swap.update if store.swap is not None else None,
    )
    stepper.offload(host)
    stepper.schedule.host = host
    return host


def swap_files(settings: Offload) -> Callable[[Store], Swap | None]:
    """Makes a store's files, where the layout says that there are any."""

    def make(store: Store) -> Swap | None:
        layout = store.layout
        if said := remark(layout):
            logger.warning(said)
        if not (layout.swap_lanes or layout.param_buffer):
            return None
        rings = {unit: tensor for (buffer, unit), tensor in store.host_tensors.items() if buffer is Buffer.SWAP_BUFFER}
        return Swap(layout, settings, rings, rank=store.ranks.rank, device=store.arena.device)

    return make


def _with_copies(update: Update) -> Update:
    """The update, which refreshes fp32 parameters beside their masters, too; its kernels write 16 bits."""

    def both(segment: Segment, hyper: dict[str, Any], number: int, scalars: torch.Tensor | None) -> None:
        if segment.param is None or segment.param.dtype is not torch.float32:
            update(segment, hyper, number, scalars)
        else:
            update(replace(segment, param=None), hyper, number, scalars)
            segment.param.copy_(segment.master)

    return both


def _exchanges(unit: UnitState, store: Store, stepper: Stepper) -> tuple[Exchange, ...]:
    setup, device = store.setup, store.arena.device
    assert unit.trainable is not None
    made = []
    buffers = (Buffer.GRAD_SHARD, Buffer.STAGE_D2H) if setup.delayed_update else (Buffer.GRAD_SHARD,)
    for turn, buffer in enumerate(buffers):
        grad = store.host_tensors[buffer, unit.name]
        out: torch.Tensor | None
        goes_up: torch.Tensor | None
        if setup.offloads_params:
            in_memory = unit.layout.param_place is Place.PINNED
            out, goes_up = unit.trainable.shard if setup.has_masters and in_memory else None, None
        elif not setup.has_masters:
            out, goes_up = None, unit.master  # None if in files
        elif setup.sends_apart:
            out = goes_up = store.host_tensors[Buffer.STAGE_H2D, unit.name].view(len(buffers), -1)[turn]
        else:
            out = goes_up = grad.view(DTYPES[setup.param_dtype])
        segments = stepper.segments_of(unit, out, grad)
        sends_master = unit.master is None and not setup.has_masters
        made.append(Exchange(grad, goes_up, segments, Mark(device), Mark(device), sends_master))
    return tuple(made)
