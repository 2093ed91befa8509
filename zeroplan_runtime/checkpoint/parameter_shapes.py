"""How parameters lie: flat tensors in a checkpoint do not tell a matrix from its transpose, nor rows from columns.

A checkpoint's state names the shape of each parameter (``shapes``) and, where ranks hold parts of the model, the shape of each
part and how it was cut (``parts``). Loading compares them with the model's, since as many elements would fit another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zeroplan.core.errors import BadInput
from zeroplan_runtime.engine_parts import EngineParts
from zeroplan_runtime.local_tensors import dimensions_of, is_distributed, local_of
from zeroplan_runtime.units import plain_named


def parts_held(engine: EngineParts) -> dict[str, str]:
    """Returns how the parameters lie of which this rank is the first that holds its part; nothing where all hold the whole."""
    if not engine.ranks.degrees:
        return {}
    return {name: cut for name, cut, is_first in _parts(engine) if is_first}


def parameter_groups(engine: EngineParts) -> dict[str, int]:
    """Returns the number of the optimizer's group that has each trained parameter, by the parameter's name."""
    return {
        unit.name_of(i): unit.layout.shape.params[index].group
        for unit in engine.model_states.units
        if unit.trainable is not None
        for i, index in enumerate(unit.trainable.layout.params)
    }


def require_same_groups(engine: EngineParts, count: int, saved: Mapping[str, int], path: str | Path) -> None:
    """Check that parameters are in the optimizer's groups in which they were saved.

    Args:
        engine: the engine, which has an optimizer.
        count: the checkpoint's groups.
        saved: the group of each parameter by name; those that it lacks are not compared.
        path: what to name in an error.

    Raises:
        BadInput: for another number of groups, or a parameter in another one.
    """
    groups = len(engine.optimizer.param_groups) if engine.optimizer is not None else 0
    if count != groups:
        raise BadInput(
            f"the checkpoint's optimizer has {count} parameter groups, not {groups}",
            where=str(path),
            remedy="make the optimizer as it was, or load_optimizer_states=False",
        )
    for name, group in parameter_groups(engine).items():
        if saved.get(name, group) != group:
            raise BadInput(
                f"{name!r} was in parameter group {saved[name]} and is in group {group} here",
                where=str(path),
                remedy="make the groups as they were, in their order, or load_optimizer_states=False",
            )


def require_same_order(engine: EngineParts, state: dict[str, Any], path: Path) -> None:
    """Checks the order of elements in a checkpoint's tensors.

    Args:
        engine: the engine.
        state: the checkpoint's.
        path: its folder.

    Raises:
        BadInput: for a parameter of another shape, or one that was cut otherwise.
    """
    model = state.get("model", {})
    cuts = model.get("parts", {})
    for name, cut, _ in _parts(engine):
        if cuts.get(name, cut) != cut:
            raise _another(name, cuts[name], cut, path)
    if engine.ranks.degrees:  # the shapes are those of the first rank's model, as one of several stages
        return
    shapes = model.get("shapes", {})
    for name, param in plain_named(engine.module.named_parameters()):
        if name in shapes and _long(shapes[name]) != _long(param.shape):
            raise _another(name, str(tuple(shapes[name])), str(tuple(param.shape)), path)


def _another(name: str, saved: str, here: str, path: Path) -> BadInput:
    return BadInput(
        f"{name!r} was saved as {saved} and is {here} here", where=str(path), remedy="build the model that was saved"
    )


def _parts(engine: EngineParts) -> Iterator[tuple[str, str, bool]]:
    """Yields each parameter's name in a checkpoint, how this rank's part lies, and whether this rank is the first with it."""
    model_states = engine.model_states
    for unit in model_states.units:
        for placed in unit.placed():
            first = model_states.comm_of(placed.flat.layout).rank == 0
            yield f"{model_states.part_of(unit)}{placed.name}", _cut(placed.param), first


def _cut(param: torch.Tensor) -> str:
    """The shape of this rank's part, and the dimension that each dimension of the mesh divides."""
    with torch._C.DisableTorchFunctionSubclass():
        said = str(tuple(local_of(param).shape))
        if not is_distributed(param):
            return said
        pairs = zip(dimensions_of(param), param.placements, strict=True)
        return " ".join([said, *(f"{name}:{placement}" for name, placement in pairs if not placement.is_replicate())])


def _long(shape: Any) -> list[int]:
    """A shape without its dimensions of one element, which change no order."""
    return [int(size) for size in shape if size != 1]
