"""One rank of the runtime in a case: the setup, and the layout that the Arena allocates by."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from zeroplan.core.arena.layout import ArenaLayout, UnitShape, plan_layout
from zeroplan.core.arena.layout_setup import RuntimeSetup, require_exchange, require_masters
from zeroplan.core.curriculum import CURRICULUM_LEARNING
from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.layer_drop import LAYER_DROP
from zeroplan.core.one_bit import NOT_EXPERTS, NOT_SPLIT
from zeroplan.core.optimizers import RUNTIME_NAMES, find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.quantize_training import QUANTIZE_TRAINING, QuantizeTraining
from zeroplan.core.sparse_attention import require_model_type
from zeroplan.core.workload import DType, Precision, Workload
from zeroplan.core.zero_config import OffloadDevice, ZeroConfig
from zeroplan.ds_config.runtime import runtime_setup
from zeroplan.ds_config.runtime_options import RuntimeOptions
from zeroplan.engines.runtime.units import unit_shapes
from zeroplan.models.spec import ModelSpec, SpecUnit

if TYPE_CHECKING:
    from zeroplan.core.pipeline import Stage
    from zeroplan.engines.case import Case


def setup_of(workload: Workload, zero: ZeroConfig, parallel: ParallelLayout, runtime_options: RuntimeOptions) -> RuntimeSetup:
    """Return the runtime's setup for a plan."""
    return runtime_setup(
        zero,
        runtime_options,
        ranks=parallel.shard_group,
        dtype=workload.numerics.dtype,
        optimizer=workload.numerics.optimizer,
        grad_accum=workload.batch.grad_accum,
        quantize_training=workload.technique(QuantizeTraining),
        local_steps=workload.numerics.local_steps > 1,
        ep=parallel.ep,
        across=parallel.tp if parallel.experts_across else 1,
    )


@lru_cache(maxsize=64)
def _shapes(
    units: tuple[SpecUnit, ...],
    model_type: str,
    wide_numel: int,
    tp: int,
    ep: int,
    whole_experts: bool,
    chunks: tuple[Stage, ...],
) -> tuple[UnitShape, ...]:
    spec = ModelSpec("", units, "units", model_type)
    held = _held(spec, tp, ep, whole_experts, chunks)
    return tuple(unit_shapes(spec, wide_numel=wide_numel, held=held, shares_experts=ep > 1))


def _held(spec: ModelSpec, tp: int, ep: int, whole_experts: bool, chunks: tuple[Stage, ...]) -> dict[str, int] | None:
    """Return the elements of each parameter that a rank holds; None where it holds the whole model."""
    if tp == ep == 1 and not chunks:
        return None
    from zeroplan.core.expert_parallel import with_local_experts
    from zeroplan.core.pipeline import stage_parameters
    from zeroplan.core.tensor_parallel import local_parameters

    shared = local_parameters(spec.parameters, spec.model_type, tp, whole_experts=whole_experts)
    parameters = with_local_experts(shared, ep)
    if chunks:
        parameters = stage_parameters(parameters, chunks)
    return dict(zip(parameters.names, parameters.numel, strict=True))


def layout_of(
    spec: ModelSpec,
    workload: Workload,
    zero: ZeroConfig,
    parallel: ParallelLayout,
    runtime_options: RuntimeOptions,
    chunks: tuple[Stage, ...] = (),
) -> ArenaLayout:
    """Return the layout of one rank of a pipeline stage; all of these ranks have the same.

    Args:
        spec: the whole model.
        workload: what is computed.
        zero: stage and offload.
        parallel: how the ranks divide the work.
        runtime_options: the ``zeroplan`` section of the ds_config.
        chunks: the pipeline stages that the rank has; none without a pipeline.
    """
    return plan_layout(
        _shapes(
            spec.units,
            spec.model_type,
            runtime_options.wide_numel,
            parallel.tp,
            parallel.ep,
            parallel.experts_across,
            chunks,
        ),
        setup_of(workload, zero, parallel, runtime_options),
    )


def require_splittable(case: Case, runtime_options: RuntimeOptions) -> None:
    """Refuse what the runtime does not do with ranks that share matrices or experts.

    Raises:
        BadInput: optimizers that step by whole tensors' norms, the head over labelled tokens with `tp`, and files with `ep`.
    """
    if case.layout.experts_across and case.layout.ep % case.layout.tp:
        what = f"ep {case.layout.ep} is no multiple of tp {case.layout.tp}, whose ranks each have experts of their own"
        remedy = f"use a multiple of {case.layout.tp}, or --etp {case.layout.tp}, which shares their matrices"
        raise BadInput(what, where="--ep", remedy=remedy)
    if case.layout.sp and case.zero.activation_checkpointing.partition_activations:
        raise BadInput(
            "sequence parallelism has divided the blocks' inputs already",
            where="activation_checkpointing.partition_activations",
            remedy="leave the key out, or --sp",
        )
    divided = next((name for name in ("tp", "ep") if getattr(case.layout, name) > 1), None)
    if divided is None:
        return
    kernel = find_optimizer(case.workload.numerics.optimizer).runtime
    if kernel is not None and kernel.takes_norms:
        raise BadInput(
            f"{case.workload.numerics.optimizer} steps by the norms of whole tensors, of which ranks of {divided} have parts",
            where="--optimizer",
            remedy=f"use adamw, or --{divided} 1",
        )
    if divided == "ep" and OffloadDevice.NVME in (case.zero.offload_optimizer.device, case.zero.offload_param.device):
        raise BadInput("files are not supported with ep", where="--ep", remedy="offload to the cpu, or leave --ep at 1")
    if divided == "tp" and runtime_options.labelled_tokens_only:
        raise BadInput(
            "is not done by tensor-parallel ranks", where="labelled_tokens_only", remedy="leave it out, or use --tp 1"
        )


def require_sparse_attention(case: Case) -> None:
    """Refuse what block-sparse attention is not made for, or not modelled with.

    Raises:
        BadInput: other models, ranks that share the model or its tokens, and compiled blocks.
    """
    where = "sparse_attention"
    require_model_type(case.spec.model_type)
    if case.parallel is not None:
        raise BadInput(
            "it is not supported where ranks share the model or its tokens",
            where=where,
            remedy="leave the key out, or --tp, --cp and --pp",
        )
    if case.workload.compile is not None:
        raise BadInput("it is not modelled in compiled blocks", where=where, remedy="leave the key out, or --compile")


def _require_without(degrees: Sequence[str], case: Case, section: str) -> None:
    for name in degrees:
        if getattr(case.layout, name) > 1:
            remedy = f"leave the section out, or --{name}"
            raise BadInput(f"it is not supported with {name}", where=section, remedy=remedy)


def require_whole_samples(case: Case) -> None:
    """Refuse a curriculum by sequence length where ranks share samples or layers, as the runtime does."""
    _require_without(("cp", "pp"), case, CURRICULUM_LEARNING)


def require_halvable(case: Case) -> None:
    """Refuse a backward in two halves where the runtime does. Raises BadInput: stage 3."""
    if case.halves and case.zero.stage == 3:
        what = "parameters of stage 3 are not there from a forward to the second half of its backward"
        raise BadInput(what, where="--schedule", remedy="use 1f1b or gpipe, or --stage 2")


def require_droppable(case: Case) -> None:
    """Refuse layer dropping where the runtime does, and in compiled blocks.

    Raises:
        BadInput: two stacks of blocks, ranks that hold parts of the model, and compiled blocks.
    """
    _require_without(("tp", "pp", "ep"), case, LAYER_DROP)
    stacks = {unit.name.rpartition(".")[0] for unit in case.spec.units if unit.block}
    if len(stacks) > 1:
        what = f"it is known for one stack of blocks, and the model has {', '.join(sorted(stacks))}"
        raise BadInput(what, where=LAYER_DROP, remedy="leave the section out")
    if case.workload.compile is not None:
        raise BadInput("blocks that may be left out are not compiled", where=LAYER_DROP, remedy="leave it out, or --compile")


def require_quantisable(case: Case) -> None:
    """Refuse a mixture of quantization where the runtime does, or is not modelled with.

    Raises:
        BadInput: as :func:`~zeroplan.core.arena.layout_setup.require_masters`, and for ranks that hold parts of the model.
    """
    require_masters(case.workload.numerics.dtype, case.zero.stage, case.zero.offload_optimizer.device)
    _require_without(("tp", "pp", "ep"), case, QUANTIZE_TRAINING)


def require_exchangeable(workload: Workload, zero: ZeroConfig, parallel: ParallelLayout) -> None:
    """Refuse what a 1-bit optimizer cannot be combined with.

    Raises:
        BadInput: stages 2 and 3, offload, and ranks that hold parts of the model.
    """
    if not find_optimizer(workload.numerics.optimizer).compresses:
        return
    require_exchange(zero.stage, zero.offload_optimizer.device, local_steps=workload.numerics.local_steps > 0)
    if parallel.tp * parallel.pp * parallel.ep > 1:
        refusal = NOT_EXPERTS if parallel.ep > 1 else NOT_SPLIT
        raise BadInput(refusal.what, where="--optimizer", remedy=refusal.remedy)


def require_trainable(workload: Workload) -> None:
    """Refuse what the runtime does not train.

    Raises:
        BadInput: other optimizers than its own, autocast, and pure 16-bit states.
    """
    if workload.numerics.optimizer not in RUNTIME_NAMES:
        near = did_you_mean(workload.numerics.optimizer, RUNTIME_NAMES)
        remedy = near or f"use one of {', '.join(RUNTIME_NAMES)}"
        raise BadInput(f"the runtime has no optimizer {workload.numerics.optimizer!r}", where="--optimizer", remedy=remedy)
    if workload.numerics.precision not in (Precision.MIXED, Precision.FP32):
        raise BadInput(
            f"the runtime does not train in {workload.numerics.precision} precision",
            where="--dtype",
            remedy="use bf16, fp16 or fp32",
        )
    if (workload.numerics.precision is Precision.FP32) is not (workload.numerics.dtype is DType.FP32):
        raise BadInput(f"{workload.numerics.dtype} is not {workload.numerics.precision} precision", where="--dtype")
