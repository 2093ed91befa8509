"""Registers the strategies in Lightning's registry, at once where Lightning is imported already, else when it is.

Lightning has an entry point for callbacks, which it reads after it has looked up the strategy's name, and none for strategies.
So :func:`register_strategies` watches for the import of Lightning's module of strategies and registers them behind it; a
program that does not use Lightning never imports it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Mapping
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: The packages that hold Lightning, of the newer and the older name.
NAMESPACES = ("lightning.pytorch", "pytorch_lightning")

#: Names for ``Trainer(strategy=…)``, with what each gives to the strategy.
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "zeroplan": {"stage": 2},
    "zeroplan_stage_0": {"stage": 0},
    "zeroplan_stage_1": {"stage": 1},
    "zeroplan_stage_1_offload": {"stage": 1, "offload_optimizer": True},
    "zeroplan_stage_2": {"stage": 2},
    "zeroplan_stage_2_offload": {"stage": 2, "offload_optimizer": True},
    "zeroplan_stage_3": {"stage": 3},
    "zeroplan_stage_3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
}


def register_strategies() -> None:
    """Registers :data:`STRATEGIES` in each package of Lightning, now or when it is imported. A second call does nothing."""
    waiting = set()
    for namespace in NAMESPACES:
        module = sys.modules.get(f"{namespace}.strategies")
        if module is not None:
            _register(namespace, module)
        else:
            waiting.add(namespace)
    if waiting and not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher(waiting))


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the modules that it waits for register the strategies when they have been executed."""

    def __init__(self, namespaces: set[str]) -> None:
        self._waiting = {f"{namespace}.strategies": namespace for namespace in namespaces}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self._waiting:
            return None
        namespace = self._waiting.pop(name)  # the search below comes here again and must go on to the other finders
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(namespace, module)

        loader.exec_module = execute_and_register
        return spec


def _register(namespace: str, module: Any) -> None:
    for name, options in STRATEGIES.items():
        if name not in module.StrategyRegistry:
            described = ", ".join(f"{key} {value}" for key, value in options.items())
            make = partial(_make, namespace)
            module.StrategyRegistry.register(name, make, description=f"zeroplan's runtime: {described}", **options)


def _make(namespace: str, **options: Any) -> Any:
    from zeroplan_runtime.integrations.lightning.strategy import strategy_class  # imports Lightning

    return strategy_class(namespace)(**options)
