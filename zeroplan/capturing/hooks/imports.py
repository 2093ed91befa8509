"""Calls a function once a module is imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Hook = Callable[[Any], None]
_waiting: dict[str, list[Hook]] = {}
#: Called with a module or class before attributes of it are set.
on_change: Hook | None = None


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._busy: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting or fullname in self._busy:
            return None
        self._busy.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        own = spec.loader.exec_module

        def run(module: ModuleType) -> None:
            own(module)
            for hook in _waiting.pop(fullname, ()):
                _call(hook, module)

        spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


def when_imported(name: str, hook: Hook) -> None:
    """Call `hook` with a module once it is there."""
    module = sys.modules.get(name)
    if module is not None:
        _call(hook, module)
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting.setdefault(name, []).append(hook)


def changes(*homes: Any) -> None:
    """Say of which modules and classes attributes are about to be set, so that a capture within a process can put them back.

    A module for which a hook waits is one of them already, and its classes, where it is none of torch's.
    """
    if on_change is not None:
        for home in homes:
            on_change(home)


def _call(hook: Hook, module: Any) -> None:
    changes(module)
    hook(module)
