"""A ModelSpec from a live ``nn.Module``: on any device, meta included, and before or after ZeRO has partitioned it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.model_config import auto_classes_of
from zeroplan.models.families import FAMILIES
from zeroplan.models.grouping import units_of_tensors
from zeroplan.models.spec import ModelSpec, OwnExperts, SpecUnit, Tensor

_KINDS = {"Linear": "linear", "Conv1D": "conv1d", "Embedding": "embedding"}
#: DeepSpeed's own MoE layer, by the module and name of its class.
_MOE = ("deepspeed.moe.layer", "MoE")
#: Layers of DeepSpeed whose module shows one rank's part of the model, by the module and name of their class: what no plan can
#: tell from that part, and what to ask instead.
_PARTS = {
    ("deepspeed.module_inject.auto_ep_layer", "AutoEPMoELayer"): (
        "AutoEP's layers, which show one rank's experts; how ZeRO shards those over ranks with the same ones is not modelled",
        "plan the mixture as transformers has it",
    ),
    ("deepspeed.runtime.pipe.module", "PipelineModule"): (
        "one rank's stage of DeepSpeed's PipelineModule",
        "give the whole model's id or config.json, with --pp (pp=) and --partition (partition=)",
    ),
}


def spec_from_module(module: Any, *, name: str | None = None) -> ModelSpec:
    """Describe the parameters of a module, tied and frozen ones marked.

    Args:
        module: an ``nn.Module``; parameters that DeepSpeed's ``zero.Init`` has emptied count whole.
        name: what to call it; None takes the name it was loaded from, or its class.

    Raises:
        BadInput: when the module has no parameters, some have no shape yet (lazy modules), or it shows one rank's part of a
            model.
    """
    _require_whole(module)
    config = _config_of(module)
    model_type = config.get("model_type")
    kind = type(module).__name__
    spec = ModelSpec(name or str(config.get("_name_or_path") or kind)[:200], units_from_module(module), "module")
    if (experts := _own_experts(module)) is not None:
        return replace(spec, own_experts=experts)
    if spec.has_fused_layers:
        return spec  # its config would be traced with other layers
    return replace(
        spec,
        model_type=model_type if isinstance(model_type, str) else "",
        config=config,
        auto_class=_auto_class(kind, str(model_type)),
    )


def _require_whole(module: Any) -> None:
    """Refuse a module of which DeepSpeed gives each rank a part."""
    if "_modules" not in vars(module):
        what = f"{type(module).__name__} has no parameters: its __init__ never called nn.Module's"
        raise BadInput(what, where="model", remedy="call super().__init__() first")
    for name, child in module.named_modules():
        for base in type(child).__mro__:
            known = _PARTS.get((base.__module__, base.__name__))
            if known is not None:
                what, remedy = known
                raise BadInput(f"{name or type(child).__name__} is of {what}", where="model", remedy=remedy)


def _own_experts(module: Any) -> OwnExperts | None:
    """Return what a module's MoE layers say of their experts; None for a module without.

    Raises:
        BadInput: layers that differ in it.
    """
    layers = [one for one in module.modules() if _MOE in {(base.__module__, base.__name__) for base in type(one).__mro__}]
    sizes = sorted({int(layer.ep_size) for layer in layers})
    if len(sizes) > 1:
        raise BadInput(
            f"MoE layers of {' and '.join(map(str, sizes))} ranks in one model are not modelled",
            where="model",
            remedy="give all layers the same ep_size",
        )
    return OwnExperts(sizes[0], all(layer.deepspeed_moe.gate.drop_tokens for layer in layers)) if sizes else None


def _auto_class(kind: str, model_type: str) -> str:
    """The auto class that builds a module of class `kind`; an adapter's wrapper is built by none."""
    if kind.startswith("Peft"):
        return ""
    if kind.endswith("ForConditionalGeneration") and model_type in FAMILIES:
        return FAMILIES[model_type][1]
    return next(auto_classes_of({"architectures": [kind]}), "")


def units_from_module(module: Any) -> tuple[SpecUnit, ...]:
    """Group a module's parameters into units, in the order of ``named_parameters()``."""
    kinds = _kinds(module)
    owners: dict[int, str] = {}
    tensors: list[Tensor] = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(parameter), name)
        parent, _, leaf = name.rpartition(".")
        tensors.append(
            Tensor(
                name,
                _shape(parameter, name),
                bool(parameter.requires_grad),
                None if owner == name else owner,
                kinds.get(parent, "") if leaf == "weight" else "",
            )
        )
    if not tensors:
        raise BadInput(f"{type(module).__name__} has no parameters", where="model", remedy="give a module with weights")
    return units_of_tensors(tensors)


def _shape(parameter: Any, name: str) -> tuple[int, ...]:
    """The whole parameter's shape, wherever its elements are now."""
    for holder in (parameter, getattr(parameter, "quant_state", None)):
        # ZeRO-3 keeps the whole shape beside an emptied tensor; bitsandbytes' 4-bit weights keep it in their state.
        shape = getattr(holder, "ds_shape", None) if holder is parameter else getattr(holder, "shape", None)
        if shape is not None:
            return tuple(int(size) for size in shape)
    try:
        return tuple(int(size) for size in parameter.shape)
    except RuntimeError:
        raise BadInput(f"parameter {name!r} has no shape yet", where="model", remedy="run a lazy module once") from None


def _kinds(module: Any) -> dict[str, str]:
    """Return each module's kind, by the names of its classes, so that subclasses count and torch is not needed."""
    head = getattr(module, "get_output_embeddings", None)
    head = head() if callable(head) else None
    found: dict[str, str] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        if head is not None and child is head:
            found[name] = "head"
            continue
        found[name] = next((_KINDS[base.__name__] for base in type(child).__mro__ if base.__name__ in _KINDS), "")
    return found


def _config_of(module: Any) -> dict[str, Any]:
    """Return a transformers module's config as a plain dict, or an empty one."""
    config = getattr(module, "config", None)
    if isinstance(config, Mapping):
        return dict(config)
    to_dict = getattr(config, "to_dict", None)
    found = to_dict() if callable(to_dict) else None
    if not isinstance(found, Mapping):
        return {}
    kind = type(module).__name__
    # The class is what runs, whatever the config was published with.
    return {**found, "architectures": [kind]} if next(auto_classes_of({"architectures": [kind]}), None) else dict(found)
