"""The torch backend: the updates in plain torch operations, for any device. It is the reference and the last resort.

It keeps Note [Arithmetic] of :mod:`.update`: no operation here may fuse a product and a sum (``alpha=``, ``addcmul_`` and
``lerp_`` do so on some devices), so its bits are those of the kernels. It works chunk by chunk, which bounds the temporaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch

from zeroplan.core.arena.layout import FLOAT8_HEAD
from zeroplan.core.one_bit import SCALE_BLOCK, scales_of
from zeroplan_runtime.kernels.block_quantisation import BlockwiseArgs, decode, encode
from zeroplan_runtime.kernels.segments import TensorSegments
from zeroplan_runtime.kernels.update import FACTOR, NORM, SKIP, SQUARES, SignArgs, UpdateArgs

#: Elements updated at a time; a temporary then has 16 MiB.
CHUNK = 1 << 22
#: The same with states in blocks, whose temporaries are more: a multiple of every block.
_BLOCKWISE_CHUNK = 1 << 19


def _chunks(args: UpdateArgs) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of the buffers, each with its scaled fp32 gradient; none if the step is skipped, which waits for a GPU."""
    if args.scalars is not None and bool(args.scalars[SKIP]):
        return
    for part in _slices(args.param.numel()):
        assert args.grad is not None
        grad = args.grad[part].float()
        yield part, grad if args.scalars is None else grad * args.scalars[FACTOR]


def _slices(numel: int) -> Iterator[slice]:
    for begin in range(0, numel, CHUNK):
        yield slice(begin, min(begin + CHUNK, numel))


def _emit(args: UpdateArgs, part: slice) -> None:
    if args.out is not None:
        args.out[part].copy_(args.param[part])


def adam(args: UpdateArgs) -> None:
    """Steps Adam or AdamW; see ``csrc/cuda/adam.cu``."""
    assert args.first is not None
    assert args.second is not None
    for part, scaled in _chunks(args):
        p, m, v = args.param[part], args.first[part], args.second[part]
        grad = scaled + p * args.l2
        m.mul_(args.beta1).add_(grad * args.one_minus_beta1)
        v.mul_(args.beta2).add_((grad * args.one_minus_beta2).mul_(grad))
        p.mul_(args.keep).sub_((m / _root(v).mul_(args.root2).add_(args.eps)).mul_(args.rate))
        _emit(args, part)


def adam_blockwise(args: BlockwiseArgs) -> None:
    """Steps AdamW with blockwise states; see ``csrc/cuda/adam_blockwise.cu``."""
    whole, kept = args.update, args.format
    if whole.scalars is not None and bool(whole.scalars[SKIP]):
        return
    codes, maps = (args.first, args.second), (kept.first, kept.second)
    for begin in range(0, whole.param.numel(), _BLOCKWISE_CHUNK):
        part = slice(begin, min(begin + _BLOCKWISE_CHUNK, whole.param.numel()))
        packed = slice(part.start // kept.codes_a_byte, part.stop // kept.codes_a_byte)
        scales = args.scales.view(-1, 2)[part.start // kept.block : part.stop // kept.block]
        m, v = (decode(codes[i][packed], scales[:, i], kept, maps[i]) for i in (0, 1))
        out = None if whole.out is None else whole.out[part]
        assert whole.grad is not None
        adam(replace(whole, param=whole.param[part], grad=whole.grad[part], out=out, first=m, second=v))
        for i, values in enumerate((m, v)):
            codes[i][packed], scales[:, i] = encode(values, kept, maps[i])


def lion(args: UpdateArgs) -> None:
    """Steps Lion; see ``csrc/cuda/lion.cu``."""
    assert args.first is not None
    for part, grad in _chunks(args):
        p, m = args.param[part], args.first[part]
        direction = (m * args.beta1).add_(grad * args.one_minus_beta1)
        # torch.sign maps NaN to 0, but NaN must reach the parameter.
        sign = torch.where(direction.isnan(), direction, direction.sign())
        p.mul_(args.keep).sub_(sign.mul_(args.rate))
        m.mul_(args.beta2).add_(grad * args.one_minus_beta2)
        _emit(args, part)


def sgd(args: UpdateArgs) -> None:
    """SGD; `beta1` is the momentum, `one_minus_beta1` the factor on the gradient; see ``csrc/cuda/sgd.cu``."""
    for part, scaled in _chunks(args):
        p = args.param[part]
        grad = scaled + p * args.l2
        if args.first is not None:
            buffer = args.first[part]
            buffer.mul_(args.beta1).add_(grad * args.one_minus_beta1)
            grad = grad + buffer * args.beta1 if args.nesterov else buffer
        p.sub_(grad * args.rate)
        _emit(args, part)


def lamb_moments(args: UpdateArgs, segments: TensorSegments) -> None:
    """Runs LAMB's first pass: updates the moments and writes ``segments.norms``; see ``csrc/cuda/lamb.cu``."""
    assert args.first is not None
    assert args.second is not None
    for part, grad in _chunks(args):
        args.first[part].mul_(args.beta1).add_(grad * args.one_minus_beta1)
        args.second[part].mul_(args.beta2).add_((grad * args.one_minus_beta2).mul_(grad))
    segments.norms.zero_()
    for i, (begin, end) in enumerate(pairwise(segments.bounds)):
        for part in _slices(end - begin):
            within = slice(begin + part.start, begin + part.stop)
            segments.norms[i, 0] += _squares(args.param[within])
            segments.norms[i, 1] += _squares(_direction(args, within))


def lamb_apply(args: UpdateArgs, segments: TensorSegments, min_trust: float, max_trust: float) -> None:
    """Runs LAMB's second pass: updates the parameters by the trust ratios from ``segments.norms``; see
    ``csrc/cuda/lamb.cu``.
    """
    if args.scalars is not None and bool(args.scalars[SKIP]):
        return
    weight, update = segments.norms.sqrt().unbind(1)
    trust = (weight / update).clamp(min_trust, max_trust)
    rates = (torch.where((weight != 0) & (update != 0), trust, 1.0) * args.rate).float()
    for i, (begin, end) in enumerate(pairwise(segments.bounds)):
        for part in _slices(end - begin):
            within = slice(begin + part.start, begin + part.stop)
            args.param[within].sub_(_direction(args, within).mul_(rates[i]))
    for part in _slices(args.param.numel()):
        _emit(args, part)


def _root(x: torch.Tensor) -> torch.Tensor:
    """√x, correctly rounded as IEEE 754 requires; torch's fp32 root on CPUs is not always."""
    return x.sqrt() if x.is_cuda else x.double().sqrt_().float()


def _direction(args: UpdateArgs, part: slice) -> torch.Tensor:
    assert args.first is not None
    assert args.second is not None
    return (args.first[part] / _root(args.second[part]).add_(args.eps)).add_(args.param[part] * args.l2)


def _squares(values: torch.Tensor) -> torch.Tensor:
    wide = values.float()
    return (wide * wide).sum(dtype=torch.float64)


def sum_of_squares(grad: torch.Tensor, scalars: torch.Tensor, *, accumulate: bool) -> None:
    """Writes (or, with `accumulate`, adds) the sum of the gradient's squares, in fp64, to ``scalars[SQUARES]``."""
    total = scalars[SQUARES].double() if accumulate else torch.zeros((), dtype=torch.float64, device=grad.device)
    for part in _slices(grad.numel()):
        total = total + _squares(grad[part])
    scalars[SQUARES].copy_(total)


def finalize(scalars: torch.Tensor, max_norm: float, loss_scale: float, *, may_skip: bool) -> None:
    """Computes NORM, FACTOR and SKIP from SQUARES in fp64, without waiting for the device; see ``csrc/cuda/norm.cu``."""
    squares = scalars[SQUARES].double()
    norm = squares.sqrt() / torch.tensor(loss_scale, dtype=torch.float64, device="cpu")
    clip = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norm)
    scalars[NORM].copy_(norm)
    scalars[FACTOR].copy_(clip / torch.tensor(loss_scale, dtype=torch.float64, device="cpu"))
    if may_skip:
        scalars[SKIP].copy_(~torch.isfinite(squares))
    else:
        scalars[SKIP].zero_()


def cast(source: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """Writes ``source * scale``, computed in fp32, to `out`."""
    for part in _slices(source.numel()):
        out[part].copy_(source[part].float() * scale)


def widen_messages(messages: torch.Tensor, out: torch.Tensor) -> None:
    """See :func:`.float8.widen_messages`."""
    values = out.view(messages.shape[0], -1)
    values.copy_(messages[:, FLOAT8_HEAD : FLOAT8_HEAD + values.shape[1]].view(torch.float8_e4m3fn))
    values.mul_(messages[:, :4].view(torch.float32))


def turn_float8(bits: torch.Tensor, out: torch.Tensor) -> None:
    """See :func:`.float8.turned`."""
    out.view(torch.uint8).copy_(bits.view(torch.uint8).t())


def _rows(logits: torch.Tensor) -> Iterator[slice]:
    step = max(1, CHUNK // max(1, logits.shape[1]))
    for begin in range(0, logits.shape[0], step):
        yield slice(begin, min(begin + step, logits.shape[0]))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore: int, lse: torch.Tensor, losses: torch.Tensor) -> None:
    """Writes each row's log-sum-exp to `lse` and its loss to `losses`."""
    for part in _rows(logits):
        wide, label = logits[part].float(), labels[part]
        counts = label != ignore
        torch.logsumexp(wide, 1, out=lse[part])
        chosen = wide.gather(1, label.where(counts, 0).unsqueeze(1)).squeeze(1)
        losses[part] = torch.where(counts, lse[part] - chosen, 0.0)


def cross_entropy_grad(
    logits: torch.Tensor, labels: torch.Tensor, ignore: int, lse: torch.Tensor, scale: torch.Tensor, grad: torch.Tensor
) -> None:
    """Writes the gradient of `scale` × the sum of the rows' losses to `grad`."""
    for part in _rows(logits):
        wide, label = logits[part].to(torch.float32, copy=True), labels[part]
        counts = (label != ignore).unsqueeze(1)
        wide.sub_(lse[part].unsqueeze(1)).exp_()
        wide.scatter_add_(1, label.unsqueeze(1).where(counts, 0), wide.new_full((len(label), 1), -1.0))
        grad[part] = torch.where(counts, wide.mul_(scale), 0.0)


def sign_pack(args: SignArgs, momentum: torch.Tensor, grad: torch.Tensor, error: torch.Tensor, beta1: float) -> None:
    """Compresses a rank's momentum; see ``csrc/cuda/onebit.cu``."""
    for chunk, message in enumerate(args.messages.view(args.ranks, -1)):
        part = slice(chunk * args.shard, (chunk + 1) * args.shard)
        scaled = grad[part].float()
        if args.scalars is not None:
            scaled = scaled * args.scalars[FACTOR]
        left = _compress((momentum[part] * beta1 + scaled * (1 - beta1)).add_(error[part]), message)
        if args.scalars is None or not bool(args.scalars[SKIP]):
            error[part] = left


def sign_average(args: SignArgs, error: torch.Tensor, message: torch.Tensor) -> None:
    """Averages the ranks' messages and compresses the mean; see ``csrc/cuda/onebit.cu``."""
    mean = torch.zeros_like(error)
    for received in args.messages.view(args.ranks, -1):
        mean += _values(received, args.shard)
    left = _compress(mean.mul_(1 / args.ranks).add_(error), message)
    if args.scalars is None or not bool(args.scalars[SKIP]):
        error.copy_(left)


def sign_unpack(args: SignArgs, values: torch.Tensor, decay: float) -> None:
    """Writes the values of the messages; see :func:`.one_bit.sign_unpack`."""
    if args.scalars is not None and bool(args.scalars[SKIP]):
        return
    for message, chunk in zip(args.messages.view(args.ranks, -1), values.view(args.ranks, -1), strict=True):
        found = _values(message, args.shard)
        chunk.copy_(chunk * decay + found * (1 - decay) if decay else found)


def frozen_adam(args: UpdateArgs) -> None:
    """Steps Adam with a second moment that stays; see ``csrc/cuda/onebit.cu``."""
    assert args.first is not None
    assert args.second is not None
    if args.scalars is not None and bool(args.scalars[SKIP]):
        return
    for part in _slices(args.param.numel()):
        p, m, v = args.param[part], args.first[part], args.second[part]
        direction = torch.where(v == 0, 0.0, m / _root(v).mul_(args.root2).add_(args.eps))
        p.mul_(args.keep).sub_(direction.mul_(args.rate))
        _emit(args, part)


def _message_parts(message: torch.Tensor, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of the signs, uint8 [shard / 8], and the scales, fp32, of one message."""
    first = shard // 32
    return message[:first].view(torch.uint8), message[first : first + scales_of(shard)]


def _compress(values: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
    """Writes the message of `values`, fp32 [shard]; returns what it leaves out."""
    signs, scales = _message_parts(message, len(values))
    scales.copy_(_mean_magnitudes(values))
    above = values >= 0
    torch.sum(above.view(-1, 8) * _bits(values.device), 1, dtype=torch.uint8, out=signs)
    each = scales.repeat_interleave(SCALE_BLOCK)[: len(values)]
    return values - torch.where(above, each, -each)


def _values(message: torch.Tensor, shard: int) -> torch.Tensor:
    signs, scales = _message_parts(message, shard)
    each = scales.repeat_interleave(SCALE_BLOCK)[:shard]
    above = (signs.unsqueeze(1) & _bits(message.device)).view(-1) != 0
    return torch.where(above, each, -each)


def _bits(device: torch.device) -> torch.Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


def _mean_magnitudes(values: torch.Tensor) -> torch.Tensor:
    """The mean of |values| of each block, added in fp64 in the order of a GPU's thread block."""
    blocks, lanes = scales_of(len(values)), SCALE_BLOCK // 8
    padded = values.new_zeros(blocks * SCALE_BLOCK)
    padded[: len(values)] = values.abs()
    eights = padded.double().view(blocks, lanes, 8)
    sums = eights[..., 0].clone()
    for k in range(1, 8):
        sums += eights[..., k]
    halves = _add_halves(_add_halves(sums.view(blocks, lanes // 32, 32)))
    counts = torch.full_like(halves, SCALE_BLOCK)
    counts[-1] = len(values) - (blocks - 1) * SCALE_BLOCK
    return (halves / counts).float()


def _add_halves(sums: torch.Tensor) -> torch.Tensor:
    """Adds up the last dimension, of 32: the second half to the first, and so on."""
    for half in (16, 8, 4, 2, 1):
        sums = sums[..., :half] + sums[..., half : 2 * half]
    return sums[..., 0]
