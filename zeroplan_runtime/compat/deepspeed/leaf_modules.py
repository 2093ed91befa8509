"""``deepspeed.utils.set_z3_leaf_modules`` and its siblings: marks that DeepSpeed's stage 3 needs and the runtime does not.

DeepSpeed gathers each module's own parameters, which goes wrong where ranks call other modules, as a mixture's experts; a leaf
is gathered whole. The runtime gathers whole units, a block each, so the marks change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


def z3_leaf_module(model: nn.Module) -> bool:
    """Returns whether a module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that are marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks a module, or takes its mark away."""
    marked: Any = model
    marked._z3_leaf = flag


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks the modules of some classes, given as classes, names, or full names; returns them.

    Raises:
        ValueError: when there is none.
    """
    return _of_classes(model, list(leaf_module_classes), True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Takes marks away; as :func:`set_z3_leaf_modules`."""
    return _of_classes(model, list(leaf_module_classes), False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by their names; returns them, and the names that no module has.

    Raises:
        ValueError: for a name that no module has.
    """
    return _of_names(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by how their names end; as :func:`set_z3_leaf_modules_by_name`."""
    return _of_names(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def _of_classes(model: nn.Module, classes: list[type | str], flag: bool, raises: bool) -> list[nn.Module]:
    if not all(isinstance(one, type | str) for one in classes):
        raise AssertionError(f"leaf_module_classes must be a list of types or names, got {classes}")
    kinds, names = tuple(one for one in classes if isinstance(one, type)), {one for one in classes if isinstance(one, str)}
    found: list[nn.Module] = []
    for module in model.modules():
        own = type(module)
        if isinstance(module, kinds) or {own.__name__, f"{own.__module__}.{own.__qualname__}"} & names:
            set_z3_leaf_module(module, flag)
            found.append(module)
    if not found and raises:
        raise ValueError(f"No modules of type {classes} found in model {model}")
    return found


def _of_names(
    model: nn.Module, wanted: Iterable[str], fits: Callable[[str, str], bool], flag: bool, raises: bool
) -> tuple[list[nn.Module], list[str]]:
    found: dict[int, nn.Module] = {}
    missing = []
    for text in wanted:
        fitting = [module for name, module in model.named_modules() if fits(name, text)]
        for module in fitting:
            set_z3_leaf_module(module, flag)
            found[id(module)] = module
        if not fitting:
            missing.append(text)
    if missing and raises:
        raise ValueError(f"No modules named {missing} found in model {model}")
    return list(found.values()), missing
