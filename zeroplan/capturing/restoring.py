"""Puts back what a capture within a process replaced, so that the process goes on as before.

Note [What a capture replaces]
    A capture sets attributes of modules and classes, adds entries to torch's registries of hooks, and lets libraries believe
    in a GPU, which some of them remember. Of every home whose attributes it sets these are noted before, and those that differ
    afterwards are set back: of those here, of each library for which a hook waits, with its classes, as it runs, and of what
    a stand-in names (:func:`zeroplan.capturing.hooks.imports.changes`).
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import shutil
import socket
import subprocess
import sys
from types import ModuleType
from typing import Any

_MISSING = object()
#: Libraries that remember what they found out about the machine.
_REMEMBERS = ("accelerate", "transformers", "lightning", "lightning_fabric", "pytorch_lightning", "trl", "peft", "diffusers")


def _homes() -> list[Any]:
    """Modules and classes whose attributes a capture sets."""
    import torch.distributed
    import torch.nn.utils.clip_grad
    import torch.utils._foreach_utils
    import torch.utils.checkpoint
    import torch.utils.data

    named = (
        "torch", "torch.cuda", "torch.cuda.memory", "torch.cuda.random", "torch.cuda.nvtx", "torch.cuda.nccl", "torch.version",
        "torch.backends.cuda", "torch.random", "torch.accelerator", "torch.serialization", "torch.autograd",
        "torch.autograd.graph", "torch.utils.checkpoint", "torch.utils._foreach_utils", "torch.optim.optimizer",
        "torch.nn.utils.clip_grad", "torch.distributed", "torch.distributed.distributed_c10d", "torch.nn.modules.module",
    )  # fmt: skip
    modules = [sys.modules[name] for name in named if name in sys.modules]
    classes = [torch.utils.data.DataLoader, torch.nn.Parameter, torch.nn.RNNBase, socket.socket]
    return [builtins, io, os, shutil, socket, subprocess, *modules, *classes]


def _registries() -> list[dict[Any, Any]]:
    """Torch's registries of hooks, and the checks of checkpointing."""
    home, optimizer = sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"]
    names = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_forward_hooks_always_called")
    found = [getattr(home, name) for name in names]
    found += [getattr(optimizer, name) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")]
    checks = getattr(sys.modules["torch.utils.checkpoint"], "_allowed_determinism_checks_to_fns", None)
    return found if checks is None else [*found, checks]


class Restoring:
    """Notes what there is, and puts it back."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._environment = dict(os.environ)
        for home in _homes():
            self.note(home)
        self._registries = [(one, dict(one)) for one in _registries()]
        self._waiting = _waiting()
        self._finders = list(sys.meta_path)
        self._forget()

    def note(self, home: Any) -> None:
        """Note the attributes of a module or class; of a module its classes', too, where it is none of torch's or Python's."""
        if id(home) in self._noted:
            return
        self._noted[id(home)] = home, dict(vars(home))
        name = getattr(home, "__name__", "")
        if isinstance(home, ModuleType) and "." in name and not name.startswith("torch."):
            for value in list(vars(home).values()):
                if isinstance(value, type) and value.__module__ == name:
                    self.note(value)

    def restore(self) -> None:
        """Put everything back."""
        for home, before in self._noted.values():
            for name, value in dict(vars(home)).items():
                if before.get(name, _MISSING) is not value and name in before:
                    setattr(home, name, before[name])
                elif name not in before and _is_of_a_capture(value):
                    delattr(home, name)
        for registry, entries in self._registries:
            for key in [key for key in registry if key not in entries]:
                del registry[key]
            registry.update(entries)
        for name in [name for name, one in sys.modules.items() if _is_of_a_capture(type(one))]:
            del sys.modules[name]
        sys.meta_path[:] = [one for one in sys.meta_path if one in self._finders or not _is_of_a_capture(type(one))]
        waiting = _waiting()
        for name in [name for name in waiting if name not in self._waiting]:
            del waiting[name]
        for name in [name for name in os.environ if name not in self._environment]:
            del os.environ[name]
        os.environ.update(self._environment)
        self._forget()

    @staticmethod
    def _forget() -> None:
        """Let libraries ask anew what the machine has."""
        for name, module in list(sys.modules.items()):
            if module is None or name.partition(".")[0] not in _REMEMBERS:
                continue
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
        state: Any = sys.modules.get("accelerate.state")
        if state is not None:
            state.AcceleratorState._reset_state(reset_partial_state=True)
            state.GradientState._reset_state()


def _is_of_a_capture(value: Any) -> bool:
    made = value.fget if isinstance(value, property) else value
    return str(getattr(made, "__module__", "")).startswith("zeroplan.capturing")


def _waiting() -> dict[str, Any]:
    from zeroplan.capturing.hooks import imports

    return imports._waiting
