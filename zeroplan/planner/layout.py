"""The parallel layout that a request's flags describe, held against the model and the engine."""

from __future__ import annotations

from zeroplan.core.buffers import Buffer
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.model_config import auto_class_of
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Attention, Workload
from zeroplan.models.spec import ModelSpec
from zeroplan.run.ask import Ask

#: The order of micro batches that needs no flag.
DEFAULT_SCHEDULE = "1f1b"
#: Mixtures with attention that torch's ring has no plan of ours for: latent, or with sinks and windows.
_OTHER_ATTENTION = ("deepseek_v2", "deepseek_v3", "gpt_oss")
_DEGREES = ("tp", "cp", "ulysses", "pp", "vpp", "ep", "etp")


def layout_of(
    request: Ask,
    cluster: Cluster,
    spec: ModelSpec,
    workload: Workload,
    *,
    whole_vocabulary: bool = False,
    own_layers: bool = False,
    partition: str = "",
    auto_ep: bool = False,
) -> ParallelLayout | None:
    """Return the layout that the request's degrees give on the cluster; None for data parallelism alone.

    Args:
        spec: the model, which the degrees have to divide.
        workload: the run.
        whole_vocabulary: how the engine divides embedding and head.
        own_layers: the engine's layers are its own, which it holds against the layout itself.
        partition: how it divides layers over pipeline stages (:class:`~zeroplan.engines.base.Case`).
        auto_ep: whether it puts AutoEP's layers in the place of blocks with experts.

    Raises:
        BadInput: degrees that do not divide the ranks or the model, or a model that cannot be divided so.
    """
    if request.schedule != DEFAULT_SCHEDULE and request.pp == 1:
        raise BadInput("a schedule without pipeline stages", where="--schedule", remedy="give --pp as well")
    degrees = {name: getattr(request, name) for name in _DEGREES}
    if spec.own_experts is not None:
        return _of_own_experts(request, cluster, spec.own_experts.ranks)
    if auto_ep:
        return _of_auto_ep(request, cluster, spec, workload)
    splits = set(degrees.values()) != {1} or request.sp
    if not splits and request.dp_replicate == 1:
        return None
    layout = ParallelLayout(
        cluster.gpus,
        cluster.nodes,
        sp=request.sp,
        dp_replicate=request.dp_replicate,
        whole_vocabulary=whole_vocabulary and request.tp > 1,
        **degrees,
    )
    if not splits or own_layers:
        return layout
    _require_language_model(request, spec, workload)
    if layout.tp > 1:
        _require_tensor_parallel(layout, spec, workload)
    if layout.cp > 1:
        _require_context_parallel(layout, spec, workload)
    if layout.ulysses > 1:
        _require_ulysses(layout, spec, workload)
    if layout.ep > 1 or layout.etp > 1:
        _require_experts(layout, spec, workload)
    if layout.pp > 1:
        _require_pipeline(layout, spec, workload, request.schedule, partition)
    return layout


def _of_own_experts(request: Ask, cluster: Cluster, ep: int) -> ParallelLayout:
    """Return the layout of a module whose layers share their experts among `ep` ranks, beside data parallelism.

    Raises:
        BadInput: another `ep`, or other degrees.
    """
    if request.ep not in (1, ep):
        raise BadInput(f"{request.ep} differs from the layers' ep_size {ep}", where="--ep", remedy="leave it out")
    for name in _DEGREES:
        if name != "ep" and getattr(request, name) > 1:
            raise BadInput("is not modelled beside MoE layers", where=f"--{name}", remedy="leave it at 1")
    if request.lora_rank is not None:
        raise BadInput("adapters of MoE layers are not modelled", where="--lora-rank", remedy="leave it out")
    return ParallelLayout(cluster.gpus, cluster.nodes, ep=ep, own_experts=True)


def _of_auto_ep(request: Ask, cluster: Cluster, spec: ModelSpec, workload: Workload) -> ParallelLayout:
    """Return the layout of a model whose blocks AutoEP replaces, beside data parallelism.

    Raises:
        BadInput: what AutoEP does not divide or take, and what is not modelled beside it.
    """
    from zeroplan.core.auto_ep import require_model

    for name in (*_DEGREES, "dp_replicate"):
        if name != "ep" and getattr(request, name) > 1:
            where = f"--{name.replace('_', '-')}"
            raise BadInput("is not modelled beside AutoEP", where=where, remedy="leave it or --ep at 1")
    if workload.lora_rank is not None:
        raise BadInput("adapters beside AutoEP are not modelled", where="--lora-rank", remedy="leave it out")
    _require_language_model(request, spec, workload)
    require_model(spec.parameters, spec.model_type, request.ep)
    if workload.numerics.dtype.bytes != 2 or workload.numerics.param_bytes == 4:
        raise BadInput("AutoEP is modelled in 16 bits", where="--dtype", remedy="use --dtype bf16, or --ep 1")
    if workload.batch.lengths:
        raise BadInput("batches of different lengths are not modelled with AutoEP", where="--lengths", remedy="leave it out")
    return ParallelLayout(cluster.gpus, cluster.nodes, sp=request.sp, ep=request.ep, own_experts=True, auto_ep=True)


def without_degrees(request: Ask) -> str:
    """Return the remedy that leaves data parallelism alone: which of the request's flags to leave out."""
    said = [f"--{name}" for name in _DEGREES if getattr(request, name) > 1]
    return f"leave {' and '.join(said) or '--dp-replicate'} out"


def unmeasured(layout: ParallelLayout) -> str:
    """Return a warning where a layout was held against few GPUs; empty elsewhere."""
    if layout.own_experts and not layout.auto_ep:
        return "MoE layers: measured on two GPUs alone"
    return ""


def _require_language_model(request: Ask, spec: ModelSpec, workload: Workload) -> None:
    where = next((f"--{name}" for name in _DEGREES if getattr(request, name) > 1), "--pp")
    if request.task is not None or (spec.config and auto_class_of(spec.config) != "AutoModelForCausalLM"):
        raise BadInput("is modelled for causal language models alone", where=where, remedy="leave it at 1, and --task out")
    if workload.batch.lengths and max(request.cp, request.ulysses, request.pp) > 1:
        where = next(f"--{name}" for name in ("cp", "ulysses", "pp") if getattr(request, name) > 1)
        raise BadInput(f"batches of different lengths are not modelled with {where}", where="--lengths", remedy="leave it out")
    if Buffer.OPTIM_FACTORED in (row := find_optimizer(workload.numerics.optimizer)).buffers or row.rest:
        raise BadInput(
            f"{row.name} steps whole matrices, and is not modelled on their parts", where="--optimizer", remedy="use adamw"
        )


def _require_tensor_parallel(layout: ParallelLayout, spec: ModelSpec, workload: Workload) -> None:
    from zeroplan.core.tensor_parallel import require_divides, tensor_plan

    if not spec.has_shapes:
        raise BadInput(
            "a count of parameters does not tell what is shared", where="--tp", remedy="give the model's id or config.json"
        )
    plan = tensor_plan(spec.model_type, auto_tp=layout.whole_vocabulary)
    if layout.sp and not plan.splits_tokens:
        raise BadInput(f"sequence parallelism of {spec.model_type} is not modelled", where="--sp", remedy="leave it out")
    if layout.whole_vocabulary and any(tensor.tied_to is not None for unit in spec.units for tensor in unit.tensors):
        raise BadInput(
            "AutoTP splits a vocabulary that embedding and head share, which is not modelled",
            where="--tp",
            remedy="use --engine fsdp2",
        )
    require_divides(spec.config, layout, workload.batch.seq_len)
    if workload.lora_rank is not None:
        raise BadInput("tensor parallelism with LoRA is not modelled", where="--tp", remedy="leave --lora-rank out")


def _require_context_parallel(layout: ParallelLayout, spec: ModelSpec, workload: Workload) -> None:
    """Refuse what torch's ``context_parallel`` does not take, and what is not modelled."""
    from zeroplan.core.expert_parallel import GROUPED
    from zeroplan.core.tensor_parallel import PLANS

    cp, tokens = layout.cp, workload.batch.seq_len or 0
    pieces = 2 * cp * (layout.tp if layout.sp else 1)
    if tokens % pieces:
        what = f"cp {cp} divides each half of a sample" + (" and sp its parts" if layout.sp else "")
        raise BadInput(
            f"{what}, and {tokens:,} tokens are no multiple of {pieces}", where="--cp", remedy="use another --seq-len"
        )
    if workload.numerics.attn is not Attention.SDPA:
        raise BadInput("torch has ring attention for sdpa alone", where="--attn", remedy="use --attn sdpa")
    known = (*PLANS, *(name for name in GROUPED if name not in _OTHER_ATTENTION))
    if spec.model_type not in known:
        what = f"context parallelism of {spec.model_type or 'this model'} is not modelled"
        raise BadInput(what, where="--cp", remedy=f"of {', '.join(known)} it is")
    if workload.numerics.dtype.bytes != 2 or workload.numerics.param_bytes == 4:
        raise BadInput("ring attention is modelled for 16 bits", where="--dtype", remedy="use --dtype bf16, or --cp 1")
    if workload.lora_rank is not None:
        raise BadInput("context parallelism with LoRA is not modelled", where="--cp", remedy="leave --lora-rank out")
    if workload.recomputation is not None and workload.recomputation.selective:
        raise BadInput(
            "selective checkpointing of ring attention is not modelled", where="--checkpoint-policy", remedy="use full"
        )


def _require_ulysses(layout: ParallelLayout, spec: ModelSpec, workload: Workload) -> None:
    """Refuse what DeepSpeed's Ulysses refuses, and what is not modelled beside it.

    Source: DeepSpeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py (UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter)
    """
    from zeroplan.core.tensor_parallel import PLANS

    ranks, where = layout.ulysses, "--ulysses"
    if max(layout.tp, layout.cp, layout.pp, layout.ep) > 1:
        raise BadInput(
            "Ulysses is modelled beside data parallelism alone", where=where, remedy="leave --tp, --cp, --pp and --ep at 1"
        )
    if spec.model_type not in PLANS:
        what = f"Ulysses of {spec.model_type or 'this model'} is not modelled"
        raise BadInput(what, where=where, remedy=f"of {', '.join(PLANS)} it is")
    heads = int(spec.config["num_attention_heads"])
    groups = int(spec.config.get("num_key_value_heads") or heads)
    if heads % ranks:
        raise BadInput(
            f"ulysses {ranks} does not divide the {heads} attention heads", where=where, remedy=f"use a divisor of {heads}"
        )
    if groups % ranks and ranks % groups:
        what = f"neither of ulysses {ranks} and the {groups} KV heads divides the other"
        raise BadInput(what, where=where, remedy=f"use a divisor or a multiple of {groups}")
    if (workload.batch.seq_len or 0) % ranks:
        what = f"ulysses {ranks} does not divide the {workload.batch.seq_len:,} tokens of a sample"
        raise BadInput(what, where=where, remedy=f"use a --seq-len that {ranks} divides")
    if workload.batch.pairs or workload.objective.reference is not None:
        raise BadInput("pairs of samples and references are not modelled with Ulysses", where=where, remedy="leave it at 1")
    if workload.numerics.attn is Attention.EAGER:
        raise BadInput(
            "DeepSpeed's Ulysses drops masks, which eager attention needs", where="--attn", remedy="use sdpa or flash"
        )


def _require_experts(layout: ParallelLayout, spec: ModelSpec, workload: Workload) -> None:
    """Refuse what expert parallelism does not divide, and what is not modelled beside it."""
    from zeroplan.core.expert_parallel import experts_of, require_experts

    if layout.etp not in (1, layout.tp):
        what = f"etp {layout.etp} is neither 1 nor tp {layout.tp}"
        remedy = "experts' matrices are whole, or shared as the dense ones are; --engine megatron has any"
        raise BadInput(what, where="--etp", remedy=remedy)
    if layout.etp > 1 and spec.has_shapes and not experts_of(spec.parameters):
        what = f"{spec.model_type or 'this model'} has no experts whose matrices could be shared"
        raise BadInput(what, where="--etp", remedy="leave it out")
    if layout.etp > 1 and layout.ep == 1:
        return  # the ranks of tp share all matrices
    tokens = workload.batch.micro_batch * (workload.batch.seq_len or 0) // layout.cp
    if layout.experts_across and tokens % layout.tp:
        what = f"tp {layout.tp} does not divide the {tokens:,} tokens of a micro batch, which its ranks exchange in parts"
        raise BadInput(what, where="--etp", remedy=f"use another --seq-len, or --etp {layout.tp}")
    if workload.lora_rank is not None:
        raise BadInput("expert parallelism with LoRA is not modelled", where="--ep", remedy="leave --lora-rank out")
    require_experts(spec.parameters, spec.model_type, layout)
    if workload.numerics.dtype.bytes != 2 or workload.numerics.param_bytes == 4:
        raise BadInput("shared experts are modelled in 16 bits", where="--dtype", remedy="use --dtype bf16, or --ep 1")
    if workload.batch.lengths:
        raise BadInput("batches of different lengths are not modelled with --ep", where="--lengths", remedy="leave it out")


def _require_pipeline(layout: ParallelLayout, spec: ModelSpec, workload: Workload, schedule: str, partition: str) -> None:
    from zeroplan.core.expert_parallel import GROUPED
    from zeroplan.core.pipeline import layer_stages, stages_of
    from zeroplan.core.pipeline_order import PipelineOrder, schedule_of
    from zeroplan.core.tensor_parallel import PLANS

    order = schedule_of(schedule)
    if not spec.has_shapes:
        raise BadInput(
            "a count of parameters does not tell the blocks", where="--pp", remedy="give the model's id or config.json"
        )
    known = (*PLANS, *GROUPED)
    if spec.model_type not in known:
        what = f"pipeline stages of {spec.model_type or 'this model'} are not modelled"
        raise BadInput(what, where="--pp", remedy=f"of {', '.join(known)} they are")
    if not partition and any(tensor.tied_to is not None for unit in spec.units for tensor in unit.tensors):
        raise BadInput(
            "the head is tied to the embedding, which is on another pipeline stage", where="--pp", remedy="use --pp 1"
        )
    if workload.lora_rank is not None:
        raise BadInput("pipeline stages with LoRA are not modelled", where="--pp", remedy="leave --lora-rank out")
    if order.halves:
        _require_halves(layout, spec, workload)
    if partition:
        if schedule != DEFAULT_SCHEDULE or layout.vpp > 1:
            where = "--vpp" if layout.vpp > 1 else "--schedule"
            raise BadInput("DeepSpeed's PipelineModule runs 1f1b with one chunk a rank", where=where, remedy="leave it out")
        layer_stages(spec.parameters, layout.pp, partition)
        return
    stages_of(len({block for block in spec.parameters.blocks if block}), layout.pp * layout.vpp)
    PipelineOrder(order, 0, layout.pp, layout.vpp, workload.batch.grad_accum)


def _require_halves(layout: ParallelLayout, spec: ModelSpec, workload: Workload) -> None:
    """Refuse where the halves of a backward are not known, or run otherwise than anyone wants."""
    from zeroplan.core.tensor_parallel import PLANS

    where, remedy = "--schedule", "use 1f1b"
    if workload.recomputation is not None:
        what = (
            "the second half of a zero-bubble backward recomputes a block once for each of its weights, which is not modelled"
        )
        raise BadInput(what, where=where, remedy="use 1f1b, or --no-gradient-checkpointing")
    if workload.compile is not None:
        raise BadInput("torch runs no zero-bubble schedule of compiled models", where=where, remedy="use 1f1b, or no --compile")
    shared = next((name for name in ("tp", "cp", "ep") if getattr(layout, name) > 1), None)
    if shared is not None:
        what = f"a backward in two halves is not modelled with --{shared}"
        raise BadInput(what, where=where, remedy=f"{remedy}, or leave --{shared} at 1")
    if spec.model_type not in PLANS:
        raise BadInput(f"a backward of {spec.model_type} in two halves is not modelled", where=where, remedy=remedy)
