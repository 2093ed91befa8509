"""Resolves a Request: loads the model, checks every value, and makes one case for each plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import FLOAT8_CAPABILITY
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.quantization import PackedWeights
from zeroplan.core.tasks import parse_task
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import Attention, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.base import Case, Engine
from zeroplan.engines.registry import find_engine
from zeroplan.models.attention import eager_only
from zeroplan.models.load import bare_params, load_model
from zeroplan.models.spec import ModelSpec
from zeroplan.planner.layout import layout_of, require_compilable, unmeasured, without_degrees
from zeroplan.planner.quantized_checkpoint import KEY, base_of
from zeroplan.planner.request import Request
from zeroplan.planner.requested_types import with_checked_types
from zeroplan.planner.training_task import with_training_task
from zeroplan.planner.workload import workload_of

#: Sections of a config whose models take images or sound beside tokens.
_TOWERS = frozenset(("vision_config", "audio_config"))

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


def resolve(request: Request) -> Resolved:
    """Load the model, check every value and make the cases.

    Raises:
        BadInput: the first value that cannot be used.
    """
    request = with_training_task(with_checked_types(request))
    if request.depth is not None and request.depth not in DEPTHS:
        raise BadInput(f"unknown depth {request.depth!r}", where="--depth", remedy=f"use one of {', '.join(DEPTHS)}")
    engine = find_engine(request.engine)
    warnings: list[str] = []
    if request.deepspeed_version is not None:
        from zeroplan.interop.deepspeed_version import asked_version

        version, stated = asked_version(request.deepspeed_version)
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
    )
    spec = _model(request)
    checkpoint = base_of(spec, request.quantize, engine, adapters=request.lora_rank is not None)
    unmodelled = request.unmodelled
    auto_ep = engine.auto_ep and request.ep > 1
    if checkpoint is not None:
        unmodelled += checkpoint.left_out
        quantize = None if checkpoint.quantize is None else str(checkpoint.quantize)
        named = request.quantized_by if request.quantize is not None else KEY
        whole = request.whole_base or checkpoint.in_bytes
        request = replace(request, quantize=quantize, quantized_by=named, whole_base=whole)
    if request.told_by_file and not request.images and (towers := _TOWERS & spec.config.keys()):
        says = f"the model has a {min(towers)}, and no key tells of images or sound; text alone is counted (--images)"
        unmodelled += (Unmodelled("images", Effect.UNKNOWN, says),)
    if request.ds_config is None:
        workload = workload_of(request, engine, spec)
        zeros = [engine.for_optimizer(zero, workload.optimizer) for zero in _zeros(request, engine)]
    else:
        from zeroplan.planner.from_ds_config import read_run

        run = read_run(request, engine, cluster, spec)
        engine, workload, zeros = run.engine, run.workload, [run.zero]
        warnings += run.warnings
        unmodelled += run.unmodelled
        request = replace(request, tp=run.tp, ulysses=run.ulysses, ep=run.ep)
        auto_ep = run.auto_ep
    engine = engine.for_workload(workload)
    if not workload.set_to_none and not engine.keeps_gradients:
        raise BadInput(f"{engine.name} frees gradients after each step", where="--no-set-to-none", remedy="leave it out")
    if workload.fp8 is not None and not engine.float8:
        raise BadInput(
            f"8-bit products are not modelled under {engine.name}", where="--fp8", remedy="use --engine fsdp2 or ddp"
        )
    if workload.compile is not None and not engine.compiles:
        raise BadInput(
            f"compiled models are not planned under {engine.name}",
            where="--compile",
            remedy="use --engine zeroplan, fsdp2 or ddp",
        )
    if workload.fp8 is not None and cluster.gpu.capability < FLOAT8_CAPABILITY:
        raise BadInput(f"{cluster.gpu.name} has no 8-bit floats", where="--fp8", remedy="leave it out, or name an H100")
    tiled = [f"--tiled-{name}" for name in ("mlp", "loss") if getattr(workload, f"tiled_{name}")]
    if tiled and not engine.tiles_mlps:
        raise BadInput(f"tiles are DeepSpeed's, and {engine.name} has none", where=tiled[0], remedy="use --engine deepspeed")
    if tiled:
        _require_tiles(request, workload)
    if workload.offload_checkpoints:
        _require_offloaded_checkpoints(request, workload, offered=engine.tiles_mlps)
    if workload.tiled_loss:
        _require_plain_loss(request, spec, workload)
    if workload.quantize is not None:
        packed = workload.quantize.method if isinstance(workload.quantize, PackedWeights) else ""
        if packed and packed not in engine.packed_bases:
            raise BadInput(
                f"a base of {packed} is not modelled under {engine.name}",
                where=workload.quantized_by,
                remedy="use --engine ddp" + ("" if packed == "torchao" else " or fsdp2"),
            )
        if not engine.quantized_bases:
            raise BadInput(
                f"a quantised base is not modelled under {engine.name}",
                where=workload.quantized_by,
                remedy="use --engine ddp, fsdp2 or deepspeed",
            )
        from zeroplan.models.quantized import with_quantized_base

        spec = with_quantized_base(spec, linear_experts=workload.linear_experts)
    rank = workload.lora_rank
    if rank is not None:
        from zeroplan.models.lora import with_lora
        from zeroplan.models.lora_targets import named_targets

        if spec.has_shapes:
            workload = replace(workload, lora_targets=named_targets(spec, workload.lora_targets))
        spec = with_lora(spec, rank, workload.lora_targets)
    if spec.own_experts is not None and not engine.own_experts:
        raise BadInput(f"{engine.name} does not train DeepSpeed's MoE layers", where="model", remedy="use --engine deepspeed")
    row = find_optimizer(workload.optimizer)
    if row.runtime_only and not engine.own_optimizers:
        raise BadInput(
            f"{row.name} is not modelled under {engine.name}", where="--optimizer", remedy="use --engine zeroplan, or adamw8bit"
        )
    if row.until is not None and engine.dialect is None:
        raise BadInput(
            f"{row.name} is built from a ds_config alone, and {engine.name} reads none",
            where="--optimizer",
            remedy="use --engine zeroplan, or adamw",
        )
    if workload.attn is Attention.SDPA and (missing := eager_only(spec.model_type)):
        warnings.append(missing)
    if workload.compile is not None and engine.starts_uncompiled and request.pp == 1:  # no plan of stages has peaks
        warnings.append("the first micro batch of a compiled model runs uncompiled; the peaks hold it")
    zero_init = request.zero_init is not False and workload.quantize is None  # transformers makes no quantised model under it
    if request.partition is not None and not (engine.partition and request.pp > 1):
        raise BadInput(
            "layers are divided by a method on stages of DeepSpeed's PipelineModule",
            where="--partition",
            remedy="use --engine deepspeed --pp 2, or leave it out",
        )
    partition = request.partition or engine.partition
    layout = layout_of(
        request,
        cluster,
        spec,
        workload,
        whole_vocabulary=engine.whole_vocabulary,
        own_layers=engine.own_layers,
        partition=partition,
        auto_ep=auto_ep,
    )
    if layout is not None and workload.quantize is not None:
        raise BadInput(
            "quantised bases are modelled for data parallelism alone",
            where=workload.quantized_by,
            remedy=without_degrees(request),
        )
    if layout is not None and workload.fp8 is not None:
        raise BadInput("8-bit products are modelled for data parallelism alone", where="--fp8", remedy=without_degrees(request))
    if workload.sparse_attention is not None and workload.compile is not None:
        raise BadInput("compiled blocks with sparse attention are not planned", where="--compile", remedy="leave it out")
    if layout is not None and workload.compile is not None:
        require_compilable(request, engine.compiled_degrees)
    warnings += [f"{where}: as DeepSpeed's source has it, but not measured on a GPU" for where in tiled]
    if layout is not None and not engine.own_layers and (said := unmeasured(layout, request.schedule)):
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
            partition=partition,
        )
        for zero in zeros
    ]
    cases = _cases(request, engine, every)
    warnings += sorted({said for case in cases if (said := engine.remark(case))})
    return Resolved(spec, workload, cluster, engine, cases, request.depth, tuple(warnings), unmodelled)


def _require_tiles(request: Request, workload: Workload) -> None:
    """Refuse more tiles than there are tokens: a rank's of a sample for MLPs, those of all samples for the loss.

    Raises:
        BadInput: such a number.
    """
    tokens = (workload.seq_len or 1) // request.ulysses
    for name, count, most in (("mlp", workload.tiled_mlp, tokens), ("loss", workload.tiled_loss, tokens * workload.rows)):
        if count > most:
            raise BadInput(f"{count:,} tiles of {most:,} tokens", where=f"--tiled-{name}", remedy="use 8, or fewer than tokens")


def _require_offloaded_checkpoints(request: Request, workload: Workload, *, offered: bool) -> None:
    """Refuse what `CheckpointHiddenStatesOffload` does not do, and what is not modelled beside it.

    Raises:
        BadInput: naming it.
    """
    where, policy = "--offload-checkpoints", workload.recomputation
    if not offered:
        what = "checkpoints on the host by DeepSpeed's context are planned under DeepSpeed alone"
        raise BadInput(what, where=where, remedy="use --engine deepspeed, or zeroplan with activation_checkpointing")
    if policy is None or policy.selective or policy.every > 1:
        what = "every block's input is offloaded where every block is recomputed as a whole"
        raise BadInput(what, where=where, remedy="use --gradient-checkpointing with --checkpoint-policy full")
    others = (
        ("--task", request.task is not None),
        ("--lora-rank", workload.lora_rank is not None),
        ("--pp", request.pp > 1),
        ("--tp", request.tp > 1),
        ("--compile", workload.compile is not None),
        ("--images", bool(workload.images)),
        ("--lengths", bool(workload.lengths)),
    )
    for flag, asked in others:
        if asked:
            raise BadInput("checkpoints on the host are not modelled beside it", where=flag, remedy=f"leave it or {where} out")


def _require_plain_loss(request: Request, spec: ModelSpec, workload: Workload) -> None:
    """Refuse what is not modelled beside a loss in tiles, and a head whose gradient is not complete with the loss.

    Raises:
        BadInput: naming it.
    """
    if any(tensor.tied_to is not None for unit in spec.units for tensor in unit.tensors):
        raise BadInput(
            "the head is tied to the embedding, and DeepSpeed would reduce their gradient twice in a step",
            where="--tiled-loss",
            remedy="leave it out",
        )
    others = (
        ("--task", request.task is not None),
        ("--lora-rank", workload.lora_rank is not None),
        ("--pp", request.pp > 1),
        ("--tp", request.tp > 1),
        ("--ulysses", request.ulysses > 1),
        ("loss", workload.chunked_head or workload.pair_loss is not None),
    )
    for where, asked in others:
        if asked:
            raise BadInput("a loss in tiles is not modelled beside it", where=where, remedy="leave one of the two out")


def _model(request: Request) -> ModelSpec:
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


def _cases(request: Request, engine: Engine, cases: list[Case]) -> tuple[Case, ...]:
    """The cases that the engine can run. A table leaves out the others; a single case that cannot run is bad input."""
    kept: list[Case] = []
    for case in cases:
        engine.require_layout(case.layout)
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


def _zeros(request: Request, engine: Engine) -> list[ZeroConfig]:
    """Return the configurations that the flags leave open: all options of the engine, one stage's, or exactly one."""
    optimizer, param = request.offload_optimizer, request.offload_param
    if request.stage is not None and (optimizer is not None or param is not None):
        param = param or "none"
        return [engine.configured(ZeroConfig.of(request.stage, optimizer or engine.optimizer_device(param), param))]
    if request.stage is not None and request.stage not in (0, 1, 2, 3):
        raise BadInput(f"stage {request.stage} does not exist", where="--stage", remedy="use 0, 1, 2 or 3")
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
