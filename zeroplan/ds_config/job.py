"""What a ds_config says of the computation: batches, precision, optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.workload import DType, OptimizerKind, Precision, Workload

#: DeepSpeed's own optimizers (runtime/config.py of 0.19.8), matched without regard to case.
DEEPSPEED_OPTIMIZERS = frozenset({"adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon"})
#: The classes of ``torch.optim`` (torch 2.13), matched with case. ``Muon`` is DeepSpeed's own by then.
TORCH_OPTIMIZERS = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "LBFGS",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
    | {"SparseAdam", "Muon"}
)
#: Once DeepSpeed's, gone in 0.19; before, they refused ZeRO.
ONE_BIT_OPTIMIZERS = frozenset({"onebitadam", "zerooneadam", "onebitlamb"})

#: From DeepSpeed's names to those of the ledger.
_LEDGER_NAMES = {"muadam": "adamw", "muadamw": "adamw", "musgd": "sgd", "adam": "adamw"}
#: Those that DeepSpeed runs as one fused kernel (or its CPU counterpart).
_FUSED = frozenset({"adam", "adamw", "lamb", "lion"})


@dataclass(frozen=True, slots=True)
class Job:
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
    def optimizer_name(self) -> str:
        """The type in lower case where DeepSpeed knows it, else as written; empty without one."""
        name = self.optimizer or ""
        return name.lower() if name.lower() in DEEPSPEED_OPTIMIZERS else name

    @property
    def torch_adam(self) -> bool:
        """Whether ``optimizer.params.torch_adam`` asks for torch's Adam in place of DeepSpeed's."""
        return bool(self.optimizer_params.get("torch_adam")) and self.optimizer_name in ("adam", "adamw", "muon")

    def workload(self, base: Workload, *, pure: bool = False, given: frozenset[str] = frozenset()) -> Workload:
        """`base` with what the file fixes. `given` names fields of `base` that the user set by flag.

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
            said |= {"optimizer": self._ledger_name(), "optimizer_kind": self._kind()}
        for name, value in said.items():
            if name in given and getattr(base, name) != value:
                raise BadInput(
                    f"the ds_config says {value}, the flag {getattr(base, name)}",
                    where=f"--{name.replace('_', '-')}",
                    remedy="change one of the two",
                )
        return replace(base, **said)

    def _ledger_name(self) -> str:
        name = self.optimizer_name.lower()
        if name == "sgd" and self.optimizer_params.get("momentum"):
            return "sgd_momentum"
        return _LEDGER_NAMES.get(name, name)

    def _kind(self) -> OptimizerKind:
        fused = self.optimizer_name in _FUSED and not self.torch_adam
        return OptimizerKind.FUSED if fused or self.optimizer_params.get("fused") is True else OptimizerKind.FOREACH
