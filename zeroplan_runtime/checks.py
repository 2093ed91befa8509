"""What an engine may rely on and what may follow a failure. Every fault is one line that names the remedy.

An engine's parameters are views of memory that it allocated once (Note [Addresses] in model_states). Whoever moves, casts or
replaces them afterwards would train something else without any error; so do two engines on one model. Both are looked for here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from zeroplan.core.errors import BadInput
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.optim.zero_optimizer import ZeroOptimizer

#: Parameters under an engine, and those that an engine has emptied.
_claimed: WeakIdKeyDictionary = WeakIdKeyDictionary()
_emptied: WeakIdKeyDictionary = WeakIdKeyDictionary()

#: Classes, by name, that distribute a model themselves.
_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"})


def require_model(model: nn.Module) -> None:
    """Refuses a model whose parameters have no values of their own, or another owner.

    Raises:
        BadInput: with the parameter's name.
    """
    if type(model).__name__ in _WRAPPERS:
        raise BadInput(f"a {type(model).__name__} distributes the model itself", where="model", remedy="give the module within")
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise BadInput(f"{name!r} has no shape yet", where="model", remedy="call the model with a batch first")
        if type(param.data).__name__ == "DTensor":
            raise BadInput(f"{name!r} is sharded already", where="model", remedy="give the model as it is before fully_shard()")
        if param in _claimed:
            raise BadInput(
                f"{name!r} is under another engine",
                where="model",
                remedy="call engine.destroy(keep_parameters=True) on that one first, or build the model anew",
            )
        if not param.numel() and param in _emptied:
            raise BadInput(
                f"{name!r} is empty since its engine was destroyed",
                where="model",
                remedy="use engine.destroy(keep_parameters=True), or build the model anew",
            )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise BadInput(f"buffer {name!r} has no values (meta device)", where="model", remedy="initialise the model first")


def groups_of(model: nn.Module, optimizer: ZeroOptimizer | None) -> dict[int, int]:
    """The optimizer group of each parameter, by ``id``.

    Raises:
        BadInput: when the optimizer holds what is not the model's, or lacks what is trained.
    """
    if optimizer is None:
        return {}
    own = {id(param) for param in model.parameters()}
    groups: dict[int, int] = {}
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in own:
                raise BadInput(
                    f"a tensor of shape {tuple(param.shape)} is no parameter of the model",
                    where="optimizer",
                    remedy="make the optimizer from the parameters of this very model",
                )
            groups[id(param)] = i
    for name, param in model.named_parameters():
        if param.requires_grad and id(param) not in groups:
            raise BadInput(f"parameter {name!r} is in no optimizer group", remedy="freeze it or add it to a group")
    return groups


def require_loss(value: object) -> None:
    """Refuses what no gradients can be taken of.

    Raises:
        BadInput: with what it is instead.
    """
    if not isinstance(value, torch.Tensor):
        what = f"a {type(value).__name__} is no loss"
    elif value.numel() != 1:
        what = f"the loss has shape {tuple(value.shape)}, not one element"
    elif not value.requires_grad:
        what = "the loss has no gradients, as under torch.no_grad() or where every parameter is frozen"
    else:
        return
    raise BadInput(what, where="engine.backward", remedy="give the loss as it came out of the forward")


class EngineChecks:
    """Holds an engine's parameters to the places where `store` has put them, and its calls to an order that makes sense."""

    def __init__(self, model: nn.Module, model_states: ModelStates) -> None:
        self._model = model
        self._params = [param for unit in model_states.units for flat in unit.flats() for param in flat.params]
        self._addresses = [param.data_ptr() for param in self._params]
        self._trained = [param.requires_grad for param in self._params]
        self.is_destroyed = False
        self._failed_step = ""  # why a step ended half-way
        self._failed_backward = ""  # why a backward did
        self._has_reduced_grads = False  # the backward before a step has been
        self._checked_model = False  # the model's parameters have been found to be those of the start

    # ------------------------------------------------------------------ calls

    def require_usable(self, where: str, *, allow_failed_step: bool = False) -> None:
        """Refuses calls that need parameters with values; after a failed step only if `allow_failed_step`.

        Raises:
            BadInput: when the engine is destroyed, or its last step failed.
        """
        if self.is_destroyed:
            raise BadInput("the engine has been destroyed", where=where, remedy="initialize a new one")
        if self._failed_step and not allow_failed_step:
            raise BadInput(
                f"the last step failed half-way ({self._failed_step})",
                where=where,
                remedy="load a checkpoint, or initialize anew",
            )

    def require_backward(self, *, once: bool) -> None:
        """Refuses a backward that would add to gradients which cannot be added to.

        Raises:
            BadInput: after a backward that failed, and, where gradients can be reduced but `once` a step, after that.
        """
        self._require_complete_grads("engine.backward")
        if once and self._has_reduced_grads:
            raise BadInput(
                "updates by the gradients of this step have begun, as nothing clips or checks them",
                where="engine.backward",
                remedy="add the losses and go back once, count each as a micro batch, or set gradient_clipping",
            )

    def require_gradients(self) -> None:
        """Refuses a step without a whole backward before it.

        Raises:
            BadInput: with the remedy.
        """
        self._require_complete_grads("engine.step")
        if not self._has_reduced_grads:
            raise BadInput(
                "there are no gradients of engine.backward()",
                where="engine.step",
                remedy="call engine.backward(loss), not loss.backward(), before it",
            )
        for param, trained in zip(self._params, self._trained, strict=True):
            if param.requires_grad is not trained:
                was, now = ("trained", "frozen") if trained else ("frozen", "trained")
                raise BadInput(
                    f"{self._name(param)!r} was {was} when the engine was made and is to be {now}",
                    where="engine.step",
                    remedy="call engine.destroy(keep_parameters=True) and initialize again",
                )

    def _require_complete_grads(self, where: str) -> None:
        if self._failed_backward:
            raise BadInput(
                f"the last backward failed and left part of its gradients ({self._failed_backward})",
                where=where,
                remedy="call engine.zero_grad() to drop them",
            )

    @contextmanager
    def during_backward(self, *, boundary: bool) -> Iterator[None]:
        """Around a backward; `boundary` says that a step follows."""
        try:
            yield
        except BaseException as fault:
            self._failed_backward = _first_line(fault)
            if "backward through the graph a second time" in str(fault):
                self._failed_backward = "its graph was gone"
                raise BadInput(
                    "the graph of this loss has been gone through already",
                    where="engine.backward",
                    remedy="call the forward again, or give retain_graph=True the first time",
                ) from None
            raise
        self._has_reduced_grads = boundary

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Around an update."""
        try:
            yield
        except BaseException as fault:
            self._failed_step = _first_line(fault)
            raise
        self._has_reduced_grads = False

    def refuse_mixed_collectives(self) -> NoReturn:
        """The ranks went through different units in the last step.

        Raises:
            BadInput: always.
        """
        self._failed_step = "the ranks went through different units"
        raise BadInput(
            "the ranks went through different units, so that gradients of one were added to another's",
            where="engine.step",
            remedy="load a checkpoint; call every unit on every rank, if need be with an empty input, or give a policy that "
            "takes the module which chooses among them",
        )

    def grads_were_dropped(self) -> None:
        """All gradients are gone."""
        self._failed_backward, self._has_reduced_grads = "", False

    def checkpoint_was_loaded(self) -> None:
        """A checkpoint was read: all parameters and states are of one step again."""
        self._failed_step = ""

    def claim_parameters(self) -> None:
        """No other engine may have these parameters."""
        for param in self._params:
            _claimed[param] = True

    def give_up_parameters(self, *, emptied: bool) -> None:
        """The engine is no more; it has left its parameters without values if `emptied`."""
        self.is_destroyed = True
        for param in self._params:
            if param in _claimed:
                del _claimed[param]
            if emptied:
                _emptied[param] = True

    # ------------------------------------------------------------------ parameters

    def require_parameters(self) -> None:
        """Refuses a model whose parameters are no longer where the engine updates them.

        Raises:
            BadInput: with the parameter's name.
        """
        for param, address in zip(self._params, self._addresses, strict=True):
            if param.data_ptr() != address:
                raise BadInput(
                    f"{self._name(param)!r} was moved or cast after the engine was made, which updates it elsewhere",
                    where="model",
                    remedy="do so before initialize(), whose config says the dtype",
                )
        if self._checked_model:
            return
        known = {id(param) for param in self._params}
        for name, param in self._model.named_parameters():
            if id(param) not in known and param.numel():
                raise BadInput(f"{name!r} was put into the model after the engine was made", where="model", remedy=_ANEW)
        self._checked_model = True

    def recheck_parameters(self) -> None:
        """The model may have got other parameters."""
        self._checked_model = False

    def _name(self, wanted: nn.Parameter) -> str:
        return next((name for name, param in self._model.named_parameters() if param is wanted), "a parameter")


_ANEW = "change the model before initialize(), or call engine.destroy(keep_parameters=True) and initialize again"


def _first_line(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {(str(fault).strip().splitlines() or [''])[0]}"[:120]


def refuse_copy(*_: Any) -> NoReturn:
    """Copying or pickling a module with an engine's hooks would copy the engine and all its memory.

    Raises:
        BadInput: always.
    """
    raise BadInput(
        "a model under an engine cannot be copied or pickled",
        where="model",
        remedy="build a second model and load engine.module_state_dict(), or copy it before initialize()",
    )
