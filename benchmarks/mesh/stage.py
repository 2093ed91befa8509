"""One pipeline stage of a transformers model, under torch's own schedules on fake ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules
from torch.distributed.pipelining import stage as stages

from benchmarks.mesh.cases import Case
from zeroplan.core.pipeline import stages_of

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class StageModel(nn.Module):
    """The part of a causal language model that one stage has. The first takes tokens, the last returns logits."""

    def __init__(self, model: Any, case: Case) -> None:
        super().__init__()
        stage = stages_of(len(model.model.layers), case.pp)[case.pp_rank]
        self.first, self.last, self.config = stage.is_first, stage.is_last, model.config
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


def stage_of(model: Any, case: Case) -> StageModel:
    """Return the stage's part of a model on the meta device."""
    return StageModel(model, case)


def schedule_on(model: Any, case: Case, group: ProcessGroup, device: torch.device) -> Callable[[torch.Tensor], None]:
    """Return a function that runs the schedule over all micro batches of a step.

    The metadata is given, since other ranks cannot tell it; on CUDA the buffers hold what was there.
    """
    size = (case.micro_batch, case.seq_len)
    hidden = torch.empty(*size, model.config.hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    tokens = torch.empty(size, dtype=torch.int64, device="meta")
    logits = torch.empty(*size, model.config.vocab_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    first, last = case.pp_rank == 0, case.pp_rank == case.pp - 1
    known: dict[str, Any] = {"input_args": (tokens if first else hidden,), "output_args": (logits if last else hidden,)}
    grad = hidden.detach()
    known |= {"input_grads": None if first else (grad,), "output_grads": None if last else (grad,)}
    taken = {name: value for name, value in known.items() if name in inspect.signature(PipelineStage.__init__).parameters}
    stage = PipelineStage(model, case.pp_rank, case.pp, device, group=group, **taken)
    _agree_statically()

    def loss(found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = model.loss_function(logits=found, labels=labels, vocab_size=model.config.vocab_size)
        return value

    schedule = SCHEDULES[case.schedule](stage, n_microbatches=case.grad_accum, loss_fn=loss)
    silent: dict[str, Any] = (
        {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}
    )

    def step(ids: torch.Tensor) -> None:
        given, target = ((ids,) if first else ()), (ids if last else None)
        schedule.step(*given, target=target, **silent)

    return step


def _agree_statically() -> None:
    """Newer torch lets stages vote on how they learn their metadata; no fake rank answers."""
    modes = [module.InferenceMode for module in (schedules, stages) if hasattr(module, "InferenceMode")]
    if not modes:
        return

    def static(_: Any, all_stages: Any, *__: Any) -> None:
        for stage in all_stages:
            stage._inference_mode = modes[0].STATIC

    mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", static, create=True).start()  # a method of newer torch alone
