"""The runtime's units, found in a ModelSpec by the rules that `zeroplan_runtime.units` applies to a live module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from zeroplan.core.arena.layout import EXPERTS_SUFFIX, WIDE_NUMEL, ParamShape, UnitKind, UnitShape, is_narrow
from zeroplan.core.errors import BadInput
from zeroplan.core.expert_parallel import is_expert
from zeroplan.models.spec import ModelSpec, Tensor

#: Kinds of tensors whose modules may be units of their own: plain embeddings and linear layers.
_WIDE_KINDS = frozenset({"embedding", "linear", "head"})
#: What peft puts before the names of the model that it wraps; a spec's names lack it.
PEFT_PREFIX = "base_model.model."

#: Embeddings that are classes of their own in transformers, by model type and leaf name: their forward is not
#: ``nn.Embedding``'s (it scales, or shifts positions), so the runtime leaves them to the root.
_OWN_CLASSES = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "embed_tokens"),
    **dict.fromkeys(("opt", "bart", "mbart", "whisper"), "embed_positions"),
}

_ROOT = ""


def unit_shapes(
    spec: ModelSpec, *, wide_numel: int = WIDE_NUMEL, held: Mapping[str, int] | None = None, shares_experts: bool = False
) -> list[UnitShape]:
    """Assign every parameter of the model to exactly one unit: the root first, the others in order of definition.

    Blocks are the members of every stack of two or more; an embedding or linear layer outside them with at least
    `wide_numel` elements of its own is a unit, too; everything else, and what is tied across units, is the root's.

    Args:
        wide_numel: see above.
        held: the elements that one rank holds of each parameter, by name, where it holds parts of some or lacks others (tensor
            and pipeline parallelism); None where it holds all.
        shares_experts: the experts of a block are a unit behind the block's.

    Raises:
        BadInput: for shared experts that are in no block of a stack.
    """
    tensors = _held(list(_placed(spec)), held)
    homes = _homes(tensors, wide_numel, _OWN_CLASSES.get(spec.model_type, ""))
    shared = _shared(tensors, homes)
    members: dict[str, list[ParamShape]] = {_ROOT: []}
    for name, block, tensor in tensors:
        home = _home(name, block, homes)
        members.setdefault(home, [])
        if tensor.tied_to is None:
            members[_ROOT if name in shared else home].append(
                ParamShape(name, tensor.numel, tensor.trainable, narrow=is_narrow(tensor.shape))
            )
    made = []
    for home, params in members.items():
        experts = tuple(param for param in params if shares_experts and is_expert(param.name))
        own = tuple(param for param in params if param not in experts)
        kind = homes[home] if home else UnitKind.ROOT
        if experts and (kind is not UnitKind.BLOCK or not own):
            raise BadInput(
                f"{experts[0].name!r} is an expert's, and in no stack of blocks", where="--ep", remedy="leave it at 1"
            )
        parts = ((home or "root", kind, own), (f"{home}{EXPERTS_SUFFIX}", UnitKind.EXPERTS, experts))
        made += [UnitShape(name, what, held) for name, what, held in parts if held]
    return made


def _placed(spec: ModelSpec) -> Iterator[tuple[str, str, Tensor]]:
    """Yield every tensor, tied ones too, with its full name and the block that it lies in (or "")."""
    stacks: dict[str, int] = {}
    for unit in spec.units:
        stacks[unit.name] = stacks.get(unit.name, 0) + unit.count
    marked = any(unit.block and stacks[unit.name] >= 2 for unit in spec.units)
    for unit in spec.units:
        stack = "{}" in unit.name and stacks[unit.name] >= 2 and (unit.block or not marked)
        for prefix in unit.names():
            for tensor in unit.tensors:
                yield (f"{prefix}.{tensor.name}" if prefix else tensor.name), (prefix if stack else ""), tensor


def _held(tensors: list[tuple[str, str, Tensor]], held: Mapping[str, int] | None) -> list[tuple[str, str, Tensor]]:
    """Return the parts that a rank holds, as tensors of one dimension. A stack of which it holds one block is none to it."""
    if held is None:
        return tensors
    kept = [(name, block, tensor) for name, block, tensor in tensors if (tensor.tied_to or name) in held]
    sizes = [(name, block, replace(tensor, shape=(held[tensor.tied_to or name],))) for name, block, tensor in kept]
    members: dict[str, set[str]] = {}
    for _, block, _ in sizes:
        members.setdefault(block.rpartition(".")[0], set()).add(block)
    return [(name, block if len(members[block.rpartition(".")[0]]) > 1 else "", tensor) for name, block, tensor in sizes]


def _homes(tensors: list[tuple[str, str, Tensor]], wide_numel: int, own_class: str) -> dict[str, UnitKind]:
    """The units beside the root, by the full name of their module; `own_class` names modules that are none."""
    tied = {tensor.tied_to for _, _, tensor in tensors} | {name for name, _, tensor in tensors if tensor.tied_to}
    homes: dict[str, UnitKind] = {}
    loose: dict[str, list[tuple[str, Tensor]]] = {}
    for name, block, tensor in tensors:
        if block:
            homes[block] = UnitKind.BLOCK
        else:
            loose.setdefault(name.rpartition(".")[0], []).append((name, tensor))
    for module, own in loose.items():
        plain = any(tensor.kind in _WIDE_KINDS for _, tensor in own) and not any(name in tied for name, _ in own)
        if module and plain and module.rpartition(".")[2] != own_class and sum(tensor.numel for _, tensor in own) >= wide_numel:
            homes[module] = UnitKind.WIDE
    return homes


def _home(name: str, block: str, homes: dict[str, UnitKind]) -> str:
    module = name.rpartition(".")[0]
    return block or (module if module in homes else _ROOT)


def _shared(tensors: list[tuple[str, str, Tensor]], homes: dict[str, UnitKind]) -> set[str]:
    """Return the names of the tensors that modules of more than one unit hold."""
    users: dict[str, set[str]] = {}
    for name, block, tensor in tensors:
        users.setdefault(tensor.tied_to or name, set()).add(_home(name, block, homes))
    return {name for name, where in users.items() if len(where) > 1}
