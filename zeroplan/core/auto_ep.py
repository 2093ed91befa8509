"""DeepSpeed's AutoEP: which models it takes, and what one rank holds of them.

Note [AutoEP's parameters]
    AutoEP puts a layer of its own in the place of a block with experts. Its router comes first, then the rank's experts, whose
    matrices of gate and up are now apart (``w1``, ``w3``), then what every token passes. That is the order in which DeepSpeed
    flattens and steps them.

    Sources: DeepSpeed 0.19.8, module_inject/auto_ep_layer.py (AutoEPMoELayer), moe/ep_repack.py, moe/ep_experts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from zeroplan.core.errors import BadInput
from zeroplan.core.parameters import Parameters

#: Rows of one expert are padded to a multiple of this (moe/ep_kernels.py, TOKEN_GROUP_ALIGN_SIZE_M).
ROW_MULTIPLE = 8
#: Architectures whose blocks AutoEP's presets replace, and that are modelled, with the names of a block's shared expert and of
#: that one's gate (module_inject/auto_ep_presets).
SHARED = {
    "mixtral": ("", ""),
    "qwen2_moe": ("shared_expert", "shared_expert_gate"),
    "qwen3_moe": ("", ""),
    "deepseek_v2": ("shared_experts", ""),
    "deepseek_v3": ("shared_experts", ""),
}
#: Keys of a ds_config's section that change no tensor of the planned layer (module_inject/auto_ep_config.py).
NO_BYTES = frozenset(
    {
        "enabled",
        "autoep_size",
        "preset_model",
        "disable_triton_grouped_mm",
        "validate_folding_routing",
        "route_scale",
        "routed_scaling_factor",
        "comm_num_sm",
        "comm_qp_margin",
        "comm_max_tokens_per_rank",
    }
)
_UP, _DOWN, _GATE = "experts.gate_up_proj", "experts.down_proj", "gate.weight"
_LAYER = ".mlp."
_MATRICES = frozenset({"w1", "w2", "w3"})


def require_model(parameters: Parameters, model_type: str, ep: int) -> None:
    """Refuse models whose blocks AutoEP does not replace, or not in a way that is modelled, and a degree that does not divide
    their experts.
    """
    where = "--ep"
    if parameters.stand_in:
        raise BadInput(
            "a count of parameters does not tell the experts", where=where, remedy="give the model's id or config.json"
        )
    up = next((shape for name, shape in zip(parameters.names, parameters.shapes, strict=True) if name.endswith(_UP)), None)
    if model_type not in SHARED:
        what = f"AutoEP of {model_type} is not modelled" if up else f"{model_type or 'this model'} has no experts to share"
        raise BadInput(what, where=where, remedy=f"of {', '.join(SHARED)} it is" if up else "leave it at 1")
    if up is None:
        raise BadInput(f"this {model_type} has no experts to share", where=where, remedy="leave it at 1")
    if up[0] % ep:
        raise BadInput(f"ep {ep} does not divide the {up[0]:,} experts", where=where, remedy=f"use a divisor of {up[0]:,}")


def is_auto_ep_expert(name: str) -> bool:
    """Return whether a parameter, by its full name, is one of AutoEP's experts."""
    owner, _, leaf = name.rpartition(".")
    return leaf in _MATRICES and owner.rpartition(".")[2] == "experts"


def is_auto_ep_router(name: str) -> bool:
    """Return whether a parameter, by its full name, is the weight of one of AutoEP's routers."""
    return name.endswith(f".router.{_GATE}")


def with_auto_ep(parameters: Parameters, model_type: str, ep: int) -> Parameters:
    """Return what one of `ep` ranks holds once AutoEP has replaced its blocks. See Note [AutoEP's parameters]."""
    layers = {name.removesuffix(_UP) for name in parameters.names if name.endswith(_LAYER + _UP)}
    layer_of = [name[: name.find(_LAYER) + len(_LAYER)] for name in parameters.names]
    rows: list[_Row] = []
    done: set[str] = set()
    for p, layer in enumerate(layer_of):
        if layer not in layers:
            rows.append(_Row(parameters.names[p], parameters.shapes[p], p))
        elif layer not in done:
            done.add(layer)
            own = [other for other, name in enumerate(layer_of) if name == layer]
            rows += _replaced(parameters, layer, own, SHARED[model_type], ep)
    made: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        made.setdefault(row.source, []).append(place)
    columns: dict[str, Any] = {
        name: tuple(column[row.source] for row in rows)
        for name in ("trainable", "blocks", "embeddings", "quantized")
        if (column := getattr(parameters, name))
    }
    return replace(
        parameters,
        names=tuple(row.name for row in rows),
        shapes=tuple(row.shape for row in rows),
        modules=tuple(_modules(parameters, made, [layer if layer in layers else "" for layer in layer_of])),
        autocast=tuple(row.linear(parameters.autocast[row.source]) for row in rows),
        **columns,
    )


def _modules(parameters: Parameters, made: dict[int, list[int]], layer_of: list[str]) -> Iterator[tuple[int, ...]]:
    """Yield what each module owns, those of a replaced block in the order of its new layer."""
    every = [[place for p in own for place in made[p]] for own in parameters.modules]
    block = [layer_of[own[0]] if own else "" for own in parameters.modules]
    done: set[str] = set()
    for at, own in enumerate(every):
        if not block[at]:
            yield tuple(own)
        elif block[at] not in done:
            done.add(block[at])
            yield from sorted(tuple(sorted(every[other])) for other, name in enumerate(block) if name == block[at])


class _Row(NamedTuple):
    """A parameter, and the one of transformers' model that it comes from."""

    name: str
    shape: tuple[int, ...]
    source: int

    def linear(self, before: bool) -> bool:
        """Return whether autocast runs its layer in 16 bits: the router is a linear layer now, and experts are none."""
        return not is_auto_ep_expert(self.name) if before else self.name.endswith(f"router.{_GATE}")


def _replaced(parameters: Parameters, layer: str, own: list[int], shared: tuple[str, str], ep: int) -> list[_Row]:
    """Return the parameters of one layer of AutoEP in order; `own` are those of the block that it replaces."""
    names = {parameters.names[p].removeprefix(layer): p for p in own}
    up, down = names.pop(_UP), names.pop(_DOWN)
    experts, both, hidden = parameters.shapes[up]
    gate = names.pop(_GATE)
    matrix, back = (experts // ep, both // 2, hidden), (experts // ep, hidden, both // 2)
    rows = [
        _Row(f"{layer}router.{_GATE}", parameters.shapes[gate], gate),
        _Row(f"{layer}experts.w1", matrix, up),
        _Row(f"{layer}experts.w2", back, down),
        _Row(f"{layer}experts.w3", matrix, up),
    ]
    for source, target in zip(shared, ("shared_experts", "shared_experts_gate"), strict=True):
        for name, p in names.items():
            if source and name.startswith(f"{source}."):
                rows.append(_Row(f"{layer}{target}{name.removeprefix(source)}", parameters.shapes[p], p))
    return rows
