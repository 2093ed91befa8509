"""LoRA (Hu et al. 2021): the same model with its parameters frozen and two small matrices beside each targeted layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.models.spec import ModelSpec, Tensor, Unit

#: peft's word for the default targets.
ALL_LINEAR = "all-linear"
_LINEAR = ("linear", "conv1d")


def with_lora(spec: ModelSpec, rank: int, targets: Sequence[str] = ()) -> ModelSpec:
    """The model as peft's LoRA trains it: base frozen, adapters added where peft registers them.

    A targeted layer of shape ``(out, in)`` keeps its parameters under ``base_layer`` and gains ``lora_A`` of shape
    ``(rank, in)`` and ``lora_B`` of shape ``(out, rank)``, both trainable. Names lack peft's prefix ``base_model.model.``.

    Args:
        spec: the base model.
        rank: the adapters' rank.
        targets: names of layers, matched as peft does (the full name or its last parts); empty or ``("all-linear",)``
            means every linear layer but the output projection. Experts that are kept as one three-dimensional parameter
            are no linear layers, and get no adapter.

    Raises:
        BadInput: when the rank is not above zero, a target matches no linear layer, or the model has no shapes.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= 1 << 20:
        raise BadInput(f"{rank!r} is no rank", where="LoRA rank", remedy="give a whole number such as 16")
    if not spec.has_shapes:
        raise BadInput(
            "a bare parameter count has no layers to adapt", where="LoRA", remedy="give a model's id, folder or config.json"
        )
    wanted = tuple(target for target in targets if target.lower() != ALL_LINEAR)
    used: set[str] = set()
    units = tuple(adapted for unit in spec.units for adapted in _adapt(unit, rank, wanted, used))
    unused = [target for target in wanted if target not in used]
    if unused or not any(tensor.trainable for unit in units for tensor in unit.tensors):
        leaves = dict.fromkeys(module.rpartition(".")[2] for unit in spec.units for module in _layers(unit))
        layers = ", ".join(list(leaves)[:12]) or "none"
        raise BadInput(
            f"{unused[0]!r} matches no linear layer of {spec.name}" if unused else f"{spec.name} has no linear layer to adapt",
            where="LoRA targets",
            remedy=(did_you_mean(unused[0], leaves) if unused else "") or f"its linear layers are {layers}",
        )
    return replace(spec, units=units)


def _layers(unit: Unit) -> list[str]:
    """Full names of the unit's first module's linear layers."""
    prefix = next(unit.names())
    return [f"{prefix}.{tensor.name}".rpartition(".")[0] for tensor in unit.tensors if tensor.kind in (*_LINEAR, "head")]


def _matched(module: str, targets: Sequence[str]) -> set[str]:
    return {target for target in targets if module == target or module.endswith(f".{target}")}


def _adapt(unit: Unit, rank: int, targets: Sequence[str], used: set[str]) -> tuple[Unit, ...]:
    """The unit with its adapters; split where a target names one of its modules by index."""
    if unit.count > 1 and any(any(ch.isdigit() for ch in target) for target in targets):
        singles = [replace(unit, first=unit.first + i, count=1) for i in range(unit.count)]
        adapted = [_adapt_tensors(one, rank, targets, used) for one in singles]
        if any(one != adapted[0] for one in adapted):
            return tuple(replace(one, tensors=tensors) for one, tensors in zip(singles, adapted, strict=True))
        return (replace(unit, tensors=adapted[0]),)
    return (replace(unit, tensors=_adapt_tensors(unit, rank, targets, used)),)


def _adapt_tensors(unit: Unit, rank: int, targets: Sequence[str], used: set[str]) -> tuple[Tensor, ...]:
    prefix = next(unit.names())
    found: list[Tensor] = []
    hit = ""  # the adapted layer whose tensors are being walked, as a name within the unit
    pair: tuple[Tensor, ...] = ()
    for tensor in unit.tensors:
        layer, _, leaf = tensor.name.rpartition(".")
        if pair and layer != hit:
            found += pair
            hit, pair = "", ()
        if tensor.kind in (*_LINEAR, "head"):
            module = f"{prefix}.{layer}" if prefix and layer else prefix or layer
            names = _matched(module, targets)
            used |= names
            if names or (not targets and tensor.kind != "head"):
                hit, pair = layer, _adapters(tensor, layer, rank)
        inside = bool(pair) and layer == hit
        name = f"{layer}.base_layer.{leaf}".removeprefix(".") if inside else tensor.name
        found.append(replace(tensor, name=name, trainable=False))
    return (*found, *pair)


def _adapters(tensor: Tensor, layer: str, rank: int) -> tuple[Tensor, Tensor]:
    outputs, inputs = tensor.shape if tensor.kind != "conv1d" else tensor.shape[::-1]
    dot = "." if layer else ""
    return (
        Tensor(f"{layer}{dot}lora_A.default.weight", (rank, inputs)),
        Tensor(f"{layer}{dot}lora_B.default.weight", (outputs, rank)),
    )
