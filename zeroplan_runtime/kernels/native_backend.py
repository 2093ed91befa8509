"""The native backend: updates of CPU tensors by ``libzeroplan_cpu`` (``csrc/cpu/optim.hpp``), called through ctypes."""

from __future__ import annotations

import ctypes
import threading
from functools import cache, partial

import torch

from zeroplan.core.plumbing.native import library as shared_library
from zeroplan_runtime.kernels.block_quantisation import BlockwiseArgs
from zeroplan_runtime.kernels.segments import TensorSegments
from zeroplan_runtime.kernels.update import FACTOR, SKIP, SQUARES, SignArgs, UpdateArgs

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NONE = -1
_COEFFICIENTS = ("beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "root2", "eps", "l2", "keep", "rate")


class _UpdateArguments(ctypes.Structure):
    """``ZeroplanStep``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("param", "grad", "first", "second", "out")),
        ("n", ctypes.c_int64),
        ("grad_type", ctypes.c_int32),
        ("out_type", ctypes.c_int32),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_float) for name in _COEFFICIENTS),
        ("nesterov", ctypes.c_int32),
    ]


class _Blockwise(ctypes.Structure):
    """``ZeroplanBlockwise``."""

    _fields_ = [
        ("step", _UpdateArguments),
        *((name, ctypes.c_void_p) for name in ("first", "second", "scales", "maps")),
        ("bits", ctypes.c_int32),
        ("block", ctypes.c_int32),
    ]


class _Cast(ctypes.Structure):
    """``ZeroplanCast``."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("source_type", ctypes.c_int32),
        ("out_type", ctypes.c_int32),
        ("scale", ctypes.c_float),
    ]


class _Signs(ctypes.Structure):
    """``ZeroplanSigns``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("momentum", "grad", "error", "messages")),
        ("shard", ctypes.c_int64),
        ("words", ctypes.c_int64),
        ("ranks", ctypes.c_int32),
        ("grad_type", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("factor", "beta1", "one_minus_beta1")),
        ("skip", ctypes.c_int32),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """The library with its functions declared; None where it is not built, does not load, or lacks one of them."""
    found = shared_library()
    if found is None:
        return None
    pointer, count, threads, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
    try:
        for name in ("adam", "adam_blockwise", "lion", "sgd", "cast", "frozen_adam", "sign_pack"):
            function = getattr(found, f"zeroplan_{name}")
            function.argtypes, function.restype = [pointer, threads], None
        found.zeroplan_sum_of_squares.argtypes = [pointer, ctypes.c_int32, count, threads]
        found.zeroplan_sum_of_squares.restype = real
        found.zeroplan_lamb_moments.argtypes = [pointer, pointer, count, pointer, count, threads]
        found.zeroplan_lamb_moments.restype = None
        found.zeroplan_lamb_apply.argtypes = [pointer, pointer, count, pointer, real, real, real, threads]
        found.zeroplan_lamb_apply.restype = None
        found.zeroplan_sign_average.argtypes = [pointer, pointer, ctypes.c_float, threads]
        found.zeroplan_sign_average.restype = None
        found.zeroplan_sign_unpack.argtypes, found.zeroplan_sign_unpack.restype = [pointer, pointer, threads], None
        found.zeroplan_use_instructions.argtypes, found.zeroplan_use_instructions.restype = [ctypes.c_char_p], ctypes.c_int
        found.zeroplan_instructions.argtypes, found.zeroplan_instructions.restype = [], ctypes.c_char_p
    except AttributeError:
        return None
    return found


def _loaded() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None, "the native backend was chosen without its library"
    return loaded


def instructions() -> str:
    """Returns the instruction set in use: ``avx512``, ``avx2`` or ``plain``."""
    name: bytes = _loaded().zeroplan_instructions()
    return name.decode()


def use_instructions(name: str | None) -> bool:
    """Makes the routines use one instruction set; None removes the choice. False if this processor lacks it."""
    done: int = _loaded().zeroplan_use_instructions(None if name is None else name.encode())
    return done == 0


_local = threading.local()


def use_threads(count: int | None) -> None:
    """Sets the number of threads of routines that this thread calls; None for ``torch.get_num_threads()``."""
    _local.threads = count


def _threads() -> int:
    return getattr(_local, "threads", None) or torch.get_num_threads()


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _arguments(args: UpdateArgs) -> _UpdateArguments | None:
    """The update as a C struct; None if it is skipped."""
    scale = 1.0
    if args.scalars is not None:
        if float(args.scalars[SKIP]):
            return None
        scale = float(args.scalars[FACTOR])
    return _UpdateArguments(
        param=_pointer(args.param),
        grad=_pointer(args.grad),
        first=_pointer(args.first),
        second=_pointer(args.second),
        out=_pointer(args.out),
        n=args.param.numel(),
        grad_type=_NONE if args.grad is None else _TYPES[args.grad.dtype],
        out_type=_NONE if args.out is None else _TYPES[args.out.dtype],
        scale=scale,
        nesterov=int(args.nesterov),
        **{name: getattr(args, name) for name in _COEFFICIENTS},
    )


def _update(name: str, args: UpdateArgs) -> None:
    arguments = _arguments(args)
    if arguments is not None:
        getattr(_loaded(), name)(ctypes.byref(arguments), _threads())


#: Each steps an optimizer; see :mod:`.functional` and, of the last, :mod:`.one_bit`.
adam, lion, sgd, frozen_adam = (partial(_update, f"zeroplan_{name}") for name in ("adam", "lion", "sgd", "frozen_adam"))


def adam_blockwise(args: BlockwiseArgs) -> None:
    """Steps AdamW with blockwise states; see :func:`.functional.adamw_blockwise`."""
    step = _arguments(args.update)
    if step is not None:
        pointers = (_pointer(t) for t in (args.first, args.second, args.scales, args.maps))
        arguments = _Blockwise(step, *pointers, args.format.bits, args.format.block)
        _loaded().zeroplan_adam_blockwise(ctypes.byref(arguments), _threads())


def lamb_moments(args: UpdateArgs, segments: TensorSegments) -> None:
    """Runs LAMB's first pass: updates the moments and writes ``segments.norms``."""
    arguments = _arguments(args)
    if arguments is not None:
        _loaded().zeroplan_lamb_moments(
            ctypes.byref(arguments),
            segments.tiles.data_ptr(),
            len(segments.tiles),
            segments.norms.data_ptr(),
            segments.count,
            _threads(),
        )


def lamb_apply(args: UpdateArgs, segments: TensorSegments, min_trust: float, max_trust: float) -> None:
    """Runs LAMB's second pass: updates the parameters by the trust ratios from ``segments.norms``."""
    arguments = _arguments(args)
    if arguments is not None:
        _loaded().zeroplan_lamb_apply(
            ctypes.byref(arguments),
            segments.tiles.data_ptr(),
            len(segments.tiles),
            segments.norms.data_ptr(),
            args.rate,
            min_trust,
            max_trust,
            _threads(),
        )


def sum_of_squares(grad: torch.Tensor, scalars: torch.Tensor, *, accumulate: bool) -> None:
    """Writes (or, with `accumulate`, adds) the sum of the gradient's squares to ``scalars[SQUARES]``."""
    before = float(scalars[SQUARES]) if accumulate else 0.0
    total = _loaded().zeroplan_sum_of_squares(grad.data_ptr(), _TYPES[grad.dtype], grad.numel(), _threads())
    scalars[SQUARES] = before + total


def cast(source: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """Writes ``source * scale``, computed in fp32, to `out`."""
    arguments = _Cast(_pointer(source), _pointer(out), source.numel(), _TYPES[source.dtype], _TYPES[out.dtype], scale)
    _loaded().zeroplan_cast(ctypes.byref(arguments), _threads())


def sign_pack(args: SignArgs, momentum: torch.Tensor, grad: torch.Tensor, error: torch.Tensor, beta1: float) -> None:
    """Compresses a rank's momentum; see :func:`.one_bit.sign_pack`."""
    signs = _signs(args, error)
    signs.momentum, signs.grad, signs.grad_type = _pointer(momentum), _pointer(grad), _TYPES[grad.dtype]
    signs.beta1, signs.one_minus_beta1 = beta1, 1 - beta1
    _loaded().zeroplan_sign_pack(ctypes.byref(signs), _threads())


def sign_average(args: SignArgs, error: torch.Tensor, message: torch.Tensor) -> None:
    """Averages the ranks' messages and compresses the mean; see :func:`.one_bit.sign_average`."""
    _loaded().zeroplan_sign_average(ctypes.byref(_signs(args, error)), _pointer(message), 1 / args.ranks, _threads())


def sign_unpack(args: SignArgs, values: torch.Tensor, decay: float) -> None:
    """Writes the values of the messages; see :func:`.one_bit.sign_unpack`."""
    signs = _signs(args, None)
    signs.beta1, signs.one_minus_beta1 = decay, 1 - decay
    if not signs.skip:
        _loaded().zeroplan_sign_unpack(ctypes.byref(signs), _pointer(values), _threads())


def _signs(args: SignArgs, error: torch.Tensor | None) -> _Signs:
    given = args.scalars
    return _Signs(
        error=_pointer(error),
        messages=_pointer(args.messages),
        shard=args.shard,
        words=args.words,
        ranks=args.ranks,
        factor=1.0 if given is None else float(given[FACTOR]),
        skip=int(given is not None and bool(given[SKIP])),
    )
