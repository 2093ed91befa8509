"""The CUDA backend: launches the kernels of ``csrc/cuda``, one launch for each flat buffer.

Everything is asynchronous on the current stream; the kernels read FACTOR and SKIP on the device.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
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


def _run(
    file: str,
    name: str,
    config: KernelConfig,
    blocks: int,
    *arguments: object,
    like: torch.Tensor,
    grad: torch.dtype | None = None,
    out: torch.dtype | None = None,
    more: tuple[tuple[str, str], ...] = (),
    threads: int | None = None,
) -> None:
    """Launches a kernel on the device of `like`; tensors are given by their address, None by null.

    Args:
        file, name: where it is.
        config: how it is built and launched.
        blocks: of the grid.
        arguments: the kernel's.
        like: says where to launch.
        grad, out: ``ZP_GRAD`` and ``ZP_OUT`` of the build; by default the dtype of `like`, and void.
        more: further macros.
        threads: of a block, where they are fewer than the config's.
    """
    index = _index(like.device)
    kernel = _kernel(index, f"{file}.cu", name, grad or like.dtype, out, config, more)
    given = [each.data_ptr() if isinstance(each, torch.Tensor) else 0 if each is None else each for each in arguments]
    core, stream = nvrtc.core(), _stream(torch.cuda.current_stream(index).cuda_stream)
    with nullcontext() if index == torch.cuda.current_device() else torch.cuda.device(index):
        core.launch(stream, _launch_config(blocks, threads or config.threads), kernel, *given)


def _dtype(tensor: torch.Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _blocks(config: KernelConfig, device: torch.device, n: int) -> int:
    covering = -(-n // (config.threads * config.vector * config.unroll))
    if config.blocks:
        covering = min(covering, config.blocks * _multiprocessors(_index(device)))
    return max(1, min(covering, 2**31 - 1))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


_f = ctypes.c_float
_d = ctypes.c_double


def _update(
    name: str,
    args: UpdateArgs,
    tensors: tuple[torch.Tensor | None, ...],
    numbers: tuple[float, ...],
    *more: object,
    file: str = "",
) -> None:
    n, config = args.param.numel(), KERNEL_CONFIGS[name]
    if n:
        blocks, head = _blocks(config, args.param.device, n), _head(config.vector, *args.buffers())
        like = args.param if args.grad is None else args.grad
        given = (*tensors, n, head, args.scalars, *map(_f, numbers), *more)
        _run(file or name, f"zp_{name}", config, blocks, *given, like=like, out=_dtype(args.out))


def adam(args: UpdateArgs) -> None:
    """Steps Adam or AdamW; see :func:`.functional.adamw`."""
    tensors = (args.param, args.grad, args.first, args.second, args.out)
    _update("adam", args, tensors, (*_decays(args), args.root2, args.eps, args.l2, args.keep, args.rate))


def _decays(args: UpdateArgs) -> tuple[float, float, float, float]:
    return args.beta1, args.one_minus_beta1, args.beta2, args.one_minus_beta2


def adam_blockwise(args: BlockwiseArgs) -> None:
    """Steps AdamW with blockwise states; see :func:`.functional.adamw_blockwise`."""
    update, kept, config = args.update, args.format, KERNEL_CONFIGS["adam_blockwise"]
    assert update.grad is not None
    count = kept.blocks(update.param.numel())
    if count == 0:
        return
    sizes = (("ZP_BITS", str(kept.bits)), ("ZP_BLOCK", str(kept.block)))
    # A warp works on a block of elements, so each of its threads on a 32nd.
    grid = _blocks(replace(config, vector=kept.block // 32), update.param.device, update.param.numel())
    tensors = (update.param, update.grad, args.first, args.second, args.scales, update.out, args.maps)
    numbers = map(_f, (*_decays(update), update.root2, update.eps, update.keep, update.rate))
    given = (*tensors, count, update.scalars, *numbers)
    _run("adam_blockwise", "zp_adam_blockwise", config, grid, *given, like=update.grad, out=_dtype(update.out), more=sizes)


def lion(args: UpdateArgs) -> None:
    """Steps Lion; see :func:`.functional.lion`."""
    _update("lion", args, (args.param, args.grad, args.first, args.out), (*_decays(args), args.keep, args.rate))


def sgd(args: UpdateArgs) -> None:
    """SGD; `beta1` is the momentum, `one_minus_beta1` the factor on the gradient."""
    tensors, numbers = (args.param, args.grad, args.first, args.out), (args.beta1, args.one_minus_beta1, args.l2, args.rate)
    _update("sgd", args, tensors, numbers, ctypes.c_int(args.nesterov))


def lamb_moments(args: UpdateArgs, segments: TensorSegments) -> None:
    """Runs LAMB's first pass: updates the moments and writes ``segments.norms``."""
    assert args.grad is not None
    config, grad = KERNEL_CONFIGS["lamb"], args.grad
    if segments.count == 0:
        return
    if len(segments.tiles):
        head = _head(config.vector, *(t for t in args.buffers() if t is not args.out))
        tensors = (args.param, grad, args.first, args.second, segments.tiles, segments.partial)
        given = (*tensors, args.param.numel(), head, args.scalars, *map(_f, (*_decays(args), args.eps, args.l2)))
        _run("lamb", "zp_lamb_moments", config, len(segments.tiles), *given, like=grad)
    _run("lamb", "zp_lamb_norms", config, segments.count, segments.partial, segments.first_tile, segments.norms, like=grad)


def lamb_apply(args: UpdateArgs, segments: TensorSegments, min_trust: float, max_trust: float) -> None:
    """Runs LAMB's second pass: updates the parameters by the trust ratios from ``segments.norms``."""
    assert args.grad is not None
    config = KERNEL_CONFIGS["lamb"]
    if not len(segments.tiles):
        return
    head = _head(config.vector, *(t for t in args.buffers() if t is not args.grad))
    tensors = (args.param, args.first, args.second, args.out, segments.tiles, segments.norms)
    numbers = (_f(args.eps), _f(args.l2), *map(_d, (args.rate, min_trust, max_trust)))
    given = (*tensors, args.param.numel(), head, args.scalars, *numbers)
    _run("lamb", "zp_lamb_apply", config, len(segments.tiles), *given, like=args.grad, out=_dtype(args.out))


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
    config = KERNEL_CONFIGS["norm_fp32" if grad.dtype == torch.float32 else "norm"]
    space = _workspace(_index(grad.device)) if workspace is None else workspace
    blocks = min(_blocks(config, grad.device, grad.numel()), NORM_PARTS)
    room = (space, space.data_ptr() + NORM_PARTS * 8)
    given = (grad, grad.numel(), _head(config.vector, grad), *room, scalars, ctypes.c_int(accumulate))
    _run("norm", "zp_sum_of_squares", config, blocks, *given, like=grad)


def finalize(scalars: torch.Tensor, max_norm: float, loss_scale: float, *, may_skip: bool) -> None:
    """Computes NORM, FACTOR and SKIP from SQUARES."""
    given = (scalars, _d(max_norm), _d(loss_scale), ctypes.c_int(may_skip))
    _run("norm", "zp_finalize", KERNEL_CONFIGS["norm"], 1, *given, like=scalars, grad=torch.bfloat16, threads=1)


def cast(source: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """Writes ``source * scale``, computed in fp32, to `out`."""
    config, n = KERNEL_CONFIGS["cast"], source.numel()
    if n:
        given = (source, out, n, _head(config.vector, source, out), _f(scale))
        _run("cast", "zp_cast", config, _blocks(config, source.device, n), *given, like=source, out=out.dtype)


def widen_messages(messages: torch.Tensor, out: torch.Tensor) -> None:
    """See :func:`.float8.widen_messages`."""
    config, (ranks, size), shard = KERNEL_CONFIGS["float8"], messages.shape, out.numel() // messages.shape[0]
    if shard:
        blocks = _blocks(config, out.device, shard)
        _run("float8", "zp_widen_float8", config, ranks * blocks, messages, out, shard, size, blocks, like=out, out=out.dtype)


def turn_float8(bits: torch.Tensor, out: torch.Tensor) -> None:
    """See :func:`.float8.turned`."""
    config, (rows, columns) = KERNEL_CONFIGS["float8"], bits.shape
    down, across = -(-rows // 64), -(-columns // 64)
    if down * across:
        given, dtype = (bits, out, rows, columns, across), torch.bfloat16
        _run("float8", "zp_turn_float8", config, down * across, *given, like=bits, grad=dtype, out=dtype)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore: int, lse: torch.Tensor, losses: torch.Tensor) -> None:
    """Writes each row's log-sum-exp to `lse` and its loss to `losses`."""
    rows, vocab = logits.shape
    if rows:
        given = (logits, labels, vocab, ignore, lse, losses)
        _run("loss", "zp_cross_entropy", KERNEL_CONFIGS["loss"], rows, *given, like=logits)


def cross_entropy_grad(
    logits: torch.Tensor, labels: torch.Tensor, ignore: int, lse: torch.Tensor, scale: torch.Tensor, grad: torch.Tensor
) -> None:
    """Writes the gradient of `scale` × the sum of the rows' losses to `grad`."""
    rows, vocab = logits.shape
    if rows:
        given = (logits, labels, vocab, ignore, lse, scale, grad)
        _run("loss", "zp_cross_entropy_grad", KERNEL_CONFIGS["loss"], rows, *given, like=logits)


def frozen_adam(args: UpdateArgs) -> None:
    """Steps Adam with a second moment that stays; see :func:`.one_bit.frozen_adam`."""
    tensors = (args.param, args.first, args.second, args.out)
    _update("frozen_adam", args, tensors, (args.root2, args.eps, args.keep, args.rate), file="onebit")


def sign_pack(args: SignArgs, momentum: torch.Tensor, grad: torch.Tensor, error: torch.Tensor, beta1: float) -> None:
    """Compresses a rank's momentum; see :func:`.one_bit.sign_pack`."""
    given = (momentum, grad, error, args.messages, args.shard, args.words, args.scalars, _f(beta1), _f(1 - beta1))
    _signs(args, "pack", args.ranks, grad, *given)


def sign_average(args: SignArgs, error: torch.Tensor, message: torch.Tensor) -> None:
    """Averages the ranks' messages and compresses the mean; see :func:`.one_bit.sign_average`."""
    share = (ctypes.c_int(args.ranks), args.scalars, _f(1 / args.ranks))
    _signs(args, "average", 1, error, args.messages, error, message, args.shard, args.words, *share)


def sign_unpack(args: SignArgs, values: torch.Tensor, decay: float) -> None:
    """Writes the values of the messages; see :func:`.one_bit.sign_unpack`."""
    given = (args.messages, values, args.shard, args.words, args.scalars, _f(decay), _f(1 - decay))
    _signs(args, "unpack", args.ranks, values, *given)


def _signs(args: SignArgs, what: str, chunks: int, grad: torch.Tensor, *arguments: object) -> None:
    """Launches a kernel with one thread block for each scale of `chunks` chunks."""
    _run("onebit", f"zp_sign_{what}", KERNEL_CONFIGS["signs"], chunks * scales_of(args.shard), *arguments, like=grad)
