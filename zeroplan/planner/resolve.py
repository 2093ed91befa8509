"""Resolves a Ask: loads the model, checks every value, and makes one case for each plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import DEGREES, ParallelLayout
from zeroplan.core.preferences import PLAIN_TASKS, PLANNED, PairLoss, passes_of
from zeroplan.core.tasks import parse_task, training_of
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import Attention, Reference, TiledMlp, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.models.attention import eager_only
from zeroplan.models.load import bare_params, load_model
from zeroplan.models.spec import ModelSpec
from zeroplan.planner.quantized_checkpoint import KEY, base_of
from zeroplan.planner.workload import beyond_positions, workload_of
from zeroplan.run.ask import Ask
from zeroplan.techniques.base import Facts
from zeroplan.techniques.compiled import COMPILED
from zeroplan.techniques.degrees import DIVIDING, require_language_model
from zeroplan.techniques.experts import AUTO_EP, OWN_EXPERTS
from zeroplan.techniques.media import TOWERS, MediaTechnique
from zeroplan.techniques.pipeline import PipelineTechnique
from zeroplan.techniques.quantized_base import ADAPTERS_RANK, QuantizedBaseTechnique, lacks_adapters
from zeroplan.techniques.table import found_in, techniques_of

_DEGREES = ("tp", "cp", "ulysses", "pp", "vpp", "ep", "etp")


def layout_of(request: Ask, engine: Engine, facts: Facts, *, auto_ep: bool = False) -> ParallelLayout | None:
    """Return the layout that the request's degrees give on the cluster; None for data parallelism alone.

    Args:
        request: names the degrees.
        engine: divides embedding, head and layers in its way.
        facts: the run, whose model the degrees have to divide.
        auto_ep: whether AutoEP's layers take the place of blocks with experts.

    Raises:
        BadInput: degrees that do not divide the ranks or the model, or a model that cannot be divided so.
    """
    cluster, spec = facts.cluster, facts.spec
    PipelineTechnique.require_stages(request, divides_layers=bool(engine.partition))
    if spec.own_experts is not None:
        return OWN_EXPERTS.layout(facts, spec.own_experts.ranks)
    if auto_ep:
        AUTO_EP.require_alone(facts)
        require_language_model(facts)
        return AUTO_EP.layout(facts)
    degrees: dict[str, Any] = {name: facts.degrees[name] for name in _DEGREES}
    splits = set(degrees.values()) != {1} or request.sp
    if not splits and request.dp_replicate == 1:
        return None
    layout = ParallelLayout(
        cluster.gpus,
        cluster.nodes,
        sp=request.sp,
        dp_replicate=request.dp_replicate,
        whole_vocabulary=engine.whole_vocabulary and request.tp > 1,
        **degrees,
    )
    if splits and not engine.own_layers:
        require_language_model(facts)
        for technique in DIVIDING:
            if technique.divides(layout):
                technique.require_layout(layout, facts)
    return layout


def facts_of(request: Ask, engine: Engine, workload: Workload, cluster: Cluster, spec: ModelSpec) -> Facts:
    """Return what rules of techniques read of a run."""
    degrees = {name: int(getattr(request, name)) for name in (*DEGREES, "vpp")} | {"sp": 1 + request.sp}
    said = [f"--{name}" for name in _DEGREES if getattr(request, name) > 1]
    return Facts(
        engine,
        workload,
        spec,
        cluster,
        degrees,
        task=request.task,
        alone=f"leave {' and '.join(said) or '--dp-replicate'} out",
        schedule=request.schedule,
        partition=request.partition or engine.partition,
    )


def unmeasured(layout: ParallelLayout) -> str:
    """Return a warning where a layout was held against few GPUs; empty elsewhere."""
    if layout.own_experts and not layout.auto_ep:
        return "MoE layers: measured on two GPUs alone"
    return ""


DEPTHS = ("formula", "simulated")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A resolved request: one case for each plan, in the order in which the report shows them."""

    spec: ModelSpec
    workload: Workload
    cluster: Cluster
    engine: Engine
    cases: tuple[Case, ...]
    depth: str | None
    warnings: tuple[str, ...]
    unmodelled: tuple[Unmodelled, ...] = ()


def resolve(request: Ask) -> Resolved:
    """Load the model, check every value and make the cases. Raises BadInput: the first value that cannot be used."""
    request = with_training_task(request.checked())
    if request.depth is not None and request.depth not in DEPTHS:
        raise BadInput(f"unknown depth {request.depth!r}", where="--depth", remedy=f"use one of {', '.join(DEPTHS)}")
    engine = find_engine(request.engine)
    warnings: list[str] = []
    if lacks_adapters(request):
        request = request.replace(lora_rank=ADAPTERS_RANK)
        warnings.append(
            f"a quantised base is frozen, so LoRA adapters of rank {ADAPTERS_RANK} are trained beside it (--lora-rank)"
        )
    if request.deepspeed_version is not None:
        from zeroplan.interop.deepspeed_version import requested_version

        version, stated = requested_version(request.deepspeed_version)
        engine = engine.at_version(version)
        warnings += [f"DeepSpeed {engine.version}, as {stated} says"] if stated else []
    cluster = Cluster.of(
        gpus=request.gpus,
        nodes=request.nodes,
        gpu=request.gpu,
        vram=request.vram,
        cpu_ram=request.cpu_ram,
        nvme=request.nvme,
        host=request.host,
        network=request.network,
    )
    if cluster.nodes != request.nodes:
        shape = f"{cluster.nodes} nodes of {cluster.gpus}"
        warnings.append(f"{cluster.layout.world_size} GPUs are more than a node holds, and are taken to be {shape} (--nodes)")
    spec = _model(request)
    checkpoint = base_of(spec, request[QuantizedBaseTechnique.quantize], engine, adapters="lora_rank" in request)
    unmodelled = request.unmodelled
    auto_ep = AUTO_EP.taken_by(engine) and request.ep > 1
    if checkpoint is not None:
        unmodelled += checkpoint.left_out
        quantize = None if checkpoint.quantize is None else str(checkpoint.quantize)
        named = request[QuantizedBaseTechnique.quantized_by] if "quantize" in request else KEY
        whole = request[QuantizedBaseTechnique.whole_base] or checkpoint.in_bytes
        request = request.replace(quantize=quantize, quantized_by=named, whole_base=whole)
    told = request[MediaTechnique.images] or request[MediaTechnique.audio_seconds]
    if request.described_by_files and not told and (towers := TOWERS & spec.config.keys()):
        says = f"the model has a {min(towers)}, and no key tells of images or sound; text alone is counted"
        says += f" ({'--images' if 'vision_config' in towers else '--audio-seconds'})"
        unmodelled += (Unmodelled("images", Effect.UNKNOWN, says),)
    if request.ds_config is None:
        workload = workload_of(request, engine, spec)
        zeros = [engine.for_optimizer(zero, workload.numerics.optimizer) for zero in _zeros(request, engine)]
    else:
        from zeroplan.planner.from_ds_config import read_run

        run = read_run(request, engine, cluster, spec)
        engine, workload, zeros = run.engine, run.workload, [run.zero]
        warnings += run.warnings
        unmodelled += run.unmodelled
        request = request.replace(tp=run.tp, ulysses=run.ulysses, ep=run.ep)
        auto_ep = run.auto_ep
    engine = engine.for_workload(workload)
    workload = found_in(workload, spec)
    facts = facts_of(request, engine, workload, cluster, spec)
    for technique, value in techniques_of(workload):
        technique.require(value, facts)
    spec, workload = _as_trained(spec, workload)
    OWN_EXPERTS.require_model(facts)
    if workload.numerics.attn is Attention.SDPA and (missing := eager_only(spec.model_type)):
        warnings.append(missing)
    if said := beyond_positions(workload, spec):
        warnings.append(said)
    if workload.compile is not None and COMPILED.starts_eager(engine) and request.pp == 1:  # no plan of stages has peaks
        warnings.append("the first micro batch of a compiled model runs uncompiled; the peaks hold it")
    zero_init = request.zero_init is not False and workload.quantize is None  # transformers makes no quantised model under it
    layout = layout_of(request, engine, replace(facts, spec=spec, workload=workload), auto_ep=auto_ep)
    for technique, value in techniques_of(workload):
        technique.require_degrees(value, replace(facts, shared=layout is not None))
    if workload.has(TiledMlp):
        warnings.append("--tiled-mlp: as DeepSpeed's source has it, but not measured on a GPU")
    if layout is not None and not engine.own_layers and (said := unmeasured(layout)):
        warnings.append(said)
    every = [
        Case(
            spec,
            workload,
            cluster,
            zero,
            parallel=layout,
            zero_init=zero_init,
            unmodelled=unmodelled,
            pipeline=request.schedule,
            partition=facts.partition,
        )
        for zero in zeros
    ]
    cases = _cases(request, engine, every)
    warnings += sorted({said for case in cases if (said := engine.remark(case))})
    return Resolved(spec, workload, cluster, engine, cases, request.depth, tuple(warnings), unmodelled)


def _as_trained(spec: ModelSpec, workload: Workload) -> tuple[ModelSpec, Workload]:
    """Return the model as the techniques train it, and the workload with the names that they find in the model."""
    for technique, value in techniques_of(workload):
        named = technique.named(value, spec) or value
        if named is not value:
            workload = workload.with_techniques(named)
        spec = technique.trained(named, spec)
    return spec, workload


def _model(request: Ask) -> ModelSpec:
    if (request.model is None) == (request.params is None):
        given = "both a model and --params" if request.model is not None else "no model"
        raise BadInput(given, where="MODEL", remedy="give one id, path or config, or --params 7.5B")
    if request.params is not None and request.task is not None:
        raise BadInput("a bare count has no head", where="--task", remedy="give a model")
    if request.params is not None:
        return bare_params(request.params, largest_layer=request.largest_layer_params)
    return load_model(
        request.model,
        token=request.token,
        trust_remote_code=request.trust_remote_code,
        offline=request.offline,
        task=None if request.task is None else parse_task(request.task),
    )


def _cases(request: Ask, engine: Engine, cases: list[Case]) -> tuple[Case, ...]:
    """The cases that the engine can run. A table leaves out the others; a single case that cannot run is bad input."""
    kept: list[Case] = []
    for case in cases:
        engine.require_layout(case.layout)
        if request.ds_config is None:
            engine.require_runnable(case.zero)
        try:
            engine.require_workload(case)
            for technique, value in techniques_of(case.workload):
                technique.require_sharding(value, engine, case.zero)
        except BadInput:
            if len(cases) == 1 or (case is cases[-1] and not kept):
                raise
            continue
        kept.append(case)
    return tuple(kept)


def require_stage(stage: int) -> None:
    """Raise BadInput where ZeRO has no such stage."""
    if stage not in (0, 1, 2, 3):
        raise BadInput(f"stage {stage} does not exist", where="--stage", remedy="use 0, 1, 2 or 3")


def _zeros(request: Ask, engine: Engine) -> list[ZeroConfig]:
    """Return the configurations that the flags leave open: all options of the engine, one stage's, or exactly one."""
    optimizer, param = request.offload_optimizer, request.offload_param
    if request.stage is not None:
        require_stage(request.stage)
    if request.stage is not None and (optimizer is not None or param is not None):
        param = param or "none"
        return [engine.configured(ZeroConfig.of(request.stage, optimizer or engine.optimizer_device(param), param))]
    if request.stage is not None:
        engine.require_runnable(ZeroConfig.of(request.stage))
        return [engine.configured(ZeroConfig.of(request.stage))]
    options = engine.options()
    if optimizer is not None:
        ZeroConfig.of(3, optimizer)  # refuses an unknown device
        options = [zero for zero in options if zero.offload_optimizer.device == optimizer]
    if param is not None:
        ZeroConfig.of(3, "none", param)
        options = [zero for zero in options if zero.offload_param.device == param]
    if not options:
        options = [engine.configured(ZeroConfig.of(3, optimizer or "none", param or "none"))]
    return options


def with_training_task(request: Ask) -> Ask:
    """Return the request with what its task passes through the model; as it is where ``--task`` names a head, or nothing.

    Raises:
        BadInput: a task whose step is not modelled.
    """
    task = training_of(request.task)
    if task is None:
        return request
    if task in PLAIN_TASKS:
        return request.replace(task=None)
    if task not in PLANNED:
        raise BadInput(
            f"a step of {task} is not modelled: it generates, or asks further models",
            where="--task",
            remedy=f"use one of {', '.join((*PLANNED, *PLAIN_TASKS))}, or give the run's file by --from",
        )
    passes = passes_of(task, adapters="lora_rank" in request)
    if "pair_loss" in passes:
        passes["pair_loss"] = PairLoss(passes["pair_loss"])
    if "reference" in passes:
        passes["reference"] = Reference(passes["reference"])
    return request.replace(task=passes.pop("head", None), **passes)
