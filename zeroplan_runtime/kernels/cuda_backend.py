"""The updates on CUDA tensors by the kernels of ``csrc/cuda``: shapes of the launch, arguments, one launch a flat buffer.

Everything is asynchronous on the current stream; factor and skip flag are read on the device.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from zeroplan.core.layout import NORM_PARTS, NORM_WORKSPACE
from zeroplan_runtime.kernels import nvrtc
from zeroplan_runtime.kernels.segments import Segments
from zeroplan_runtime.kernels.update import Step

_NAMES = {torch.float32: "float", torch.bfloat16: "zp::bf16", torch.float16: "zp::fp16"}


@dataclass(frozen=True, slots=True)
class Shape:
    """How a kernel is cut: `threads` a block; `vector` elements an access; `unroll` vectors in flight a thread; `blocks` a
    multiprocessor for a grid that stays, 0 for one that covers the buffer; cache hints of loads and stores (see common.cuh).
    """

    threads: int = 256
    vector: int = 4
    unroll: int = 1
    blocks: int = 0
    load: int = 0
    store: int = 0


#: The fastest of benchmarks/kernels/tune.py on an H100 (benchmarks/results/kernels_tune.json).
SHAPES = {
    "adam": Shape(threads=1024),
    "lion": Shape(threads=1024),
    "sgd": Shape(threads=1024),
    "cast": Shape(),
    "norm": Shape(threads=512, vector=8, unroll=2, blocks=16, load=1),
    "norm_fp32": Shape(threads=512, vector=4, unroll=4, blocks=16, load=1),
    "lamb": Shape(threads=1024),
    "loss": Shape(threads=512, vector=8),
}
#: Bytes of the norm's workspace, zeroed once: the parts, and the ticket that tells the last block.
WORKSPACE_BYTES = NORM_WORKSPACE * 4


def _head(vector: int, *tensors: torch.Tensor) -> int:
    """Elements before the first that is aligned in every tensor for accesses of `vector` elements; all, if none is."""
    pointers = 0
    for tensor in tensors:
        pointers |= tensor.data_ptr()
    if pointers % 16 == 0:  # as it nearly always is
        return 0
    n = tensors[0].numel()
    for head in range(min(vector, n + 1)):
        if all((t.data_ptr() + head * t.element_size()) % min(16, vector * t.element_size()) == 0 for t in tensors):
            return head
    return n


@cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _kernel(device: int, file: str, name: str, grad: torch.dtype, out: torch.dtype | None, shape: Shape) -> Any:
    macros = (
        ("ZP_GRAD", _NAMES[grad]),
        ("ZP_OUT", "void" if out is None else _NAMES[out]),
        ("ZP_THREADS", str(shape.threads)),
        ("ZP_VEC", str(shape.vector)),
        ("ZP_UNROLL", str(shape.unroll)),
        ("ZP_LOAD", str(shape.load)),
        ("ZP_STORE", str(shape.store)),
    )
    major, minor = torch.cuda.get_device_capability(device)
    torch.cuda.current_stream(device)  # makes torch's context, which cuda.core joins
    nvrtc.core().Device(device).set_current()
    return nvrtc.kernel(file, name, macros, f"sm_{major}{minor}")


@cache
def _config(blocks: int, threads: int) -> Any:
    return nvrtc.core().LaunchConfig(grid=blocks, block=threads)


@cache
def _stream(handle: int) -> Any:
    # The legacy default stream's handle is 0 to torch and 1 to the driver.
    return nvrtc.core().Stream.from_handle(handle or 1)


def _launch(device: torch.device, kernel: Any, blocks: int, threads: int, *arguments: object) -> None:
    core, index = nvrtc.core(), _index(device)
    stream = _stream(torch.cuda.current_stream(index).cuda_stream)
    if index == torch.cuda.current_device():
        core.launch(stream, _config(blocks, threads), kernel, *arguments)
    else:
        with torch.cuda.device(index):
            core.launch(stream, _config(blocks, threads), kernel, *arguments)


def _blocks(shape: Shape, device: torch.device, n: int) -> int:
    covering = -(-n // (shape.threads * shape.vector * shape.unroll))
    if shape.blocks:
        covering = min(covering, shape.blocks * _multiprocessors(_index(device)))
    return max(1, min(covering, 2**31 - 1))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


_f = ctypes.c_float
_d = ctypes.c_double


def _update(file: str, step: Step, pointers: tuple[int, ...], *coefficients: object) -> None:
    assert step.grad is not None
    n, device, shape = step.param.numel(), step.param.device, SHAPES[file]
    if n == 0:
        return
    out = None if step.out is None else step.out.dtype
    kernel = _kernel(_index(device), f"{file}.cu", f"zp_{file}", step.grad.dtype, out, shape)
    head = _head(shape.vector, *step.buffers())
    blocks = _blocks(shape, device, n)
    _launch(device, kernel, blocks, shape.threads, *pointers, n, head, _pointer(step.scalars), *coefficients)


def adam(step: Step) -> None:
    """Adam and AdamW."""
    pointers = (_pointer(step.param), _pointer(step.grad), _pointer(step.first), _pointer(step.second), _pointer(step.out))
    numbers = (step.beta1, step.one_minus_beta1, step.beta2, step.one_minus_beta2)
    _update("adam", step, pointers, *map(_f, (*numbers, step.root2, step.eps, step.l2, step.keep, step.rate)))


def lion(step: Step) -> None:
    """Lion."""
    pointers = (_pointer(step.param), _pointer(step.grad), _pointer(step.first), _pointer(step.out))
    numbers = (step.beta1, step.one_minus_beta1, step.beta2, step.one_minus_beta2, step.keep, step.rate)
    _update("lion", step, pointers, *map(_f, numbers))


def sgd(step: Step) -> None:
    """SGD with `beta1` as momentum and `one_minus_beta1` as what the gradient adds to it."""
    pointers = (_pointer(step.param), _pointer(step.grad), _pointer(step.first), _pointer(step.out))
    numbers = map(_f, (step.beta1, step.one_minus_beta1, step.l2, step.rate))
    _update("sgd", step, pointers, *numbers, ctypes.c_int(step.nesterov))


def lamb_moments(step: Step, segments: Segments) -> None:
    """LAMB's first pass: the moments, and each segment's squared norms."""
    assert step.grad is not None
    device, shape = step.param.device, SHAPES["lamb"]
    if segments.count == 0:
        return
    build = (_index(device), "lamb.cu")
    if len(segments.tiles):
        buffers = [t for t in step.buffers() if t is not step.out]
        _launch(
            device,
            _kernel(*build, "zp_lamb_moments", step.grad.dtype, None, shape),
            len(segments.tiles),
            shape.threads,
            *map(_pointer, (step.param, step.grad, step.first, step.second, segments.tiles, segments.partial)),
            step.param.numel(),
            _head(shape.vector, *buffers),
            _pointer(step.scalars),
            *map(_f, (step.beta1, step.one_minus_beta1, step.beta2, step.one_minus_beta2, step.eps, step.l2)),
        )
    _launch(
        device,
        _kernel(*build, "zp_lamb_norms", step.grad.dtype, None, shape),
        segments.count,
        shape.threads,
        *map(_pointer, (segments.partial, segments.first_tile, segments.norms)),
    )


def lamb_apply(step: Step, segments: Segments, min_trust: float, max_trust: float) -> None:
    """LAMB's second pass, with the norms of whole tensors in ``segments.norms``."""
    assert step.grad is not None
    device, shape = step.param.device, SHAPES["lamb"]
    if not len(segments.tiles):
        return
    out = None if step.out is None else step.out.dtype
    buffers = [t for t in step.buffers() if t is not step.grad]
    _launch(
        device,
        _kernel(_index(device), "lamb.cu", "zp_lamb_apply", step.grad.dtype, out, shape),
        len(segments.tiles),
        shape.threads,
        *map(_pointer, (step.param, step.first, step.second, step.out, segments.tiles, segments.norms)),
        step.param.numel(),
        _head(shape.vector, *buffers),
        _pointer(step.scalars),
        _f(step.eps),
        _f(step.l2),
        *map(_d, (step.rate, min_trust, max_trust)),
    )


@cache
def _workspace(device: int) -> torch.Tensor:
    # For callers beside the engine, whose norms use the Arena's.
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{device}")


def sum_of_squares(
    grad: torch.Tensor, scalars: torch.Tensor, *, accumulate: bool, workspace: torch.Tensor | None = None
) -> None:
    """``scalars[SQUARES]`` = (itself, if `accumulate`) + the sum of the gradient's squares, the same bits every time.

    `workspace`: :data:`WORKSPACE_BYTES` zeroed bytes, for one stream at a time; by default the device's own.
    """
    device, shape = grad.device, SHAPES["norm_fp32" if grad.dtype == torch.float32 else "norm"]
    index = _index(device)
    space = _workspace(index) if workspace is None else workspace
    blocks = min(_blocks(shape, device, grad.numel()), NORM_PARTS)
    _launch(
        device,
        _kernel(index, "norm.cu", "zp_sum_of_squares", grad.dtype, None, shape),
        blocks,
        shape.threads,
        _pointer(grad),
        grad.numel(),
        _head(shape.vector, grad),
        space.data_ptr(),
        space.data_ptr() + NORM_PARTS * 8,
        _pointer(scalars),
        ctypes.c_int(accumulate),
    )


def finalize(scalars: torch.Tensor, max_norm: float, loss_scale: float, *, may_skip: bool) -> None:
    """Norm, factor and skip from the sum of squares."""
    kernel = _kernel(_index(scalars.device), "norm.cu", "zp_finalize", torch.bfloat16, None, SHAPES["norm"])
    _launch(scalars.device, kernel, 1, 1, _pointer(scalars), _d(max_norm), _d(loss_scale), ctypes.c_int(may_skip))


def cast(source: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """``out = source * scale`` through fp32."""
    shape, n = SHAPES["cast"], source.numel()
    if n == 0:
        return
    kernel = _kernel(_index(source.device), "cast.cu", "zp_cast", source.dtype, out.dtype, shape)
    head = _head(shape.vector, source, out)
    _launch(
        source.device,
        kernel,
        _blocks(shape, source.device, n),
        shape.threads,
        _pointer(source),
        _pointer(out),
        n,
        head,
        _f(scale),
    )


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore: int, lse: torch.Tensor, losses: torch.Tensor) -> None:
    """Each row's log-sum-exp and loss."""
    device, shape = logits.device, SHAPES["loss"]
    rows, vocab = logits.shape
    if rows == 0:
        return
    kernel = _kernel(_index(device), "loss.cu", "zp_cross_entropy", logits.dtype, None, shape)
    pointers = (_pointer(logits), _pointer(labels), vocab, ignore, _pointer(lse), _pointer(losses))
    _launch(device, kernel, rows, shape.threads, *pointers)


def cross_entropy_grad(
    logits: torch.Tensor, labels: torch.Tensor, ignore: int, lse: torch.Tensor, scale: torch.Tensor, grad: torch.Tensor
) -> None:
    """The gradient of `scale` × the sum of the rows' losses."""
    device, shape = logits.device, SHAPES["loss"]
    rows, vocab = logits.shape
    if rows == 0:
        return
    kernel = _kernel(_index(device), "loss.cu", "zp_cross_entropy_grad", logits.dtype, None, shape)
    pointers = (_pointer(logits), _pointer(labels), vocab, ignore, _pointer(lse), _pointer(scale), _pointer(grad))
    _launch(device, kernel, rows, shape.threads, *pointers)
