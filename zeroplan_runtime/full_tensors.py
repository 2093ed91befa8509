"""The model's state dict, unsharded: what ``model.state_dict()`` gives in plain torch. Every rank must go through all units.

The names are those that the model has now, also of a layer that was tied, replaced or wrapped since the engine was made: other
parameters stand in for the sharded ones while the model's own ``state_dict()`` runs, so its hooks, its extra states and what a
class of the user's makes of it are in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from zeroplan_runtime.local_tensors import gather_whole, local_of
from zeroplan_runtime.schedule import Schedule

#: Models in which other parameters stand in for those of an engine.
_standing: list[nn.Module] = []


def full_params(schedule: Schedule) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    """Yields each parameter with its full name and the values that this rank has of it when its unit is gathered, which are
    valid until the next is asked for.
    """
    for unit in schedule.model_states.units:
        with schedule.unsharded(unit):
            for placed in unit.placed():
                with torch._C.DisableTorchFunctionSubclass():
                    values = local_of(placed.param).detach()
                yield placed.name, placed.param, values


def whole_params(schedule: Schedule) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    """As :func:`full_params`, with what tensor-parallel ranks hold put together."""
    for name, param, values in full_params(schedule):
        yield name, param, gather_whole(param, values)


def full_tensors(model: nn.Module, schedule: Schedule) -> Iterator[tuple[str, Any]]:
    """Yields every parameter, then every other entry of the state dict, by name and unsharded.

    See :meth:`zeroplan_runtime.engine.Engine.full_tensors`. Where the state dict computes entries from parameters, all of it is
    made first, and comes on the first rank alone.
    """
    entries, names = _entries(model, schedule)
    if any(_is_meta(value) and name not in names for name, value in entries.items()):
        yield from (full_state_dict(model, schedule) or {}).items()
        return
    first = {key: name for name, key in reversed(names.items())}
    for _, param, values in whole_params(schedule):
        if id(param) in first:
            if schedule.setup.shards_params:  # who keeps one reads another's bytes later, if nothing refuses it
                schedule.guard.guard_values(param, values)
            yield first[id(param)], values
    for name, value in entries.items():
        if name not in names:
            yield name, value.detach() if isinstance(value, torch.Tensor) else value


def other_entries(model: nn.Module, schedule: Schedule) -> dict[str, Any]:
    """Returns what the state dict holds beside parameters, buffers and extra states, and what it computes from them."""
    entries, names = _entries(model, schedule)
    known = {buffer.untyped_storage()._cdata for buffer in model.buffers()}

    def is_other(name: str, value: Any) -> bool:
        if name in names or name.endswith(_EXTRA_STATE_KEY_SUFFIX) or _is_meta(value):
            return False
        return not isinstance(value, torch.Tensor) or (value.numel() > 0 and value.untyped_storage()._cdata not in known)

    return {name: value for name, value in entries.items() if is_other(name, value)}


def _entries(model: nn.Module, schedule: Schedule) -> tuple[dict[str, Any], dict[str, int]]:
    """The state dict with tensors that have no memory for the engine's parameters, and the identities of these by name."""
    stands: dict[int, nn.Parameter] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for unit in schedule.model_states.units:
            for param, *_ in unit.placed():
                stands[id(param)] = _stand_in(param, torch.empty(param.shape, dtype=param.dtype, device="meta"))
    places = {stand.untyped_storage()._cdata: key for key, stand in stands.items()}
    with _standing_in(model, stands):
        entries = dict(model.state_dict())
    names = {
        name: places[value.untyped_storage()._cdata]
        for name, value in entries.items()
        if _is_meta(value) and value.untyped_storage()._cdata in places
    }
    return entries, names


def full_state_dict(model: nn.Module, schedule: Schedule) -> dict[str, Any] | None:
    """Returns the unsharded state dict of `model` in host memory, on the first rank (of each pipeline stage); None on the
    others.

    Raises:
        BadInput: on every rank, for an entry that shares memory with a parameter of a unit that is not gathered.
    """
    for value in other_entries(model, schedule).values():
        if isinstance(value, torch.Tensor):
            value.detach().reshape(-1)[:0].clone()  # a read, as the first rank's below, which must not fail alone
    keep = schedule.model_states.ranks.leads_stage
    stands: dict[int, nn.Parameter] = {}
    for _, param, values in whole_params(schedule):
        if keep:
            stands[id(param)] = _stand_in(param, values.to("cpu", copy=True))
    if not keep:
        return None
    ours = {stand.untyped_storage().data_ptr() for stand in stands.values()}
    with _standing_in(model, stands):
        state = model.state_dict()
    return {name: _on_host(value, ours) for name, value in state.items()}


def stands_in(model: nn.Module) -> bool:
    """Returns whether other parameters stand in `model` for those of its engine."""
    return any(one is model for one in _standing)


@contextmanager
def _standing_in(model: nn.Module, stands: Mapping[int, nn.Parameter]) -> Iterator[None]:
    """Puts `stands`, by the identity of a parameter, in the places of the parameters."""
    kept = [
        (module._parameters, name, param)
        for module in model.modules()
        for name, param in module._parameters.items()
        if param is not None and id(param) in stands
    ]
    _standing.append(model)
    try:
        for where, name, param in kept:
            where[name] = stands[id(param)]
        yield
    finally:
        for where, name, param in kept:
            where[name] = param
        _standing.remove(model)


def _stand_in(param: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    made = nn.Parameter(values, requires_grad=False)
    vars(made).update(vars(param))  # such as a quantised weight's scales
    return made


def _on_host(value: Any, ours: set[int]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return value if value.untyped_storage().data_ptr() in ours else value.to("cpu", copy=True)


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta
