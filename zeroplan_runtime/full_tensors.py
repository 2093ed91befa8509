"""The model's parameters and buffers, unsharded and one after another. Every rank must go through all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from zeroplan_runtime.local_tensors import gather_whole, local_of
from zeroplan_runtime.schedule import Schedule


def full_params(schedule: Schedule) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    """Yields each parameter with its full name and the values that this rank has of it when its unit is gathered, which are
    valid until the next is asked for.
    """
    for unit in schedule.model_states.units:
        with schedule.unsharded(unit):
            for flat in unit.flats():
                for i, param in zip(flat.layout.params, flat.params, strict=True):
                    with torch._C.DisableTorchFunctionSubclass():
                        values = local_of(param).detach()
                    yield unit.layout.shape.params[i].name, param, values


def whole_params(schedule: Schedule) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    """As :func:`full_params`, with what tensor-parallel ranks hold put together."""
    for name, param, values in full_params(schedule):
        yield name, param, gather_whole(param, values)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each buffer that a state dict holds, with its full name."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer.detach()


def full_tensors(model: nn.Module, schedule: Schedule) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every parameter, then every persistent buffer, by name and unsharded; see :meth:`Engine.full_tensors`."""
    yield from ((name, values) for name, _, values in whole_params(schedule))
    yield from persistent_buffers(model)


def full_state_dict(model: nn.Module, schedule: Schedule) -> dict[str, torch.Tensor] | None:
    """Returns the unsharded state dict of `model` in host memory, on the first rank (of each pipeline stage); None on the
    others.
    """
    keep = schedule.model_states.ranks.leads_stage
    state, names = {}, {}
    for name, param, values in whole_params(schedule):
        names[id(param)] = name
        if keep:
            state[name] = values.to("cpu", copy=True)
    if not keep:
        return None
    state.update({name: buffer.to("cpu", copy=True) for name, buffer in persistent_buffers(model)})
    for name, param in model.named_parameters(remove_duplicate=False):
        first = names.get(id(param))
        state.setdefault(name, state[first] if first is not None else param.detach().cpu())  # empty ones are in no unit
    return state
