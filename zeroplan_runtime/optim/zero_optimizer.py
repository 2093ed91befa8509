"""The optimizer that users hold: parameter groups and hyperparameters, whose step the engine takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zeroplan.core.errors import BadInput, did_you_mean

#: Hyperparameters by kind, with their defaults (those of DeepSpeed's classes; SGD: torch's).
DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True},
    "lamb": {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "bias_correction": True,
        "min_coeff": 0.01,
        "max_coeff": 10.0,
    },
    "lion": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
}
#: Settings of torch's and DeepSpeed's optimizers that choose an implementation or are off by default here.
_IGNORED = frozenset({"torch_adam", "foreach", "fused", "capturable", "differentiable", "fp32_optimizer_states"})
_MUST_BE_FALSE = ("amsgrad", "maximize", "eps_inside_sqrt")

#: DeepSpeed's names for LAMB's bounds, by the kernels'.
_KERNEL_NAMES = {"min_coeff": "min_trust", "max_coeff": "max_trust"}

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class ZeroOptimizer(torch.optim.Optimizer):
    """Holds the parameter groups. Learning-rate schedules act on ``param_groups``; the engine reads them at each step.

    `kind` is one of :data:`DEFAULTS`; `decoupled` tells AdamW from Adam with L2 regularisation.
    """

    def __init__(self, params: Params, kind: str, hyper: dict[str, Any], *, decoupled: bool = True) -> None:
        if kind not in DEFAULTS:
            remedy = did_you_mean(kind, DEFAULTS) or f"use one of {', '.join(DEFAULTS)}"
            raise BadInput(f"optimizer {kind!r} is not supported", where="optimizer.type", remedy=remedy)
        known = DEFAULTS[kind]
        for key, value in hyper.items():
            if key in _MUST_BE_FALSE and value:
                raise BadInput(f"{key!r} is not supported", where="optimizer.params")
            if key not in known and key not in _IGNORED and key not in _MUST_BE_FALSE:
                raise BadInput(f"unknown key {key!r} for {kind}", where="optimizer.params", remedy=did_you_mean(key, known))
            if key in known:
                _check(key, value, known[key])
        self.kind, self.decoupled = kind, decoupled
        self.take_step: Callable[[], None] | None = None
        self._scheduled: torch.optim.Optimizer = self  # what schedules were made on
        try:
            super().__init__(params, {**known, **{k: v for k, v in hyper.items() if k in known}})
        except (TypeError, ValueError) as fault:  # torch's, for lists that are empty or hold something else
            raise BadInput(str(fault), where="model_parameters", remedy="give parameters or parameter groups") from None

    @classmethod
    def from_torch(cls, optimizer: torch.optim.Optimizer) -> ZeroOptimizer:
        """The same groups and hyperparameters as a torch optimizer's, sharing its group dicts, so that learning-rate
        schedules made on it keep acting.

        Raises:
            BadInput: when it is not AdamW, Adam or SGD, or uses AMSGrad or maximises.
        """
        kinds = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"}
        kind = kinds.get(type(optimizer))
        if kind is None:
            raise BadInput(
                f"an optimizer of type {type(optimizer).__name__} is not supported",
                where="optimizer",
                remedy="give torch.optim.AdamW, Adam or SGD, or name the optimizer in the config",
            )
        for key in ("amsgrad", "maximize"):
            if any(group.get(key) for group in optimizer.param_groups):
                raise BadInput(f"{key!r} is not supported", where="optimizer")
        if kind == "adam" and any(group.get("decoupled_weight_decay") for group in optimizer.param_groups):
            kind = "adamw"
        made = cls(optimizer.param_groups, kind, {}, decoupled=kind == "adamw")
        made.param_groups = optimizer.param_groups
        made._scheduled = optimizer
        return made

    @property
    def layout_kind(self) -> str:
        """The key of :data:`zeroplan.core.layout.OPTIMIZER_STATES`."""
        momentum = self.kind == "sgd" and any(group["momentum"] for group in self.param_groups)
        return "sgd_momentum" if momentum else self.kind

    def hyper(self, group: int) -> dict[str, Any]:
        """One group's present hyperparameters, by the names that the kernels' functions take."""
        values = self.param_groups[group]
        hyper = {_KERNEL_NAMES.get(key, key): values[key] for key in DEFAULTS[self.kind] if key in values}
        hyper["lr"] = float(hyper["lr"])
        if self.kind in ("adam", "adamw"):
            hyper["decoupled"] = self.decoupled
        return hyper

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes the engine's step; a closure is not supported."""
        if closure is not None:
            raise BadInput("a closure is not supported", where="optimizer.step")
        if self.take_step is not None:
            self.take_step()

    def was_stepped(self) -> None:
        """Tells torch's learning-rate schedules that a step has come before theirs; they warn otherwise."""
        for optimizer in (self, self._scheduled):
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, until an engine has the optimizer."""
        self._require_free("a group cannot be added any more", "give all groups to initialize()")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, until an engine has the optimizer, whose states are sharded."""
        self._require_free("its states are the engine's", "use engine.save_checkpoint()")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As :meth:`state_dict`."""
        self._require_free("its states are the engine's", "use engine.load_checkpoint()")
        super().load_state_dict(state_dict)

    def _require_free(self, what: str, remedy: str) -> None:
        if getattr(self, "take_step", None) is not None:
            raise BadInput(what, where="optimizer", remedy=remedy)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the engine begins new gradients after each step."""


def _check(key: str, value: Any, default: Any) -> None:
    """Refuse a hyperparameter of the wrong kind; torch would keep it until the first step, or train with it."""
    where = f"optimizer.params.{key}"
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise BadInput(f"{value!r} is not true or false", where=where)
    elif isinstance(default, tuple):
        if not isinstance(value, list | tuple) or len(value) != len(default) or not all(_number(one) for one in value):
            raise BadInput(f"{value!r} is not {len(default)} numbers", where=where, remedy=f"such as {list(default)}")
        if not all(0 <= one < 1 for one in value):
            raise BadInput(f"{value!r} is not from 0 to below 1", where=where)
    elif not _number(value) or value < 0:
        raise BadInput(f"{value!r} is not a number of zero or more", where=where, remedy=f"such as {default}")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
