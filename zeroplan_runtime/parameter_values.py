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
from zeroplan_runtime.unit_state import PlacedParam, UnitState


def place_of(engine: EngineParts, param: nn.Parameter) -> tuple[UnitState, PlacedParam]:
    """Returns the unit of `param`, trained or frozen, and its place there.

    Raises:
        BadInput: when the engine does not have it.
    """
    for unit in engine.model_states.units:
        for placed in unit.placed():
            if placed.param is param:
                return unit, placed
    raise BadInput("this parameter is not the engine's", where="param", remedy="give one of engine.module.parameters()")


@contextmanager
def whole_value(engine: EngineParts, param: nn.Parameter) -> Iterator[torch.Tensor]:
    """A context that gives the values of `param` as forwards use them. Every rank must enter it."""
    unit, (_, _, flat, position) = place_of(engine, param)
    with engine.schedule.unsharded(unit):
        yield flat.views(flat.full)[position]


def require_writable(engine: EngineParts, param: nn.Parameter) -> None:
    """Refuses writes to weights that are rounded from their masters.

    Raises:
        BadInput: where the config rounds weights.
    """
    if engine.model_states.quantiser is not None:
        raise rounded_weights(place_of(engine, param)[1].name)


@torch.no_grad()
def write_value(engine: EngineParts, param: nn.Parameter, value: torch.Tensor) -> None:
    """Writes `value`, the same on every rank, to the master, the shard and the unsharded memory of `param`.

    Raises:
        BadInput: when `value` has another number of elements, or where updates are delayed.
    """
    unit, (_, _, flat, position) = place_of(engine, param)
    states, layout = engine.model_states, flat.layout
    if value.numel() != layout.numels[position]:
        raise BadInput(f"{value.numel()} values for a parameter of {layout.numels[position]}", where="value")
    require_writable(engine, param)
    if states.setup.delayed_update:
        raise BadInput("a parameter cannot be written while updates are delayed", where="zeroplan.delayed_update")
    engine.drain()
    if unit.in_files:
        buffer = Buffer.PARAM_SHARD if flat is unit.trainable else Buffer.PARAM_FROZEN
        with states.share_in_file(unit, buffer) as shard:
            states.fill_shard(shard, layout, position, value)
    elif flat.shard.untyped_storage().data_ptr() != flat.full.untyped_storage().data_ptr():
        states.fill_shard(flat.shard, layout, position, value)
    if flat is unit.trainable:
        if unit.master is not None and unit.master is not flat.shard:
            states.fill_shard(unit.master, layout, position, value)
        elif unit.master is None:
            with states.share_in_file(unit, Buffer.PARAM_MASTER) as share:
                states.fill_shard(share, layout, position, value)
    if unit.param_slot.holder is unit:
        unit.param_slot.ready.wait(engine.schedule.compute_stream)
        view = flat.views(flat.full)[position]
        view.copy_(value.reshape(view.shape))
        unit.param_slot.last_use.record(engine.schedule.compute_stream)
    unit.updated.record(engine.schedule.compute_stream)
    engine.writes.stepped()
