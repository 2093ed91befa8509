"""The optimizer that users get: parameter groups and hyperparameters; the engine updates the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.optimizers import OPTIMIZERS, RUNTIME_OPTIMIZERS

#: Keys of torch's and DeepSpeed's optimizers that only choose an implementation.
_IGNORED = frozenset({"torch_adam", "foreach", "fused", "capturable", "differentiable", "fp32_optimizer_states"})
_MUST_BE_FALSE = ("amsgrad", "maximize", "eps_inside_sqrt")

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class ZeroOptimizer(torch.optim.Optimizer):
    """Parameter groups with hyperparameters. Learning-rate schedules change ``param_groups``; the engine reads them each step.

    Args:
        params: parameters or parameter groups.
        kind: a key of :data:`~zeroplan.core.optimizers.RUNTIME_OPTIMIZERS`.
        hyper: hyperparameters for all groups, by DeepSpeed's names.
        decoupled: decoupled weight decay (AdamW) instead of L2 regularisation (Adam).

    Attributes:
        take_step: the engine's step; None until an engine has the optimizer.

    Raises:
        BadInput: for an optimizer, a hyperparameter or parameters that are not supported.
    """

    def __init__(self, params: Params, kind: str, hyper: dict[str, Any], *, decoupled: bool = True) -> None:
        row = RUNTIME_OPTIMIZERS.get(kind)
        if row is None or row.runtime is None:
            remedy = did_you_mean(kind, RUNTIME_OPTIMIZERS) or f"use one of {', '.join(RUNTIME_OPTIMIZERS)}"
            raise BadInput(f"optimizer {kind!r} is not supported", where="optimizer.type", remedy=remedy)
        self.row, self.kernel = row, row.runtime
        known = row.runtime.defaults
        for key, value in hyper.items():
            if key in _MUST_BE_FALSE and value:
                raise BadInput(f"{key!r} is not supported", where="optimizer.params")
            if key not in known and key not in _IGNORED and key not in _MUST_BE_FALSE:
                raise BadInput(f"unknown key {key!r} for {kind}", where="optimizer.params", remedy=did_you_mean(key, known))
            if key in known:
                _check(key, value, known[key])
        self.kind, self.decoupled = kind, decoupled
        self._take_step: Callable[[], None] | None = None
        self._drop_grads: Callable[[], None] | None = None
        self._keeps_momentum = False
        self._had_momentum: set[int] = set()  # SGD's groups of which a step had momentum, and those of which none had
        self._had_none: set[int] = set()
        self._fixed: list[dict[str, Any]] = []  # each group's hyperparameters that must stay as they are
        self._scheduled: torch.optim.Optimizer = self  # what schedules were made on
        try:
            super().__init__(params, {**known, **{k: v for k, v in hyper.items() if k in known}})
        except (TypeError, ValueError) as fault:  # torch raises them for an empty list and for other objects
            raise BadInput(str(fault), where="model_parameters", remedy="give parameters or parameter groups") from None

    @classmethod
    def from_torch(cls, optimizer: torch.optim.Optimizer) -> ZeroOptimizer:
        """Makes one from a torch optimizer and shares its group dicts, so that its learning-rate schedules still work.

        Raises:
            BadInput: when its class has no row with a kernel, or an option that the kernel has not.
        """
        rows = {row.torch.name: row for row in RUNTIME_OPTIMIZERS.values() if row.torch is not None}
        row = next((row for name, row in rows.items() if type(optimizer) is getattr(torch.optim, name)), None)
        if row is None:
            *others, last = rows
            raise BadInput(
                f"an optimizer of type {type(optimizer).__name__} is not supported",
                where="optimizer",
                remedy=f"give torch.optim.{', '.join(others)} or {last}, or name the optimizer in the config",
            )
        if any(_has_stepped(state) for state in optimizer.state.values()):
            raise BadInput(
                "the optimizer has states of earlier steps, which the engine's do not take over",
                where="optimizer",
                remedy="give a new optimizer; to go on from an earlier run, use engine.load_checkpoint()",
            )
        kernel = row.runtime
        assert kernel is not None
        decoupled = kernel.decoupled
        known = {*kernel.defaults, *_IGNORED, *(["decoupled_weight_decay"] if decoupled else [])}
        for key in optimizer.defaults:
            if key not in known and any(group.get(key) for group in optimizer.param_groups):
                raise BadInput(f"{key!r} is not supported", where=f"torch.optim.{type(optimizer).__name__}")
        if decoupled and any(group.get("decoupled_weight_decay") for group in optimizer.param_groups):
            row = OPTIMIZERS[decoupled]
        made = cls(optimizer.param_groups, row.name, {}, decoupled=row.name == decoupled)
        made.param_groups = optimizer.param_groups
        made._scheduled = optimizer
        optimizer.state.clear()  # Adagrad makes its states at once
        return made

    @property
    def layout_kind(self) -> str:
        """The name of the row in the optimizer table that has its states; SGD with momentum has a row of its own."""
        momentum = self.row.with_momentum and any(group["momentum"] for group in self.param_groups)
        return self.row.with_momentum if momentum else self.row.name

    def hyper(self, group: int) -> dict[str, Any]:
        """Returns the current hyperparameters of group number `group`, by the names of the kernels' arguments.

        Raises:
            BadInput: for momentum that comes too late, and for what must stay as it was.
        """
        values = self.param_groups[group]
        if self.row.with_momentum and values["momentum"]:
            self._require_momentum(group, values)
        for key, first in self._fixed[group].items() if self._fixed else ():
            if values[key] != first:
                raise BadInput(
                    f"{key!r} of {self.kind} was changed to {values[key]!r}, which its kernel cannot follow",
                    where=f"optimizer.param_groups[{group}]",
                    remedy=f"leave it at {first!r}, as by cycle_momentum=False in OneCycleLR",
                )
        names = self.kernel.kernel_names
        hyper = {names.get(key, key): values[key] for key in self.kernel.defaults if key in values}
        hyper["lr"] = float(hyper["lr"])
        if self.kernel.decoupled:
            hyper["decoupled"] = self.decoupled
        return hyper

    def _require_momentum(self, group: int, values: dict[str, Any]) -> None:
        if not self._keeps_momentum:
            what, remedy = "was 0 when the engine was made", "give it to the optimizer, or its schedule to initialize()"
        elif values["dampening"] and group in self._had_none - self._had_momentum:
            what, remedy = (
                "was 0 in earlier steps, which no dampened sum can follow",
                "begin with momentum, or set dampening 0",
            )
        else:
            return
        raise BadInput(
            f"momentum is {values['momentum']:g} but {what}", where=f"optimizer.param_groups[{group}]", remedy=remedy
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Calls the engine's ``step()``, if an engine has the optimizer.

        Raises:
            BadInput: when a closure is given.
        """
        if closure is not None:
            raise BadInput("a closure is not supported", where="optimizer.step")
        if self._take_step is not None:
            self._take_step()

    def attach(self, *, take_step: Callable[[], None], drop_grads: Callable[[], None]) -> None:
        """Gives :meth:`step` and :meth:`zero_grad` to an engine."""
        self._take_step, self._drop_grads = take_step, drop_grads
        self._keeps_momentum = self.layout_kind == self.row.with_momentum
        self._fixed = [{key: group[key] for key in self.kernel.fixed} for group in self.param_groups]

    def was_stepped(self) -> None:
        """Tells torch's learning-rate schedules that the optimizer has stepped; otherwise they warn."""
        if self.row.with_momentum:
            for i, group in enumerate(self.param_groups):
                if group["momentum"]:
                    self._had_momentum.add(i)
                elif i not in self._had_momentum:
                    self._had_none.add(i)
        for optimizer in (self, self._scheduled):
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as torch's optimizers do.

        Raises:
            BadInput: when an engine has the optimizer.
        """
        self._require_free("a group cannot be added any more", "give all groups to initialize()")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as torch's optimizers do.

        Raises:
            BadInput: when an engine has the optimizer, as its states are sharded.
        """
        self._require_free("its states are the engine's", "use engine.save_checkpoint()")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as torch's optimizers do.

        Raises:
            BadInput: when an engine has the optimizer, as its states are sharded.
        """
        self._require_free("its states are the engine's", "use engine.load_checkpoint()")
        super().load_state_dict(state_dict)

    def _require_free(self, what: str, remedy: str) -> None:
        if getattr(self, "_take_step", None) is not None:
            raise BadInput(what, where="optimizer", remedy=remedy)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that no step has used. After a step there are none."""
        if self._drop_grads is not None:
            self._drop_grads()


def _has_stepped(state: dict[str, Any]) -> bool:
    return bool(state) and float(state.get("step", 1)) > 0


def _check(key: str, value: Any, default: Any) -> None:
    """Checks a hyperparameter's type and range; torch would fail in the first step or train with it."""
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
