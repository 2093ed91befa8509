"""Launches the kernels of ``csrc/cuda/layer.cu``; arguments are those of :mod:`zeroplan_runtime.kernels.layer`."""

from __future__ import annotations

import ctypes

import torch

from zeroplan_runtime.kernels import cuda_backend
from zeroplan_runtime.kernels.cuda_backend import KernelConfig
from zeroplan_runtime.kernels.philox import GROUP, Dropout

#: The widest row that a block of threads holds.
MOST_COLUMNS = 1024 * GROUP
#: Blocks of the backwards, each with sums of its own: four of each of an H200's 132 multiprocessors.
_NORM_PARTS = 528
#: Blocks of GELU's backward, two of each multiprocessor; threads of one.
_GELU_BLOCKS, _GELU_THREADS = 264, 256
#: Rows that a block of a backward takes at once: R of the kernels.
_NORM_ROWS, _GELU_ROWS = 2, 4

_f = ctypes.c_float
_u = ctypes.c_uint32


def norm_parts(rows: int) -> int:
    """Returns the blocks of a norm's backward."""
    return max(1, min(-(-rows // _NORM_ROWS), _NORM_PARTS))


def gelu_parts(rows: int, columns: int) -> int:
    """Returns the parts of the rows in GELU's backward."""
    return max(1, min(-(-rows // _GELU_ROWS), _GELU_BLOCKS // _gelu_chunks(columns)))


def _gelu_chunks(columns: int) -> int:
    return -(-columns // (_GELU_THREADS * GROUP))


def _launch(name: str, like: torch.Tensor, blocks: int, threads: int, *arguments: object) -> None:
    """Launches a kernel; tensors are given by their address, None by null."""
    cuda_backend._run("layer", name, KernelConfig(threads=threads), blocks, *arguments, like=like)


def _dropping(dropout: Dropout | None) -> tuple[object, ...]:
    if dropout is None:
        return None, _u(0), _u(0), _u(0), _f(1.0)
    salt = dropout.salt & 0xFFFFFFFF
    return dropout.seed, _u(dropout.stream), _u(salt), _u(dropout.threshold), _f(dropout.scale)


def _row_threads(columns: int) -> int:
    return -(-columns // (32 * GROUP)) * 32


def drop(x: torch.Tensor, dropout: Dropout, out: torch.Tensor) -> None:
    """Writes `x` with some elements dropped to `out`."""
    groups = x.numel() // GROUP
    if groups:
        _launch("zp_drop", x, min(-(-groups // 256), 1 << 16), 256, x, out, groups, *_dropping(dropout))


def add_norm(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    dropout: Dropout | None,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    summed: torch.Tensor | None,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> None:
    """Writes the sum, and its norm, mean and reciprocal deviation."""
    rows, columns = x.shape
    weight, shift, eps = norm if norm is not None else (None, None, 0.0)
    out = results if results is not None else (None, None, None)
    if rows:
        pointers = (x, bias, residual, weight, shift, summed, *out)
        _launch("zp_add_norm", x, rows, _row_threads(columns), *pointers, *_dropping(dropout), _f(eps), columns)


def norm_backward(
    grad: torch.Tensor,
    extra: torch.Tensor | None,
    saved: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor | None],
    dropout: Dropout | None,
    grads: tuple[torch.Tensor, torch.Tensor | None],
    sums: tuple[torch.Tensor, ...],
    partial: torch.Tensor,
) -> None:
    """Writes the gradients of the sum and of what was dropped, and the sums over rows: of weight, shift and bias."""
    rows, columns = grad.shape
    pointers = (grad, extra, saved, mean, rstd, *norm, *grads, partial)
    counts = (rows, columns, ctypes.c_int(len(sums)))
    _launch("zp_norm_backward", grad, len(partial), _row_threads(columns), *pointers, *_dropping(dropout), *counts)
    _sum_columns(partial, sums)


def add_backward(
    grad: torch.Tensor,
    dropout: Dropout | None,
    grad_x: torch.Tensor | None,
    sums: tuple[torch.Tensor, ...],
    partial: torch.Tensor,
) -> None:
    """Writes the gradient of what was dropped, and that of the bias."""
    rows, columns = grad.shape
    pointers = (grad, grad_x, partial, *_dropping(dropout))
    _launch("zp_add_backward", grad, len(partial), _row_threads(columns), *pointers, rows, columns)
    _sum_columns(partial, sums)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: str, out: torch.Tensor) -> None:
    """Writes GELU of `x` + `bias` to `out`."""
    groups, width = x.numel() // GROUP, x.shape[1] // GROUP
    if groups:
        counts = (groups, _u(width), ctypes.c_int(approximate == "tanh"))
        _launch("zp_bias_gelu", x, min(-(-groups // 256), 1 << 16), 256, x, bias, out, *counts)


def bias_gelu_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor,
    approximate: str,
    grad_bias: torch.Tensor,
    partial: torch.Tensor,
) -> None:
    """Writes the gradient of `x` over `grad`, and that of the bias."""
    rows, columns = grad.shape
    chunks = _gelu_chunks(columns)
    counts = (rows, columns, _u(chunks), ctypes.c_int(approximate == "tanh"))
    _launch("zp_bias_gelu_backward", grad, len(partial) * chunks, _GELU_THREADS, grad, x, bias, partial, *counts)
    _sum_columns(partial, (grad_bias,))


def _sum_columns(partial: torch.Tensor, sums: tuple[torch.Tensor, ...]) -> None:
    """Adds up the blocks' sums in tensors of the gradients' own dtype."""
    columns = sums[0].numel()
    targets = (*sums, None, None)[:3]
    counts = (len(partial), columns, ctypes.c_int(len(sums)))
    _launch("zp_column_sums", sums[0], -(-columns * len(sums) // 32), 256, partial, *counts, *targets)
