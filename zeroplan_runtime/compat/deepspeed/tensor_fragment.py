"""``deepspeed.utils.safe_get_full_*`` and their siblings. See :mod:`zeroplan_runtime.parameter_states` for what they give."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from zeroplan_runtime.compat.deepspeed.owners import owner, states_of
from zeroplan_runtime.compat.deepspeed.refusals import Refusal, refusing
from zeroplan_runtime.parameter_states import MASTER, ParameterStates


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The fp32 master of `param`, whole, on every rank; None for a parameter that is not trained."""
    return safe_get_full_optimizer_state(param, MASTER)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Writes the fp32 master of `param`, and `param` itself at once."""
    safe_set_full_optimizer_state(param, value, MASTER)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """An optimizer state of `param`, whole, on every rank; None for a parameter that is not trained."""
    states = states_of(param)
    if states is None:
        return None
    with refusing():
        return states.whole(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Writes an optimizer state of `param`."""
    with refusing():
        _required(param).set_whole(param, value, optim_state_key)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient of `param`, whole, on every rank; None where there is none."""
    states = states_of(param)
    if states is None:
        return None
    with refusing():
        return states.grad(param)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Writes the gradient of `param`, after the backward that ends an accumulation."""
    with refusing():
        _required(param).set_grad(param, value)


def safe_update_full_grad_vectorized(
    param_list: list[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Writes what `update_func` makes of each gradient, whole, and its parameter; parameters without one are left out."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's part of the fp32 master of `param`, 1-D. At stage 3."""
    return safe_get_local_optimizer_state(param, MASTER)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Writes this rank's part of the fp32 master of `param`; every rank must call it. At stage 3."""
    safe_set_local_optimizer_state(param, value, MASTER)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of an optimizer state of `param`, 1-D; None for a parameter that is not trained. At stage 3."""
    states = _sharded(param)
    with refusing():
        return None if states is None else states.local(param, optim_state_key)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Writes this rank's part of an optimizer state of `param`. At stage 3."""
    with refusing():
        _trained(_sharded(param)).set_local(param, value, optim_state_key)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the gradient of `param`, 1-D; None where there is none. At stage 3."""
    states = _sharded(param)
    with refusing():
        return None if states is None else states.local_grad(param)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Writes this rank's part of the gradient of `param`. At stage 3."""
    with refusing():
        _trained(_sharded(param)).set_local_grad(param, value)


def _required(param: nn.Parameter) -> ParameterStates:
    return _trained(states_of(param))


def _trained(states: ParameterStates | None) -> ParameterStates:
    if states is None:
        raise Refusal(
            "no engine trains this parameter", where="param", remedy="give a trained parameter of the engine's module"
        )
    return states


def _sharded(param: nn.Parameter) -> ParameterStates | None:
    engine = owner(param)
    if engine is not None and engine.zero_optimization_stage() < 3:
        raise Refusal("only stage 3 shards parameters", where="param", remedy="use the function with 'full' in its name")
    return states_of(param)
