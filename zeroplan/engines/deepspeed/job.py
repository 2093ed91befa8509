"""One rank of a case: a case as DeepSpeed takes it, and what of the model one rank has."""

from __future__ import annotations

from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.parameters import Parameters
from zeroplan.engines.case import Case
from zeroplan.engines.deepspeed.rank import DeepSpeedRank, deepspeed_rank
from zeroplan.engines.deepspeed.saved_weights import saved_elements


def rank_of(case: Case, parameters: Parameters) -> DeepSpeedRank:
    """Return rank 0 of the case, of the pipeline stage that is looked at, derived once.

    Args:
        case: the configuration, as today's DeepSpeed wraps it.
        parameters: the whole model's.
    """
    return case.once(("deepspeed", parameters), lambda: _derive(case, parameters))


def _derive(case: Case, parameters: Parameters) -> DeepSpeedRank:
    more: dict[str, Any] = {}
    if case.layout.pp > 1:
        from zeroplan.core.pipeline import stage_parameters

        (stage,) = case.pipeline_chunks
        parameters = stage_parameters(parameters, (stage,))
        work = case.workload
        width = int(case.spec.config.get("hidden_size") or 0) * work.numerics.dtype.bytes
        more = {"pipeline_stage": stage, "hidden": work.batch.micro_batch * (work.batch.seq_len or 1) * width}
    if case.workload.checkpoints_on_host:
        work, blocks = case.workload, {block for block in parameters.blocks if block}
        tokens = work.batch.micro_batch * (work.batch.seq_len or 1) // case.layout.ulysses
        width = int(case.spec.config.get("hidden_size") or 0) * work.numerics.dtype.bytes
        more = {"checkpoint": tokens * width, "offloaded_inputs": max(0, len(blocks) - 1)}
    return deepspeed_rank(
        parameters,
        case.workload,
        case.zero,
        case.layout,
        gpu=case.cluster.gpu,
        device_memory=case.cluster.vram,
        zero_init=case.zero_init,
        saved_weights=saved_elements(case),
        fetches_wrapper=not parameters.packed,
        **more,
    )


def require_pipeline(case: Case) -> None:
    """Refuse what a ``PipelineModule`` does not take, and what is not modelled on its stages.

    Source: runtime/pipe/engine.py, PipelineEngine.__init__
    """
    if case.zero.stage > 1:
        raise BadInput(
            "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism: DeepSpeed's PipelineModule takes stages 0 and 1",
            where="--stage",
            remedy="use --stage 1",
        )
    if case.zero.offload_optimizer:
        raise BadInput(
            "offload is not modelled on stages of a PipelineModule", where="--offload-optimizer", remedy="leave it out"
        )
    if case.zero.zenflow is not None:
        raise BadInput("ZenFlow is not modelled on stages of a PipelineModule", where="zenflow", remedy="leave it out")
