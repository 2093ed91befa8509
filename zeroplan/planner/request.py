"""A request as users make it, by flags or arguments, resolved into cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.workload import Attention, CheckpointPolicy, DType, Precision, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.base import Case, Engine
from zeroplan.engines.registry import find_engine
from zeroplan.ledger.optimizers import find_optimizer
from zeroplan.models.attention import eager_only
from zeroplan.models.facts import max_seq_len
from zeroplan.models.load import bare_params, load_model
from zeroplan.models.spec import ModelSpec

DEFAULT_SEQ_LEN = 2048
DEPTHS = ("formula", "simulated")
#: No count of a workload goes beyond this; it keeps arithmetic and loops sane.
_MOST = 1 << 31
_E = TypeVar("_E", DType, Attention)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for. None means left open: the default, or what the ds_config says."""

    model: Any = None
    params: int | None = None
    largest_layer_params: int | None = None
    token: str | None = None
    trust_remote_code: bool = False
    offline: bool | None = None
    # workload
    micro_batch: int | None = None
    seq_len: int | None = None
    grad_accum: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    gradient_checkpointing: bool = False
    checkpoint_policy: str = "full"
    attn: str = "sdpa"
    lora_rank: int | None = None
    lora_targets: Sequence[str] = ()
    # cluster
    gpus: int = 1
    nodes: int = 1
    gpu: str | None = None
    vram: str | int | None = None
    cpu_ram: str | int | None = None
    nvme: str | int | None = None
    # sharding
    engine: str = "deepspeed"
    stage: int | None = None
    offload_optimizer: str | None = None
    offload_param: str | None = None
    ds_config: str | Path | dict[str, Any] | None = None
    depth: str | None = None
    alloc_conf: str = ""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request made definite: one case for each plan, in the order in which they are shown."""

    spec: ModelSpec
    workload: Workload
    cluster: Cluster
    engine: Engine
    cases: tuple[Case, ...]
    depth: str | None
    warnings: tuple[str, ...]


def resolve(request: Request) -> Resolved:
    """Load the model, check every value and lay out the cases.

    Raises:
        BadInput: the first value that cannot be used.
    """
    if request.depth is not None and request.depth not in DEPTHS:
        raise BadInput(f"unknown depth {request.depth!r}", where="--depth", remedy=f"use one of {', '.join(DEPTHS)}")
    engine = find_engine(request.engine)
    cluster = Cluster.of(
        gpus=request.gpus,
        nodes=request.nodes,
        gpu=request.gpu,
        vram=request.vram,
        cpu_ram=request.cpu_ram,
        nvme=request.nvme,
    )
    spec = _model(request)
    warnings: list[str] = []
    workload, zeros = _workload_and_zeros(request, engine, cluster, spec, warnings)
    if workload.lora_rank is not None:
        from zeroplan.models.lora import with_lora

        spec = with_lora(spec, workload.lora_rank, workload.lora_targets)
    if warning := find_optimizer(workload.optimizer).warning:
        warnings.append(warning)
    if workload.attn is Attention.SDPA and (missing := eager_only(spec.model_type)):
        warnings.append(missing)
    cases = _cases(request, engine, [Case(spec, workload, cluster, zero) for zero in zeros])
    if engine.name == "zeroplan":
        from zeroplan.engines.runtime.engine import Runtime

        assert isinstance(engine, Runtime)
        warnings += sorted({said for case in cases if (said := engine.remark(case))})
    return Resolved(spec, workload, cluster, engine, cases, request.depth, tuple(warnings))


def _cases(request: Request, engine: Engine, cases: list[Case]) -> tuple[Case, ...]:
    """The cases that the engine can run: one that cannot is left out of a table, and alone is bad input."""
    kept: list[Case] = []
    for case in cases:
        if request.ds_config is None:
            engine.require_runnable(case.zero)
        try:
            engine.require_workload(case)
        except BadInput:
            if len(cases) == 1 or (case is cases[-1] and not kept):
                raise
            continue
        kept.append(case)
    return tuple(kept)


def _model(request: Request) -> ModelSpec:
    if (request.model is None) == (request.params is None):
        given = "both a model and --params" if request.model is not None else "no model"
        raise BadInput(given, where="MODEL", remedy="give one id, path or config, or --params 7.5B")
    if request.params is not None:
        return bare_params(request.params, largest_layer=request.largest_layer_params)
    return load_model(request.model, token=request.token, trust_remote_code=request.trust_remote_code, offline=request.offline)


def _workload_and_zeros(
    request: Request, engine: Engine, cluster: Cluster, spec: ModelSpec, warnings: list[str]
) -> tuple[Workload, list[ZeroConfig]]:
    if request.ds_config is not None:
        from zeroplan.planner.from_ds_config import workload_and_zero

        return workload_and_zero(request, engine, cluster, spec, warnings)
    workload = workload_of(request, engine, spec)
    return workload, _zeros(request, engine)


def workload_of(request: Request, engine: Engine, spec: ModelSpec) -> Workload:
    """The workload that the request describes, defaults filled in and checked.

    Raises:
        BadInput: a value out of range or of an unknown name.
    """
    dtype = _one_of(DType, request.dtype or "bf16", "--dtype")
    for where, value in (
        ("--micro-batch", request.micro_batch),
        ("--seq-len", request.seq_len),
        ("--grad-accum", request.grad_accum),
        ("--lora-rank", request.lora_rank),
    ):
        if value is not None and not 1 <= value <= _MOST:
            raise BadInput(f"{value} is out of range", where=where, remedy="use a whole number above zero")
    optimizer = find_optimizer(request.optimizer or "adamw")
    if request.lora_targets and request.lora_rank is None:
        raise BadInput("targets without a rank", where="--lora-targets", remedy="give --lora-rank 16 as well")
    policy = CheckpointPolicy.parse(request.checkpoint_policy)
    if policy != CheckpointPolicy() and not request.gradient_checkpointing:
        raise BadInput(
            "a policy without checkpointing", where="--checkpoint-policy", remedy="give --gradient-checkpointing as well"
        )
    precision = Precision.FP32 if dtype is DType.FP32 else Precision.MIXED
    if engine.name == "ddp" and dtype is not DType.FP32:
        precision = Precision.AUTOCAST
    return Workload(
        micro_batch=request.micro_batch or 1,
        seq_len=sequence_length(request.seq_len, spec),
        grad_accum=request.grad_accum or 1,
        dtype=dtype,
        precision=precision,
        optimizer=optimizer.name,
        attn=_one_of(Attention, request.attn, "--attn"),
        gradient_checkpointing=request.gradient_checkpointing,
        checkpoint_policy=str(policy),
        lora_rank=request.lora_rank,
        lora_targets=tuple(request.lora_targets),
    )


def sequence_length(asked: int | None, spec: ModelSpec) -> int:
    """The asked length, else 2048 or the model's maximum if that is less.

    Raises:
        BadInput: when the model cannot take the asked length.
    """
    most = max_seq_len(spec)
    if asked is None:
        return min(DEFAULT_SEQ_LEN, most) if most else DEFAULT_SEQ_LEN
    if most is not None and asked > most:
        raise BadInput(f"{asked} is beyond the model's {most} positions", where="--seq-len", remedy=f"use at most {most}")
    return asked


def _one_of(kind: type[_E], text: str, where: str) -> _E:
    try:
        return kind(text.strip().lower())
    except ValueError:
        raise BadInput(f"unknown value {text[:60]!r}", where=where, remedy=f"use one of {', '.join(kind)}") from None


def _zeros(request: Request, engine: Engine) -> list[ZeroConfig]:
    """The configurations that the flags leave: all options of the engine, those of one stage, or exactly one."""
    optimizer, param = request.offload_optimizer, request.offload_param
    if request.stage is not None and (optimizer is not None or param is not None):
        # The runtime's parameters leave the device only with their optimizer.
        follows = param == "cpu" or (param == "nvme" and engine.name == "zeroplan")
        return [ZeroConfig.of(request.stage, optimizer or ("cpu" if follows else "none"), param or "none")]
    if request.stage is not None and request.stage not in (0, 1, 2, 3):
        raise BadInput(f"stage {request.stage} does not exist", where="--stage", remedy="use 0, 1, 2 or 3")
    if request.stage is not None:
        engine.require_runnable(ZeroConfig.of(request.stage))
        return [ZeroConfig.of(request.stage)]
    options = engine.options()
    if optimizer is not None:
        ZeroConfig.of(3, optimizer)  # refuses an unknown device
        options = [zero for zero in options if zero.offload_optimizer.device == optimizer]
    if param is not None:
        ZeroConfig.of(3, "none", param)
        options = [zero for zero in options if zero.offload_param.device == param]
    if not options:
        options = [ZeroConfig.of(3, optimizer or "none", param or "none")]
    return options


def describe_workload(workload: Workload) -> dict[str, Any]:
    """The workload as the report's JSON shows it."""
    return {name: _plain(getattr(workload, name)) for name in Workload.__dataclass_fields__}


def describe_cluster(cluster: Cluster) -> dict[str, Any]:
    """The cluster as the report's JSON shows it; sizes are bytes."""
    return {
        "nodes": cluster.nodes,
        "gpus": cluster.gpus,
        "ranks": cluster.ranks,
        "gpu": cluster.gpu.name,
        "vram": cluster.vram,
        "usable_vram": cluster.usable_vram,
        "cpu_ram": cluster.cpu_ram,
        "nvme": cluster.nvme,
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, str) else value
