"""The optimizer that users get: parameter groups and hyperparameters; the engine updates the parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from itertools import chain
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.hyperparameters import IMPLEMENTATION, check_hyperparameters
from zeroplan.core.one_bit import local_steps
from zeroplan.core.optimizer_row import Optimizer, RuntimeKernel
from zeroplan.core.optimizers import OPTIMIZERS, RUNTIME_OPTIMIZERS, torch_row, variant_of, why_no_kernel
from zeroplan_runtime import kernels
from zeroplan_runtime.techniques.one_bit.compression_schedule import SCHEDULES, CompressionStep

_NO_CODE: Any = SimpleNamespace(co_filename="")
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
        self.row = row
        known = row.runtime.defaults
        check_hyperparameters(kind, hyper, known)
        self.kind, self.decoupled = kind, decoupled
        self._take_step: Callable[[], None] | None = None
        self._drop_grads: Callable[[], None] | None = None
        self._row_with_states: Optimizer | None = None  # what the engine has made room for
        self._options: dict[str, bool] = {}  # hyperparameters that add states: whether the engine has made those
        self._taken: list[dict[str, Any]] = []  # each group's hyperparameters of the last step
        self._had_momentum: set[int] = set()  # SGD's groups of which a step had momentum, and those of which none had
        self._had_none: set[int] = set()
        self._scheduled: torch.optim.Optimizer = self  # what schedules were made on
        self._params: list[list[nn.Parameter]] = []  # each group's when the engine took them
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
        row = _row_of(optimizer)
        if any(_has_stepped(state) for state in optimizer.state.values()):
            raise BadInput(
                "the optimizer has states of earlier steps, which the engine's do not take over",
                where="optimizer",
                remedy="give a new optimizer; to go on from an earlier run, use engine.load_checkpoint()",
            )
        kernel = row.runtime
        assert kernel is not None
        decoupled = kernel.decoupled
        known = {*kernel.defaults, *IMPLEMENTATION, *(["decoupled_weight_decay"] if decoupled else [])}
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
    def row_with_states(self) -> Optimizer:
        """The row in the optimizer table that has its states, some of which hyperparameters such as momentum add."""
        return self._row_with_states or variant_of(self.row, self._wanted())

    def _wanted(self) -> dict[str, bool]:
        """Returns for each hyperparameter that adds states whether a group has it."""
        return {key: any(group.get(key) for group in self.param_groups) for key in _options_of(self.row)}

    @property
    def kernel(self) -> RuntimeKernel:
        """The kernel that updates the parameters, with its hyperparameters."""
        kernel = self.row_with_states.runtime
        assert kernel is not None
        return kernel

    def hyper(self, group: int) -> dict[str, Any]:
        """Returns the current hyperparameters of group number `group`, by the names of the kernels' arguments.

        Raises:
            BadInput: for momentum and other options that come too late.
        """
        values, kernel = self.param_groups[group], self.kernel
        for key, kept in self._options.items():
            if values.get(key):
                self._require_states(group, values, key, kept=kept)
        for key in ("betas", *kernel.exchange) if kernel.exchange else ():
            if values[key] != self.param_groups[0][key]:
                raise BadInput(
                    f"{key} is {values[key]} but {self.param_groups[0][key]} in the first group, and a unit's momentum is "
                    "exchanged as one",
                    where=f"optimizer.param_groups[{group}]",
                    remedy="give all groups the same",
                )
        given = (
            key for key in kernel.defaults if key in values and key not in kernel.exchange and self._options.get(key, True)
        )
        hyper = {kernel.kernel_names.get(key, key): values[key] for key in given}
        hyper["lr"] = float(hyper["lr"])
        if kernel.decoupled:
            hyper["decoupled"] = self.decoupled
        if kernel.carried:
            hyper[kernel.carried] = values.get(kernel.carried)
        self._taken[group] = hyper
        return hyper

    @property
    def steps_alone(self) -> bool:
        """Whether it lets ranks step alone (0/1 Adam's local steps)."""
        return self.row.compresses and local_steps(self.param_groups[0]) > 1

    def compression(self, number: int) -> CompressionStep:
        """What the ranks exchange in applied step `number`, from 1, of an optimizer that compresses."""
        return SCHEDULES[self.kernel.exchange[0]](number, self.param_groups[0])

    def _require_states(self, group: int, values: dict[str, Any], key: str, *, kept: bool) -> None:
        if not kept:
            was = "false" if values[key] is True else "0"
            what = f"was {was} when the engine was made"
            remedy = "give it to the optimizer, or its schedule to initialize()"
        elif values.get("dampening") and group in self._had_none - self._had_momentum:
            what, remedy = (
                "was 0 in earlier steps, which no dampened sum can follow",
                "begin with momentum, or set dampening 0",
            )
        else:
            return
        raise BadInput(f"{key} is {values[key]} but {what}", where=f"optimizer.param_groups[{group}]", remedy=remedy)

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
        self._options = self._wanted()
        self._row_with_states = variant_of(self.row, self._options)
        self._taken = [{} for _ in self.param_groups]
        for group in self.param_groups:
            group.pop(self.kernel.carried, None)  # of an engine before
        self._params = [list(group["params"]) for group in self.param_groups]
        self.state = self._scheduled.state = EngineStates()  # type: ignore[assignment]

    def release_states(self) -> None:
        """Makes the states the optimizer's own again, and empty, since the engine is destroyed."""
        self.state = self._scheduled.state = defaultdict(dict)

    def require_same_groups(self) -> None:
        """Checks that the groups are those that the engine took, with the same parameters, and that ``step`` is torch's own.

        Raises:
            BadInput: with what was changed.
        """
        for optimizer in (self, self._scheduled):
            step = vars(optimizer).get("step")  # a schedule's, which calls the one before, or the one that an engine gave it
            is_ours = step is None or getattr(step, "__self__", None) is self
            if not is_ours and getattr(step, "__code__", _NO_CODE).co_filename != lr_scheduler.__file__:
                raise BadInput(
                    "was replaced, and engine.step() does not call it",
                    where="optimizer.step",
                    remedy="use optimizer.register_step_pre_hook() and register_step_post_hook(), which run around each update",
                )
        now = self.param_groups
        if len(now) != len(self._params):
            what, where = f"{len(self._params)} groups are now {len(now)}", "optimizer.param_groups"
        else:
            changed = (
                i
                for i, (group, taken) in enumerate(zip(now, self._params, strict=True))
                if len(group["params"]) != len(taken) or any(a is not b for a, b in zip(group["params"], taken, strict=True))
            )
            if (i := next(changed, None)) is None:
                return
            what, where = "its parameters were changed after the engine was made", f"optimizer.param_groups[{i}]"
        raise BadInput(what, where=where, remedy="give all groups to initialize(); to stop training some, set their lr to 0")

    @property
    def has_step_hooks(self) -> bool:
        """Whether hooks wait for a step: on this optimizer, on the one that it was made from, or on all of torch's."""
        return any(chain(*self._hooks(before=True), *self._hooks(before=False)))

    def _hooks(self, *, before: bool) -> list[Iterable[Callable[..., Any]]]:
        """The hooks of a step in the order in which torch runs them."""
        everyones: Mapping[int, Callable[..., Any]] = _global_optimizer_pre_hooks if before else _global_optimizer_post_hooks
        name = "_optimizer_step_pre_hooks" if before else "_optimizer_step_post_hooks"
        owners = [self] if self._scheduled is self else [self._scheduled, self]
        own = [getattr(one, name).values() for one in owners]
        return [everyones.values(), *own] if before else [*own, everyones.values()]

    def run_step_hooks(self, *, before: bool) -> None:
        """Runs the hooks on a step as torch's optimizers do, with the optimizer that users registered them on.

        Raises:
            BadInput: when one returns other arguments for the step, which has none here.
        """
        for hook in list(chain(*self._hooks(before=before))):
            if hook(self._scheduled, (self._scheduled,), {}) is not None and before:
                raise BadInput("a hook returns other arguments for it", where="optimizer.step", remedy="return nothing")

    def was_stepped(self, number: int) -> None:
        """Notes that applied step `number`, from 1, is done. Torch's learning-rate schedules are told, which else warn."""
        kernel = self.kernel
        for i, taken in enumerate(self._taken):
            if taken.get("momentum"):
                self._had_momentum.add(i)
            elif i not in self._had_momentum:
                self._had_none.add(i)
            if kernel.carried and taken:
                self.param_groups[i][kernel.carried] = kernels.CARRIED[kernel.carried](number, taken)
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

    def take_hyperparameters(self, groups: Iterable[dict[str, Any]]) -> None:
        """Goes on with the hyperparameters that a checkpoint holds, one dict a group."""
        for group, values in zip(self.param_groups, groups, strict=True):
            group.pop(self.kernel.carried, None)
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})

    def _require_free(self, what: str, remedy: str) -> None:
        if getattr(self, "_take_step", None) is not None:
            raise BadInput(what, where="optimizer", remedy=remedy)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that no step has used. After a step there are none."""
        if self._drop_grads is not None:
            self._drop_grads()


ZeroOptimizer.step.hooked = True  # type: ignore[attr-defined]  # the engine runs the hooks, so torch must not wrap it to


class EngineStates(MutableMapping[Any, Any]):
    """Stands for ``optimizer.state`` under an engine, whose states are sharded in flat buffers.

    Raises:
        BadInput: for every use.
    """

    def _refuse(self, *_: Any) -> NoReturn:
        raise BadInput(
            "the states are the engine's, in shards",
            where="optimizer.state",
            remedy="read and write them by zeroplan_runtime.parameter_states.ParameterStates(engine): whole(param, 'exp_avg'), "
            "set_whole(param, value, 'exp_avg')",
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = _refuse

    def __repr__(self) -> str:
        return "the engine's states"


def _row_of(optimizer: torch.optim.Optimizer) -> Optimizer:
    """The row of a torch optimizer.

    Raises:
        BadInput: for one that no kernel steps, with the reason.
    """
    kind = type(optimizer)
    own = kind is getattr(torch.optim, kind.__name__, None)
    row = torch_row(kind.__name__) if own else None
    if row is not None and row.runtime is not None:
        return row
    names = [name for name in dir(torch.optim) if (one := torch_row(name)) is not None and one.runtime is not None]
    *others, last = names
    why = why_no_kernel(kind.__name__) if own else "only torch's own classes are known, and a class's step may do anything"
    raise BadInput(
        f"an optimizer of type {kind.__name__} is not supported: {why}",
        where="optimizer",
        remedy=f"give torch.optim.{', '.join(others)} or {last}, or name the optimizer in the config",
    )


def _options_of(row: Optimizer) -> set[str]:
    """The hyperparameters that add states to those of `row`."""
    return set(row.variants).union(*(_options_of(OPTIMIZERS[name]) for name in row.variants.values()))


def _has_stepped(state: dict[str, Any]) -> bool:
    return bool(state) and float(state.get("step", 1)) > 0
