"""Finds the units of a module: blocks, large embeddings and heads, and the root. See Note [Layout] in core/arena/layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from zeroplan.core.arena.layout import EXPERTS_SUFFIX, WIDE_NUMEL, ParamShape, UnitKind, UnitShape, is_narrow
from zeroplan.core.errors import BadInput
from zeroplan_runtime.local_tensors import local_of

Policy = Callable[[str, nn.Module], bool]
T = TypeVar("T")
#: What torch's CheckpointWrapper puts into the names of what it wraps.
_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of a live model: its shape, the module whose forward uses it, and its parameters in the shape's order."""

    shape: UnitShape
    module: nn.Module
    params: tuple[nn.Parameter, ...]


def find_blocks(model: nn.Module, policy: Policy | None = None) -> dict[str, nn.Module]:
    """Returns the modules that become block units, by full name, in the order of definition.

    Args:
        model: the whole model.
        policy: given a module's full name and the module, whether it is a block. By default the blocks are the members of
            the outermost ``nn.ModuleList`` containers with two or more members that have parameters, or, if there are none,
            of the outermost such ``nn.Sequential``.

    Raises:
        BadInput: when the policy takes a module inside another one that it takes.
    """
    if policy is not None:
        taken: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            if name and policy(name, module):
                outer = next((n for n in taken if name.startswith(n + ".")), None)
                if outer is not None:
                    raise BadInput(f"units may not nest: {name!r} is inside {outer!r}", where="policy")
                taken[name] = module
        return taken
    first_names = {id(module): name for name, module in model.named_modules()}  # a module may have several
    for container in (nn.ModuleList, nn.Sequential):
        blocks: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            if not isinstance(module, container) or any(name == block or name.startswith(block + ".") for block in blocks):
                continue
            members = {
                first_names[id(child)]: child
                for child in module.children()
                if next(child.parameters(), None) is not None and _is_called(child)
            }
            if len(members) >= 2:
                inside = [one for one in members if any(one.startswith(f"{block}.") for block in blocks)]
                blocks.update({one: child for one, child in members.items() if one not in inside})
        if blocks:
            return blocks
    return {}


def _is_called(module: nn.Module) -> bool:
    """Returns whether the module has a forward; pure containers have none, so a forward hook on them would never run."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def find_units(
    model: nn.Module,
    groups: Mapping[int, int] | None = None,
    *,
    policy: Policy | None = None,
    wide_numel: int = WIDE_NUMEL,
    experts: Callable[[nn.Parameter], bool] | None = None,
) -> list[Unit]:
    """Divides the model's parameters into units, each parameter in exactly one.

    Args:
        model: the whole model.
        groups: the optimizer group of each trainable parameter, by the parameter's ``id``; 0 where absent.
        policy: which modules are blocks; see :func:`find_blocks`.
        experts: whether a parameter is one of experts that ranks share; None where they share none.
        wide_numel: embeddings and linear layers outside the blocks with at least this many elements become units.

    Returns:
        The units: the root first, which has all other parameters, then the others in the order of definition, a block's
        experts behind it.

    Raises:
        BadInput: for shared experts outside the blocks.
    """
    groups = groups or {}
    names: dict[int, str] = {}
    owners: dict[int, list[str]] = {}  # by parameter: full names of the modules that hold it
    params: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            full = plain_name(f"{prefix}.{name}" if prefix else name)
            names.setdefault(id(param), full)
            params[id(param)] = param
            owners.setdefault(id(param), []).append(prefix)

    homes = _homes(model, owners, policy, wide_numel)
    members: dict[str, list[int]] = {"": [], **{name: [] for name in homes}}
    for key, holders in owners.items():
        found = {_home_of(holder, homes) for holder in holders}
        members[found.pop() if len(found) == 1 else ""].append(key)

    modules = [name for name, _ in model.named_modules()]
    order = ["", *sorted(homes, key=modules.index)]
    units = []
    for home in order:
        kind, module = homes[home] if home else (UnitKind.ROOT, model)
        shared = [key for key in members[home] if experts is not None and experts(params[key])]
        own = [key for key in members[home] if key not in shared]
        if shared and (kind is not UnitKind.BLOCK or not own):
            raise BadInput(
                f"{names[shared[0]]!r} is one of experts that ranks share, and in no block with other parameters",
                where="policy",
                remedy="give a policy that takes the blocks around the experts",
            )
        for name, what, keys in ((home or "root", kind, own), (f"{home}{EXPERTS_SUFFIX}", UnitKind.EXPERTS, shared)):
            if keys:
                shapes = tuple(
                    ParamShape(
                        names[k],
                        local_of(params[k]).numel(),
                        params[k].requires_grad,
                        groups.get(k, 0),
                        is_narrow(params[k].shape),
                    )
                    for k in keys
                )
                units.append(Unit(UnitShape(name, what, shapes), module, tuple(params[k] for k in keys)))
    return units


def _homes(
    model: nn.Module, owners: Mapping[int, list[str]], policy: Policy | None, wide_numel: int
) -> dict[str, tuple[UnitKind, nn.Module]]:
    """Returns the modules that are units but for the root: blocks, and outside them wide layers that share no parameter."""
    homes = {name: (UnitKind.BLOCK, block) for name, block in find_blocks(model, policy).items()}
    for name, module in model.named_modules():
        alone = all(len(owners[id(p)]) == 1 for p in module.parameters(recurse=False))
        if name and not _home_of(name, homes) and alone and _may_be_wide(module, wide_numel):
            homes[name] = (UnitKind.WIDE, module)
    return homes


def _home_of(name: str, homes: Iterable[str]) -> str:
    """Returns the first home that a module is or lies in; an empty name, the root's, for none."""
    return next((home for home in homes if name == home or name.startswith(f"{home}.")), "")


def _may_be_wide(module: nn.Module, wide_numel: int) -> bool:
    # Only these types are known to be used through their own forward; other modules may read such parameters directly.
    if type(module) not in (nn.Embedding, nn.Linear):
        return False
    return sum(local_of(p).numel() for p in module.parameters(recurse=False)) >= wide_numel


def reads_params_in_backward(module: nn.Module) -> bool:
    """Returns whether the module's backward reads its parameters; that of a plain embedding reads only the indices."""
    return not (type(module) is nn.Embedding and module.max_norm is None and not module.sparse)


def plain_name(name: str) -> str:
    """Returns a parameter's or buffer's name without that of torch's CheckpointWrapper, as a state dict has it."""
    return name.replace(_CHECKPOINT_PREFIX, "")


def plain_named(named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Yields the pairs of ``named_parameters()`` or ``named_buffers()`` with :func:`plain_name`."""
    return ((plain_name(name), value) for name, value in named)


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules whose class has a ``get_extra_state()`` of its own, by name."""
    own = {name: one for name, one in model.named_modules() if type(one).get_extra_state is not nn.Module.get_extra_state}
    return {plain_name(name): module for name, module in own.items()}


def cast_floating(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the model's persistent floating-point buffers, such as running statistics, and empty parameters to `dtype`.

    Buffers that are not saved with the model, such as rotary frequencies, keep their precision. Other parameters are cast when
    they get memory.
    """
    for param in model.parameters():
        if not param.numel() and param.is_floating_point():
            param.data = param.data.to(dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(dtype)
