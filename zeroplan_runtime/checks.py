"""Checks of the model, the loss and the order of calls. Every error is one line that names the remedy.

An engine's parameters are views of memory that it allocated once (Note [Addresses] in model_states). If they are moved, cast or
replaced afterwards, or if two engines hold one model, training would go wrong without an error; the checks here find both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from zeroplan.core.errors import BadInput
from zeroplan_runtime.local_tensors import is_distributed, local_of
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.optim.zero_optimizer import ZeroOptimizer
from zeroplan_runtime.pytree import tensors_of

logger = logging.getLogger("zeroplan_runtime")

#: Parameters that an engine owns, and parameters that a destroyed engine has left empty.
_claimed: WeakIdKeyDictionary = WeakIdKeyDictionary()
_emptied: WeakIdKeyDictionary = WeakIdKeyDictionary()

#: Names of wrapper classes that distribute a model themselves.
_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"})


def require_model(model: nn.Module, ranks: int = 1, *, on_mesh: bool = False) -> None:
    """Checks that an engine can take the model: parameters with values, not wrapped, not sharded, not owned by an engine.

    Parameters may be DTensors where the engine is `on_mesh`. With several `ranks`, no embedding may have a ``max_norm``: its
    forward scales down the rows that it looks up, which are others on each rank, so that the ranks' weights would part.

    Raises:
        BadInput: with the parameter's name and the remedy.
    """
    if type(model).__name__ in _WRAPPERS:
        raise BadInput(f"a {type(model).__name__} distributes the model itself", where="model", remedy="give the module within")
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise BadInput(f"{name!r} has no shape yet", where="model", remedy="call the model with a batch first")
        if is_distributed(param) and not on_mesh:
            raise BadInput(
                f"{name!r} is a DTensor, distributed over {param.device_mesh}",
                where="model",
                remedy="give initialize(mesh=...) the mesh of tensor parallelism, and the model as it is before fully_shard()",
            )
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
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"{name!r} is a module of torch.jit" if name else "it is a module of torch.jit"
            raise BadInput(f"{what}, which takes no hooks", where="model", remedy="give what was scripted or traced")
        if ranks > 1 and isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise BadInput(
                f"{name!r} has max_norm, by which each rank changes the rows of its own batch, so their weights would part",
                where="model",
                remedy="leave max_norm out and clamp the rows after engine.step(), alike on every rank",
            )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise BadInput(f"buffer {name!r} has no values (meta device)", where="model", remedy="initialise the model first")


def groups_of(model: nn.Module, optimizer: ZeroOptimizer | None) -> dict[int, int]:
    """Returns the index of each parameter's optimizer group, by the parameter's ``id``; empty without an optimizer.

    Raises:
        BadInput: when the optimizer holds a tensor that is not the model's.
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
    return groups


def freeze_outside(model: nn.Module, groups: dict[int, int]) -> list[nn.Parameter]:
    """Freezes the parameters that no optimizer group has, since nothing would use their gradients; says which.

    Args:
        model: the model.
        groups: of :func:`groups_of`, not empty.

    Returns:
        The parameters that were trainable before.
    """
    outside = {name: param for name, param in model.named_parameters() if param.requires_grad and id(param) not in groups}
    for param in outside.values():
        param.requires_grad_(False)
    if outside:
        names = ", ".join(list(outside)[:4]) + (" and more" if len(outside) > 4 else "")
        logger.warning("%d parameters are in no optimizer group and stay as they are: %s", len(outside), names)
    return list(outside.values())


def require_loss(value: object) -> None:
    """Checks that `value` is a tensor of one element with a gradient.

    Raises:
        BadInput: that says what it is instead.
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
    """Checks that an engine's parameters stay where `model_states` put them and that its methods are called in order."""

    def __init__(self, model: nn.Module, model_states: ModelStates) -> None:
        self._model = model
        self._params = [param for unit in model_states.units for flat in unit.flats() for param in flat.params]
        self._addresses = [local_of(param).data_ptr() for param in self._params]
        self._trained = [param.requires_grad for param in self._params]
        self.is_destroyed = False
        self._thread: int | None = None  # which is in a forward
        self._failed = ""  # what failed half-way and why, so that parameters and states do not fit together; empty if nothing
        self._failed_backward = ""  # why the last backward raised; empty if it did not
        self._has_reduced_grads = False  # the last backward of an accumulation is done
        self._no_samples = False  # in the last forward
        self._names = {name: param for name, param in model.named_parameters(remove_duplicate=False) if param.numel()}
        self._checked_model = False  # the model was found to have the parameters that the engine took

    # ------------------------------------------------------------------ calls

    @contextmanager
    def in_one_thread(self) -> Iterator[None]:
        """Enters the context of a forward.

        Raises:
            BadInput: while another thread is in one: both would gather into the same slots.
        """
        here, before = get_ident(), self._thread
        if before not in (None, here):
            raise BadInput("a forward runs in another thread", where="engine", remedy="call one after another")
        self._thread = here
        try:
            yield
        finally:
            self._thread = before

    def saw_inputs(self, args: Any, kwargs: Any) -> None:
        """Notes whether a forward's inputs hold no samples."""
        self._no_samples = any(one.dim() and not len(one) for one in tensors_of((args, kwargs)))

    def require_number(self, loss: torch.Tensor) -> None:
        """Checks the loss of a batch of no samples, whose mean is none; only there does the host wait for it.

        Raises:
            BadInput: with the remedy.
        """
        if self._no_samples and bool(local_of(loss.detach()).isnan()):
            raise BadInput(
                "the batch holds no samples, and its loss is not a number",
                where="engine.backward",
                remedy="leave it out on all ranks (a loader's drop_last), or divide the loss's sum by one at least",
            )

    def require_usable(self, where: str, *, allow_failed_step: bool = False) -> None:
        """Checks that the engine is not destroyed and, unless `allow_failed_step`, that its last step or load did not fail.

        Raises:
            BadInput: with `where`, the method that was called.
        """
        if self.is_destroyed:
            raise BadInput("the engine has been destroyed", where=where, remedy="initialize a new one")
        if self._failed and not allow_failed_step:
            raise BadInput(
                f"the last {self._failed}",
                where=where,
                remedy="load a checkpoint, or initialize anew",
            )

    def require_backward(self, *, once: bool) -> None:
        """Checks that the gradients can be added to.

        Args:
            once: gradients can be reduced only once a step.

        Raises:
            BadInput: after a backward that failed, and, if `once`, when this step's gradients have been reduced.
        """
        self._require_complete_grads("engine.backward")
        if once and self._has_reduced_grads:
            raise BadInput(
                "updates with this step's gradients have begun, as neither clipping nor overflow checks delay them",
                where="engine.backward",
                remedy="add the losses and call backward once, count each as a micro batch, or set gradient_clipping",
            )

    def require_synchronized(self, in_no_sync: bool) -> None:
        """Checks that no step is taken within ``engine.no_sync()``.

        Raises:
            BadInput: with the remedy.
        """
        if in_no_sync:
            raise BadInput(
                "It is illegal to call Engine.step() inside no_sync context manager",
                where="engine.step",
                remedy="leave it before the last micro batch, whose backward then reduces all gradients",
            )

    def require_gradients(self) -> None:
        """Checks that a complete backward came before the step and that no parameter was thawed that was frozen at the start.

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
        with torch._C.DisableTorchFunctionSubclass():
            for param, trained in zip(self._params, self._trained, strict=True):
                if param.requires_grad and not trained:
                    raise BadInput(
                        f"{self._name(param)!r} was frozen when the engine was made, so it has no states, and is trained now",
                        where="engine.step",
                        remedy="freeze it after initialize(), or engine.destroy(keep_parameters=True) and initialize again",
                    )
                if trained and param.grad is not None:
                    raise BadInput(
                        f"{self._name(param)}.grad was set by hand",
                        where="engine.step",
                        remedy="add it to the loss, whose gradients engine.backward() takes",
                    )

    def _require_complete_grads(self, where: str) -> None:
        if self._failed_backward:
            raise BadInput(
                f"the last backward failed and left part of its gradients ({self._failed_backward})",
                where=where,
                remedy="call engine.zero_grad() to drop them",
            )

    def require_no_gradients(self, found: bool) -> None:
        """Checks, before a checkpoint is saved, that no gradients wait for a step; `found` says whether there are any.

        Raises:
            BadInput: with the remedy.
        """
        if found:
            raise BadInput(
                "there are gradients that no step has used, which a checkpoint does not hold",
                where="engine.save_checkpoint",
                remedy="save after the step that ends an accumulation, or call engine.zero_grad() first",
            )

    def require_same_names(self, model: nn.Module) -> None:
        """Checks, before a checkpoint is saved, that the model has the parameters of ``initialize`` under their names.

        Raises:
            BadInput: with its name and the remedy.
        """
        for name, param in model.named_parameters():
            if param not in _claimed and param.numel():
                raise BadInput(
                    f"{name!r} became a parameter after initialize, so no checkpoint holds it",
                    where="engine.save_checkpoint",
                    remedy="register it before initialize, or keep it as a plain tensor",
                )
        now = {name: param for name, param in model.named_parameters(remove_duplicate=False) if param.numel()}
        other = next((name for name in [*now, *self._names] if now.get(name) is not self._names.get(name)), None)
        if other is not None:
            raise BadInput(
                f"{other!r} is not the parameter that had this name at initialize, by whose names a checkpoint holds values",
                where="engine.save_checkpoint",
                remedy="tie, swap and delete layers before initialize, or save engine.module_state_dict()",
            )

    @contextmanager
    def during_backward(self, *, boundary: bool) -> Iterator[None]:
        """Enters the context of a backward; notes whether it failed.

        Args:
            boundary: the optimizer steps after it.

        Raises:
            BadInput: when the loss's graph has been freed by an earlier backward.
        """
        try:
            yield
        except BaseException as fault:
            self._failed_backward = _first_line(fault)
            if "modified by an inplace operation" in str(fault):
                self._failed_backward = "its graph was out of date"
                raise BadInput(
                    f"the loss was computed with a tensor that has been changed since ({_first_line(fault)})",
                    where="engine.backward",
                    remedy="call the forward again after each step, and after each write to a parameter",
                ) from None
            if "backward through the graph a second time" in str(fault):
                self._failed_backward = "its graph was gone"
                raise BadInput(
                    "the graph of this loss was freed by an earlier backward",
                    where="engine.backward",
                    remedy="call the forward again, or give retain_graph=True the first time",
                ) from None
            raise
        self._has_reduced_grads = boundary

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Enters the context of the optimizer's step; notes whether it failed."""
        try:
            yield
        except BaseException as fault:
            self._failed = f"step failed half-way ({_first_line(fault)})"
            raise
        self._has_reduced_grads = False

    @contextmanager
    def during_load(self) -> Iterator[None]:
        """A context for what a load changes; notes whether it failed, and else that all is consistent again."""
        try:
            yield
        except BaseException as fault:
            self._failed = f"load failed half-way ({_first_line(fault)})"
            raise
        self._failed = ""

    def refuse_mixed_collectives(self) -> NoReturn:
        """Marks the last step as failed because the ranks ran different units.

        Raises:
            BadInput: always.
        """
        self._failed = "step failed half-way (the ranks went through different units)"
        raise BadInput(
            "the ranks went through different units, so that gradients of one were added to another's, "
            "or froze different parameters",
            where="engine.step",
            remedy="load a checkpoint; call every unit on every rank, if need be with an empty input, or give a policy that "
            "takes the module which chooses among them",
        )

    def grads_were_dropped(self) -> None:
        """Notes that all gradients are gone."""
        self._failed_backward, self._has_reduced_grads = "", False

    def claim_parameters(self) -> None:
        """Marks the parameters as owned by this engine; another engine refuses them."""
        for param in self._params:
            _claimed[param] = True

    def give_up_parameters(self, *, emptied: bool) -> None:
        """Marks the engine as destroyed and its parameters as free and, if `emptied`, without values."""
        self.is_destroyed = True
        for param in self._params:
            if param in _claimed:
                del _claimed[param]
            if emptied:
                _emptied[param] = True

    # ------------------------------------------------------------------ parameters

    def require_parameters(self, model: nn.Module) -> None:
        """Checks that the parameters of `model`, the engine's now, are the tensors, at the addresses, that the engine updates.

        Raises:
            BadInput: with the parameter's name.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for param, address in zip(self._params, self._addresses, strict=True):
                if local_of(param).data_ptr() != address:
                    raise BadInput(
                        f"{self._name(param)!r} was moved or cast after the engine was made, so updates would not reach it",
                        where="model",
                        remedy="move and cast before initialize(); the config sets the dtype",
                    )
        if self._checked_model and model is self._model:
            return
        self._model = model
        known = {id(param) for param in self._params}
        for name, param in self._model.named_parameters():
            if id(param) not in known and param.numel():
                raise BadInput(f"{name!r} was put into the model after the engine was made", where="model", remedy=_ANEW)
        self._checked_model = True

    def recheck_parameters(self) -> None:
        """Makes the next :meth:`require_parameters` look through the whole model again."""
        self._checked_model = False

    def _name(self, wanted: nn.Parameter) -> str:
        return next((name for name, param in self._model.named_parameters() if param is wanted), "a parameter")


_ANEW = "change the model before initialize(), or call engine.destroy(keep_parameters=True) and initialize again"


def _first_line(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {(str(fault).strip().splitlines() or [''])[0]}"[:120]


def kept_alias(name: str) -> BadInput:
    """The error for a forward that has kept an alias of the parameter `name`; of another rank's where `name` is empty."""
    what = f"parameter {name!r}" if name else "a parameter on another rank"
    return BadInput(
        f"the forward has kept a tensor that shares memory with {what}, which shows other values later",
        where="stage 3",
        remedy="keep a clone() of it, or use stage 2",
    )


def refuse_copy(*_: Any) -> NoReturn:
    """Stands for ``__reduce_ex__``: copying or pickling a module with an engine's hooks would copy all of its memory.

    Raises:
        BadInput: always.
    """
    raise BadInput(
        "a model under an engine cannot be copied or pickled",
        where="model",
        remedy="build a second model and load engine.module_state_dict(), or copy it before initialize()",
    )
