"""What rules of techniques read of a run, and whether an engine has experts, optimizers and partitions of its own."""

from __future__ import annotations

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import DEGREES
from zeroplan.core.workload import Workload
from zeroplan.engines.base import Engine
from zeroplan.models.spec import ModelSpec
from zeroplan.planner.layout import without_degrees
from zeroplan.run.ask import Ask
from zeroplan.techniques.base import Facts


def facts_of(request: Ask, engine: Engine, workload: Workload, cluster: Cluster, spec: ModelSpec) -> Facts:
    """Return what rules of techniques read of a run."""
    degrees = {name: int(getattr(request, name)) for name in (*DEGREES, "vpp")} | {"sp": 1 + request.sp}
    return Facts(engine, workload, spec, cluster, degrees, task=request.task, alone=without_degrees(request))


def require_buildable(engine: Engine, workload: Workload) -> None:
    """Refuse optimizers that a ds_config alone makes, under an engine that reads none."""
    row = find_optimizer(workload.numerics.optimizer)
    if row.until is not None and engine.dialect is None:
        raise BadInput(
            f"{row.name} is built from a ds_config alone, and {engine.name} reads none",
            where="--optimizer",
            remedy="use --engine zeroplan, or adamw",
        )


def require_partition(request: Ask, engine: Engine) -> None:
    """Refuse a way to divide layers that the engine does not have."""
    if request.partition is not None and not (engine.partition and request.pp > 1):
        raise BadInput(
            "layers are divided by a method on stages of DeepSpeed's PipelineModule",
            where="--partition",
            remedy="use --engine deepspeed --pp 2, or leave it out",
        )
