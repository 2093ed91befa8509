"""Keeps ``torch.compile`` out of the runtime: a compiled model breaks its graph where a unit begins and ends.

Note [Hooks under torch.compile]
    Dynamo traces the hooks of a module that it compiles. The runtime's hooks issue collectives, record events and change the
    classes of parameters, none of which can be part of a graph. ``torch.compiler.disable`` keeps dynamo out, but imports it,
    which takes more than a second; so hooks are wrapped only once somebody else has imported it. The computation of each unit
    is then a graph of its own, whether the model is compiled as a whole or block by block.

Note [What the uncompiled micro batch leaves]
    The first micro batch is checked, which is done uncompiled, and holds what an eager one holds. The allocator would keep its
    segments for good, though compiled micro batches need fewer and other ones. So they are given back once, before the first
    compiled forward. That waits for the device, and changes no later step.

Note [CUDA graphs]
    Their replays would find every parameter where it was, since slots keep their addresses. But what a graph made lies in a
    memory pool of the graphs' own as long as they live: activations and a backward's gradients would lie beside the buffers
    that the runtime frees for them, and a forward that gradient checkpointing runs again would replay between two backwards.
    No plan has that memory and no GPU has run it: modes with CUDA graphs are refused. They would save the gaps between kernels:
    of a 1B's compiled step on two H200s at most 25.6 of 64.2 ms at micro batch 1, 6.2 of 133.5 at 4 (benchmarks/results/limit).

Note [Compiled parts]
    A parameter that ``tp`` or ``ep`` divides is a DTensor whose part lies in the Arena beside others'. Dynamo makes fake ones
    of a graph's parameters, and of DTensors whose parts share memory it cannot (torch 2.13, ``_subclasses/meta_utils.py``,
    ``meta_tensor``: "Attempted to set the storage of a tensor on device cpu to a storage on different device meta"). Pipeline
    stages have whole parameters and are compiled like any model.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroplan.core.errors import BadInput
from zeroplan_runtime.local_tensors import is_distributed

_Call = TypeVar("_Call", bound=Callable[..., Any])


def may_compile() -> bool:
    """Returns whether something of this process may have been compiled by dynamo."""
    return "torch._dynamo" in sys.modules


class _Opaque:
    """A hook that dynamo does not look into."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook
        self._call = torch.compiler.disable(hook, reason="zeroplan_runtime runs outside graphs")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._hook.__reduce_ex__(protocol)


_whole: list[Callable[..., Any]] = []


def whole_in_graphs(function: _Call) -> _Call:
    """Marks a function as one node of dynamo's graphs, which AOTAutograd looks into. Dynamo hears of it once it is there."""
    _whole.append(function)
    return function


def keep_out_of_graphs(handles: Iterable[RemovableHandle]) -> None:
    """Makes the hooks of `handles` opaque to dynamo, and tells it of what is whole. Each keeps its place among its module's
    hooks.
    """
    for function in _whole:
        torch.compiler.allow_in_graph(function)
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            hooks[handle.id] = _Opaque(hooks[handle.id])


def compile_units(model: nn.Module, blocks: Sequence[nn.Module], *, hooked: bool, args: Any, kwargs: Any) -> None:
    """Compiles each block in place and, if hooks part the units or where there is no block, the model around them.

    Gradient checkpointing keeps dynamo away from what it wraps, so blocks are compiled by themselves. A graph over several
    would hold the gradients of all of them until its backward ends, so the model around them is one only where hooks part it.

    Raises:
        BadInput: as ``Engine.compile``.
    """
    if kwargs.get("fullgraph") and hooked:
        remedy = "leave fullgraph out, or use zeroplan_runtime.compile_blocks(model, fullgraph=True) before initialize()"
        raise BadInput("hooks between the units part the graph", where="engine.compile", remedy=remedy)
    require_whole(model)
    for block in blocks:
        block.compile(*args, **kwargs)
    if hooked or not blocks:
        model.compile(*args, **kwargs)
    refuse_compiled(model)


def is_compiled(model: nn.Module) -> bool:
    """Returns whether a module of the model, or the model itself, runs compiled."""
    return any(_compiled_of(module) is not None for module in model.modules())


def _compiled_of(module: nn.Module) -> Any:
    """What ``torch.compile`` made of this module: of its call, of its forward, or a module around it; None for nothing."""
    for made in (module._compiled_call_impl, vars(module).get("forward"), module):
        if hasattr(made, "get_compiler_config"):
            return made
    return None


def is_graph(module: nn.Module) -> bool:
    """Returns whether this module runs compiled: its backward returns the gradients of its parameters at once."""
    return _compiled_of(module) is not None


def require_whole(model: nn.Module) -> None:
    """Refuses to compile a model whose parameters ranks have parts of. See Note [Compiled parts].

    Raises:
        BadInput: naming a parameter.
    """
    name = next((name for name, param in model.named_parameters() if is_distributed(param)), None)
    if name is not None:
        raise BadInput(
            f"ranks have parts of {name!r}, and torch.compile does not take such parameters where they lie side by side",
            where="torch.compile",
            remedy="train it uncompiled, or divide it by pipeline stages",
        )


def refuse_compiled(model: nn.Module) -> None:
    """Refuses a model, or modules of it, that were compiled with CUDA graphs, or of which ranks have parts of parameters.

    See Note [CUDA graphs] and Note [Compiled parts].

    Raises:
        BadInput: naming the module or a parameter.
    """
    if is_compiled(model):
        require_whole(model)
    for name, module in model.named_modules():
        compiled = _compiled_of(module)
        settings = None if compiled is None else compiled.get_compiler_config()
        if settings and settings.get("triton.cudagraphs"):
            raise BadInput(
                "CUDA graphs keep activations and gradients in a memory pool of their own, which the runtime cannot free",
                where=f"torch.compile of {name or type(module).__name__}",
                remedy="leave mode out, or use max-autotune-no-cudagraphs",
            )


@contextmanager
def uncompiled(mode: AbstractContextManager[object]) -> Iterator[None]:
    """The context `mode`, with compiled functions run as written: under a dispatch mode dynamo gives them up for good."""
    with mode, torch.compiler.set_stance("force_eager") if may_compile() else nullcontext():
        yield


def outside_graphs(function: _Call) -> _Call:
    """A method that dynamo does not look into, where the object itself is compiled."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(_Call, call)
