"""Sizes of a tape's allocations, as exact expressions in micro batch B, sequence length S and LoRA rank R.

Nearly every storage is a polynomial with one term, such as ``4096·B·S``. The few that are not (a kernel's sorting buffers,
padded rows) are one of :data:`FUNCTIONS` applied to such polynomials.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zeroplan.core.gpus import Gpu

#: coefficient, exponent of B, of S, of R
Term = tuple[int, int, int, int]
Poly = tuple[Term, ...]


#: Scratch bytes of CUB's scan, and of its radix sort beside two bytes-for-bytes copies of keys and values (CUDA 13).
_SCAN_SCRATCH, _SORT_SCRATCH = 1279, 17919


#: Elements to which memory-efficient attention aligns the rows of a mask (``attention.cpp``, ``preprocess_mask``).
MASK_ALIGNMENT = 8


def align(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def _sorting(count: int) -> bool:
    """CUDA's embedding backward sorts the indices when there are more than 3072 of them (``Embedding.cu``)."""
    return count > 3072


def _sort_index(count: int) -> int:
    return 8 * count if _sorting(count) else 0


def _embedding_index(count: int, weights: int) -> int:
    return 8 * min(count, weights) if _sorting(count) else 0


def _embedding_partials(count: int, weights: int) -> int:
    # A segment holds the rows of one index; partial segments hold at most ten of them.
    return count // 10 + min(count, weights)


def _embedding_partial_index(count: int, weights: int) -> int:
    return 8 * _embedding_partials(count, weights) if _sorting(count) else 0


def _embedding_partial_grad(count: int, weights: int, width: int) -> int:
    return 4 * _embedding_partials(count, weights) * align(width, 32) if _sorting(count) else 0


@dataclass(frozen=True, slots=True)
class KernelDevice:
    """Properties of a GPU that a tape's sizes depend on. The default is a Hopper GPU (H100, H200).

    `cudnn_attention`: PyTorch prefers cuDNN's attention kernels on compute capabilities 9 and 10 (``sdp_utils.cpp``).
    """

    multiprocessors: int = 132
    threads_per_multiprocessor: int = 2048
    cudnn_attention: bool = True

    @classmethod
    def of(cls, gpu: Gpu) -> KernelDevice:
        """The device of a preset; one whose multiprocessors are not listed counts as a Hopper GPU's number of them."""
        threads = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}.get(gpu.capability, 2048)
        return cls(_MULTIPROCESSORS.get(gpu.name, 132), threads, gpu.capability[0] in (9, 10))


#: Source: the vendors' data sheets and white papers.
_MULTIPROCESSORS = {
    "T4": 40,
    "V100-16G": 80,
    "V100-32G": 80,
    "A10G": 80,
    "L4": 58,
    "L40S": 142,
    "RTX3090": 82,
    "RTX4090": 128,
    "RTX5090": 170,
    "A100-40G": 108,
    "A100-80G": 108,
    "B200": 148,
    "MI300X": 304,
}


def _last_power_of_two(value: int) -> int:
    return 1 << (value.bit_length() - 1) if value > 0 else 1


def _reduction(device: KernelDevice, outputs: int, inputs: int, fastest: int, vector: int, acc_size: int) -> tuple[int, int]:
    """Bytes of the partial results and of the semaphores of a reduction that is split across thread blocks.

    Args:
        outputs: elements of the result.
        inputs: elements reduced to each.
        fastest: 1 when the fastest moving dimension is reduced.
        vector: elements a thread loads at once, along the output.
        acc_size: bytes of an accumulator.

    Source: ``setReduceConfig`` in ``aten/src/ATen/native/cuda/Reduce.cuh``.
    """
    if outputs <= 0 or inputs <= 0:
        return 0, 0
    dim0, dim1 = (inputs, outputs) if fastest else (outputs // vector, inputs)
    most = 512 // vector
    wide, high = (min(_last_power_of_two(d), most) for d in (dim0, dim1))
    width = min(wide, 32)
    height = min(high, most // width)
    width = min(wide, most // height)
    step_input = width if fastest else 1
    step_output = 1 if fastest else width
    split_warps = -(-inputs // step_input) >= min(height * 16, 256)
    if split_warps:
        step_input *= height
    else:
        step_output *= height
    values = -(-inputs // step_input)
    grid = -(-(outputs // vector) // step_output)
    blocks = device.threads_per_multiprocessor // (width * height)
    target = device.multiprocessors * blocks
    if not split_warps or values < 256 or grid > target:
        return 0, 0
    blocks_per_output = max(min(-(-target // grid), -(-values // 16)), -(-values // 256))
    if blocks_per_output <= 1:
        return 0, 0
    size = acc_size * outputs * blocks_per_output
    return (size if fastest else size * width * vector), 4 * grid


def _cudnn_backward(device: KernelDevice, rows: int, dim: int, grouped: int, key_rows: int = 0) -> int:
    """cuDNN's workspace: gradient of the queries in fp32, row sums, and whole key and value gradients if heads are grouped.

    `rows` is batch × heads × sequence, and `key_rows` the same of the keys, where their sequence is another.
    """
    if not device.cudnn_attention:
        return 0
    whole = (key_rows or rows) * dim * 4 if grouped else 0
    return rows * dim * 4 + whole + rows * 4 + 256


def _token_chunk(tokens: int, parts: int, row: int) -> int:
    """Bytes of a chunk of rows, with the least power of two of tokens that `parts` such chunks hold all of."""
    return min(tokens, 1 << (-(-tokens // parts) - 1).bit_length()) * row


#: name -> bytes, given the device and integers
FUNCTIONS: dict[str, Callable[..., int]] = {
    "sort_index": lambda _, count: _sort_index(count),
    "sort_number": lambda _, count: 8 if _sorting(count) else 0,
    "sort_scan": lambda _, count: _SCAN_SCRATCH if _sorting(count) else 0,
    "sort_scratch": lambda _, count: 16 * count + _SORT_SCRATCH if _sorting(count) else 0,
    "scan_scratch": lambda _, count, row: _SCAN_SCRATCH if count == row else 0,
    "embedding_index": lambda _, count, weights: _embedding_index(count, weights),
    "embedding_partial_index": lambda _, count, weights: _embedding_partial_index(count, weights),
    "embedding_partial_grad": lambda _, count, weights, width: _embedding_partial_grad(count, weights, width),
    "reduce_partial": lambda *args: _reduction(*args)[0],
    "reduce_semaphores": lambda *args: _reduction(*args)[1],
    "cudnn": lambda device, size: size if device.cudnn_attention else 0,
    "flash": lambda device, size: 0 if device.cudnn_attention else size,
    "flash_rows": lambda device, seq, multiple, factor: 0 if device.cudnn_attention else align(seq, multiple) * factor,
    "mask_rows": lambda _, last, factor: align(last, MASK_ALIGNMENT) * factor if last % MASK_ALIGNMENT else 0,
    "rows": lambda _, seq, multiple, factor: align(seq, multiple) * factor,
    "cudnn_backward": _cudnn_backward,
    "channels_last": lambda _, image, weight, result: image + weight + result + 16,
    "token_chunk": lambda _, tokens, parts, row: _token_chunk(tokens, parts, row),
    "per_multiprocessor": lambda device, nbytes: device.multiprocessors * nbytes,
}


def evaluate(poly: Poly, batch: int, seq: int, rank: int) -> int:
    """Evaluate a polynomial at these numbers."""
    return sum(c * batch**b * seq**s * rank**r for c, b, s, r in poly)
