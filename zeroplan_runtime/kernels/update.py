"""What one optimizer update needs, in one form for the three backends.

Note [Arithmetic]
    Every product, sum, root and quotient of an update is rounded to fp32 on its own (no fused multiply-add, IEEE division
    and square root, subnormals kept), in one order that csrc/cuda, csrc/cpu and :mod:`.torch_backend` all keep; scalars are
    computed here in fp64 and rounded to fp32 once. So the three backends give the same bits (NaN payloads aside), and a run
    may move between them. Sums of squares are the exception: each backend adds in its own fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Places in the step's scalars, an fp32 tensor on the gradients' device. SQUARES: sum of the squares of the gradients as
#: they lie, loss scale and all. NORM: of the gradients without loss scale, before clipping. FACTOR: multiplies every
#: gradient, clip factor over loss scale. SKIP: 1 where the update must leave everything as it is. ORDER and the next: the
#: largest number that any rank made of the order of its collectives, and the largest of its negatives.
SQUARES, NORM, FACTOR, SKIP, ORDER = range(5)


@dataclass(frozen=True, slots=True)
class Step:
    """One update of flat buffers of equal length, and its coefficients.

    `first`, `second`: fp32 states (None where the optimizer has none). `out`: the parameters in the model's dtype. `scalars`:
    see :data:`FACTOR`, :data:`SKIP`. `l2` times the parameter is added to the gradient (LAMB: to the direction); `keep`
    multiplies the parameter (decoupled weight decay); `rate` is the step size; `root2` is 1 / √(1 − β₂ᵗ).
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
        """The flat buffers, parameter first."""
        return [t for t in (self.param, self.grad, self.first, self.second, self.out) if t is not None]

    def check(self) -> None:
        """Raises ValueError unless the buffers are flat, contiguous, of one length, on one device and of known dtypes."""
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


_MASTERS = (torch.float32,)
_HALVES = (torch.bfloat16, torch.float16)
_ELEMENTS = (torch.float32, *_HALVES)


def bias_corrections(step: int, beta1: float, beta2: float, *, wanted: bool = True) -> tuple[float, float]:
    """1 − β₁ᵗ and 1 − β₂ᵗ for update number `step` (from 1); both 1 where not wanted."""
    if step < 1:
        raise ValueError(f"expected a step of at least 1 but got {step}")
    return (1 - beta1**step, 1 - beta2**step) if wanted else (1.0, 1.0)


def check_elements(tensor: torch.Tensor, name: str, device: torch.device) -> None:
    """Raises ValueError unless `tensor` is contiguous, on `device`, and fp32, bf16 or fp16."""
    if tensor.dtype not in _ELEMENTS:
        raise ValueError(f"expected {name} of {' or '.join(map(str, _ELEMENTS))} but got {tensor.dtype}")
    if tensor.device != device or not tensor.is_contiguous():
        how = "" if tensor.is_contiguous() else "strided "
        raise ValueError(f"expected contiguous {name} on {device} but got {how}{name} on {tensor.device}")
