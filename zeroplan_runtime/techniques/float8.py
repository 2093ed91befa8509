"""Linear layers of the blocks multiply in 8-bit floats; their parameters, gradients and outputs stay in bf16.

Each of a layer's three products (output, gradient of the input, gradient of the weight) rounds both factors to 8 bits when it
needs them, scaled so that the largest value of a scaled part is representable. Scales are powers of two: they cost no precision
but at the small end, and rounding what is rounded already changes nothing. What the backward keeps is the input as it came.

==========  ====================================================  ========================================================
recipe      a scale                                                8-bit floats
==========  ====================================================  ========================================================
tensorwise  for each factor                                        e4m3, e5m2 for gradients of outputs
rowwise     for each row of the left and column of the right one   e4m3
blockwise   for 128 elements of the left one's rows, and for       e4m3
            128 × 128 of the weight
==========  ====================================================  ========================================================

On GPUs ``torch._scaled_mm`` multiplies; elsewhere rounded values are multiplied in fp32, which differs by the order of sums.

Note [Graphs]
    The casts are torch's own operations, so that inductor fuses them with the norm or the activation in front of them where
    blocks are compiled. A product scaled by blocks is one opaque operation: dynamo's rules for ``_scaled_mm`` know no
    scales of blocks in fp32, and inductor may lay scales out otherwise than cuBLAS takes them. So is a turned factor, which
    inductor writes byte by byte across rows where it fuses it (0.42 ms for a gate of an 8B on an H200). Dynamo takes the
    whole product as one node, which AOTAutograd then looks into: what dynamo traces of a Function by itself loses the mark of
    a checkpoint around it up to torch 2.11, and its graph would keep the products' results and factors for the backward.

Sources: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", 3.3;
torchao ``float8/config.py`` (which formats and sums each recipe has).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import BLOCK, FLOAT8_CAPABILITY, Float8Recipe, multiple_of
from zeroplan_runtime.compiled import whole_in_graphs
from zeroplan_runtime.gradient_hooks import is_plain_linear
from zeroplan_runtime.kernels.float8 import turned
from zeroplan_runtime.local_tensors import is_distributed
from zeroplan_runtime.unit_state import UnitState

_KEY = "ds_config.zeroplan.float8"
_NARROW, _WIDE = torch.float8_e4m3fn, torch.float8_e5m2
#: Added to the largest value of a part, so that a part of zeros has a scale.
_LEAST = 2.0**-100
#: Hopper's, on which cuBLAS multiplies by scales of blocks.
_HOPPER = (9, 0)


class Narrow(NamedTuple):
    """A factor [rows, columns] in 8 bits, along whose columns the product sums, and what its bits are multiplied by.

    `scale` is fp32: one element, [rows, 1], [rows, columns / 128] or [rows / 128, columns / 128].
    """

    bits: torch.Tensor
    scale: torch.Tensor

    def widened(self) -> torch.Tensor:
        """Returns the values, fp32 [rows, columns]."""
        scale = self.scale
        for dim in range(scale.dim()):
            if scale.shape[dim] > 1:
                scale = scale.repeat_interleave(self.bits.shape[dim] // scale.shape[dim], dim)
        return self.bits.to(torch.float32) * scale


def power_of_two_scale(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the least power of two by which values up to `largest` can be divided to fit in `dtype`, fp32; what is not finite
    stays.
    """
    ratio = (largest.to(torch.float32) + _LEAST) / torch.finfo(dtype).max
    upwards = (ratio.view(torch.int32) + 0x7FFFFF).bitwise_and(0x7F800000).view(torch.float32)  # the exponent alone, rounded up
    return torch.where(torch.isfinite(ratio), upwards, ratio)


def _rounded(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x / `scale` in `dtype`, contiguous. A division by a power of two is exact in bf16."""
    return (x * scale.reciprocal().to(x.dtype)).to(dtype).contiguous()


def narrow_tensor(x: torch.Tensor, dtype: torch.dtype = _NARROW) -> Narrow:
    """Rounds `x` [rows, columns] with one scale."""
    scale = power_of_two_scale(torch.linalg.vector_norm(x, float("inf")), dtype)
    return Narrow(_rounded(x, scale, dtype), scale)


def narrow_rows(x: torch.Tensor) -> Narrow:
    """Rounds `x` [rows, columns] with a scale for each row."""
    scale = power_of_two_scale(torch.linalg.vector_norm(x, float("inf"), dim=1, keepdim=True), _NARROW)
    return Narrow(_rounded(x, scale, _NARROW), scale)


def narrow_parts(x: torch.Tensor) -> Narrow:
    """Rounds `x` [rows, columns] with a scale for each 128 columns of a row."""
    parts = x.reshape(x.shape[0], -1, BLOCK)
    scale = power_of_two_scale(torch.linalg.vector_norm(parts, float("inf"), dim=2), _NARROW)
    bits = _rounded(parts, scale.unsqueeze(2), _NARROW)
    return Narrow(bits.view(x.shape), scale)


def narrow_blocks(x: torch.Tensor) -> Narrow:
    """Rounds `x` [rows, columns] with a scale for each block of 128 × 128."""
    rows, columns = (size // BLOCK for size in x.shape)
    blocks = x.reshape(rows, BLOCK, columns, BLOCK)
    scale = power_of_two_scale(torch.linalg.vector_norm(blocks, float("inf"), dim=(1, 3)), _NARROW)
    bits = _rounded(blocks, scale.view(rows, 1, columns, 1), _NARROW)
    return Narrow(bits.view(x.shape), scale)


@torch.library.custom_op("zeroplan::turned_float8", mutates_args=())
def _turned_bits(bits: torch.Tensor) -> torch.Tensor:
    return turned(bits)


@_turned_bits.register_fake
def empty_turned(bits: torch.Tensor) -> torch.Tensor:
    """Returns memory for the transpose of `bits` [rows, columns]."""
    return bits.new_empty((bits.shape[1], bits.shape[0]))


def _turned(one: Narrow) -> Narrow:
    """The transpose of a factor, by whose scales its rows or blocks lie the other way round. See Note [Graphs]."""
    return Narrow(torch.ops.zeroplan.turned_float8(one.bits), one.scale.t() if one.scale.dim() else one.scale)


def turned_tensor(x: torch.Tensor) -> Narrow:
    """Rounds the transpose of `x` with one scale."""
    return _turned(narrow_tensor(x))


def turned_rows(x: torch.Tensor) -> Narrow:
    """Rounds the transpose of `x` with a scale for each row of it."""
    scale = power_of_two_scale(torch.linalg.vector_norm(x, float("inf"), dim=0, keepdim=True), _NARROW)
    return _turned(Narrow(_rounded(x, scale, _NARROW), scale))


def turned_parts(x: torch.Tensor) -> Narrow:
    """Rounds the transpose of `x` with a scale for each 128 columns of a row of it."""
    parts = x.reshape(-1, BLOCK, x.shape[1])
    scale = power_of_two_scale(torch.linalg.vector_norm(parts, float("inf"), dim=1), _NARROW)
    return _turned(Narrow(_rounded(parts, scale.unsqueeze(1), _NARROW).view(x.shape), scale))


def turned_blocks(x: torch.Tensor) -> Narrow:
    """Rounds the transpose of `x` with a scale for each block of 128 × 128."""
    return _turned(narrow_blocks(x))


def is_traced() -> bool:
    """Returns whether graphs for a GPU are made of tensors that are none of its."""
    return False


class Factors(NamedTuple):
    """How the factors of a layer's products are rounded, by recipe."""

    tokens: Callable[[torch.Tensor], Narrow]  # inputs and gradients of outputs, along what is summed
    grads: Callable[[torch.Tensor], Narrow]
    weight: Callable[[torch.Tensor], Narrow]
    turned_tokens: Callable[[torch.Tensor], Narrow]
    turned_weight: Callable[[torch.Tensor], Narrow]


def _narrow_wide(x: torch.Tensor) -> Narrow:
    return narrow_tensor(x, _WIDE)


_FACTORS: dict[Float8Recipe, Factors] = {
    Float8Recipe.TENSORWISE: Factors(narrow_tensor, _narrow_wide, narrow_tensor, turned_tensor, turned_tensor),
    Float8Recipe.ROWWISE: Factors(narrow_rows, narrow_rows, narrow_rows, turned_rows, turned_rows),
    Float8Recipe.BLOCKWISE: Factors(narrow_parts, narrow_parts, narrow_blocks, turned_parts, turned_blocks),
}


def product(left: Narrow, right: Narrow, *, fast: bool) -> torch.Tensor:
    """Returns left · rightᵀ, bf16 [left's rows, right's rows].

    Args:
        left: [rows, columns]; where it has a scale for each 128 columns, the tensor cores' sums of 128 are added in fp32.
        right: [rows, columns].
        fast: sums may lose precision in the tensor cores.
    """
    if not (left.bits.is_cuda or is_traced()):
        return (left.widened() @ right.widened().t()).to(torch.bfloat16)
    if left.scale.dim() and left.scale.shape[1] > 1:
        found: torch.Tensor = torch.ops.zeroplan.blockwise_product(*left, *right)
        return found
    scales = left.scale, right.scale.t() if right.scale.dim() else right.scale
    return torch._scaled_mm(left.bits, right.bits.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)


def blockwise_operands(
    left: torch.Tensor, left_scale: torch.Tensor, right: torch.Tensor, right_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns what ``torch._scaled_mm`` takes: the factors, and their scales, those of parts with all rows' side by side."""
    by_parts = right_scale.shape[0] == right.shape[0]
    lying = right_scale.t().contiguous() if by_parts else right_scale.contiguous().t()
    return left.contiguous(), right.contiguous().t(), left_scale.t().contiguous().t(), lying


@torch.library.custom_op("zeroplan::blockwise_product", mutates_args=())
def _blockwise_product(
    left: torch.Tensor, left_scale: torch.Tensor, right: torch.Tensor, right_scale: torch.Tensor
) -> torch.Tensor:
    """left · rightᵀ, where `left` has a scale for each 128 columns, and `right` such or one for each 128 × 128.

    See Note [Graphs].
    """
    return torch._scaled_mm(*blockwise_operands(left, left_scale, right, right_scale), out_dtype=torch.bfloat16)


@_blockwise_product.register_fake
def _(left: torch.Tensor, left_scale: torch.Tensor, right: torch.Tensor, right_scale: torch.Tensor) -> torch.Tensor:
    return left.new_empty((left.shape[0], right.shape[0]), dtype=torch.bfloat16)


def _whole_parts(rows: torch.Tensor, recipe: Float8Recipe) -> torch.Tensor:
    """`rows` with rows of zeros behind them, up to a multiple of what a product may sum over."""
    missing = -rows.shape[0] % (BLOCK if recipe is Float8Recipe.BLOCKWISE else 16)
    return pad(rows, (0, 0, 0, missing)) if missing else rows


class Float8Product(torch.autograd.Function):
    """``x Wᵀ + b`` by 8-bit floats, and the gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Float8Recipe, in_graph: bool
    ) -> torch.Tensor:
        """Returns [..., out], bf16, for `x` [..., in], `weight` [out, in] and `bias` [out]."""
        if in_graph:
            ctx.save_for_backward(x, weight)
        else:  # a saved parameter would look like an alias of it; its address is constant
            ctx.save_for_backward(x)
            ctx.weight, ctx.version = weight, weight._version
        ctx.recipe = recipe
        how = _FACTORS[recipe]
        out = product(how.tokens(x.reshape(-1, x.shape[-1])), how.weight(weight), fast=True)
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of `x`, of the weight and of the bias, in bf16."""
        x, *saved = ctx.saved_tensors
        weight = saved[0] if saved else ctx.weight
        if not saved and weight._version != ctx.version:  # in the words of autograd, which checks what it saves itself
            raise RuntimeError("a weight needed for gradient computation has been modified by an inplace operation")
        recipe = ctx.recipe
        how = _FACTORS[recipe]
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        whole = how.grads(grad) if recipe is Float8Recipe.TENSORWISE else None  # one rounding for both products
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = product(how.grads(grad) if whole is None else whole, how.turned_weight(weight), fast=False).view(x.shape)
        if ctx.needs_input_grad[1]:
            rows = _whole_parts(x.reshape(-1, x.shape[-1]), recipe)
            if whole is None:
                left = how.turned_tokens(_whole_parts(grad, recipe))
            else:  # pad() takes no 8-bit floats, but bytes
                left = _turned(Narrow(_whole_parts(whole.bits.view(torch.uint8), recipe).view(_WIDE), whole.scale))
            grad_weight = product(left, how.turned_tokens(rows), fast=False)
        return grad_x, grad_weight, grad.sum(0) if ctx.needs_input_grad[2] else None, None, None


@whole_in_graphs
def float8_product_in_graph(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: str) -> torch.Tensor:
    """:class:`Float8Product` of a compiled block. See Note [Graphs]."""
    out: torch.Tensor = Float8Product.apply(x, weight, bias, Float8Recipe(recipe), True)
    return out


def _forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.bfloat16:
        what = f"a linear layer has inputs in {str(x.dtype).removeprefix('torch.')}, and 8-bit products stand in for bf16's"
        raise BadInput(what, where=_KEY, remedy="leave the key out")
    recipe: Float8Recipe = vars(module)["_float8_recipe"]
    if torch.compiler.is_compiling():
        return float8_product_in_graph(x, module.weight, module.bias, recipe.value)
    out: torch.Tensor = Float8Product.apply(x, module.weight, module.bias, recipe, False)
    return out


def float8_layers(blocks: Sequence[nn.Module], recipe: Float8Recipe) -> Iterator[nn.Linear]:
    """Yields the plain linear layers of the blocks whose sizes divide as the recipe asks for."""
    size = multiple_of(recipe)
    for block in blocks:
        for module in block.modules():
            if is_plain_linear(module) and module.in_features % size == module.out_features % size == 0:
                yield module


def attach_float8(
    blocks: Sequence[nn.Module], recipe: Float8Recipe, device: torch.device, gathered: Sequence[UnitState] = ()
) -> Callable[[], None]:
    """Lets the linear layers of `blocks` multiply in 8-bit floats.

    Args:
        blocks: those of the model's; what lies outside them, such as the head, stays in 16 bits.
        recipe: how factors are scaled.
        device: where the model is.
        gathered: units whose matrices are gathered in 8 bits, and must be such layers'.

    Returns:
        A function that gives the layers their own forwards back.

    Raises:
        BadInput: for a GPU without such products, layers of another dtype or divided among ranks, and where no layer fits, or
            another's matrix is gathered in 8 bits.
    """
    _require_capable(recipe, device)
    layers = list(float8_layers(blocks, recipe))
    _require_own(gathered, layers)
    if not layers:
        what = f"no block has a plain linear layer whose sizes are multiples of {multiple_of(recipe)}"
        raise BadInput(what, where=_KEY, remedy="leave the key out")
    own = [(layer, vars(layer).get("forward")) for layer in layers]
    for layer in layers:
        if is_distributed(layer.weight):
            raise BadInput("ranks have parts of linear layers", where=_KEY, remedy="leave the key out, or use no mesh")
        if layer.weight.dtype != torch.bfloat16:
            raise BadInput(f"the model is in {layer.weight.dtype}, not in bf16", where=_KEY, remedy="enable bf16")
        vars(layer)["_float8_recipe"] = recipe
        # One function, or graphs could not serve several blocks.
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]

    def detach() -> None:
        for layer, forward in own:
            vars(layer).pop("_float8_recipe", None)
            vars(layer).pop("forward", None)
            if forward is not None:
                vars(layer)["forward"] = forward

    return detach


def _require_own(gathered: Sequence[UnitState], layers: Sequence[nn.Linear]) -> None:
    """Refuses gathers that would round a matrix which no 8-bit product takes."""
    weights = {id(layer.weight) for layer in layers}
    for unit in gathered:
        for position in set(range(len(unit.trainable.params) if unit.trainable is not None else 0)) - set(unit.layout.wide):
            assert unit.trainable is not None
            if unit.layout.narrow and id(unit.trainable.params[position]) not in weights:
                what = f"{unit.name_of(position)!r} would be gathered in 8 bits, and is no plain linear layer's"
                raise BadInput(what, where=f"{_KEY}_gathers", remedy="leave the key out")


def _require_capable(recipe: Float8Recipe, device: torch.device) -> None:
    if device.type != "cuda":
        return  # emulated
    capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    if capability < FLOAT8_CAPABILITY:
        raise BadInput(f"{name} has no 8-bit floats", where=_KEY, remedy="leave the key out")
    if recipe is Float8Recipe.BLOCKWISE and capability != _HOPPER:
        what = f"{name} has no products scaled by blocks of 128, which cuBLAS has for Hopper"
        raise BadInput(what, where=_KEY, remedy="use tensorwise or rowwise")
