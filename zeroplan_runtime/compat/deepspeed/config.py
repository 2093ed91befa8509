"""``deepspeed.runtime.config``: a ds_config by the attributes of DeepSpeed's class, read by zeroplan's reader."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch.distributed as dist

from zeroplan.core.workload import DType
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.dialect import Dialect
from zeroplan.ds_config.findings import Severity
from zeroplan.ds_config.reader import DsConfig, inspect_ds_config
from zeroplan.ds_config.source import load_source
from zeroplan_runtime.compat.deepspeed.refusals import Refusal, refusing

Source = str | os.PathLike[str] | Mapping[str, Any]

ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER = "adagrad", "adam", "adamw"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"
GRADIENT_CLIPPING_DEFAULT = ZeroConfig().step.gradient_clipping

DeepSpeedConfigError = Refusal


class OffloadDeviceEnum(StrEnum):
    """Memories that states are offloaded to; DeepSpeed's members are in lower case."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


def removed_but_off(source: Source) -> tuple[dict[str, Any], str]:
    """The config's object without the sections that DeepSpeed has taken out and that the file switches off; and its name."""
    raw, name, _ = load_source(source)
    off = [key for key in ("amp", "eigenvalue", "elasticity") if isinstance(raw.get(key), Mapping)]
    return {key: value for key, value in raw.items() if key not in off or value.get("enabled", False)}, name


class Namespace:
    """The keys of one section as attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in vars(self).items())})"


class DeepSpeedConfig:
    """A ds_config, by DeepSpeed's names.

    Args:
        config: a dict, the path of its file, or base64 text.
        mpu: what says the number of data-parallel ranks; by default it is that of torch.distributed, or 1.
        mesh_device: has no effect.

    Raises:
        Refusal: for what DeepSpeed refuses.
    """

    def __init__(self, config: Source, mpu: Any = None, mesh_device: Any = None) -> None:
        with refusing():
            self._param_dict, _ = removed_but_off(config)
        if mpu is not None:
            self.world_size = int(mpu.get_data_parallel_world_size())
        else:
            self.world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self._read = read = inspect_ds_config(self._param_dict, dialect=Dialect.DEEPSPEED, world_size=self.world_size)
        _require(read)
        job, values = read.training, read.values
        self.train_batch_size: int | None = job.train_batch
        self.train_micro_batch_size_per_gpu: int | None = job.micro_batch
        self.gradient_accumulation_steps: int | None = job.grad_accum
        self.zero_config = read.zero
        self.zero_optimization_stage = read.zero.stage
        self.zero_enabled = read.zero.stage > 0
        self.gradient_clipping = read.zero.step.gradient_clipping
        self.gradient_allreduce_op = str(values.get("gradient_allreduce_op", "mean")).lower()
        self.float16_enabled = self.fp16_enabled = job.dtype is DType.FP16
        self.bfloat16_enabled = job.dtype is DType.BF16
        self.optimizer_name = job.optimizer.lower() if job.optimizer else None
        self.optimizer_params = dict(job.optimizer_params) or None
        self.scheduler_name = job.scheduler
        self.scheduler_params = self._param_dict.get("scheduler", {}).get("params")
        self.steps_per_print = values.get("steps_per_print")
        self.dataloader_drop_last = bool(values.get("dataloader_drop_last", False))
        self.managed_gradient_accumulation = bool(values.get("managed_gradient_accumulation", True))
        self.wall_clock_breakdown = bool(values.get("wall_clock_breakdown", False))
        self.zero_allow_untested_optimizer = read.zero.step.zero_allow_untested_optimizer
        self.load_universal_checkpoint = bool(values.get("checkpoint.load_universal", False))
        self.eigenvalue_enabled = self.eigenvalue_verbose = False

    def __getattr__(self, name: str) -> Any:
        """A key of the top level that has no attribute of its own, as the file gives it."""
        if name.startswith("_") or name not in self._param_dict:
            raise AttributeError(f"this ds_config has no {name!r}")
        return self._param_dict[name]

    def _configure_train_batch_size(self) -> None:
        """Fills what is open of batch, micro batch and accumulation, and checks that they agree."""
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        read = inspect_ds_config(given, dialect=Dialect.DEEPSPEED, world_size=self.world_size)
        _require(read)
        self.train_batch_size, self.train_micro_batch_size_per_gpu = read.training.train_batch, read.training.micro_batch
        self.gradient_accumulation_steps = read.training.grad_accum


def _require(read: DsConfig) -> None:
    faults = read.of_severity(Severity.ERROR, Severity.OPEN)
    if faults:
        with refusing():
            raise read.refusal(faults)


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """The clipping norm; DeepSpeed's default where the config has none."""
    return float(param_dict.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT))


class DeepSpeedZeroConfig(Namespace):
    """The ``zero_optimization`` section given as keywords.

    Raises:
        Refusal: for a key that DeepSpeed refuses.
    """

    def __init__(self, **section: Any) -> None:
        read = inspect_ds_config({"zero_optimization": section, "train_micro_batch_size_per_gpu": 1}, dialect=Dialect.DEEPSPEED)
        _require(read)
        super().__init__(read.zero.leaves())


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> Namespace:
    """Returns the ``bf16`` section, under either of its names."""
    return _precision(param_dict, "bf16", "bfloat16")


def get_float16_config(param_dict: Mapping[str, Any]) -> Namespace:
    """Returns the ``fp16`` section."""
    return _precision(param_dict, "fp16")


def _precision(param_dict: Mapping[str, Any], *names: str) -> Namespace:
    section = next((dict(param_dict[name]) for name in names if name in param_dict), {})
    return Namespace({"enabled": False, **section})
