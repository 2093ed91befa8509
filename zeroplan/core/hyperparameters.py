"""What an optimizer's hyperparameters may be: one check for the plan of a ds_config and for the runtime that steps by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput, did_you_mean

#: Keys of torch's and DeepSpeed's optimizers that only choose an implementation.
IMPLEMENTATION = frozenset(
    {
        "torch_adam",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
        "fp32_optimizer_states",
        "cuda_aware",
        "comm_backend_name",
    }
)
_MUST_BE_FALSE = ("amsgrad", "maximize", "eps_inside_sqrt")
_WHERE = "optimizer.params"


def check_hyperparameters(kind: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Check what the included runtime is given for an optimizer, whose step would fail or train with it.

    Args:
        kind: the optimizer's name, for messages.
        given: hyperparameters by DeepSpeed's names.
        known: those of the kernel, with their defaults.
    """
    for key, value in given.items():
        if key in _MUST_BE_FALSE and key not in known and value:
            raise BadInput(f"{key!r} is not supported", where=_WHERE)
        if key not in known and key not in IMPLEMENTATION and key not in _MUST_BE_FALSE:
            raise BadInput(f"unknown key {key!r} for {kind}", where=_WHERE, remedy=did_you_mean(key, known))
        if key in known:
            _check(key, value, known[key])


def not_a_number(value: Any, default: Any) -> str:
    """Return what is wrong with a value in the place of a number, or of as many as `default` has; empty for nothing.

    The range is left open: DeepSpeed's own optimizers step with any number.
    """
    if isinstance(default, tuple):
        right = isinstance(value, list | tuple) and len(value) == len(default) and all(map(_real, value))
        return "" if right else f"{_short(value)} is not {len(default)} numbers"
    if isinstance(default, bool) or _real(value):
        return ""
    return f"{_short(value)} is not a number"


def _check(key: str, value: Any, default: Any) -> None:
    where = f"{_WHERE}.{key}"
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise BadInput(f"{_short(value)} is not true or false", where=where)
    elif isinstance(default, tuple):
        if not isinstance(value, list | tuple) or len(value) != len(default) or not all(_number(one) for one in value):
            raise BadInput(f"{_short(value)} is not {len(default)} numbers", where=where, remedy=f"such as {list(default)}")
        if key == "betas" and not all(0 <= one < 1 for one in value):
            raise BadInput(f"{_short(value)} is not from 0 to below 1", where=where)
    elif isinstance(default, int):
        if not _number(value) or value != int(value) or value < 1:
            raise BadInput(f"{_short(value)} is not a whole number of 1 or more", where=where, remedy=f"such as {default}")
    elif not _number(value) or value < 0:
        raise BadInput(f"{_short(value)} is not a number of zero or more", where=where, remedy=f"such as {default}")


def _short(value: Any) -> str:
    return repr(value)[:60]


def _real(value: Any) -> bool:
    return isinstance(value, int | float)


def _number(value: Any) -> bool:
    return _real(value) and not isinstance(value, bool) and math.isfinite(value)
