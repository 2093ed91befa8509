"""The ds_config that ``verify`` gives to the included runtime on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.optimizers import runtime_type
from zeroplan.core.workload import DType
from zeroplan.engines.case import Case
from zeroplan.engines.verification import LEARNING_RATE, optimizer_section

#: fp16 begins at this loss scale where no file says otherwise, so that no step is lost to finding it.
_FP16_POWER = 8


def run_config(case: Case, raw: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Return the user's file with explicit batches and precision or, without a file, what the flags say."""
    work = case.workload
    config = {key: value for key, value in raw.items() if key not in ("train_batch_size", "fp16", "bf16")}
    config["train_micro_batch_size_per_gpu"] = work.batch.micro_batch
    config["gradient_accumulation_steps"] = work.batch.grad_accum
    config.setdefault("gradient_clipping", 1.0)
    zero = config.get("zero_optimization")
    config["zero_optimization"] = {**_offload(case), **(zero if isinstance(zero, Mapping) else {}), "stage": case.zero.stage}
    own_type = runtime_type(work.numerics.optimizer)
    made = {"type": own_type, "params": {"lr": LEARNING_RATE}} if own_type else optimizer_section(work.numerics.optimizer)
    config.setdefault("optimizer", made)
    picks: dict[str, Any] = {} if work.batch.labelled_share is None else {"labelled_tokens_only": True}
    recipe = work.technique(Float8Recipe)
    picks |= {} if recipe is None else {"float8": str(recipe)}
    config["zeroplan"] = {"timeout": timeout, **picks, **dict(config.get("zeroplan") or {})}
    if work.numerics.dtype is not DType.FP32:
        section = raw.get(work.numerics.dtype.value)
        own = {"initial_scale_power": _FP16_POWER} if work.numerics.dtype is DType.FP16 and not section else {}
        config[work.numerics.dtype.value] = {**own, **(section if isinstance(section, Mapping) else {}), "enabled": True}
    return config


def _offload(case: Case) -> dict[str, Any]:
    """Return the offload sections that flags stand for."""
    optimizer, param = case.zero.offload_optimizer, case.zero.offload_param
    found: dict[str, Any] = {}
    if optimizer:
        found["offload_optimizer"] = {"device": optimizer.device.value, "nvme_path": optimizer.nvme_path}
    if param:
        found["offload_param"] = {"device": param.device.value, "nvme_path": param.nvme_path}
    return found
