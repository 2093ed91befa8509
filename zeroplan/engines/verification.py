"""The part of an engine that ``verify`` uses: which buffers it accounts for, and how it trains on a rank.

A trainer is a function ``build(run: TrainingRun) -> Trainer`` in a module that imports torch. Only a rank's process imports it,
by the dotted path that the engine names (:attr:`zeroplan.engines.base.Engine.trainer`), so planning never loads torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import DType, Precision

if TYPE_CHECKING:
    import torch

    from zeroplan.core.workload import Workload

#: Small enough that no optimizer leaves the loss's range within the few steps of a run.
LEARNING_RATE = 1e-5

#: What names one buffer on one rank: buffer, unit, place.
Key = tuple[str, str, str]
#: One measured buffer: buffer, unit, place, bytes.
Row = tuple[str, str, str, int]


@dataclass(frozen=True, slots=True)
class OwnedBuffers:
    """The buffers that an engine allocates through an account of its own, so that a run must equal them to the byte.

    Attributes:
        rows: bytes by buffer, unit and place.
        passing: names of the buffers that come and go; their bytes are those at their fullest.
    """

    rows: Mapping[Key, int]
    passing: frozenset[str] = frozenset()


class ModelMaker(Protocol):
    """Makes the model of a run."""

    def __call__(self, dtype: torch.dtype, *, cheap: bool = False) -> Any:
        """Build the model on the current device, in training mode.

        Args:
            dtype: of the parameters; a user's own module keeps its own.
            cheap: fill the weights with a repeated random pattern in place of transformers' initialisation.
        """


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The run that ``verify`` hands to an engine on each rank. The process group is joined already.

    Attributes:
        stage: the ZeRO stage.
        workload: what was planned, which the trainer must run as it is.
        ds_config: what the engine's :meth:`~zeroplan.engines.base.Engine.run_config` returned.
        device: this rank's GPU, or the CPU.
        mark: call ``mark("load", "init")`` when the model is built, ``mark("init", "forward")`` when the engine is ready, and
            likewise after each forward, backward and step: the phase that ended, and the one that follows.
        make_model: makes the model.
        prepare: adds adapters and checkpointing to the model, and returns it.
        loss_of: the loss in what the model's forward returned.
        layout: how the ranks divide the work; data parallelism alone but for engines that run others
            (:attr:`~zeroplan.engines.base.Engine.verified_degrees`).
        schedule: the order of micro batches on pipeline stages (:class:`~zeroplan.core.pipeline_order.PipelineSchedule`).
        partition: how layers are divided over them (:class:`~zeroplan.engines.case.Case`).
    """

    stage: int
    workload: Workload
    ds_config: Mapping[str, Any]
    device: torch.device
    mark: Callable[[str, str], None]
    make_model: ModelMaker
    prepare: Callable[[Any], Any]
    loss_of: Callable[[Any], torch.Tensor]
    layout: ParallelLayout
    schedule: str
    partition: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the arithmetic."""
        import torch

        return {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}[self.workload.numerics.dtype]

    @property
    def kept_dtype(self) -> torch.dtype:
        """The dtype in which the model is read: fp32, or that of the arithmetic under fp32 adapters."""
        import torch

        return self.dtype if self.workload.numerics.precision is Precision.HALF_AUTOCAST else torch.float32

    @property
    def optimizer(self) -> str:
        """A name of :data:`zeroplan.core.optimizers.OPTIMIZERS`."""
        return self.workload.numerics.optimizer

    @property
    def grad_accum(self) -> int:
        """Micro batches an optimizer step."""
        return self.workload.batch.grad_accum


@dataclass(frozen=True, slots=True)
class Trainer:
    """A model that is ready to train.

    Attributes:
        step: trains one optimizer step on a batch (the keyword arguments of one micro batch's forward), returns the loss; None
            where another pipeline stage has it.
        rows: what the engine keeps between two steps.
        owned: whether `rows` are all that the engine owns, each at its peak.
        close: ends what would outlive the run.
        where: what the engine is doing, for messages; empty where it does not tell.
        pinned: bytes of host memory that the engine pinned without torch.
    """

    step: Callable[[dict[str, torch.Tensor]], torch.Tensor | None]
    rows: Callable[[], list[Row]]
    owned: bool = False
    close: Callable[[], None] = lambda: None
    where: Callable[[], str] = lambda: ""
    pinned: Callable[[], int] = lambda: 0


def optimizer_section(name: str) -> dict[str, Any]:
    """Return the ``optimizer`` section of a ds_config for a run of a few steps.

    Raises:
        BadInput: an optimizer that a ds_config cannot name.
    """
    written = find_optimizer(name).written
    if written is None:
        raise BadInput(
            f"DeepSpeed builds no {name} from a config", where="--optimizer", remedy="give --ds-config, or use adamw"
        )
    return {"type": written.type, "params": {**written.params, "lr": LEARNING_RATE}}
