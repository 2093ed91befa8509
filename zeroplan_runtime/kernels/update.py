"""The arguments of one optimizer update, the same for the three backends.

Note [Arithmetic]
    Every product, sum, root and quotient of an update is rounded to fp32 by itself (no fused multiply-add, IEEE division and
    square root, subnormals kept), in one order that csrc/cuda, csrc/cpu and :mod:`.torch_backend` share. Coefficients are
    computed in fp64 and rounded to fp32 once. So the three backends give the same bits (except the payloads of NaNs), and a
    run may move between them. Sums of squares are the exception: each backend adds in its own fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Adds up the ranks' parts of a tensor in place.
Reduce = Callable[[torch.Tensor], None]

#: Indices into the step's scalars, an fp32 tensor on the gradients' device. SQUARES: the sum of the squares of the gradients,
#: which include the loss scale. NORM: the norm of the gradients without the loss scale, before clipping. FACTOR: clip factor
#: / loss scale, which multiplies every gradient. SKIP: 1 where the update must change nothing. ORDER and ORDER + 1: the
#: maximum over the ranks of the hash of their collectives' order, and of the hash times −1; they add up to 0 if all agree.
SQUARES, NORM, FACTOR, SKIP, ORDER = range(5)


@dataclass(frozen=True, slots=True)
class UpdateArgs:
    """The flat buffers of one update, all of n elements on one device, and its coefficients.

    Attributes:
        param: fp32, updated in place.
        grad: fp32, bf16 or fp16.
        first, second: fp32 states, updated in place; None where the optimizer has none.
        out: bf16 or fp16, receives the updated parameters; None where there are none.
        scalars: see :data:`FACTOR` and :data:`SKIP`; None for factor 1 and no skip.
        root2: 1 / √(1 − β₂ᵗ).
        l2: this times the parameter is added to the gradient (LAMB: to the update direction).
        keep: multiplies the parameter: 1 − ηλ with decoupled weight decay.
        rate: the step size.
    """

    param: torch.Tensor
    grad: torch.Tensor | None
    first: torch.Tensor | None = None
    second: torch.Tensor | None = None
    out: torch.Tensor | None = None
    scalars: torch.Tensor | None = None
    beta1: float = 0.0
    one_minus_beta1: float = 0.0
    beta2: float = 0.0
    one_minus_beta2: float = 0.0
    root2: float = 1.0
    eps: float = 0.0
    l2: float = 0.0
    keep: float = 1.0
    rate: float = 0.0
    nesterov: bool = False

    def buffers(self) -> list[torch.Tensor]:
        """Returns the flat buffers that exist, the parameter first."""
        return [t for t in (self.param, self.grad, self.first, self.second, self.out) if t is not None]

    def check(self) -> None:
        """Checks the buffers.

        Raises:
            ValueError: unless they are 1-D, contiguous, of one length, on one device and of supported dtypes.
        """
        n, device = self.param.numel(), self.param.device
        for name, tensor, dtypes in (
            ("param", self.param, _MASTERS),
            ("grad", self.grad, _ELEMENTS),
            ("first state", self.first, _MASTERS),
            ("second state", self.second, _MASTERS),
            ("param_out", self.out, _HALVES),
        ):
            if tensor is None:
                continue
            if tensor.dtype not in dtypes:
                raise ValueError(f"expected {name} of {' or '.join(map(str, dtypes))} but got {tensor.dtype}")
            if tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError(f"expected {name} flat and contiguous but got shape {tuple(tensor.shape)}")
            if tensor.numel() != n or tensor.device != device:
                raise ValueError(f"expected {name} of {n} elements on {device} but got {tensor.numel()} on {tensor.device}")


@dataclass(frozen=True, slots=True)
class SignArgs:
    """A flat of ``ranks × shard`` elements, or this rank's chunk of it, and its messages.

    Attributes:
        messages: fp32 words [ranks × words], a message for each rank's chunk, or from each rank for this one.
        ranks: chunks.
        shard: elements of a chunk, a multiple of 64.
        scalars: the step's, with FACTOR and SKIP; None for factor 1 and no skip.
    """

    messages: torch.Tensor
    ranks: int
    shard: int
    scalars: torch.Tensor | None

    @property
    def words(self) -> int:
        """Words of one message."""
        return self.messages.numel() // self.ranks


_MASTERS = (torch.float32,)
_HALVES = (torch.bfloat16, torch.float16)
_ELEMENTS = (torch.float32, *_HALVES)


def bias_corrections(step: int, beta1: float, beta2: float, *, wanted: bool = True) -> tuple[float, float]:
    """Returns 1 − β₁ᵗ and 1 − β₂ᵗ for step number t = `step`, from 1; 1 and 1 if not `wanted`.

    Raises:
        ValueError: for a step below 1.
    """
    if step < 1:
        raise ValueError(f"expected a step of at least 1 but got {step}")
    return (1 - beta1**step, 1 - beta2**step) if wanted else (1.0, 1.0)


def check_elements(tensor: torch.Tensor, name: str, device: torch.device) -> None:
    """Checks one tensor.

    Raises:
        ValueError: unless `tensor` is contiguous, on `device`, and fp32, bf16 or fp16.
    """
    if tensor.dtype not in _ELEMENTS:
        raise ValueError(f"expected {name} of {' or '.join(map(str, _ELEMENTS))} but got {tensor.dtype}")
    if tensor.device != device or not tensor.is_contiguous():
        how = "" if tensor.is_contiguous() else "strided "
        raise ValueError(f"expected contiguous {name} on {device} but got {how}{name} on {tensor.device}")
