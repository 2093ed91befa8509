"""Stands for what DeepSpeed's tests import and the runtime has not, so that a test fails only where it uses such a thing."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from zeroplan_runtime.compat.deepspeed.install import install

#: Numbers that tests take from DeepSpeed, by their full names.
_CONSTANTS = {"deepspeed.runtime.swap_tensor.MIN_SWAPPABLE_BYTES": 1 << 20}


class _Absent(type):
    """The class of placeholders: they can be imported and derived from, and no object is an instance of one."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(f"{cls.__qualname__}.{name}")

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"absent: {next(base.__qualname__ for base in cls.__mro__ if base.__module__ == __name__)}")


def placeholder(path: str) -> _Absent:
    """Make a class that stands for DeepSpeed's name `path`."""
    return _Absent(path.rpartition(".")[2], (), {"__qualname__": path, "__module__": __name__})


class _AbsentModule(ModuleType):
    """A module of DeepSpeed that the runtime has not; its attributes are placeholders."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        return _CONSTANTS[path] if path in _CONSTANTS else placeholder(path)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "deepspeed" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def install_with_placeholders() -> None:
    """Installs ``zeroplan_runtime.compat.deepspeed`` as ``deepspeed``, with placeholders for everything that it has not."""
    kind: Any = type(install())
    own = kind.__getattr__

    def own_or_absent(module: ModuleType, name: str) -> Any:
        try:
            return own(module, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return placeholder(f"{module.__name__}.{name}")

    kind.__getattr__ = own_or_absent
    sys.meta_path.insert(0, _Finder())
