"""The pipeline stages that one rank has of a causal language model of transformers, under torch's own schedules.

Imports torch: only trainers import this module, and only a rank's process imports those.

Note [Stages of a model]
    A stage keeps the model's own code: its part of the list of blocks, and of embedding, final norm and head what
    :class:`~zeroplan.core.pipeline.Stage` says. Behind the first stage the blocks are given hidden states in place of
    embeddings. A config that names a kind of attention for each block (``layer_types``) is cut with them, since the model
    numbers its blocks from 0. What stands behind the head in the whole model's forward (Gemma 2's capped logits) stands there
    here, too. Source: transformers, ``modeling_gemma2.py`` (``Gemma2ForCausalLM.forward``)
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
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

from zeroplan.core.errors import BadInput
from zeroplan.core.pipeline import Stage, chunks_of
from zeroplan.core.pipeline_order import schedule_of
from zeroplan.engines.torch_mesh import Passes, whole_loss
from zeroplan.engines.verification import TrainingRun

#: torch's classes for a rank with one chunk, and for several, by the names of ``--schedule``.
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
LOOPED = {
    "1f1b": ScheduleInterleaved1F1B,
    "gpipe": ScheduleLoopedBFS,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
_BLOCK = re.compile(r"(chunk\d+\.)?model\.layers\.\d+")
_NUMBERED = re.compile(r"^(model\.layers\.)(\d+)")


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of one rank: `micro_batches` of `micro_batch` samples with `seq_len` tokens each, as it has them, in the order of
    `schedule`, a name of ``--schedule``. Between blocks a rank has `1 / parts` of them (sequence parallelism).
    """

    micro_batch: int
    seq_len: int
    micro_batches: int = 1
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.bfloat16
    parts: int = 1


class Scheduled(Protocol):
    """Runs a step's tokens through the pipeline, as :func:`run_schedule` says."""

    def __call__(
        self, tokens: torch.Tensor, labels: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Run them."""


class StageModel(nn.Module):
    """The part of a causal language model that one stage has. The first takes tokens, the last returns logits.

    Args:
        model: the whole model, laid out over the tensor-parallel ranks already.
        stage: which part of it is kept.
        parts: ranks that share the tokens between blocks (sequence parallelism).

    Raises:
        BadInput: a model of another build. See Note [Stages of a model].
    """

    def __init__(self, model: Any, stage: Stage, parts: int = 1) -> None:
        super().__init__()
        _require_cuttable(model)
        self.first, self.last = stage.is_first, stage.is_last
        self.index, self.stages = stage.index, stage.stages
        self.loss_function = model.loss_function
        model.model.layers = nn.ModuleList(list(model.model.layers)[stage.first : stage.end])
        self.config = model.model.config = _config_of(model.config, stage)
        if not stage.is_first:
            model.model.embed_tokens = None
        if not stage.is_last:
            model.model.norm, model.lm_head = nn.Identity(), None
        self.model, self.lm_head = model.model, model.lm_head
        self.cap = getattr(model.config, "final_logit_softcapping", None)
        self.begin, self.parts = stage.first, parts
        self.positions: torch.Tensor | None = None  # of this rank's part of the tokens

    def whole_name(self, name: str) -> str:
        """Return the name that a module or parameter of this stage has in the whole model."""
        return _NUMBERED.sub(lambda found: f"{found[1]}{int(found[2]) + self.begin}", name)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Map tokens [B, S] or hidden states [B, S, H] to hidden states or logits."""
        told = {} if self.positions is None else {"position_ids": self.positions}
        with contextlib.ExitStack() as inside:
            if self.parts > 1 and not self.first:
                given = inside.enter_context(self._all_tokens(given))
            hidden: torch.Tensor = self.model(
                **{"input_ids" if self.first else "inputs_embeds": given}, **told
            ).last_hidden_state
        if not self.last:
            return hidden
        logits: torch.Tensor = self.lm_head(hidden)
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    @contextlib.contextmanager
    def _all_tokens(self, part: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield hidden states [B, S, H] that hold nothing, while the first block gets `part` [B, S / parts, H] in their place.

        The model makes masks and positions of what it is given, and those are of all tokens: attention sees them all.
        """
        samples, tokens, width = part.shape
        first: Any = next(iter(self.model.layers))
        handle = first.register_forward_pre_hook(lambda _, given: (part, *given[1:]), prepend=True)
        try:
            yield part.new_empty(()).expand(samples, tokens * self.parts, width)
        finally:
            handle.remove()


class RankModel(nn.Module):
    """All stages of one rank, for an engine that trains them as one module. The forward is told which of them runs."""

    def __init__(self, stages_of_rank: Sequence[StageModel]) -> None:
        super().__init__()
        self.stages = tuple(f"chunk{at}" for at in range(len(stages_of_rank)))
        for name, one in zip(self.stages, stages_of_rank, strict=True):
            self.add_module(name, one)

    def forward(self, given: torch.Tensor, chunk: int = 0) -> torch.Tensor:
        """Run a stage by its number on this rank."""
        found: torch.Tensor = self.get_submodule(self.stages[chunk])(given)
        return found

    def whole_name(self, name: str) -> str:
        """Return the name that a module or parameter has in the whole model."""
        chunk, _, rest = name.partition(".")
        found: Any = self.get_submodule(chunk) if chunk in self.stages else None
        return name if found is None else str(found.whole_name(rest))


def is_block(name: str, _: nn.Module) -> bool:
    """Return whether a module of a rank's is a block, by its full name; a stage may have a single one."""
    return _BLOCK.fullmatch(name) is not None


def _require_cuttable(model: Any) -> None:
    blocks = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(blocks, nn.ModuleList) or not hasattr(model.model, "embed_tokens") or not hasattr(model, "lm_head"):
        what = f"{type(model).__name__} has its blocks elsewhere than in model.layers, between model.embed_tokens and lm_head"
        raise BadInput(what, where="--pp", remedy="use --pp 1")
    if getattr(model.config, "output_router_logits", False):
        what = "a mixture's auxiliary loss needs the routers of all stages"
        raise BadInput(what, where="output_router_logits", remedy="set it to false in the model's config")


def _config_of(config: Any, stage: Stage) -> Any:
    found = copy.copy(config)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        found.layer_types = list(kinds)[stage.first : stage.end]
    return found


def stages_of(run: TrainingRun, make: Callable[[], Any]) -> list[StageModel]:
    """Return this rank's stages of the model that `make` returns, a new one at each call.

    Raises:
        BadInput: a model that is not cut.
    """
    made = make()
    _require_cuttable(made)
    rank = run.layout.pipeline_rank(dist.get_rank())
    chunks = chunks_of(len(made.model.layers), run.layout.pp, run.layout.vpp, rank, schedule_of(run.schedule))
    parts = run.layout.token_parts
    found = [StageModel(made, chunks[0], parts), *stages_on(make, chunks[1:], parts)]
    gc.collect()  # blocks of other stages whose forward was replaced hold themselves
    return found


def stages_on(make: Callable[[], Any], chunks: Sequence[Stage], parts: int = 1) -> list[StageModel]:
    """Return a pipeline rank's parts of the model that `make` returns, a new one at each call; `parts` as a StageModel's."""
    return [StageModel(make(), stage, parts) for stage in chunks]


def schedule_on(
    models: Sequence[StageModel], shape: StepShape, group: ProcessGroup, device: torch.device, *, fake: bool = False
) -> Scheduled:
    """Return a function that runs the schedule over the tokens of a step, as :func:`run_schedule` says.

    Args:
        models: the rank's stages, as they are trained.
        group: the pipeline's ranks.
        fake: whether the other ranks are fake ones.
    """
    made = [
        PipelineStage(model, model.index, model.stages, device, group=group, **metadata_of(model, shape)) for model in models
    ]
    if fake:
        _agree_statically()
    options: dict[str, Any] = {"n_microbatches": shape.micro_batches, "loss_fn": partial(loss_of, models[-1])}
    kind = schedule_class(shape.schedule, len(models))
    order: Any = kind(made[0] if issubclass(kind, schedules.PipelineScheduleSingle) else made, **options)
    return partial(run_schedule, order, models)


def schedule_of_engine(engine: Any, models: Sequence[StageModel], shape: StepShape) -> Scheduled:
    """Return what :func:`schedule_on` does, for an engine of the included runtime that trains a rank's stages as one module.

    Args:
        engine: what ``zeroplan_runtime.initialize`` returned.
    """
    kind, told = schedule_class(shape.schedule, len(models)), [metadata_of(model, shape) for model in models]
    options = {name: [one[name] for one in told] for name in told[0]} if len(models) > 1 else told[0]
    order = engine.pipeline_schedule(kind, partial(loss_of, models[-1]), chunks=len(models), **options)
    return partial(run_schedule, order, models)


def schedule_class(schedule: str, chunks: int) -> type[Any]:
    """Return torch's class for a name of ``--schedule`` and a number of chunks a rank."""
    return SCHEDULES[schedule] if chunks == 1 and schedule in SCHEDULES else LOOPED[schedule]


class LazyStep:
    """Runs the schedule of a run's steps; it is made with the first batch, whose shape it has.

    Args:
        run: what ``verify`` asks for.
        make: makes the schedule for steps of a shape.
        passes: what the schedule runs in.
    """

    def __init__(self, run: TrainingRun, make: Callable[[StepShape], Scheduled], passes: Passes) -> None:
        self._run, self._make, self._passes = run, make, passes
        self._step: Scheduled | None = None

    def __call__(self, batch: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Run a step's micro batches, each of them `batch`; return their mean loss where the last stage is."""
        run = self._run
        _require_tokens_alone(batch)
        tokens = labels = batch["input_ids"].repeat(run.grad_accum, 1)
        if batch["labels"] is not batch["input_ids"]:
            labels = batch["labels"].repeat(run.grad_accum, 1)
        with self._passes({"input_ids": tokens, "labels": labels}) as given:
            tokens = given["input_ids"]  # of context-parallel ranks, a part
            if self._step is None:
                rows = len(tokens) // run.grad_accum
                parts = run.layout.token_parts
                self._step = self._make(StepShape(rows, tokens.shape[1], run.grad_accum, run.schedule, run.dtype, parts))
            if "position_ids" in given:
                return self._step(tokens, given["shift_labels"], given["position_ids"])
            return self._step(tokens, given["labels"])


def _require_tokens_alone(batch: dict[str, torch.Tensor]) -> None:
    """Refuse a batch with more than a stage is given."""
    other = next((name for name in sorted(batch) if name not in ("input_ids", "labels")), None)
    if other is not None or len(batch) < 2:
        what = f"pipeline stages are given input_ids and labels, and {'no ' + other if other else 'both'}"
        raise BadInput(what, where="inputs", remedy="give these, or leave pp at 1")


def metadata_of(model: StageModel, shape: StepShape) -> dict[str, Any]:
    """Return what a stage is told of its inputs and outputs, as far as this torch's ``PipelineStage`` takes it.

    It is given, since fake ranks cannot tell it, and ranks that find it out run the model once more for that.
    """
    size = (shape.micro_batch, shape.seq_len)
    between = (shape.micro_batch, shape.seq_len // shape.parts, model.config.hidden_size)
    hidden = torch.empty(between, dtype=shape.dtype, device="meta", requires_grad=True)
    tokens = torch.empty(size, dtype=torch.int64, device="meta")
    logits = torch.empty(*size, model.config.vocab_size, dtype=shape.dtype, device="meta", requires_grad=True)
    known: dict[str, Any] = {
        "input_args": (tokens if model.first else hidden,),
        "output_args": (logits if model.last else hidden,),
        "input_grads": None if model.first else (hidden.detach(),),
        "output_grads": None if model.last else (hidden.detach(),),
    }
    return {name: value for name, value in known.items() if name in inspect.signature(PipelineStage.__init__).parameters}


def loss_of(model: StageModel, found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of logits [B, S, V] or this rank's part of them."""
    shifted = {"labels": labels} if model.positions is None else {"labels": None, "shift_labels": labels}
    value: torch.Tensor = model.loss_function(logits=found, vocab_size=model.config.vocab_size, **shifted)
    return value


def run_schedule(
    schedule: Any,
    models: Sequence[StageModel],
    tokens: torch.Tensor,
    labels: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Run a schedule over the tokens [micro batches × B, S] of a step.

    Args:
        schedule: torch's.
        models: the rank's stages.
        labels: the tokens themselves unless given.
        positions: [1, S], of context-parallel ranks' part of the tokens; labels are then those of the tokens that follow.

    Returns:
        The mean loss of the micro batches on the rank with the last stage; None on the others.
    """
    known = inspect.signature(schedules.PipelineScheduleSingle.step).parameters  # of newer torch; else it keeps all logits
    silent: dict[str, Any] = {"return_outputs": False} if "return_outputs" in known else {}
    losses: list[torch.Tensor] = []
    for model in models:
        model.positions = positions
    given = (tokens,) if models[0].first else ()
    target = (tokens if labels is None else labels) if models[-1].last else None
    schedule.step(*given, target=target, losses=losses, **silent)
    return torch.stack([whole_loss(loss.detach()) for loss in losses]).mean() if losses else None


def _agree_statically() -> None:
    """Newer torch lets stages vote on how they learn their metadata; no fake rank answers."""
    modes = [module.InferenceMode for module in (schedules, stages) if hasattr(module, "InferenceMode")]
    if not modes:
        return

    def static(_: Any, all_stages: Any, *__: Any) -> None:
        for stage in all_stages:
            stage._inference_mode = modes[0].STATIC

    mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", static, create=True).start()  # a method of newer torch alone
