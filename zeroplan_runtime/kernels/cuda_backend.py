"""The CUDA backend: launches the kernels of ``csrc/cuda``, one launch for each flat buffer.

Everything is asynchronous on the current stream; the kernels read FACTOR and SKIP on the device.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from zeroplan.core.arena.layout import FLOAT8_HEAD, NORM_PARTS, NORM_WORKSPACE
from zeroplan.core.one_bit import SCALE_BLOCK, scales_of
from zeroplan_runtime.kernels import nvrtc
from zeroplan_runtime.kernels.block_quantisation import BlockwiseArgs
from zeroplan_runtime.kernels.segments import TensorSegments
from zeroplan_runtime.kernels.update import SignArgs, UpdateArgs

_NAMES = {torch.float32: "float", torch.bfloat16: "zp::bf16", torch.float16: "zp::fp16"}


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """The launch configuration of one kernel.

    Attributes:
        threads: per block.
        vector: elements of one load or store.
        unroll: vectors that a thread loads before it computes.
        blocks: per multiprocessor for a persistent grid; 0 for a grid that covers the buffer.
        load, store: cache hints (see common.cuh).
    """

    threads: int = 256
    vector: int = 4
    unroll: int = 1
    blocks: int = 0
    load: int = 0
    store: int = 0


#: The fastest of benchmarks/kernels/tune.py on an H100 (benchmarks/results/kernels_tune.json).
KERNEL_CONFIGS = {
    "adam": KernelConfig(threads=1024),
    "adam_blockwise": KernelConfig(threads=256, blocks=4),  # not tuned: no GPU has run it yet
    "lion": KernelConfig(threads=1024),
    "sgd": KernelConfig(threads=1024),
    "cast": KernelConfig(),
    "float8": KernelConfig(vector=FLOAT8_HEAD),
    "norm": KernelConfig(threads=512, vector=8, unroll=2, blocks=16, load=1),
    "norm_fp32": KernelConfig(threads=512, vector=4, unroll=4, blocks=16, load=1),
    "lamb": KernelConfig(threads=1024),
    "loss": KernelConfig(threads=512, vector=8),
    "signs": KernelConfig(threads=SCALE_BLOCK // 8, vector=8),
    "frozen_adam": KernelConfig(threads=1024),
}
#: Bytes of the norm's workspace, zeroed once: the blocks' partial sums and the counter that finds the last block.
WORKSPACE_BYTES = NORM_WORKSPACE * 4


def _head(vector: int, *tensors: torch.Tensor) -> int:
    """The number of elements before the first one that is aligned in all tensors for a `vector` access; n if there is none."""
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
def _kernel(
    device: int,
    file: str,
    name: str,
    grad: torch.dtype,
    out: torch.dtype | None,
    config: KernelConfig,
    more: tuple[tuple[str, str], ...] = (),
) -> Any:
    macros = (
        ("ZP_GRAD", _NAMES[grad]),
        ("ZP_OUT", "void" if out is None else _NAMES[out]),
        ("ZP_THREADS", str(config.threads)),
        ("ZP_VEC", str(config.vector)),
        ("ZP_UNROLL", str(config.unroll)),
        ("ZP_LOAD", str(config.load)),
        ("ZP_STORE", str(config.store)),
        *more,
    )
    major, minor = torch.cuda.get_device_capability(device)
    torch.cuda.current_stream(device)  # creates torch's context, which cuda.core uses
    nvrtc.core().Device(device).set_current()
    return nvrtc.kernel(file, name, macros, f"sm_{major}{minor}")


@cache
def _launch_config(blocks: int, threads: int) -> Any:
    return nvrtc.core().LaunchConfig(grid=blocks, block=threads)


@cache
def _stream(handle: int) -> Any:
    # torch gives 0 as the handle of the legacy default stream, the driver expects 1.
    return nvrtc.core().Stream.from_handle(handle or 1)


def _launch(device: torch.device, kernel: Any, blocks: int, threads: int, *arguments: object) -> None:
    core, index = nvrtc.core(), _index(device)
    stream = _stream(torch.cuda.current_stream(index).cuda_stream)
    if index == torch.cuda.current_device():
        core.launch(stream, _launch_config(blocks, threads), kernel, *arguments)
    else:
        with torch.cuda.device(index):
            core.launch(stream, _launch_config(blocks, threads), kernel, *arguments)


def _blocks(config: KernelConfig, device: torch.device, n: int) -> int:
    covering = -(-n // (config.threads * config.vector * config.unroll))
    if config.blocks:
        covering = min(covering, config.blocks * _multiprocessors(_index(device)))
    return max(1, min(covering, 2**31 - 1))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


_f = ctypes.c_float
_d = ctypes.c_double


def _update(file: str, args: UpdateArgs, pointers: tuple[int, ...], *coefficients: object) -> None:
    assert args.grad is not None
    n, device, config = args.param.numel(), args.param.device, KERNEL_CONFIGS[file]
    if n == 0:
        return
    out = None if args.out is None else args.out.dtype
    kernel = _kernel(_index(device), f"{file}.cu", f"zp_{file}", args.grad.dtype, out, config)
    head = _head(config.vector, *args.buffers())
    blocks = _blocks(config, device, n)
    _launch(device, kernel, blocks, config.threads, *pointers, n, head, _pointer(args.scalars), *coefficients)


def adam(args: UpdateArgs) -> None:
    """Steps Adam or AdamW; see :func:`.functional.adamw`."""
    pointers = (_pointer(args.param), _pointer(args.grad), _pointer(args.first), _pointer(args.second), _pointer(args.out))
    numbers = (args.beta1, args.one_minus_beta1, args.beta2, args.one_minus_beta2)
    _update("adam", args, pointers, *map(_f, (*numbers, args.root2, args.eps, args.l2, args.keep, args.rate)))


def adam_blockwise(args: BlockwiseArgs) -> None:
    """Steps AdamW with blockwise states; see :func:`.blockwise.adamw_blockwise`."""
    update, kept, config = args.update, args.format, KERNEL_CONFIGS["adam_blockwise"]
    assert update.grad is not None
    device, count = update.param.device, kept.blocks(update.param.numel())
    if count == 0:
        return
    out = None if update.out is None else update.out.dtype
    sizes = (("ZP_BITS", str(kept.bits)), ("ZP_BLOCK", str(kept.block)))
    kernel = _kernel(_index(device), "adam_blockwise.cu", "zp_adam_blockwise", update.grad.dtype, out, config, sizes)
    # A warp works on a block of elements, so each of its threads on a 32nd.
    grid = _blocks(replace(config, vector=kept.block // 32), device, update.param.numel())
    tensors = (update.param, update.grad, args.first, args.second, args.scales, update.out, args.maps)
    numbers = (update.beta1, update.one_minus_beta1, update.beta2, update.one_minus_beta2)
    _launch(
        device,
        kernel,
        grid,
        config.threads,
        *map(_pointer, tensors),
        count,
        _pointer(update.scalars),
        *map(_f, (*numbers, update.root2, update.eps, update.keep, update.rate)),
    )


def lion(args: UpdateArgs) -> None:
    """Steps Lion; see :func:`.functional.lion`."""
    pointers = (_pointer(args.param), _pointer(args.grad), _pointer(args.first), _pointer(args.out))
    numbers = (args.beta1, args.one_minus_beta1, args.beta2, args.one_minus_beta2, args.keep, args.rate)
    _update("lion", args, pointers, *map(_f, numbers))


def sgd(args: UpdateArgs) -> None:
    """SGD; `beta1` is the momentum, `one_minus_beta1` the factor on the gradient."""
    pointers = (_pointer(args.param), _pointer(args.grad), _pointer(args.first), _pointer(args.out))
    numbers = map(_f, (args.beta1, args.one_minus_beta1, args.l2, args.rate))
    _update("sgd", args, pointers, *numbers, ctypes.c_int(args.nesterov))


def lamb_moments(args: UpdateArgs, segments: TensorSegments) -> None:
    """Runs LAMB's first pass: updates the moments and writes ``segments.norms``."""
    assert args.grad is not None
    device, config = args.param.device, KERNEL_CONFIGS["lamb"]
    if segments.count == 0:
        return
    build = (_index(device), "lamb.cu")
    if len(segments.tiles):
        buffers = [t for t in args.buffers() if t is not args.out]
        _launch(
            device,
            _kernel(*build, "zp_lamb_moments", args.grad.dtype, None, config),
            len(segments.tiles),
            config.threads,
            *map(_pointer, (args.param, args.grad, args.first, args.second, segments.tiles, segments.partial)),
            args.param.numel(),
            _head(config.vector, *buffers),
            _pointer(args.scalars),
            *map(_f, (args.beta1, args.one_minus_beta1, args.beta2, args.one_minus_beta2, args.eps, args.l2)),
        )
    _launch(
        device,
        _kernel(*build, "zp_lamb_norms", args.grad.dtype, None, config),
        segments.count,
        config.threads,
        *map(_pointer, (segments.partial, segments.first_tile, segments.norms)),
    )


def lamb_apply(args: UpdateArgs, segments: TensorSegments, min_trust: float, max_trust: float) -> None:
    """Runs LAMB's second pass: updates the parameters by the trust ratios from ``segments.norms``."""
    assert args.grad is not None
    device, config = args.param.device, KERNEL_CONFIGS["lamb"]
    if not len(segments.tiles):
        return
    out = None if args.out is None else args.out.dtype
    buffers = [t for t in args.buffers() if t is not args.grad]
    _launch(
        device,
        _kernel(_index(device), "lamb.cu", "zp_lamb_apply", args.grad.dtype, out, config),
        len(segments.tiles),
        config.threads,
        *map(_pointer, (args.param, args.first, args.second, args.out, segments.tiles, segments.norms)),
        args.param.numel(),
        _head(config.vector, *buffers),
        _pointer(args.scalars),
        _f(args.eps),
        _f(args.l2),
        *map(_d, (args.rate, min_trust, max_trust)),
    )


@cache
def _workspace(device: int) -> torch.Tensor:
    # For callers outside the engine; the engine passes memory of the Arena.
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{device}")


def sum_of_squares(
    grad: torch.Tensor, scalars: torch.Tensor, *, accumulate: bool, workspace: torch.Tensor | None = None
) -> None:
    """Writes (or, with `accumulate`, adds) the sum of the gradient's squares to ``scalars[SQUARES]``; bits are reproducible.

    `workspace` is :data:`WORKSPACE_BYTES` zeroed bytes that one stream uses at a time; by default the device's own.
    """
    device, config = grad.device, KERNEL_CONFIGS["norm_fp32" if grad.dtype == torch.float32 else "norm"]
    index = _index(device)
    space = _workspace(index) if workspace is None else workspace
    blocks = min(_blocks(config, device, grad.numel()), NORM_PARTS)
    _launch(
        device,
        _kernel(index, "norm.cu", "zp_sum_of_squares", grad.dtype, None, config),
        blocks,
        config.threads,
        _pointer(grad),
        grad.numel(),
        _head(config.vector, grad),
        space.data_ptr(),
        space.data_ptr() + NORM_PARTS * 8,
        _pointer(scalars),
        ctypes.c_int(accumulate),
    )


def finalize(scalars: torch.Tensor, max_norm: float, loss_scale: float, *, may_skip: bool) -> None:
    """Computes NORM, FACTOR and SKIP from SQUARES."""
    kernel = _kernel(_index(scalars.device), "norm.cu", "zp_finalize", torch.bfloat16, None, KERNEL_CONFIGS["norm"])
    _launch(scalars.device, kernel, 1, 1, _pointer(scalars), _d(max_norm), _d(loss_scale), ctypes.c_int(may_skip))


def cast(source: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """Writes ``source * scale``, computed in fp32, to `out`."""
    config, n = KERNEL_CONFIGS["cast"], source.numel()
    if n == 0:
        return
    kernel = _kernel(_index(source.device), "cast.cu", "zp_cast", source.dtype, out.dtype, config)
    head = _head(config.vector, source, out)
    _launch(
        source.device,
        kernel,
        _blocks(config, source.device, n),
        config.threads,
        _pointer(source),
        _pointer(out),
        n,
        head,
        _f(scale),
    )


def widen_messages(messages: torch.Tensor, out: torch.Tensor) -> None:
    """See :func:`.float8.widen_messages`."""
    config, (ranks, size), shard = KERNEL_CONFIGS["float8"], messages.shape, out.numel() // messages.shape[0]
    if shard == 0:
        return
    kernel = _kernel(_index(out.device), "float8.cu", "zp_widen_float8", torch.bfloat16, torch.bfloat16, config)
    blocks = _blocks(config, out.device, shard)
    pointers = _pointer(messages), _pointer(out)
    _launch(out.device, kernel, ranks * blocks, config.threads, *pointers, shard, size, blocks)


def turn_float8(bits: torch.Tensor, out: torch.Tensor) -> None:
    """See :func:`.float8.turned`."""
    config, (rows, columns) = KERNEL_CONFIGS["float8"], bits.shape
    down, across = -(-rows // 64), -(-columns // 64)
    if not down * across:
        return
    kernel = _kernel(_index(bits.device), "float8.cu", "zp_turn_float8", torch.bfloat16, torch.bfloat16, config)
    _launch(bits.device, kernel, down * across, config.threads, _pointer(bits), _pointer(out), rows, columns, across)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore: int, lse: torch.Tensor, losses: torch.Tensor) -> None:
    """Writes each row's log-sum-exp to `lse` and its loss to `losses`."""
    device, config = logits.device, KERNEL_CONFIGS["loss"]
    rows, vocab = logits.shape
    if rows == 0:
        return
    kernel = _kernel(_index(device), "loss.cu", "zp_cross_entropy", logits.dtype, None, config)
    pointers = (_pointer(logits), _pointer(labels), vocab, ignore, _pointer(lse), _pointer(losses))
    _launch(device, kernel, rows, config.threads, *pointers)


def cross_entropy_grad(
    logits: torch.Tensor, labels: torch.Tensor, ignore: int, lse: torch.Tensor, scale: torch.Tensor, grad: torch.Tensor
) -> None:
    """Writes the gradient of `scale` × the sum of the rows' losses to `grad`."""
    device, config = logits.device, KERNEL_CONFIGS["loss"]
    rows, vocab = logits.shape
    if rows == 0:
        return
    kernel = _kernel(_index(device), "loss.cu", "zp_cross_entropy_grad", logits.dtype, None, config)
    pointers = (_pointer(logits), _pointer(labels), vocab, ignore, _pointer(lse), _pointer(scale), _pointer(grad))
    _launch(device, kernel, rows, config.threads, *pointers)


def frozen_adam(args: UpdateArgs) -> None:
    """Steps Adam with a second moment that stays; see :func:`.one_bit.frozen_adam`."""
    n, device, config = args.param.numel(), args.param.device, KERNEL_CONFIGS["frozen_adam"]
    if n == 0:
        return
    out = None if args.out is None else args.out.dtype
    kernel = _kernel(_index(device), "onebit.cu", "zp_frozen_adam", torch.float32, out, config)
    pointers = map(_pointer, (args.param, args.first, args.second, args.out))
    numbers = map(_f, (args.root2, args.eps, args.keep, args.rate))
    head = _head(config.vector, *args.buffers())
    _launch(device, kernel, _blocks(config, device, n), config.threads, *pointers, n, head, _pointer(args.scalars), *numbers)


def sign_pack(args: SignArgs, momentum: torch.Tensor, grad: torch.Tensor, error: torch.Tensor, beta1: float) -> None:
    """Compresses a rank's momentum; see :func:`.one_bit.sign_pack`."""
    pointers = map(_pointer, (momentum, grad, error, args.messages))
    numbers = (_f(beta1), _f(1 - beta1))
    _signs(args, "pack", args.ranks, grad.dtype, *pointers, args.shard, args.words, _pointer(args.scalars), *numbers)


def sign_average(args: SignArgs, error: torch.Tensor, message: torch.Tensor) -> None:
    """Averages the ranks' messages and compresses the mean; see :func:`.one_bit.sign_average`."""
    pointers = map(_pointer, (args.messages, error, message))
    share = (ctypes.c_int(args.ranks), _pointer(args.scalars), _f(1 / args.ranks))
    _signs(args, "average", 1, torch.float32, *pointers, args.shard, args.words, *share)


def sign_unpack(args: SignArgs, values: torch.Tensor, decay: float) -> None:
    """Writes the values of the messages; see :func:`.one_bit.sign_unpack`."""
    pointers = map(_pointer, (args.messages, values))
    numbers = (_f(decay), _f(1 - decay))
    _signs(args, "unpack", args.ranks, torch.float32, *pointers, args.shard, args.words, _pointer(args.scalars), *numbers)


def _signs(args: SignArgs, what: str, chunks: int, grad: torch.dtype, *arguments: object) -> None:
    """Launches a kernel with one thread block for each scale of `chunks` chunks."""
    device, config = args.messages.device, KERNEL_CONFIGS["signs"]
    kernel = _kernel(_index(device), "onebit.cu", f"zp_sign_{what}", grad, None, config)
    _launch(device, kernel, chunks * scales_of(args.shard), config.threads, *arguments)
