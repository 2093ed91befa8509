"""Stage 3's leaf modules: gathered whole, children without hooks of their own."""

from __future__ import annotations

from collections.abc import Sequence

from zeroplan.core.zero_config import ZeroConfig
from zeroplan.tape.expanded import TapeModule

#: zero/parameter_offload.py, _get_granularity_recursively: a module with more elements is never made a leaf.
LARGEST_LEAF = 1_000_000_000

_CONTAINERS = frozenset({"Container", "Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict"})


def subtree_params(modules: Sequence[TapeModule], root: int) -> tuple[int, ...]:
    """Return the parameters of a module and all below it (children follow their parents)."""
    inside = {root}
    params = list(modules[root].params)
    for m in range(root + 1, len(modules)):
        if modules[m].parent in inside:
            inside.add(m)
            params += modules[m].params
    return tuple(dict.fromkeys(params))


def leaf_modules(modules: Sequence[TapeModule], numel: Sequence[int], zero: ZeroConfig) -> frozenset[int]:
    """Return the modules that ``leaf_module`` names by class, name or suffix, and those that the granularity threshold makes
    leaves.

    Sources: runtime/zero/leaf_module_config.py, utils/z3_leaf_module.py, zero/parameter_offload.py
    """
    classes = {name.rpartition(".")[2] for name in zero.stage3.leaf_module.classes}
    leaves = {
        m
        for m, module in enumerate(modules)
        if module.type in classes
        or module.name in zero.stage3.leaf_module.names
        or any(module.name.endswith(suffix) for suffix in zero.stage3.leaf_module.name_suffixes)
    }
    if zero.stage3.module_granularity_threshold > 0:
        leaves |= _by_granularity(modules, numel, zero.stage3.module_granularity_threshold)
    return frozenset(leaves)


def inside_of(modules: Sequence[TapeModule], leaves: frozenset[int]) -> list[bool]:
    """Mark the modules inside a leaf module, whose children have no hooks."""
    inside = [False] * len(modules)
    for m, module in enumerate(modules):
        parent = module.parent
        inside[m] = parent >= 0 and (parent in leaves or inside[parent])
    return inside


def _by_granularity(modules: Sequence[TapeModule], numel: Sequence[int], threshold: int) -> set[int]:
    children: list[list[int]] = [[] for _ in modules]
    for m, module in enumerate(modules):
        if module.parent >= 0:
            children[module.parent].append(m)
    layers, counts, grain = [0] * len(modules), [0] * len(modules), [0] * len(modules)
    never = 1 << 62
    for m in range(len(modules) - 1, -1, -1):
        counts[m] = sum(numel[p] for p in modules[m].params) + sum(counts[c] for c in children[m])
        layers[m] = sum(layers[c] for c in children[m])
        grain[m] = never
        if counts[m] and not children[m]:
            layers[m] = 1
        elif counts[m] and modules[m].type not in _CONTAINERS:
            layers[m] += 1
            if counts[m] <= LARGEST_LEAF:
                grain[m] = counts[m] // layers[m]
    leaves: set[int] = set()
    pending = [m for m, module in enumerate(modules) if module.parent < 0]
    while pending:
        m = pending.pop()
        if not counts[m]:
            continue
        if grain[m] <= threshold:
            leaves.add(m)
        else:
            pending += children[m]
    return leaves
