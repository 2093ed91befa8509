"""Reads a ``ds_config`` into what the runtime needs, by the reader that the planner uses too (:mod:`zeroplan.ds_config`).

Defaults are DeepSpeed 0.19.8's. ``"auto"`` counts as not given. What the runtime cannot do is refused by name, and what
changes nothing here is listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroplan.core.curriculum import Curriculum
from zeroplan.core.errors import BadInput
from zeroplan.core.layer_drop import ProgressiveLayerDrop
from zeroplan.core.quantize_training import QuantizeTraining
from zeroplan.core.sparse_attention import SparseAttention
from zeroplan.core.workload import DType
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.dialect import Dialect
from zeroplan.ds_config.findings import Severity
from zeroplan.ds_config.reader import DsConfig, inspect_ds_config
from zeroplan.ds_config.runtime_options import RuntimeOptions
from zeroplan_runtime.optim.scaler import LossScaler

#: The sections that have a writer.
MONITORS = ("tensorboard", "wandb", "csv_monitor")


@dataclass(frozen=True)
class RuntimeConfig:
    """A ds_config's settings for the runtime.

    Attributes:
        zero: stage, offload, dtypes of gradients, clipping.
        micro_batch, grad_accum: samples of a rank's micro batch, micro batches a step.
        dtype: of the model.
        fp16: the keys given in the ``fp16`` section.
        optimizer, scheduler: ``{"type": …, "params": {…}}`` without ``auto`` values; None where the file has none.
        runtime_options: the ``zeroplan`` section.
        drop_last: leave out a loader's last batch where it is smaller.
        counts_micro_batches: the engine counts micro batches and divides the loss by their number; otherwise every step
            updates the parameters, with the sum of the gradients since the last.
        flops_profiler: the given keys of the section of that name, where it is enabled; else None.
        monitors: the given keys of ``tensorboard``, ``wandb`` and ``csv_monitor``, where they are enabled.
        sparse_attention: the section of that name; None without it.
        curriculum: of sequence lengths; None without one.
        layer_drop: progressive layer dropping; None without it.
        quantize_training: the section of that name; None without it.
        without_effect: paths of keys that change nothing here.
    """

    zero: ZeroConfig = field(default_factory=ZeroConfig)
    micro_batch: int = 1
    grad_accum: int = 1
    dtype: DType = DType.FP32
    fp16: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    scheduler: Mapping[str, Any] | None = None
    runtime_options: RuntimeOptions = field(default_factory=RuntimeOptions)
    drop_last: bool = False
    counts_micro_batches: bool = True
    monitors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    flops_profiler: Mapping[str, Any] | None = None
    sparse_attention: SparseAttention | None = None
    curriculum: Curriculum | None = None
    layer_drop: ProgressiveLayerDrop | None = None
    quantize_training: QuantizeTraining | None = None
    without_effect: tuple[str, ...] = ()

    @property
    def check_overflow(self) -> bool:
        """Whether a step with gradients that are not finite is skipped: always in fp16, in bf16 unless switched off."""
        return self.dtype is DType.FP16 or (self.dtype is DType.BF16 and self.zero.step.check_grad_overflow)

    @property
    def auto_cast(self) -> bool:
        """Whether floating inputs are cast to the model's dtype."""
        return bool(self.fp16.get("auto_cast", False))

    def loss_scaler(self) -> LossScaler:
        """Returns the loss scaler that the ``fp16`` section describes; the constant 1 without it."""
        if self.dtype is not DType.FP16:
            return LossScaler()
        static = float(self.fp16.get("loss_scale", 0))
        plain = self.zero.stage == 0  # DeepSpeed has a scaler of its own there, without hysteresis (fp16/fused_optimizer.py)
        if static:
            return LossScaler(scale=static)
        return LossScaler(
            scale=2.0 ** self.fp16.get("initial_scale_power", 16),
            dynamic=True,
            window=self.fp16.get("loss_scale_window", 1000),
            hysteresis=1 if plain else self.fp16.get("hysteresis", 2),
            stays_at_least=plain,
            consecutive_hysteresis=self.fp16.get("consecutive_hysteresis", False),
            min_scale=self.fp16.get("min_loss_scale", 1.0),
        )


def read_config(source: object, ranks: int) -> RuntimeConfig:
    """Reads a :class:`RuntimeConfig` from a dict or the path of a JSON file, for this many data-parallel ranks.

    Raises:
        BadInput: for a file that cannot be read, a key that is unknown or not supported, or batch sizes that do not agree.
    """
    if not isinstance(source, Mapping | str | Path):
        what = f"a {type(source).__name__} is no ds_config"
        raise BadInput(what, where="config", remedy="give a dict or the path of its JSON")
    config = inspect_ds_config(source, dialect=Dialect.RUNTIME, world_size=ranks)
    if faults := config.of_severity(Severity.ERROR, Severity.OPEN):
        raise config.refusal(faults)
    job = config.training
    return RuntimeConfig(
        zero=config.zero,
        micro_batch=job.micro_batch or 1,
        grad_accum=job.grad_accum or 1,
        dtype=job.dtype or DType.FP32,
        fp16=_keys_of(config, "fp16"),
        optimizer=None if job.optimizer is None else {"type": job.optimizer, "params": dict(job.optimizer_params)},
        scheduler=None if job.scheduler is None else {"type": job.scheduler, "params": _keys_of(config, "scheduler.params")},
        runtime_options=config.runtime_options,
        drop_last=bool(config.values.get("dataloader_drop_last", False)),
        counts_micro_batches=bool(config.values.get("managed_gradient_accumulation", True)),
        monitors={name: _keys_of(config, name) for name in MONITORS if config.values.get(f"{name}.enabled")},
        flops_profiler=_keys_of(config, "flops_profiler") if config.values.get("flops_profiler.enabled") else None,
        sparse_attention=config.sparse_attention,
        curriculum=config.curriculum,
        layer_drop=config.layer_drop,
        quantize_training=config.quantize_training,
        without_effect=config.ignored,
    )


def _keys_of(config: DsConfig, section: str) -> dict[str, Any]:
    """The keys that the file gives in a section, with their values."""
    prefix = f"{section}."
    return {path.removeprefix(prefix): value for path, value in config.values.items() if path.startswith(prefix)}
