"""The public functions: each checks its arguments, turns hyperparameters into coefficients and calls the device's backend.

The optimizers' functions work in place on contiguous 1-D tensors of n elements on one device. The common arguments are

- `param` and the states: fp32;
- `grad`: fp32, bf16 or fp16;
- `param_out`: bf16 or fp16, receives the updated parameters in the same pass; None where there are none;
- `scalars`: fp32, at least 4 elements, from :func:`grad_norm`: FACTOR multiplies the gradients, SKIP skips the update.

On a GPU no function waits for the host or the device. On a CPU they use ``torch.get_num_threads()`` threads. All backends give
the same bits: Note [Arithmetic] in :mod:`.update`. All functions raise ValueError for tensors that do not fit together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zeroplan_runtime.kernels import cuda_backend, torch_backend
from zeroplan_runtime.kernels.backends import backend
from zeroplan_runtime.kernels.block_quantisation import BlockFormat, BlockwiseArgs, map_words
from zeroplan_runtime.kernels.segments import TensorSegments
from zeroplan_runtime.kernels.update import NORM, SQUARES, UpdateArgs, bias_corrections, check_elements

Betas = tuple[float, float]
Reduce = Callable[[torch.Tensor], object] | None


def checked(param: torch.Tensor, scalars: torch.Tensor | None, betas: Betas, **rest: Any) -> UpdateArgs:
    """Checks the update's arguments and returns them, with the moments' coefficients from `betas`.

    The scalars are copied to the parameters' device, which waits for the GPU where only the parameters are in host memory.
    """
    if scalars is not None and scalars.device != param.device:
        scalars = scalars.to(param.device)
    first, second = betas
    decay = {"beta1": first, "one_minus_beta1": 1 - first, "beta2": second, "one_minus_beta2": 1 - second}
    args = UpdateArgs(param=param, scalars=scalars, **(decay | rest))
    args.check()
    return args


def _adam_coefficients(
    correction1: float, correction2: float, lr: float, eps: float, weight_decay: float, *, decoupled: bool = True
) -> dict[str, float]:
    """Returns the coefficients of Adam's update beside those of the moments: see :func:`adamw`."""
    decay = {"keep": 1 - lr * weight_decay} if decoupled else {"keep": 1.0, "l2": weight_decay}
    return {"root2": 1 / math.sqrt(correction2), "eps": eps, "rate": lr / correction1, **decay}


@torch.no_grad()
def adamw(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    lr: float,
    step: int,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    decoupled: bool = True,
    bias_correction: bool = True,
    second_step: int | None = None,
    param_out: torch.Tensor | None = None,
    scalars: torch.Tensor | None = None,
) -> None:
    """Steps AdamW (Loshchilov & Hutter 2019, algorithm 2); with ``decoupled=False`` Adam (Kingma & Ba 2015, algorithm 1) with
    L2.

    g ← factor·g (+ λp if not decoupled), m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g²,
    p ← (1 − ηλ)p − η/(1−β₁ᵗ) · m / (√v / √(1−β₂ˢ) + ε), where t is `step`, counted from 1, and s is `second_step`, the number
    of steps that have updated v, t by default.
    """
    correction1, _ = bias_corrections(step, *betas, wanted=bias_correction)
    _, correction2 = bias_corrections(step if second_step is None else second_step, *betas, wanted=bias_correction)
    args = checked(
        param,
        scalars,
        betas,
        grad=grad,
        first=exp_avg,
        second=exp_avg_sq,
        out=param_out,
        **_adam_coefficients(correction1, correction2, lr, eps, weight_decay, decoupled=decoupled),
    )
    backend(param.device).adam(args)


@torch.no_grad()
def adamw_blockwise(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scales: torch.Tensor,
    kept: BlockFormat,
    *,
    lr: float,
    step: int,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
    param_out: torch.Tensor | None = None,
    scalars: torch.Tensor | None = None,
    maps: torch.Tensor | None = None,
) -> None:
    """Steps AdamW (Loshchilov & Hutter 2019, algorithm 2) with its moments in 8 or 4 bits: Note [Blockwise states] in
    :mod:`.block_quantisation`.

    The update reads the new moments before they are rounded.

    Args:
        param: fp32 [n], whole blocks.
        grad: [n], fp32, bf16 or fp16.
        exp_avg, exp_avg_sq: uint8, n codes each.
        scales: fp32 [2 × blocks], of each block the first moment's and the second's.
        kept: the format of the states.
        lr, betas, eps, weight_decay: as ``torch.optim.AdamW`` has them.
        step: the number of the applied step, from 1.
        bias_correction: divide the moments by 1 − βᵗ.
        param_out: [n], bf16 or fp16, receives the updated parameters; None where there are none.
        maps: the tables of `kept` on the device; by default the device's own.

    Raises:
        ValueError: for tensors that do not fit together.
    """
    correction1, correction2 = bias_corrections(step, *betas, wanted=bias_correction)
    update = checked(
        param,
        scalars,
        betas,
        grad=grad,
        out=param_out,
        **_adam_coefficients(correction1, correction2, lr, eps, weight_decay),
    )
    tables = map_words(kept.bits, kept.block, param.device) if maps is None else maps
    args = BlockwiseArgs(update, kept, exp_avg, exp_avg_sq, scales, tables)
    args.check()
    backend(param.device).adam_blockwise(args)


@torch.no_grad()
def lion(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    *,
    lr: float,
    betas: Betas = (0.9, 0.99),
    weight_decay: float = 0.0,
    param_out: torch.Tensor | None = None,
    scalars: torch.Tensor | None = None,
) -> None:
    """Steps Lion (Chen et al. 2023, algorithm 2).

    p ← (1 − ηλ)p − η·sign(β₁m + (1−β₁)g), m ← β₂m + (1−β₂)g, with g scaled by the factor first.
    """
    args = checked(
        param,
        scalars,
        betas,
        grad=grad,
        first=exp_avg,
        out=param_out,
        keep=1 - lr * weight_decay,
        rate=lr,
    )
    backend(param.device).lion(args)


@torch.no_grad()
def sgd(
    param: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    *,
    lr: float,
    step: int = 1,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    param_out: torch.Tensor | None = None,
    scalars: torch.Tensor | None = None,
) -> None:
    """SGD as ``torch.optim.SGD``: b ← μb + (1−τ)g (b ← g at `step` 1, when b must hold zeros), p ← p − ηb.

    Nesterov: p ← p − η(g + μb). `momentum_buffer` None: p ← p − ηg. g is scaled by the factor, then λp is added.
    """
    args = checked(
        param,
        scalars,
        (momentum, 0.0),
        grad=grad,
        first=momentum_buffer,
        out=param_out,
        one_minus_beta1=1.0 if step == 1 else 1 - dampening,
        l2=weight_decay,
        rate=lr,
        nesterov=nesterov,
    )
    backend(param.device).sgd(args)


@torch.no_grad()
def lamb(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    segments: TensorSegments,
    *,
    lr: float,
    step: int,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    min_trust: float = 0.01,
    max_trust: float = 10.0,
    reduce: Reduce = None,
    param_out: torch.Tensor | None = None,
    scalars: torch.Tensor | None = None,
) -> None:
    """Steps LAMB (You et al. 2020, algorithm 2) in the form of DeepSpeed's FusedLamb, for each tensor of `segments`.

    u = m / (√v + ε) + λp, p ← p − η √(1−β₂ᵗ)/(1−β₁ᵗ) · clamp(‖p‖/‖u‖, `min_trust`, `max_trust`) · u.

    Args:
        segments: the bounds of the tensors in the flat buffers.
        reduce: called between the two passes with the squared norms, fp64 [segments, 2]; adds the other ranks' in place.
    """
    if not param.numel():  # a rank that owns nothing of the group takes part in the sums
        if reduce is not None:
            reduce(segments.norms.zero_())
        return
    correction1, correction2 = bias_corrections(step, *betas, wanted=bias_correction)
    args = checked(
        param,
        scalars,
        betas,
        grad=grad,
        first=exp_avg,
        second=exp_avg_sq,
        out=param_out,
        eps=eps,
        l2=weight_decay,
        rate=lr * math.sqrt(correction2) / correction1,
    )
    if segments.bounds[-1] != param.numel() or segments.tiles.device != param.device:
        raise ValueError(f"expected segments of {param.numel()} elements on {param.device} but got {segments.bounds[-1]}")
    impl = backend(param.device)
    impl.lamb_moments(args, segments)
    if reduce is not None:
        reduce(segments.norms)
    impl.lamb_apply(args, segments, min_trust, max_trust)


def _require_positive(loss_scale: float) -> None:
    if loss_scale <= 0:
        raise ValueError(f"expected a positive loss scale but got {loss_scale}")


def _add_squares(grad: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None, *, accumulate: bool) -> None:
    impl = backend(out.device)
    more = {"workspace": workspace} if impl is cuda_backend else {}  # the others need none
    impl.sum_of_squares(grad, out, accumulate=accumulate, **more)


def _finish(scalars: torch.Tensor, max_norm: float, loss_scale: float, may_skip: bool, reduce: Reduce) -> None:
    """Computes NORM, FACTOR and SKIP from SQUARES, this rank's sum, after `reduce` has added the other ranks'."""
    if reduce is not None:
        reduce(scalars[SQUARES : SQUARES + 1])
    impl = cuda_backend if backend(scalars.device) is cuda_backend else torch_backend  # too little work for a CPU routine
    impl.finalize(scalars, max_norm, loss_scale, may_skip=may_skip)


@torch.no_grad()
def grad_norm(
    grads: torch.Tensor | Sequence[torch.Tensor],
    scalars: torch.Tensor,
    *,
    max_norm: float = 0.0,
    loss_scale: float = 1.0,
    may_skip: bool = False,
    reduce: Reduce = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the norm of the gradients, the clip factor and the overflow check, in one pass and without waiting for a GPU.

    Args:
        grads: one or more gradients, fp32, bf16 or fp16.
        scalars: fp32, at least 4 elements. Filled with SQUARES; NORM, without the loss scale; FACTOR, the clip factor of
            ``torch.nn.utils.clip_grad_norm_`` divided by the loss scale; SKIP, 1 if `may_skip` and the sum is not finite
            (a gradient is infinite or NaN, or a square overflows fp32).
        max_norm: the norm to clip to; 0 does not clip.
        loss_scale: the factor on the loss.
        may_skip: allow SKIP.
        reduce: called with SQUARES, shape [1]; adds the other ranks' in place.
        workspace: ``WORKSPACE_BYTES`` of :mod:`.cuda_backend`, zeroed once by the caller; by default the device's own.

    Returns:
        NORM, a view of `scalars`.
    """
    grads = [grads] if isinstance(grads, torch.Tensor) else list(grads)
    if scalars.dtype != torch.float32 or scalars.numel() < 4 or not scalars.is_contiguous():
        raise ValueError(f"expected at least 4 contiguous fp32 scalars but got {scalars.numel()} of {scalars.dtype}")
    _require_positive(loss_scale)
    for grad in grads:
        check_elements(grad, "gradient", scalars.device)
    if not grads:
        scalars[SQUARES].zero_()
    for i, grad in enumerate(grads):
        _add_squares(grad, scalars, workspace, accumulate=i > 0)
    _finish(scalars, max_norm, loss_scale, may_skip, reduce)
    return scalars[NORM]


@torch.no_grad()
def squares(grad: torch.Tensor, out: torch.Tensor, *, workspace: torch.Tensor | None = None) -> None:
    """Writes the sum of the squares of `grad` to ``out[0]``, fp32, for :func:`global_norm`.

    `workspace` is that of :func:`grad_norm`.
    """
    check_elements(grad, "gradient", out.device)
    _add_squares(grad, out, workspace, accumulate=False)


@torch.no_grad()
def global_norm(
    partials: torch.Tensor,
    scalars: torch.Tensor,
    *,
    max_norm: float = 0.0,
    loss_scale: float = 1.0,
    may_skip: bool = False,
    reduce: Reduce = None,
) -> None:
    """Computes what :func:`grad_norm` does from the sums of squares that :func:`squares` left in `partials`, fp32.

    They are added in fp64, in their order in `partials`, so the order in which the gradients arrived does not change the
    bits.
    """
    _require_positive(loss_scale)
    scalars[SQUARES].copy_(partials.sum(dtype=torch.float64))
    _finish(scalars, max_norm, loss_scale, may_skip, reduce)


@torch.no_grad()
def cast(source: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """Writes ``source · scale`` to `out`, rounded to nearest even, between fp32, bf16 and fp16. Returns `out`."""
    check_elements(source, "source", source.device)
    check_elements(out, "out", source.device)
    if source.numel() != out.numel():
        raise ValueError(f"expected out of {source.numel()} elements but got {out.numel()}")
    backend(source.device).cast(source, out, scale)
    return out
