"""One rank of the runtime in a case: the setup, and the layout that the Arena allocates by."""

from __future__ import annotations

from functools import lru_cache

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.layout import Layout, UnitShape, plan_layout
from zeroplan.core.layout_setup import RuntimeSetup
from zeroplan.core.optimizers import RUNTIME_NAMES
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import DType, Precision, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.runtime import runtime_setup
from zeroplan.ds_config.runtime_options import RuntimeOptions
from zeroplan.engines.runtime.units import unit_shapes
from zeroplan.models.spec import ModelSpec, SpecUnit


def setup_of(workload: Workload, zero: ZeroConfig, parallel: ParallelLayout, runtime_options: RuntimeOptions) -> RuntimeSetup:
    """Return the runtime's setup for a plan."""
    return runtime_setup(
        zero,
        runtime_options,
        ranks=parallel.shard_group,
        dtype=workload.dtype,
        optimizer=workload.optimizer,
        grad_accum=workload.grad_accum,
    )


@lru_cache(maxsize=64)
def _shapes(units: tuple[SpecUnit, ...], model_type: str, wide_numel: int) -> tuple[UnitShape, ...]:
    return tuple(unit_shapes(ModelSpec("", units, "units", model_type), wide_numel=wide_numel))


def layout_of(
    spec: ModelSpec, workload: Workload, zero: ZeroConfig, parallel: ParallelLayout, runtime_options: RuntimeOptions
) -> Layout:
    """Return the layout of one rank; all ranks have the same."""
    return plan_layout(
        _shapes(spec.units, spec.model_type, runtime_options.wide_numel), setup_of(workload, zero, parallel, runtime_options)
    )


def require_trainable(workload: Workload) -> None:
    """Refuse what the runtime does not train.

    Raises:
        BadInput: other optimizers than its own, autocast, and pure 16-bit states.
    """
    if workload.optimizer not in RUNTIME_NAMES:
        near = did_you_mean(workload.optimizer, RUNTIME_NAMES)
        remedy = near or f"use one of {', '.join(RUNTIME_NAMES)}"
        raise BadInput(f"the runtime has no optimizer {workload.optimizer!r}", where="--optimizer", remedy=remedy)
    if workload.precision not in (Precision.MIXED, Precision.FP32):
        raise BadInput(
            f"the runtime does not train in {workload.precision} precision", where="--dtype", remedy="use bf16, fp16 or fp32"
        )
    if (workload.precision is Precision.FP32) is not (workload.dtype is DType.FP32):
        raise BadInput(f"{workload.dtype} is not {workload.precision} precision", where="--dtype")
