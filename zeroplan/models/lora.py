"""LoRA (Hu et al. 2021): the same model with its parameters frozen and two small matrices beside each targeted layer.

Note [Experts]
    transformers 5 keeps a block's experts in two parameters of shape ``(experts, out, in)``. For the architectures in
    :data:`_EXPERT_NAMES` peft takes the names that the experts' layers had before (``gate_proj``, ``up_proj``, ``down_proj``,
    the router ``gate``) to mean those parameters, and no longer linear layers of that name elsewhere. One adapter then
    spans all experts: ``lora_A (experts rank, in)`` and ``lora_B (out, experts rank)``, with twice the rank where gate and
    up are one parameter. Source: peft 0.21, ``utils/transformers_weight_conversion.py`` and ``tuners/lora/layer.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.models.spec import ModelSpec, SpecUnit, Tensor

#: peft's word for the default targets.
ALL_LINEAR = "all-linear"
_LINEAR = ("linear", "conv1d", "head")
_LARGEST_RANK = 1 << 20

_MIXTRAL = {"gate": "gate", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
_QWEN = {"gate": "gate", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
#: Architectures whose experts had layers of those names (transformers 5.17, ``conversion_mapping.py``).
_LIKE_QWEN = (
    *("afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo"),
    *("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum", "olmoe"),
    *("qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_omni_moe_thinker", "solar_open"),
)
#: model_type -> (a target's last word -> what it means); see Note [Experts].
_EXPERT_NAMES: dict[str, dict[str, str]] = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), _MIXTRAL),
    **dict.fromkeys(_LIKE_QWEN, _QWEN),
}


@dataclass(frozen=True, slots=True)
class _Plan:
    """The adapted parameters: `layers` as peft matches them (None means every linear one), and the experts' parameters."""

    rank: int
    layers: tuple[str, ...] | None
    experts: frozenset[str] = frozenset()
    expert_words: frozenset[str] = frozenset()

    def wants(self, module: str, kind: str) -> bool:
        """Return whether the linear layer of that full name is adapted."""
        leaf = module.rpartition(".")[2]
        if leaf in self.expert_words:
            return False
        if self.layers is None:
            return kind != "head"
        return any(module == target or module.endswith(f".{target}") for target in self.layers)


def with_lora(spec: ModelSpec, rank: int, targets: Sequence[str] = ()) -> ModelSpec:
    """Return the model as peft's LoRA trains it: base frozen, adapters added where peft registers them.

    A targeted layer of shape ``(out, in)`` keeps its parameters under ``base_layer`` and gains ``lora_A`` of shape
    ``(rank, in)`` and ``lora_B`` of shape ``(out, rank)``, both trainable. Names lack peft's prefix ``base_model.model.``;
    for mixtures of experts see Note [Experts].

    Args:
        targets: names of layers, matched as peft does (the full name or its last parts); empty or ``("all-linear",)``
            means every linear layer but the output projection.

    Raises:
        BadInput: when the rank is not above zero, no target matches a linear layer, or the model has no shapes.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= _LARGEST_RANK:
        raise BadInput(f"{rank!r} is no rank", where="LoRA rank", remedy="give a whole number such as 16")
    if not spec.has_shapes:
        remedy = "give a model's id, folder or config.json"
        raise BadInput("a bare parameter count has no layers to adapt", where="LoRA", remedy=remedy)
    plan = _plan(spec, rank, tuple(target for target in targets if target.lower() != ALL_LINEAR))
    units = tuple(adapted for unit in spec.units for adapted in _adapt_unit(unit, plan))
    if not any(tensor.trainable for unit in units for tensor in unit.tensors):
        raise _no_match(spec, plan.layers or ())
    return replace(spec, units=units)


def unmatched_targets(spec: ModelSpec, targets: Sequence[str]) -> tuple[str, ...]:
    """Return the targets of which a model with adapters has no layer, over which peft passes where others match."""
    known = {
        f".{tensor.name}".partition(".lora_")[0] for unit in spec.units for tensor in unit.tensors if "lora_" in tensor.name
    }
    words = _EXPERT_NAMES.get(spec.model_type, {})
    leaves = {layer.rpartition(".")[2] for layer in known}
    named = ((target, target.rpartition(".")[2]) for target in targets if target.lower() != ALL_LINEAR)
    return tuple(target for target, leaf in named if leaf not in leaves and leaf not in words)


def _plan(spec: ModelSpec, rank: int, targets: tuple[str, ...]) -> _Plan:
    """Sort the targets into layers and experts."""
    meanings = _EXPERT_NAMES.get(spec.model_type, {})
    words = frozenset(meanings)
    if not targets:
        return _Plan(rank, None, frozenset(meanings.values()), words)
    named = {target.rpartition(".")[2] for target in targets} & words
    fused = {word for word, meaning in meanings.items() if meaning == "gate_up_proj"}
    if named & fused and not fused <= named:
        missing = " and ".join(sorted(fused - named))
        raise BadInput(
            f"{' and '.join(sorted(named & fused))} and {missing} are one parameter here",
            where="LoRA targets",
            remedy=f"give {missing} too",
        )
    layers = tuple(target for target in targets if target.rpartition(".")[2] not in words)
    return _Plan(rank, layers, frozenset(meanings[word] for word in named), words)


def _no_match(spec: ModelSpec, targets: Sequence[str]) -> BadInput:
    leaves = dict.fromkeys(
        f"{unit.name}.{tensor.name}".split(".")[-2] for unit in spec.units for tensor in unit.tensors if tensor.kind in _LINEAR
    )
    near = did_you_mean(targets[0], leaves) if targets else ""
    return BadInput(
        f"{targets[0][:80]!r} matches no linear layer of {spec.name}"
        if targets
        else f"{spec.name} has no linear layer to adapt",
        where="LoRA targets",
        remedy=near or f"its linear layers are {', '.join(list(leaves)[:12]) or 'none'}",
    )


def _adapt_unit(unit: SpecUnit, plan: _Plan) -> Iterable[SpecUnit]:
    """Yield the unit with its adapters, split where a target names single blocks by index."""
    if unit.count > 1 and any(ch.isdigit() for target in plan.layers or () for ch in target):
        singles = [replace(unit, first=unit.first + i, count=1) for i in range(unit.count)]
        for tensors, run in groupby(((_adapt_tensors(one, plan), one) for one in singles), key=lambda pair: pair[0]):
            alike = [one for _, one in run]
            yield replace(unit, tensors=tensors, first=alike[0].first, count=len(alike))
        return
    yield replace(unit, tensors=_adapt_tensors(unit, plan))


def _adapt_tensors(unit: SpecUnit, plan: _Plan) -> tuple[Tensor, ...]:
    prefix = next(unit.names())
    found: list[Tensor] = []
    for layer, run in groupby(unit.tensors, key=lambda tensor: tensor.name.rpartition(".")[0]):
        own = [replace(tensor, trainable=False) for tensor in run]
        module = f"{prefix}.{layer}" if prefix and layer else prefix or layer
        kind = next((tensor.kind for tensor in own if tensor.kind in _LINEAR), "")
        is_router = "gate" in plan.experts and module.endswith(".gate")
        if is_router or (kind and plan.wants(module, kind)):
            found += _adapt_layer(own, layer, plan.rank)
        else:
            found += _adapt_experts(own, layer, plan)
    return tuple(found)


def _adapt_layer(own: list[Tensor], layer: str, rank: int) -> list[Tensor]:
    weight = next(tensor for tensor in own if len(tensor.shape) == 2)
    outputs, inputs = weight.shape if weight.kind != "conv1d" else weight.shape[::-1]
    base = [replace(tensor, name=_join(layer, "base_layer", _leaf(tensor))) for tensor in own]
    return [*base, *_pair(layer, rank, inputs, outputs)]


def _adapt_experts(own: list[Tensor], layer: str, plan: _Plan) -> list[Tensor]:
    """Wraps the module once for each targeted parameter, the first innermost."""
    targeted = [tensor for tensor in own if len(tensor.shape) == 3 and _leaf(tensor) in plan.experts]
    depth = len(targeted)
    found = [replace(tensor, name=_join(layer, *["base_layer"] * depth, _leaf(tensor))) for tensor in own]
    for i, tensor in enumerate(targeted):
        experts, outputs, inputs = tensor.shape
        rank = plan.rank * experts * (2 if _leaf(tensor) == "gate_up_proj" else 1)
        found += _pair(_join(layer, *["base_layer"] * (depth - 1 - i)), rank, inputs, outputs)
    return found


def _pair(layer: str, rank: int, inputs: int, outputs: int) -> list[Tensor]:
    return [
        Tensor(_join(layer, "lora_A.default.weight"), (rank, inputs)),
        Tensor(_join(layer, "lora_B.default.weight"), (outputs, rank)),
    ]


def _leaf(tensor: Tensor) -> str:
    return tensor.name.rpartition(".")[2]


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
