"""Allocations of CUDA kernels beside the outputs of their operators.

Three tables by operator: blocks that are allocated before the outputs (`BEFORE`) or after them (`AFTER`), both freed when the
operator returns, and outputs whose bytes on CUDA differ from those on the meta device (`OUTPUT_BYTES`).
Sources: the kernels' host code in PyTorch (``aten/src/ATen/native/cuda``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zeroplan.tape.sizes import align

#: Bytes, or a function of :data:`zeroplan.tape.sizes.FUNCTIONS` with its arguments where the bytes are no polynomial.
Size = int | tuple[Any, ...]

_aten = torch.ops.aten

#: Blocks in order. Those of an inner list are freed again before the next block.
Sizes = list[Any]

BEFORE: dict[Any, Callable[[Any, Any], Sizes]] = {}
AFTER: dict[Any, Callable[[Any, Any, Any], Sizes]] = {}
OUTPUT_BYTES: dict[Any, Callable[[int, Size, Any], Size]] = {}
#: Operators whose outputs CUDA allocates last to first.
REVERSED_OUTPUTS = {_aten.native_dropout.default}


def _embedding_sort(args: Any, kwargs: Any) -> Sizes:
    """The sorted indices and their origins; CUDA sorts when there are more than 3072 indices (``Embedding.cu``)."""
    count = args[1].numel()
    return [("sort_index", count), ("sort_index", count), [("sort_index", count), ("sort_scratch", count)]]


def _embedding_sum(args: Any, kwargs: Any, out: Any) -> Sizes:
    """Sums of at most ten rows of one index each, then of those sums (``EmbeddingBackwardKernel.cu``)."""
    count, weights, width = args[1].numel(), int(args[2]), args[0].shape[-1]
    scan = ("sort_scan", count)
    return [
        ("sort_index", count),  # segment offsets
        ("sort_number", count),
        [("sort_index", count), scan],
        ("embedding_index", count, weights),  # partial segments per segment
        ("embedding_index", count, weights),  # their offsets
        [scan],
        ("sort_number", count),
        ("embedding_partial_index", count, weights),
        ("embedding_partial_grad", count, weights, width),
    ]


BEFORE[_aten.embedding_dense_backward.default] = _embedding_sort
AFTER[_aten.embedding_dense_backward.default] = _embedding_sum


def _ctc_backward(args: Any, kwargs: Any) -> Sizes:
    """Return the bytes of CTC's backward variables, as many as its forward ones (``LossCTC.cu``)."""
    return [args[6].numel() * args[6].element_size()]


BEFORE[_aten._ctc_loss_backward.Tensor] = _ctc_backward


def _contiguous(args: Any, kwargs: Any) -> Sizes:
    """Return the bytes of the copies that a norm's kernels take of gradient and input where these are transposed
    (``layer_norm_kernel.cu``, ``expect_contiguous``).
    """
    return [one.numel() * one.element_size() for one in args[:2] if isinstance(one, torch.Tensor) and not one.is_contiguous()]


BEFORE[_aten.native_layer_norm.default] = BEFORE[_aten.native_layer_norm_backward.default] = _contiguous


def _scan(args: Any, kwargs: Any, out: Any) -> Sizes:
    """Return the bytes of a cumulative sum's cast input, and of the scratch block by which it scans a single row
    (``ScanUtils.cuh``).
    """
    cast = 0 if args[0].dtype == out.dtype else out.numel() * out.element_size()
    return [cast, ("scan_scratch", out.numel(), out.shape[-1] if out.dim() else 1)]


def _softmax_backward(args: Any, kwargs: Any, out: Any) -> Sizes:
    """Return the bytes of the product of gradient and output (``SoftMax.cu``)."""
    return [args[0].numel() * max(args[0].element_size(), args[1].element_size())]


def _whole_input(args: Any, kwargs: Any, out: Any) -> Sizes:
    """Return the bytes of the copy that the kernel makes of a slice (``SoftMax.cu``, ``host_softmax``)."""
    return [] if args[0].is_contiguous() else [args[0].numel() * args[0].element_size()]


def _safe_softmax(args: Any, kwargs: Any, out: Any) -> Sizes:
    """Return the bytes of the masks of scores, and of whole rows, that are minus infinity (``SoftMax.cpp``)."""
    return [out.numel(), out.numel() // max(out.shape[-1], 1), out.element_size()]


AFTER[_aten.cumsum.default] = _scan
AFTER[_aten._softmax_backward_data.default] = _softmax_backward
AFTER[_aten._softmax.default] = AFTER[_aten._log_softmax.default] = _whole_input
AFTER[_aten._safe_softmax.default] = _safe_softmax


def _reduce(args: Any, kwargs: Any, out: Any) -> Sizes:
    """Return the bytes of a reduction's partial results and semaphores (``Reduce.cuh``); see ``reduce_partial``."""
    tensor, result = args[0], out
    outputs, inputs = result.numel(), tensor.numel() // max(result.numel(), 1)
    if inputs <= 1:
        return []
    dims = _reduced(args, kwargs, tensor.dim())
    moving = [
        (stride, i in dims, size)
        for i, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True))
        if size > 1
    ]
    inner = [m for m in moving if m[1]]
    outer = [m for m in moving if not m[1]]
    fastest = not outer or min(inner)[0] < min(outer)[0]
    vector = 1
    if not fastest and min(outer)[0] == 1:
        vector = 4
        for stride, reduced, size in moving:
            while (size if stride == 1 and not reduced else stride) % vector:
                vector //= 2
    acc = max(4, tensor.element_size())
    shape = (outputs, inputs, int(fastest), vector, acc)
    cast = tensor.numel() * 8 if not tensor.is_floating_point() and result.element_size() > tensor.element_size() else 0
    return [cast, ("reduce_partial", *shape), ("reduce_semaphores", *shape)]


def _reduced(args: Any, kwargs: Any, ndim: int) -> set[int]:
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    if dims is None or dims == [] or isinstance(dims, bool):
        return set(range(ndim))
    return {d % ndim for d in (dims if isinstance(dims, (list, tuple)) else (dims,))} if ndim else set()


for _op in (
    _aten.sum.default,
    _aten.sum.dim_IntList,
    _aten.mean.default,
    _aten.mean.dim,
    _aten.amax.default,
):
    AFTER[_op] = _reduce
AFTER[_aten.linalg_vector_norm.default] = lambda args, kwargs, out: _reduce(
    (args[0], *args[2:3]), kwargs, out
)  # args[1]: order
for _op in (_aten.all.default, _aten.any.default):
    AFTER[_op] = lambda args, kwargs, out: _reduce((args[0],), {}, out)


def _channels_last(image: Any, weight: Any, result: Any, groups: int) -> Size:
    """Return the bytes of cuDNN's workspace for one convolution of 16 bits whose tensors have their channels first.

    Its kernels take channels last: image, weight and result are copied into that order, the channels of an image filled up to
    eight. Depthwise kernels take tensors as they are. Read off cuDNN 9.19 call by call (benchmarks/results/convolutions.jsonl);
    for fp32, and in three dimensions, it follows no such rule.
    """
    if not (image.dim() in (3, 4) and image.element_size() == 2 and image.is_contiguous()) or groups == image.shape[1] > 1:
        return 0
    kernel, filled = weight.shape[2:].numel(), 8 if groups == 1 else 1
    images = image.shape[0] * align(image.shape[1], filled) * image.shape[2:].numel()
    weights = weight.shape[0] * align(weight.shape[1], filled) * kernel if kernel > 1 else 0
    return ("channels_last", 2 * images, 2 * weights, 2 * result.numel())


def _is_product(image: Any, weight: Any, stride: Any) -> bool:
    """Whether a convolution is a product of matrices as they lie: of single pixels, whose rows are aligned to 16 bytes."""
    single = weight.shape[2:].numel() == 1 and all(step == 1 for step in stride)
    return single and image.element_size() == 2 and image.shape[2:].numel() % 8 == 0


def _convolution(args: Any, kwargs: Any, out: Any) -> Sizes:
    """A few channels under a small kernel have a kernel of their own."""
    image, weight, _, stride, _, _, transposed, _, groups = args
    small = image.shape[1] < 8 and weight.shape[2:].numel() <= 16 and image.dim() == 4
    if transposed or small or _is_product(image, weight, stride):
        return []
    return [_channels_last(image, weight, out, groups)]


def _convolution_backward(args: Any, kwargs: Any, out: Any) -> Sizes:
    """The image's gradient, then the weight's, which a product sums up by samples in fp32."""
    result, image, weight, _, stride, _, _, transposed, _, groups, wanted = args
    if transposed:
        return []
    if _is_product(image, weight, stride):
        return [[image.shape[0] * weight.numel() * 4]] if wanted[1] else []
    copies = _channels_last(image, weight, result, groups)
    return [[copies] for asked in wanted[:2] if asked]


def _masked_scatter(args: Any, kwargs: Any, out: Any) -> Sizes:
    """Return the bytes of the mask's prefix sums in 64 bits, and of a mask that is expanded to the tensor's shape
    (``IndexKernel.cpp``).
    """
    mask = args[1]
    return [8 * out.numel(), 0 if mask.is_contiguous() and mask.shape == out.shape else out.numel()]


AFTER[_aten.masked_scatter.default] = AFTER[_aten.masked_scatter_.default] = _masked_scatter
AFTER[_aten.convolution.default] = _convolution
AFTER[_aten.convolution_backward.default] = _convolution_backward

#: True while attention runs as separate operators, which add the mask in place.
in_math_attention = False


def _dropout_mask(output: int, size: Size, args: Any) -> Size:
    """Within attention the empty copy is dropout's noise, of which CUDA keeps one byte an element (``Dropout.cu``)."""
    return int(args[0].numel()) if in_math_attention else size


OUTPUT_BYTES[_aten.empty_like.default] = _dropout_mask

#: Sizes that the next allocations are recorded with in place of their own.
pending: list[Size] = []


def block(size: Size) -> torch.Tensor:
    """A storage that is recorded with `size`, which may be an expression."""
    pending.append(size)
    made = torch.empty(1, dtype=torch.uint8, device="meta")
    pending.clear()  # left over where selective checkpointing answered from its cache, so that nothing was allocated
    return made
