"""The pipeline stages that one rank has of a transformers model, under torch's own schedules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    schedules,
)
from torch.distributed.pipelining import stage as stages

from benchmarks.mesh.cases import Case
from zeroplan.core.pipeline import Stage, chunks_of
from zeroplan.core.pipeline_order import schedule_of

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
LOOPED = {
    "1f1b": ScheduleInterleaved1F1B,
    "gpipe": ScheduleLoopedBFS,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class StageModel(nn.Module):
    """The part of a causal language model that one stage has. The first takes tokens, the last returns logits."""

    def __init__(self, model: Any, stage: Stage) -> None:
        super().__init__()
        self.first, self.last, self.config = stage.is_first, stage.is_last, model.config
        self.index, self.stages = stage.index, stage.stages
        self.loss_function = model.loss_function
        model.model.layers = nn.ModuleList(list(model.model.layers)[stage.first : stage.end])
        if not stage.is_first:
            model.model.embed_tokens = None
        if not stage.is_last:
            model.model.norm, model.lm_head = nn.Identity(), None
        self.model, self.lm_head = model.model, model.lm_head

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Map tokens [B, S] or hidden states [B, S, H] to hidden states or logits."""
        hidden = self.model(**{"input_ids" if self.first else "inputs_embeds": given}).last_hidden_state
        found: torch.Tensor = self.lm_head(hidden) if self.last else hidden
        return found


def stages_on(make: Callable[[], Any], case: Case, rank: int) -> list[StageModel]:
    """Return a pipeline rank's parts of the model that `make` returns, a new one at each call."""
    blocks = case.model["num_hidden_layers"]
    return [StageModel(make(), stage) for stage in chunks_of(blocks, case.pp, case.vpp, rank, schedule_of(case.schedule))]


def schedule_on(
    models: list[StageModel], case: Case, group: ProcessGroup, device: torch.device, *, fake: bool
) -> Callable[[torch.Tensor], None]:
    """Return a function that runs the schedule over all micro batches of a step.

    The metadata is given, since fake ranks cannot tell it; on CUDA what they send holds what was there.
    """
    stages = [
        PipelineStage(model, model.index, model.stages, device, group=group, **metadata_of(model, case)) for model in models
    ]
    if fake:
        _agree_statically()
    options: dict[str, Any] = {"n_microbatches": case.grad_accum, "loss_fn": partial(loss_of, models[-1])}
    looped = case.vpp > 1 or case.schedule not in SCHEDULES
    schedule: Any = LOOPED[case.schedule](stages, **options) if looped else SCHEDULES[case.schedule](stages[0], **options)
    return partial(run, schedule, models)


def metadata_of(model: StageModel, case: Case) -> dict[str, Any]:
    """Return what a stage is told of its inputs and outputs, as far as this torch's ``PipelineStage`` takes it."""
    size = (case.micro_batch, case.seq_len)
    hidden = torch.empty(*size, model.config.hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    tokens = torch.empty(size, dtype=torch.int64, device="meta")
    logits = torch.empty(*size, model.config.vocab_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    known: dict[str, Any] = {
        "input_args": (tokens if model.first else hidden,),
        "output_args": (logits if model.last else hidden,),
        "input_grads": None if model.first else (hidden.detach(),),
        "output_grads": None if model.last else (hidden.detach(),),
    }
    return {name: value for name, value in known.items() if name in inspect.signature(PipelineStage.__init__).parameters}


def loss_of(model: StageModel, found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of logits [B, S, V] or this rank's part of them."""
    value: torch.Tensor = model.loss_function(logits=found, labels=labels, vocab_size=model.config.vocab_size)
    return value


def run(schedule: Any, models: list[StageModel], ids: torch.Tensor) -> None:
    """Run a schedule over the tokens [micro batches × B, S] of a step."""
    silent: dict[str, Any] = (
        {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}
    )
    given, target = ((ids,) if models[0].first else ()), (ids if models[-1].last else None)
    schedule.step(*given, target=target, **silent)


def _agree_statically() -> None:
    """Newer torch lets stages vote on how they learn their metadata; no fake rank answers."""
    modes = [module.InferenceMode for module in (schedules, stages) if hasattr(module, "InferenceMode")]
    if not modes:
        return

    def static(_: Any, all_stages: Any, *__: Any) -> None:
        for stage in all_stages:
            stage._inference_mode = modes[0].STATIC

    mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", static, create=True).start()  # a method of newer torch alone
