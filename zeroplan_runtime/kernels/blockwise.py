"""AdamW with its moments in 8 or 4 bits: Note [Blockwise states] in :mod:`.block_quantisation`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from zeroplan_runtime.kernels.backends import backend
from zeroplan_runtime.kernels.block_quantisation import BlockFormat, BlockwiseArgs, map_words
from zeroplan_runtime.kernels.segments import TensorSegments
from zeroplan_runtime.kernels.update import Reduce, UpdateArgs, bias_corrections


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
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
    param_out: torch.Tensor | None = None,
    scalars: torch.Tensor | None = None,
    maps: torch.Tensor | None = None,
) -> None:
    """Steps AdamW (Loshchilov & Hutter 2019, algorithm 2) with blockwise states.

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
        scalars: as in :mod:`.functional`.
        maps: the tables of `kept` on the device; by default the device's own.

    Raises:
        ValueError: for tensors that do not fit together.
    """
    correction1, correction2 = bias_corrections(step, *betas, wanted=bias_correction)
    if scalars is not None and scalars.device != param.device:
        scalars = scalars.to(param.device)
    update = UpdateArgs(
        param=param,
        grad=grad,
        out=param_out,
        scalars=scalars,
        beta1=betas[0],
        one_minus_beta1=1 - betas[0],
        beta2=betas[1],
        one_minus_beta2=1 - betas[1],
        root2=1 / math.sqrt(correction2),
        eps=eps,
        keep=1 - lr * weight_decay,
        rate=lr / correction1,
    )
    update.check()
    tables = map_words(kept.bits, kept.block, param.device) if maps is None else maps
    args = BlockwiseArgs(update, kept, exp_avg, exp_avg_sq, scales, tables)
    args.check()
    backend(param.device).adam_blockwise(args)


def _update(
    kept: BlockFormat,
    master: torch.Tensor,
    grad: torch.Tensor,
    states: Sequence[torch.Tensor],
    segments: TensorSegments | None,
    reduce: Reduce | None,
    *,
    step: int,
    **keywords: Any,
) -> None:
    adamw_blockwise(master, grad, states[0], states[1], states[2], kept, step=step, **keywords)


def blockwise_update(kept: BlockFormat) -> Any:
    """The update, by the signature that all optimizers have, with states in this format."""
    return partial(_update, kept)
