"""A request with a ds_config: the file decides, flags fill what it leaves open, and a contradiction is bad input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.workload import DType, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.findings import Finding, Severity
from zeroplan.ds_config.reader import fill_from, inspect_ds_config
from zeroplan.engines.base import Engine
from zeroplan.ledger.optimizers import find_optimizer
from zeroplan.models.facts import spec_facts
from zeroplan.models.spec import ModelSpec

if TYPE_CHECKING:
    from zeroplan.planner.request import Request

#: Fields of the Request that a ds_config may fix too.
_SHARED = ("micro_batch", "grad_accum", "dtype", "optimizer")
_DS = "zero_optimization"
#: Rules by which DeepSpeed refuses what the included runtime does: `ratio` below stage 3 and with every optimizer, three
#: buffers or fewer, LAMB unasked, odd buckets and others of the keys that change nothing there.
_DEEPSPEED_ALONE = frozenset(
    {
        "offload.ratio",
        "offload.hybrid",
        "offload.buffers",
        "optimizer.untested",
        "optimizer.lamb_scale",
        "accum.stage0",
        "bucket.even",
        "scale.reduce_scatter",
        "stage1.legacy",
    }
)


def workload_and_zero(
    request: Request, engine: Engine, cluster: Cluster, spec: ModelSpec, warnings: list[str]
) -> tuple[Workload, list[ZeroConfig]]:
    """The one workload and configuration that the file and the flags describe; warnings are appended.

    Raises:
        BadInput: what DeepSpeed refuses, a flag that contradicts the file, another engine than DeepSpeed or the runtime.
    """
    from zeroplan.planner.request import workload_of

    if engine.name not in ("deepspeed", "zeroplan"):
        raise BadInput(f"{engine.name} reads no ds_config", where="--engine", remedy="use --engine deepspeed")
    assert request.ds_config is not None
    base = workload_of(request, engine, spec)
    config = inspect_ds_config(
        request.ds_config,
        fill=_fill(request, base),
        world_size=cluster.ranks,
        hidden_size=spec_facts(spec).hidden_size,
    )
    own = engine.name == "zeroplan"
    if errors := [error for error in config.errors if not (own and error.id in _DEEPSPEED_ALONE)]:
        raise _refusal(config.source, errors)
    given = frozenset(name for name in _SHARED if getattr(request, name) is not None)
    workload = config.workload(base, given=given)
    find_optimizer(workload.optimizer, where=f"{config.source}: optimizer.type")
    if own:
        from zeroplan.engines.runtime.engine import Runtime

        assert isinstance(engine, Runtime)
        try:
            engine.configure(config.raw)
        except BadInput as fault:
            raise BadInput(fault.what, where=f"{config.source}: {fault.where}", remedy=fault.remedy) from None
    warnings += [str(finding) for finding in config.warnings if not (own and finding.where == "zeroplan")]
    return workload, [config.zero]


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


def _refusal(source: str, errors: list[Finding]) -> BadInput:
    first = next((e for e in errors if e.severity is Severity.ERROR), errors[0])
    more = f" ({len(errors) - 1} more: zeroplan check)" if len(errors) > 1 else ""
    where = f"{source}: {first.where}" if first.where else source
    return BadInput(first.what, where=where, remedy=first.remedy + more)
