"""The computation that a ds_config sets: batches, precision, optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.optimizer_row import DeepSpeedType
from zeroplan.core.optimizers import deepspeed_type, known_optimizer, optimizer_of_type
from zeroplan.core.workload import DType, OptimizerKind, Precision, Workload


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """The computation as the file states it; None is what it leaves open.

    `dtype` is the model's: bf16 or fp16 by their blocks, else fp32; None when ``auto`` was not filled. `autocast` is
    ``torch_autocast``'s dtype when that is on. `optimizer` is the type as written, `train_batch` the whole batch.
    """

    micro_batch: int | None = None
    grad_accum: int | None = None
    train_batch: int | None = None
    dtype: DType | None = None
    autocast: DType | None = None
    optimizer: str | None = None
    optimizer_params: Mapping[str, Any] = field(default_factory=dict)
    scheduler: str | None = None

    @property
    def optimizer_type(self) -> DeepSpeedType | None:
        """The optimizer that DeepSpeed builds for the type; None without one, and where the table has none of that name."""
        return deepspeed_type(self.optimizer) if self.optimizer else None

    @property
    def builds_adam(self) -> bool:
        """Whether DeepSpeed builds an Adam of its own: FusedAdam, or DeepSpeedCPUAdam where the optimizer is offloaded."""
        return self.optimizer_type is not None and self.optimizer_type.adam and not self.torch_adam

    @property
    def torch_adam(self) -> bool:
        """Whether ``optimizer.params.torch_adam`` asks for torch's Adam in place of DeepSpeed's."""
        kind = self.optimizer_type
        return bool(self.optimizer_params.get("torch_adam")) and kind is not None and kind.torch_adam

    @property
    def decays(self) -> bool:
        """Whether a class of torch's adds weight decay to the gradients, in tensors of their own."""
        row, params = optimizer_of_type(self.optimizer or "", self.optimizer_params), self.optimizer_params
        decay = params.get("weight_decay")  # a word such as auto leaves it to the program, whose default is none
        adds = isinstance(decay, int | float) and decay != 0 and not params.get("decoupled_weight_decay")
        return adds and row is not None and row.decay_lists > 0

    def workload(self, base: Workload, *, pure: bool = False, given: frozenset[str] = frozenset()) -> Workload:
        """Return `base` with what the file fixes. `given` names fields of `base` that the user set by flag.

        Args:
            base: values for what the file leaves open.
            pure: masters and states in 16 bits (``ZeroConfig.bf16_optimizer_states``).
            given: fields that must not differ from the file.

        Raises:
            BadInput: a given field that the file contradicts.
        """
        said: dict[str, Any] = {}
        if self.micro_batch is not None:
            said["micro_batch"] = self.micro_batch
        if self.grad_accum is not None:
            said["grad_accum"] = self.grad_accum
        if self.autocast is not None:
            said |= {"dtype": self.autocast, "precision": Precision.AUTOCAST}
        elif self.dtype is DType.FP32:
            said |= {"dtype": DType.FP32, "precision": Precision.FP32}
        elif self.dtype is not None:
            said |= {"dtype": self.dtype, "precision": Precision.PURE if pure else Precision.MIXED}
        if self.optimizer is not None:
            said |= {"optimizer": self._optimizer(), "optimizer_kind": self._kind(), "torch_adam": self.torch_adam}
            said["decays"] = self.decays
        for name, value in said.items():
            if name in given and base.leaf(name) != value:
                raise BadInput(
                    f"the ds_config says {value}, the flag {base.leaf(name)}",
                    where=f"--{name.replace('_', '-')}",
                    remedy="change one of the two",
                )
        return base.but(**said)

    def _optimizer(self) -> str:
        """The table's name; the type in lower case where the table has none, which its reader refuses."""
        name = self.optimizer or ""
        row = optimizer_of_type(name, self.optimizer_params)
        return known_optimizer(name) if row is None else row.name

    def _kind(self) -> OptimizerKind:
        kind = self.optimizer_type
        fused = kind is not None and kind.fused and not self.torch_adam
        return OptimizerKind.FUSED if fused or self.optimizer_params.get("fused") is True else OptimizerKind.FOREACH
