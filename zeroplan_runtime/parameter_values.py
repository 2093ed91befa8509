"""One parameter's value between the calls of a training: read whole, and written to every place that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan_runtime.engine_parts import EngineParts
from zeroplan_runtime.parameter_writes import rounded_weights
from zeroplan_runtime.unit_state import FlatParam, UnitState


def place_of(engine: EngineParts, param: nn.Parameter) -> tuple[UnitState, FlatParam, int]:
    """Returns the unit and flat of `param`, trained or frozen, and its position there.

    Raises:
        BadInput: when the engine does not have it.
    """
    for unit in engine.model_states.units:
        for flat in unit.flats():
            for position, own in enumerate(flat.params):
                if own is param:
                    return unit, flat, position
    raise BadInput("this parameter is not the engine's", where="param", remedy="give one of engine.module.parameters()")


@contextmanager
def whole_value(engine: EngineParts, param: nn.Parameter) -> Iterator[torch.Tensor]:
    """A context that gives the values of `param` as forwards use them. Every rank must enter it."""
    unit, flat, position = place_of(engine, param)
    with engine.schedule.unsharded(unit):
        yield flat.views(flat.full)[position]


def require_writable(engine: EngineParts, param: nn.Parameter) -> None:
    """Refuses writes to weights that are rounded from their masters.

    Raises:
        BadInput: where the config rounds weights.
    """
    if engine.model_states.quantiser is not None:
        unit, flat, position = place_of(engine, param)
        raise rounded_weights(unit.layout.shape.params[flat.layout.params[position]].name)


@torch.no_grad()
def write_value(engine: EngineParts, param: nn.Parameter, value: torch.Tensor) -> None:
    """Writes `value`, the same on every rank, to the master, the shard and the unsharded memory of `param`.

    Raises:
        BadInput: when `value` has another number of elements, or where updates are delayed.
    """
    unit, flat, position = place_of(engine, param)
    states, layout = engine.model_states, flat.layout
    if value.numel() != layout.numels[position]:
        raise BadInput(f"{value.numel()} values for a parameter of {layout.numels[position]}", where="value")
    require_writable(engine, param)
    if states.setup.delayed_update:
        raise BadInput("a parameter cannot be written while updates are delayed", where="zeroplan.delayed_update")
    engine.drain()
    if unit.in_files:
        buffer = Buffer.PARAM_SHARD if flat is unit.trainable else Buffer.PARAM_FROZEN
        shard = states.param_swapper.read(unit.name, buffer, 0, layout.shard)
        states.fill_shard(shard, layout, position, value)
        states.param_swapper.write(unit.name, buffer, shard)
    elif flat.shard.untyped_storage().data_ptr() != flat.full.untyped_storage().data_ptr():
        _fill(engine, flat.shard, flat, position, value)
    if flat is unit.trainable:
        if unit.master is not None and unit.master is not flat.shard:
            states.fill_shard(unit.master, layout, position, value)
        elif unit.master is None:
            swapper = states.optimizer_swapper
            share = swapper.read(unit.name, Buffer.PARAM_MASTER, 0, states.layout.share(unit.layout))
            states.fill_shard(share, layout, position, value)
            swapper.write(unit.name, Buffer.PARAM_MASTER, share)
    if unit.param_slot.holder is unit:
        unit.param_slot.ready.wait(engine.schedule.compute_stream)
        view = flat.views(flat.full)[position]
        view.copy_(value.reshape(view.shape))
        unit.param_slot.last_use.record(engine.schedule.compute_stream)
    unit.updated.record(engine.schedule.compute_stream)
    engine.writes.stepped()


def _fill(engine: EngineParts, shard: torch.Tensor, flat: FlatParam, position: int, value: torch.Tensor) -> None:
    """Copies this rank's part of `value` to its shard, of a trained or a frozen flat."""
    rank = engine.model_states.comm_of(flat.layout).rank
    start, end = flat.layout.overlap(position, rank)
    first = flat.layout.offsets[position] - rank * flat.layout.shard
    if start < end:
        shard[first + start : first + end].copy_(value.reshape(-1)[start:end])
