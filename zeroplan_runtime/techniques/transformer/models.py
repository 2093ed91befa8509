"""The layer in BERT and RoBERTa of transformers: their weights are copied in, and out again."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan_runtime.techniques.transformer.config import DeepSpeedTransformerConfig
from zeroplan_runtime.techniques.transformer.layer import DeepSpeedTransformerLayer

logger = logging.getLogger("zeroplan_runtime")

_WHERE = "use_transformer_layer"
#: transformers' layers that compute what this one does, by module.
_KNOWN = {
    "transformers.models.bert.modeling_bert": "BertLayer",
    "transformers.models.roberta.modeling_roberta": "RobertaLayer",
    "transformers.models.xlm_roberta.modeling_xlm_roberta": "XLMRobertaLayer",
}
#: torch's name of each activation of transformers that is a GELU.
_GELUS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
#: The classes that have been made, by name.
_CLASSES: dict[str, type[DeepSpeedTransformerLayer]] = {}
#: Arguments that follow from the model.
_OF_MODEL = frozenset(
    ("hidden_size", "intermediate_size", "heads", "num_hidden_layers", "layer_norm_eps", "pre_layer_norm", "return_tuple")
)


def use_transformer_layer(model: nn.Module, **options: Any) -> Callable[[], None]:
    """Gives BERT and RoBERTa of transformers in `model` fused layers, with the weights of their own.

    Call it before the model goes to an engine or an optimizer: parameters are others. A checkpoint has the layers' names; for
    one of transformers' call what is returned, which gives the model its own layers with the weights as they are then.

    Args:
        model: holds one or more models of transformers.
        **options: arguments of :class:`DeepSpeedTransformerConfig` that do not follow from the model, such as
            ``normalize_invertible``, ``gelu_checkpoint`` and ``attn_dropout_checkpoint``. Dropout ratios are the model's where
            they are not given.

    Returns:
        A function that gives the model its own layers again.

    Raises:
        BadInput: for a model without such layers, one that is a decoder, another activation than GELU, layers with
            adapters or quantised weights or of whose query, key and value only some are frozen, and options that the config
            does not have or that follow from the model.
    """
    found = [(parent, name, layer) for parent in model.modules() for name, layer in parent.named_children() if _is_known(layer)]
    if not found:
        known = ", ".join(sorted(_KNOWN.values()))
        raise BadInput(
            f"{type(model).__name__} has none of the layers {known}", where=_WHERE, remedy="use it for BERT or RoBERTa"
        )
    made = [(parent, name, layer, _fused(layer, len(found), options)) for parent, name, layer in found]
    for parent, name, _, fused in made:
        parent.add_module(name, fused)

    def restore() -> None:
        for parent, name, layer, fused in made:
            _copy(layer, fused, out=True)
            parent.add_module(name, layer.train(fused.training))

    return restore


def warn_of_adapters(model: nn.Module) -> None:
    """Says so where peft has adapted a model whose fused layers it left out: it adapts linear layers, which they lack."""
    if not hasattr(model, "peft_config"):
        return
    fused = [layer for layer in model.modules() if isinstance(layer, DeepSpeedTransformerLayer)]
    if fused and not any(param.requires_grad for layer in fused for param in layer.parameters()):
        logger.warning(
            "peft adapts linear layers, of which the %d fused layers have none: frozen, without adapters, they learn nothing; "
            "leave use_transformer_layer out, or set modules_to_save",
            len(fused),
        )


def _is_known(module: nn.Module) -> bool:
    kind = type(module)
    return _KNOWN.get(kind.__module__) == kind.__name__


def _fused(layer: Any, layers: int, options: dict[str, Any]) -> DeepSpeedTransformerLayer:
    """A fused layer with this layer's weights."""
    for name in sorted(_OF_MODEL & options.keys()):
        raise BadInput("it follows from the model", where=f"{_WHERE}: {name}", remedy="leave it out")
    config = layer.attention.self.config
    if layer.is_decoder:
        raise BadInput("a decoder is not supported", where=_WHERE, remedy="use a model with is_decoder false")
    if config.hidden_act not in _GELUS:
        known = ", ".join(sorted(_GELUS))
        raise BadInput(f"hidden_act {config.hidden_act!r} is not one of {known}", where=_WHERE, remedy="use a model with GELU")
    _require_plain(layer)
    given = {
        "attn_dropout_ratio": layer.attention.self.dropout.p,
        "hidden_dropout_ratio": layer.output.dropout.p,
        "initializer_range": config.initializer_range,
        "gelu_approximate": _GELUS[config.hidden_act],
        "training": layer.training,
        **options,
    }
    wanted = DeepSpeedTransformerConfig.from_dict(
        {
            **given,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "heads": config.num_attention_heads,
            "num_hidden_layers": layers,
            "layer_norm_eps": config.layer_norm_eps,
            "pre_layer_norm": False,
        }
    )
    own: type[nn.Module] = type(layer)
    weight = layer.attention.self.query.weight
    with torch.device(weight.device):
        fused: DeepSpeedTransformerLayer = _class_for(own)(wanted)
    fused = fused.to(weight.dtype)
    _copy(layer, fused, out=False)
    return fused


def _class_for(own: type[nn.Module]) -> type[DeepSpeedTransformerLayer]:
    """The layer as a class of transformers', which gives it gradient checkpointing and lets hidden states be recorded."""
    name = f"Fused{own.__name__}"
    if name not in _CLASSES:
        _CLASSES[name] = type(name, (DeepSpeedTransformerLayer, own), {})
    return _CLASSES[name]


def __getattr__(name: str) -> Any:
    """Returns the class of this name, by which pickle looks for it."""
    for module, own in _KNOWN.items():
        if name == f"Fused{own}":
            return _class_for(getattr(importlib.import_module(module), own))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _require_plain(layer: Any) -> None:
    """Refuses what copying weights would lose: adapters, quantised weights, and projections that are trained in part."""
    read = [param for group in _own_parameters(layer) for param in group]
    for name, param in layer.named_parameters():
        if not any(param is one for one in read):
            raise BadInput(
                f"the layer's parameter {name!r} would be lost",
                where=_WHERE,
                remedy="call it before adapters or other modules are put into the model",
            )
    for group in _own_parameters(layer):
        if not all(isinstance(one, nn.Parameter) and one.is_floating_point() for one in group):
            raise BadInput("the layer's weights are quantised", where=_WHERE, remedy="use a model with weights as they were")
        if len({one.requires_grad for one in group}) > 1:
            raise BadInput(
                "some of query, key and value are frozen, which are one matrix",
                where=_WHERE,
                remedy="freeze all three or none",
            )


def _own_parameters(layer: Any) -> list[list[Any]]:
    """The parameters of a layer of transformers that each of :func:`_fused_parameters` holds."""
    attention = layer.attention.self
    projections = (attention.query, attention.key, attention.value)
    modules = (
        layer.attention.output.dense,
        layer.attention.output.LayerNorm,
        layer.intermediate.dense,
        layer.output.dense,
        layer.output.LayerNorm,
    )
    found = [[each.weight for each in projections], [each.bias for each in projections]]
    return found + [[one] for module in modules for one in (module.weight, module.bias)]


def _fused_parameters(fused: DeepSpeedTransformerLayer) -> list[nn.Parameter]:
    return [
        *(fused.attn_qkvw, fused.attn_qkvb, fused.attn_ow, fused.attn_ob, fused.attn_nw, fused.attn_nb),
        *(fused.inter_w, fused.inter_b, fused.output_w, fused.output_b, fused.norm_w, fused.norm_b),
    ]


@torch.no_grad()
def _copy(layer: Any, fused: DeepSpeedTransformerLayer, *, out: bool) -> None:
    """Copies the weights of a layer into the fused one, or `out` of it, and whether they are trained."""
    for inside, group in zip(_fused_parameters(fused), _own_parameters(layer), strict=True):
        for one, other in zip(inside.chunk(len(group)), group, strict=True):
            if out:
                other.data = one.detach().clone()  # on the device and in the dtype where the fused layer has gone
                other.requires_grad_(inside.requires_grad)
            else:
                one.copy_(other)
        if not out:
            inside.requires_grad_(group[0].requires_grad)
