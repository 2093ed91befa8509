"""What is trained, and how: everything that decides activations, dtypes and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DType(StrEnum):
    """Element types by the names users write."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def bytes(self) -> int:
        """Bytes an element."""
        return 4 if self is DType.FP32 else 2


class Precision(StrEnum):
    """How dtypes are divided between model, masters and arithmetic."""

    FP32 = "fp32"  # everything fp32
    MIXED = "mixed"  # 16-bit model, fp32 masters
    AUTOCAST = "autocast"  # fp32 model, 16-bit arithmetic
    PURE = "pure"  # 16-bit model, masters, gradients and states


class Attention(StrEnum):
    """The attention implementation, by transformers' names."""

    SDPA = "sdpa"
    FLASH = "flash"
    EAGER = "eager"


class OptimizerKind(StrEnum):
    """How an optimizer walks its tensors, which decides its temporaries."""

    FUSED = "fused"  # one kernel, no temporaries
    FOREACH = "foreach"  # torch's multi-tensor loops
    LOOP = "loop"  # one tensor after another


@dataclass(frozen=True, slots=True)
class Workload:
    """One training job's computation on one rank.

    `optimizer` is a key of :data:`zeroplan.ledger.optimizers.OPTIMIZERS`. `lora_targets` empty means all linear layers of
    the blocks. `seq_len` None means 2048, or the model's maximum if that is less.
    """

    micro_batch: int = 1
    seq_len: int | None = None
    grad_accum: int = 1
    dtype: DType = DType.BF16
    precision: Precision = Precision.MIXED
    optimizer: str = "adamw"
    optimizer_kind: OptimizerKind = OptimizerKind.FUSED
    attn: Attention = Attention.SDPA
    gradient_checkpointing: bool = False
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()

    @property
    def param_bytes(self) -> int:
        """Bytes of one model parameter."""
        return 4 if self.precision in (Precision.FP32, Precision.AUTOCAST) else self.dtype.bytes

    @property
    def master_bytes(self) -> int:
        """Bytes of one master parameter."""
        return self.dtype.bytes if self.precision is Precision.PURE else 4
