"""A model over a quantised base: the weights of its linear layers in 4 or 8 bits, all else as it was."""

from __future__ import annotations

from dataclasses import replace

from zeroplan.core.errors import BadInput
from zeroplan.core.model_config import CAUSAL_LM
from zeroplan.models.spec import ModelSpec, Tensor

_DECODERS = ("", CAUSAL_LM)


def why_not_quantized(spec: ModelSpec) -> str:
    """Return why a quantised base of the model is not modelled; an empty string where it is."""
    if spec.auto_class not in _DECODERS:
        return f"quantised bases are modelled for causal language models, not {spec.auto_class}"
    if any(tensor.kind == "conv1d" for tensor, _ in spec.tensor_groups()):
        return f"{spec.name} has transposed linear layers, which are not modelled"
    return ""


def with_quantized_base(spec: ModelSpec, *, linear_experts: bool = False) -> ModelSpec:
    """Return the model with its linear layers quantised, but for the output projection, as transformers' bitsandbytes does.

    Experts that lie in one parameter are no linear layers and stay in 16 bits. Versions of transformers before 5 had a layer
    for each expert's matrix; with `linear_experts` their weights are quantised as those were.

    Raises:
        BadInput: a model without shapes, no language model, or one whose linear layers are transposed (GPT-2).
    """
    if not spec.has_shapes:
        raise BadInput("a bare count has no layers to quantise", where="--quantize", remedy="give a model")
    if why := why_not_quantized(spec):
        raise BadInput(why, where="--quantize", remedy="leave it out")

    def quantized(tensor: Tensor) -> bool:
        return tensor.kind == "linear" or (linear_experts and len(tensor.shape) == 3)

    units = [replace(unit, tensors=tuple(replace(t, quantized=quantized(t)) for t in unit.tensors)) for unit in spec.units]
    return replace(spec, units=tuple(units))
