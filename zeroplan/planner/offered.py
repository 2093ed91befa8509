"""Whether an engine does what a workload asks for, flag by flag; each refusal names the flag and a way out."""

from __future__ import annotations

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import FLOAT8_CAPABILITY, Float8Recipe
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import DEGREES, ParallelLayout
from zeroplan.core.quantization import PackedWeights
from zeroplan.core.sparse_attention import SparseAttention
from zeroplan.core.workload import ChunkedHead, TiledLoss, TiledMlp, Workload
from zeroplan.engines.base import Engine
from zeroplan.models.spec import ModelSpec
from zeroplan.planner.layout import require_compilable, without_degrees
from zeroplan.run.ask import Ask
from zeroplan.techniques.base import Facts


def facts_of(request: Ask, engine: Engine, workload: Workload, cluster: Cluster, spec: ModelSpec) -> Facts:
    """Return what rules of techniques read of a run."""
    degrees = {name: int(getattr(request, name)) for name in (*DEGREES, "dp_replicate")}
    return Facts(engine, workload, spec, cluster, degrees, task=request.task, alone=without_degrees(request))


def require_offered(request: Ask, engine: Engine, workload: Workload, cluster: Cluster, spec: ModelSpec) -> None:
    """Refuse what the engine or the card has no way to do, and what is not modelled beside it.

    Raises:
        BadInput: naming the flag.
    """
    if not workload.loop.set_to_none and not engine.keeps_gradients:
        raise BadInput(f"{engine.name} frees gradients after each step", where="--no-set-to-none", remedy="leave it out")
    if workload.has(Float8Recipe) and not engine.float8:
        raise BadInput(
            f"8-bit products are not modelled under {engine.name}", where="--fp8", remedy="use --engine fsdp2 or ddp"
        )
    if workload.compile is not None and not engine.compiles:
        raise BadInput(
            f"compiled models are not planned under {engine.name}",
            where="--compile",
            remedy="use --engine zeroplan, fsdp2 or ddp",
        )
    if workload.has(Float8Recipe) and cluster.gpu.capability < FLOAT8_CAPABILITY:
        raise BadInput(f"{cluster.gpu.name} has no 8-bit floats", where="--fp8", remedy="leave it out, or name an H100")
    tiled = tiled_flags(workload)
    if tiled and not engine.tiles_mlps:
        raise BadInput(f"tiles are DeepSpeed's, and {engine.name} has none", where=tiled[0], remedy="use --engine deepspeed")
    if tiled:
        _require_tiles(request, workload)
    if workload.checkpoints_on_host:
        _require_offloaded_checkpoints(request, workload, offered=engine.tiles_mlps)
    if workload.has(TiledLoss):
        _require_plain_loss(request, spec, workload)
    if workload.quantize is not None:
        _require_quantized_base(engine, workload)


def _require_quantized_base(engine: Engine, workload: Workload) -> None:
    """Refuse a base in a format that is not modelled under the engine.

    Raises:
        BadInput: naming it.
    """
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


def tiled_flags(workload: Workload) -> list[str]:
    """Return the flags of what the workload computes in tiles."""
    return [f"--tiled-{name}" for name, kind in (("mlp", TiledMlp), ("loss", TiledLoss)) if workload.has(kind)]


def require_engines_own(engine: Engine, spec: ModelSpec, workload: Workload) -> None:
    """Refuse experts and optimizers of another engine.

    Raises:
        BadInput: naming them.
    """
    if spec.own_experts is not None and not engine.own_experts:
        raise BadInput(f"{engine.name} does not train DeepSpeed's MoE layers", where="model", remedy="use --engine deepspeed")
    row = find_optimizer(workload.numerics.optimizer)
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


def require_partition(request: Ask, engine: Engine) -> None:
    """Refuse a way to divide layers that the engine does not have.

    Raises:
        BadInput: naming ``--partition``.
    """
    if request.partition is not None and not (engine.partition and request.pp > 1):
        raise BadInput(
            "layers are divided by a method on stages of DeepSpeed's PipelineModule",
            where="--partition",
            remedy="use --engine deepspeed --pp 2, or leave it out",
        )


def require_beside(request: Ask, engine: Engine, workload: Workload, layout: ParallelLayout | None) -> None:
    """Refuse what is modelled for data parallelism alone, and what compiled blocks are not planned with.

    Args:
        request: what was asked.
        engine: the engine.
        workload: the workload.
        layout: degrees beside data parallelism; None where there are none.

    Raises:
        BadInput: naming the flag.
    """
    if layout is not None and workload.quantize is not None:
        raise BadInput(
            "quantised bases are modelled for data parallelism alone",
            where=workload.quantized_by,
            remedy=without_degrees(request),
        )
    if layout is not None and workload.has(Float8Recipe):
        raise BadInput("8-bit products are modelled for data parallelism alone", where="--fp8", remedy=without_degrees(request))
    if workload.has(SparseAttention) and workload.compile is not None:
        raise BadInput("compiled blocks with sparse attention are not planned", where="--compile", remedy="leave it out")
    if layout is not None and workload.compile is not None:
        require_compilable(request, engine.compiled_degrees)


def _require_tiles(request: Ask, workload: Workload) -> None:
    """Refuse more tiles than there are tokens: a rank's of a sample for MLPs, those of all samples for the loss.

    Raises:
        BadInput: such a number.
    """
    tokens = (workload.batch.seq_len or 1) // request.ulysses
    for name, tiled, most in (
        ("mlp", workload.technique(TiledMlp), tokens),
        ("loss", workload.technique(TiledLoss), tokens * workload.batch.rows),
    ):
        if tiled is not None and (count := tiled.tiles) > most:
            raise BadInput(f"{count:,} tiles of {most:,} tokens", where=f"--tiled-{name}", remedy="use 8, or fewer than tokens")


def _require_offloaded_checkpoints(request: Ask, workload: Workload, *, offered: bool) -> None:
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
        ("--images", bool(workload.batch.images)),
        ("--lengths", bool(workload.batch.lengths)),
    )
    for flag, asked in others:
        if asked:
            raise BadInput("checkpoints on the host are not modelled beside it", where=flag, remedy=f"leave it or {where} out")


def _require_plain_loss(request: Ask, spec: ModelSpec, workload: Workload) -> None:
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
        ("loss", workload.has(ChunkedHead) or workload.objective.pair_loss is not None),
    )
    for where, asked in others:
        if asked:
            raise BadInput("a loss in tiles is not modelled beside it", where=where, remedy="leave one of the two out")
