"""8-bit products of the included runtime within compiled graphs.

The casts are operations of the graph, which inductor fuses; ``torch._scaled_mm`` is one of its operators, and a product scaled
by blocks is one that inductor does not look into. When its code runs on the meta device, :func:`allocate_blockwise` stands in
its place. Source: zeroplan_runtime/techniques/float8.py.
"""

from __future__ import annotations

from types import MethodType

import torch
from torch import nn

from zeroplan.core.float8 import Bf16Layers, Float8Recipe
from zeroplan_runtime.techniques.float8 import blockwise_operands, float8_layers, float8_product_in_graph
from zeroplan_runtime.units import find_blocks


def multiply_in_float8(model: nn.Module, recipe: Float8Recipe, kept: Bf16Layers | None) -> None:
    """Let the linear layers of the blocks but for those of `kept` multiply as in the runtime's compiled blocks."""

    def forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return float8_product_in_graph(x, layer.weight, layer.bias, recipe.value)

    blocks = list(find_blocks(model).values())
    others = range(len(blocks)) if kept is None else kept.others(len(blocks))
    for layer in float8_layers([blocks[number] for number in others], recipe):
        layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]


def allocate_blockwise(
    left: torch.Tensor, left_scale: torch.Tensor, right: torch.Tensor, right_scale: torch.Tensor
) -> torch.Tensor:
    """Allocate as the runtime's product scaled by blocks does."""
    first, second, *_scales = blockwise_operands(left, left_scale, right, right_scale)
    return first.new_empty((first.shape[0], second.shape[1]), dtype=torch.bfloat16)
