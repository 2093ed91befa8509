"""Keeps ``torch.compile`` out of the runtime: a compiled model breaks its graph where a unit begins and ends.

Note [Hooks under torch.compile]
    Dynamo traces the hooks of a module that it compiles. The runtime's hooks issue collectives, record events and change the
    classes of parameters, none of which can be part of a graph. ``torch.compiler.disable`` keeps dynamo out, but imports it,
    which takes more than a second; so hooks are wrapped only once somebody else has imported it. The computation of each unit
    is then a graph of its own, whether the model is compiled as a whole or block by block.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch.utils.hooks import RemovableHandle

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


def keep_out_of_graphs(handles: Iterable[RemovableHandle]) -> None:
    """Makes the hooks of `handles` opaque to dynamo. Each keeps its place among its module's hooks."""
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            hooks[handle.id] = _Opaque(hooks[handle.id])


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
