"""``deepspeed.zero``: building a model, and reading and writing parameters whole."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroplan_runtime.compat.deepspeed.owners import owner
from zeroplan_runtime.compat.deepspeed.refusals import Refusal, refusing
from zeroplan_runtime.engine import Engine
from zeroplan_runtime.parameter_guard import plain_class
from zeroplan_runtime.parameter_values import whole_value, write_value


class ZeroParamStatus(Enum):
    """Whether a parameter of stage 3 can be read."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Init:
    """A context in which DeepSpeed builds a model in shards. Here the model is built whole, in host memory, on every rank.

    ``initialize`` takes the first rank's values, shards them and keeps fp32 masters of them as they were built, where
    DeepSpeed's are of the values that it had cast to 16 bits. Plan the host memory of a whole model for each rank.

    Args:
        module: a model that is built already; has no effect.
        enabled: has no effect.
        _: DeepSpeed's other arguments; they have no effect.
    """

    def __init__(self, module: nn.Module | None = None, *_: Any, enabled: bool = True, **__: Any) -> None:
        self.enabled = enabled

    def __enter__(self) -> Init:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing."""


class GatheredParameters:
    """A context in which parameters hold their whole values, at any stage. Every rank must enter it.

    Where these are all parameters of an engine, forwards without gradients, as ``generate()``, need no other rank within it.

    Args:
        params: a parameter, or several. Those of no engine are left as they are.
        modifier_rank: what this rank writes to them is kept, on every rank; None keeps no write at stage 3.
        fwd_module: has no effect.
        enabled: False does nothing.

    Raises:
        Refusal: when the engine cannot be used.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | nn.Parameter,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, nn.Parameter) else list(params)
        self._params = [param for param in dict.fromkeys(given) if isinstance(param, nn.Parameter)] if enabled else []
        self._modifier_rank = modifier_rank
        self._gathered: list[tuple[nn.Parameter, Engine, torch.Tensor, type]] = []

    def __enter__(self) -> GatheredParameters:
        with refusing(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for engine, params in _by_engine(self._params):
                engine.checks.require_usable("GatheredParameters")
                engine.drain()
                if engine.zero_optimization_stage() < 3:
                    engine.wait_parameters()
                    continue
                for param in params:
                    with whole_value(engine, param) as values:
                        copy = values.clone()
                    self._gathered.append((param, engine, param.data, type(param)))
                    param.__class__ = plain_class(type(param))
                    param.data = copy
                engine.schedule.resting = len(params) == len(set(engine.module.parameters()))
        return self

    def __exit__(self, *_: object) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if self._modifier_rank is not None and dist.is_initialized():
                for param in self._params:
                    engine = owner(param)
                    _broadcast(param.data, self._modifier_rank, engine.comm.group if engine is not None else None)
            written = {id(param): param.data for param in self._params} if self._modifier_rank is not None else {}
            for param, engine, place, kind in self._gathered:
                param.data = place
                param.__class__ = kind
                engine.writes.forget()
                engine.schedule.resting = False
            for engine, params in _by_engine(self._params):
                for param in params:
                    if id(param) in written:
                        write_value(engine, param, written[id(param)])
        self._gathered.clear()


def _broadcast(values: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    """Replaces `values` by those of the rank `source`, by way of the GPU where the group's backend reaches no host memory."""
    if values.device.type == "cpu" and dist.get_backend(group) == "nccl":
        passing = values.cuda()
        dist.broadcast(passing, src=source, group=group)
        values.copy_(passing)
    else:
        dist.broadcast(values, src=source, group=group)


def _by_engine(params: list[nn.Parameter]) -> list[tuple[Engine, list[nn.Parameter]]]:
    found: dict[int, tuple[Engine, list[nn.Parameter]]] = {}
    for param in params:
        engine = owner(param)
        if engine is not None:
            found.setdefault(id(engine), (engine, []))[1].append(param)
    return list(found.values())


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing: a use of a parameter that is not gathered is refused when it happens."""
    if not isinstance(module, nn.Module):
        raise Refusal(f"a {type(module).__name__} is no nn.Module", where="register_external_parameter")


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undoes nothing."""


def is_zero_param(parameter: object) -> bool:
    """Returns whether stage 3 shards the parameter."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")


class ParameterOffload:
    """What TRL takes stage 3's hooks off by, and puts them on again; ``GatheredParameters`` lets ours rest by itself."""

    def __init__(self) -> None:
        self.module = nn.Module()
        vars(self.module)["ds_external_parameters"] = tuple  # beside none of its own
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Puts nothing on."""


#: Attributes that DeepSpeed's stage 3 sets on a parameter and that scripts look for.
_MARKS = ("ds_id", "ds_numel", "ds_persist", "ds_shape", "ds_status")


def mark(engine: Engine) -> None:
    """Sets DeepSpeed's attributes on the parameters that stage 3 shards."""
    numbered: Any
    if engine.optimizer is not None:
        engine.optimizer.parameter_offload = ParameterOffload()  # type: ignore[attr-defined]
    for number, numbered in enumerate(engine.module.parameters()):
        numbered.ds_id, numbered.ds_numel, numbered.ds_shape = number, numbered.numel(), numbered.shape
        numbered.ds_status, numbered.ds_persist = ZeroParamStatus.NOT_AVAILABLE, False


def unmark(engine: Engine) -> None:
    """Takes them away again."""
    for param in engine.module.parameters():
        for name in _MARKS:
            param.__dict__.pop(name, None)
