"""A request with a ds_config: the file decides, flags fill what it leaves open, and contradicting flags are bad input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.unmodelled import Unmodelled
from zeroplan.core.workload import DType, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.findings import merged
from zeroplan.ds_config.reader import UNMODELLED, fill_from, inspect_ds_config
from zeroplan.engines.base import Engine
from zeroplan.models.facts import spec_facts
from zeroplan.models.spec import ModelSpec
from zeroplan.planner.request import Request
from zeroplan.planner.workload import workload_of

#: Fields of the Request that a ds_config may fix too.
_SHARED = ("micro_batch", "grad_accum", "dtype", "optimizer")
_DS = "zero_optimization"


@dataclass(frozen=True, slots=True)
class DsConfigRun:
    """The one run that a ds_config and the flags describe; `engine` has read its own sections of the file."""

    engine: Engine
    workload: Workload
    zero: ZeroConfig
    warnings: tuple[str, ...]
    unmodelled: tuple[Unmodelled, ...] = ()


def read_run(request: Request, engine: Engine, cluster: Cluster, spec: ModelSpec) -> DsConfigRun:
    """Read the run that ``request.ds_config`` and the flags describe.

    Raises:
        BadInput: what the engine refuses, a flag that contradicts the file, or an engine that takes no ds_config.
    """
    if engine.dialect is None:
        raise BadInput(f"{engine.name} reads no ds_config", where="--engine", remedy="use --engine deepspeed")
    assert request.ds_config is not None
    base = workload_of(request, engine, spec)
    config = inspect_ds_config(
        request.ds_config,
        dialect=engine.dialect,
        fill=_fill(request, base),
        world_size=cluster.layout.dp,
        hidden_size=spec_facts(spec).hidden_size,
    )
    if config.errors:
        raise config.refusal(config.errors)
    given = frozenset(name for name in _SHARED if getattr(request, name) is not None)
    workload = config.workload(base, given=given)
    find_optimizer(workload.optimizer, where=f"{config.source}: optimizer.type")
    warnings = tuple(merged([finding for finding in config.warnings if finding.id != UNMODELLED]))
    return DsConfigRun(engine.with_ds_config(config), workload, config.zero, warnings, config.unmodelled)


def _fill(request: Request, base: Workload) -> dict[str, Any]:
    filled = fill_from(
        dtype=DType(request.dtype) if request.dtype is not None else None,
        micro_batch=request.micro_batch,
        grad_accum=request.grad_accum,
    )
    if request.dtype is not None and base.dtype is DType.FP32:
        filled |= {"bf16.enabled": False, "fp16.enabled": False}
    if request.stage is not None:
        filled[f"{_DS}.stage"] = request.stage
    if request.offload_optimizer is not None:
        filled[f"{_DS}.offload_optimizer.device"] = request.offload_optimizer
    if request.offload_param is not None:
        filled[f"{_DS}.offload_param.device"] = request.offload_param
    return filled
