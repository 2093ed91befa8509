"""A request with a ds_config: the file decides, flags fill what it leaves open, and contradicting flags are bad input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import DType, GradientCheckpointing, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.findings import merged
from zeroplan.ds_config.reader import UNMODELLED, DsConfig, fill_from, inspect_ds_config
from zeroplan.ds_config.source import load_source
from zeroplan.engines.base import Engine
from zeroplan.models.facts import spec_facts
from zeroplan.models.spec import ModelSpec
from zeroplan.planner.workload import workload_of
from zeroplan.run.ask import Ask
from zeroplan.techniques.experts import AUTO_EP

#: Fields of the Ask that a ds_config may fix too.
_SHARED = ("micro_batch", "grad_accum", "dtype", "optimizer")
_DS, _TP, _SP = "zero_optimization", "tensor_parallel", "sequence_parallel_size"
_EP, _EXPERTS = "expert_parallel", ("num_local_experts", "num_experts", "n_routed_experts")
#: Values of keys of ``expert_parallel`` with which the layer is the one that is planned.
_AS_PLANNED: dict[str, tuple[Any, ...]] = {
    "use_grouped_mm": (True,),
    "score_apply": ("auto", "post"),
    "combine_impl": ("auto", "weighted_sum"),
    "row_weighting_impl": ("auto", "eager"),
    "gate_up_impl": ("separate",),
    "comm_backend": ("comm",),
    "score_func": ("auto",),
    "top_k": ("auto",),
    "async_split_plan": (False,),
    "expert_tensor_parallel_size": (1,),
}
_PP, _GROUPS = "pipeline", "layers are recomputed in groups across blocks, and blocks one by one are planned"
_DATA, _ONE = "data_parallel_size", "change one of the two"
#: Keys of ``tensor_parallel`` that plans have, or that change none.
_PLANNED_KEYS = ("autotp_size", "dtype", "tp", "tensor_parallel", "keep_module_on_host")


@dataclass(frozen=True, slots=True)
class DsConfigRun:
    """The one run that a ds_config and the flags describe; `engine` has read its own sections of the file.

    `tp`, `ulysses` and `ep` are the degrees of tensor, sequence and expert parallelism that file or flag asks for; `auto_ep`
    says whether AutoEP's layers share the experts.
    """

    engine: Engine
    workload: Workload
    zero: ZeroConfig
    warnings: tuple[str, ...]
    unmodelled: tuple[Unmodelled, ...] = ()
    tp: int = 1
    ulysses: int = 1
    ep: int = 1
    auto_ep: bool = False


def read_run(request: Ask, engine: Engine, cluster: Cluster, spec: ModelSpec) -> DsConfigRun:
    """Read the run that ``request.ds_config`` and the flags describe.

    Raises:
        BadInput: what the engine refuses, a flag that contradicts the file, or an engine that takes no ds_config.
    """
    if engine.dialect is None:
        where = request.source("engine") or "--ds-config"
        raise BadInput(f"{engine.name} reads no ds_config", where=where, remedy="use --engine deepspeed")
    assert request.ds_config is not None
    base = workload_of(request, engine, spec)
    config = inspect_ds_config(
        request.ds_config,
        dialect=engine.dialect,
        fill=_fill(request, base),
        world_size=_reading_ranks(request, cluster),
        hidden_size=spec_facts(spec).hidden_size,
        engine_version=engine.version,
    )
    if config.errors:
        raise config.refusal(config.errors)
    given = frozenset(name for name in _SHARED if getattr(request, name) is not None)
    workload = config.workload(base, given=given)
    find_optimizer(workload.numerics.optimizer, where=f"{config.source}: optimizer.type")
    warnings = tuple(merged([finding for finding in config.warnings if finding.id != UNMODELLED]))
    tp, ulysses, unmodelled = request.tp, request.ulysses, config.unmodelled
    if engine.whole_vocabulary and isinstance(config.raw.get(_TP), Mapping):
        tp, unmodelled = _auto_tp(request, cluster, spec, config)
    ep, auto_ep = request.ep, AUTO_EP.taken_by(engine) and request.ep > 1
    if AUTO_EP.taken_by(engine) and config.values.get(f"{_EP}.enabled"):
        ep, unmodelled = _auto_ep(request, cluster, spec, config, unmodelled)
        auto_ep = ep > 0
    if engine.whole_vocabulary and _SP in config.raw:
        ulysses = int(config.values.get(_SP) or 1)  # by which DeepSpeed makes its groups
        _require_degree(ulysses, _SP, "ulysses", request, cluster, config)
        unmodelled = tuple(one for one in unmodelled if one.key not in (_SP, _DATA))
    if engine.partition and request.pp > 1 and isinstance(config.raw.get(_PP), Mapping):
        interval = config.raw[_PP].get("activation_checkpoint_interval") or 0
        unmodelled = tuple(one for one in unmodelled if one.key != _PP)
        if interval == 1:
            workload = workload.checkpointed()
        elif isinstance(interval, int) and interval > 1:
            workload = workload.with_techniques(
                replace(workload.technique(GradientCheckpointing) or GradientCheckpointing(), interval=interval)
            )
        elif interval:
            unmodelled += (Unmodelled(f"{_PP}.activation_checkpoint_interval", Effect.UNKNOWN, _GROUPS),)
    return DsConfigRun(
        engine.with_ds_config(config), workload, config.zero, warnings, unmodelled, tp, ulysses, max(ep, 1), auto_ep
    )


def _auto_ep(
    request: Ask, cluster: Cluster, spec: ModelSpec, config: DsConfig, unmodelled: tuple[Unmodelled, ...]
) -> tuple[int, tuple[Unmodelled, ...]]:
    """Return the degree of the file's ``expert_parallel``, 0 where its layers are not planned, and what the figures leave out.

    Raises:
        BadInput: an ``autoep_size`` that does not divide the ranks or the experts, or another than the flag's. Source:
            DeepSpeed 0.19.8, module_inject/auto_ep_folding.py (build_folding_spec), auto_ep_config.py
            (validate_autoep_post_detection)
    """
    from zeroplan.core.auto_ep import NO_BYTES, SHARED

    section, size = config.raw[_EP], config.values.get(f"{_EP}.autoep_size") or 1
    _require_auto_ep(size, cluster.layout.world_size, spec, config)
    if request.ep not in (1, size):
        raise BadInput(f"{config.source} says {size} (autoep_size), the flag {request.ep}", where="--ep", remedy=_ONE)
    others = tuple(one for one in unmodelled if one.key != _EP)
    keys = sorted(
        key for key, value in section.items() if key not in NO_BYTES and value not in (None, *_AS_PLANNED.get(key, ()))
    )
    if spec.model_type not in SHARED or not spec.has_shapes or "lora_rank" in request:
        what = "AutoEP with LoRA" if "lora_rank" in request else f"AutoEP of {spec.model_type or 'this model'}"
        return 0, (*others, Unmodelled(_EP, Effect.UNKNOWN, f"{what}; every rank's own experts are counted"))
    says = "changes AutoEP's layer; the one without is planned"
    return size, (*others, *(Unmodelled(f"{_EP}.{key}", Effect.UNKNOWN, says) for key in keys))


def _require_auto_ep(size: Any, ranks: int, spec: ModelSpec, config: DsConfig) -> None:
    experts = next((spec.config[key] for key in _EXPERTS if isinstance(spec.config.get(key), int)), 0)
    for number, what in ((ranks if ranks > 1 else 0, "ranks"), (experts, "experts of a layer")):
        if isinstance(size, int) and size > 0 and number % size:
            raise BadInput(
                f"autoep_size {size} does not divide the {number} {what}",
                where=f"{config.source}: {_EP}.autoep_size",
                remedy=f"use a divisor of {number}",
            )


def _reading_ranks(request: Ask, cluster: Cluster) -> int:
    """Return the ranks that the file's batch sizes count: groups that share samples, and pipelines, once, where a flag makes
    them. Where the file does, its reader divides.
    """
    ranks, shared = cluster.layout.dp, request.ulysses * request.pp
    if shared == 1 or ranks % shared or _SP in load_source(request.ds_config or {})[0]:
        return ranks
    return ranks // shared


def _require_degree(size: int, key: str, flag: str, request: Ask, cluster: Cluster, config: DsConfig) -> None:
    """Hold a degree of the file against the ranks and the flag.

    Raises:
        BadInput: one that does not divide the ranks, or another than the flag's.
    """
    ranks, name, asked = cluster.layout.world_size, key.rpartition(".")[2], getattr(request, flag)
    where = f"{config.source}: {key}"
    if size > 1 and ranks == 1:
        what = f"{name} {size} needs that many ranks, and nothing says how many there are"
        raise BadInput(what, where=where, remedy="give --gpus and --nodes")
    if size > 1 and ranks % size:
        remedy = f"use a divisor of {ranks}, or change --gpus and --nodes"
        raise BadInput(f"{name} {size} does not divide the {ranks} ranks", where=where, remedy=remedy)
    if asked not in (1, size):
        raise BadInput(f"{config.source} says {size} ({name}), the flag {asked}", where=f"--{flag}", remedy=_ONE)


def _auto_tp(request: Ask, cluster: Cluster, spec: ModelSpec, config: DsConfig) -> tuple[int, tuple[Unmodelled, ...]]:
    """Return the degree of the file's ``tensor_parallel``, and what the figures leave out.

    Raises:
        BadInput: a degree that does not divide the ranks, or another than the flag's.
    """
    size = int(config.values.get(f"{_TP}.autotp_size") or 0)
    others = tuple(one for one in config.unmodelled if one.key != _TP)
    if size <= 1:
        return request.tp, config.unmodelled if config.raw[_TP].get("partition_config") else others
    _require_degree(size, f"{_TP}.autotp_size", "tp", request, cluster, config)
    why = _beyond_auto_tp(request, spec, config)
    return (request.tp, (*others, Unmodelled(_TP, Effect.UNKNOWN, why))) if why else (size, others)


def _beyond_auto_tp(request: Ask, spec: ModelSpec, config: DsConfig) -> str:
    """Return what of a file's AutoTP no plan has; empty where all of it is planned.

    Raises:
        BadInput: a model whose plan AutoTP rejects.
    """
    from zeroplan.core.tensor_parallel import AUTO_TP_PLANS, auto_tp_rejects

    section = config.raw[_TP]
    keys = [key for key in section if key not in _PLANNED_KEYS and section[key]]
    if keys:
        return f"its {', '.join(sorted(map(str, keys)))[:80]}; data parallelism alone is counted"
    if (why := auto_tp_rejects(spec.model_type)) and spec.has_shapes:
        raise BadInput(why, where=f"{config.source}: {_TP}.autotp_size", remedy="write a partition_config, or remove the key")
    if spec.model_type not in AUTO_TP_PLANS or not spec.has_shapes:
        return f"AutoTP of {spec.model_type or 'this model'}; data parallelism alone is counted"
    if spec.ties:
        return "AutoTP of a vocabulary that embedding and head share; data parallelism alone is counted"
    return "AutoTP with LoRA; data parallelism alone is counted" if "lora_rank" in request else ""


def _fill(request: Ask, base: Workload) -> dict[str, Any]:
    filled = fill_from(
        dtype=DType(request.dtype) if request.dtype is not None else None,
        micro_batch=request.micro_batch,
        grad_accum=request.grad_accum,
    )
    if request.dtype is not None and base.numerics.dtype is DType.FP32:
        filled |= {"bf16.enabled": False, "fp16.enabled": False}
    if request.stage is not None:
        filled[f"{_DS}.stage"] = request.stage
    if request.offload_optimizer is not None:
        filled[f"{_DS}.offload_optimizer.device"] = request.offload_optimizer
    if request.offload_param is not None:
        filled[f"{_DS}.offload_param.device"] = request.offload_param
    return filled
