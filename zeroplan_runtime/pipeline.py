"""Pipeline stages under the engine: torch's schedules run its forwards and backwards.

Note [Pipelines]
    Each rank of ``pp`` gives its stage's module to ``initialize()``; the engine shards it over the ranks that have the same
    stage. A schedule of :mod:`torch.distributed.pipelining` sends activations and gradients between the stages and calls
    forwards and backwards of micro batches in its order. The micro batches are the accumulation's: gradients add up, and are
    reduced as for an accumulation, in the step's last backward at stages 0 and 1 and in each from stage 2 on. Zero-bubble
    schedules run a backward in halves: Note [Halves] in pipeline_halves.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    get_schedule_class,
)

from zeroplan.core.errors import BadInput
from zeroplan_runtime.comm import transport_failed
from zeroplan_runtime.pipeline_halves import Halves
from zeroplan_runtime.pytree import tensors_of
from zeroplan_runtime.watchdog import RankLost

_WHERE = "engine.pipeline_schedule"
_KNOWN = "GPipe, 1F1B or InterleavedZeroBubble"
_Engine = Any  # zeroplan_runtime.engine.Engine, which imports this file
#: Those of one stage a rank, and those that take any number, here one.
TorchSchedule = PipelineScheduleSingle | PipelineScheduleMulti


def make_schedule(
    engine: _Engine, kind: type[TorchSchedule] | str, loss_fn: Callable[..., torch.Tensor], **options: Any
) -> TorchSchedule:
    """Makes a torch schedule of this rank's stage, with as many micro batches as the config accumulates.

    Call its ``step(inputs, target=labels)`` as torch says, then ``engine.step()``.

    Args:
        engine: an engine on a mesh with ``pp``, whose model is this rank's stage.
        kind: ``ScheduleGPipe``, ``Schedule1F1B``, ``ScheduleInterleavedZeroBubble``, or their names (``"GPipe"``, ``"1F1B"``,
            ``"InterleavedZeroBubble"``).
        loss_fn: given the last stage's output and a micro batch's target, the mean loss of the micro batch.
        options: further arguments of torch's ``PipelineStage``, such as ``input_args``.

    Returns:
        The schedule.

    Raises:
        BadInput: without ``pp``, for schedules with several stages a rank, what is no loss, micro batches that the schedule
            does not take, and where a backward does not run in halves.
    """
    pp, mesh = engine.ranks.pp, engine.ranks.mesh
    if pp is None or mesh is None:
        raise BadInput("the mesh has no pp", where=_WHERE, remedy="give initialize() a mesh with a dimension pp")
    try:
        chosen = get_schedule_class(kind) if isinstance(kind, str) else kind
    except ValueError:
        raise BadInput(f"torch has no schedule {kind!r}", where=_WHERE, remedy=f"use {_KNOWN}") from None
    if not issubclass(chosen, PipelineScheduleSingle | ScheduleInterleavedZeroBubble):
        raise BadInput(
            f"{chosen.__name__} gives a rank several stages, of which an engine has one", where=_WHERE, remedy=f"use {_KNOWN}"
        )
    micros = engine.gradient_accumulation_steps()
    if not callable(loss_fn):
        raise BadInput(
            f"a {type(loss_fn).__name__} is no loss",
            where=_WHERE,
            remedy="give a function of the last stage's output and the target",
        )
    if issubclass(chosen, Schedule1F1B) and micros < pp.world_size:
        raise BadInput(
            f"{micros} micro batches are fewer than the {pp.world_size} stages of 1F1B",
            where=_WHERE,
            remedy=f"set gradient_accumulation_steps to {pp.world_size} or more, or use GPipe",
        )
    halved = issubclass(chosen, ScheduleInterleavedZeroBubble)
    rounds = max(1, micros // pp.world_size)
    if halved and micros % rounds:
        raise BadInput(
            f"the {rounds} rounds of {chosen.__name__} do not divide {micros} micro batches",
            where=_WHERE,
            remedy=f"set gradient_accumulation_steps to a multiple of {pp.world_size}",
        )
    halves = Halves(engine.schedule, engine.module, _WHERE) if halved else None
    engine.progress.boundary = True  # each engine.step() follows all micro batches
    stage = EngineStage(engine, halves, pp.rank, pp.world_size, engine.device, group=mesh.get_group("pp"), **options)
    made: Any = type(chosen.__name__, (_EvenSteps, chosen), {"stage": stage})
    stages: Any = [stage] if halved else stage
    schedule: TorchSchedule = made(stages, n_microbatches=micros, loss_fn=loss_fn, scale_grads=False)
    return schedule


class _EvenSteps:
    """A schedule of torch's whose steps take batches that divide into equal micro batches, of one shape in all steps.

    torch's stages receive into memory that is made in the first step. A smaller micro batch would leave another's rows in it.
    """

    stage: EngineStage
    _n_microbatches: int
    _has_backward: bool
    _first: dict[str, tuple[Any, ...]] | None = None

    def step(self, *args: Any, target: Any = None, **options: Any) -> Any:
        """As torch's.

        Raises:
            RankLost: when a rank of another stage has ended.
            BadInput: on this stage, for a batch that is not given, that does not divide, or whose shape is another now.
        """
        where = "schedule.step"
        given = {name: value for name, value in options.items() if name not in ("losses", "return_outputs", "loss_kwargs")}
        if self.stage.is_first and not args and not given:
            raise BadInput("the first stage was given no inputs", where=where, remedy="call step(inputs) on its ranks")
        if self.stage.is_last and self._has_backward and target is None:
            raise BadInput("the last stage was given no target", where=where, remedy="call step(target=labels) on its ranks")
        shapes = {}
        for name, value in (("inputs", (args, given)), ("target", target)):
            found = list(tensors_of(value))
            for one in found:
                if not one.dim() or not len(one) or len(one) % self._n_microbatches:
                    raise BadInput(
                        f"{name} of shape {tuple(one.shape)} do not divide into {self._n_microbatches} equal micro batches",
                        where=where,
                        remedy="give as many samples as gradient_accumulation_steps × the micro batch (a loader's drop_last)",
                    )
            shapes[name] = tuple((tuple(one.shape), one.dtype) for one in found)
        self._first = self._first or shapes
        if shapes != self._first:
            raise BadInput(
                f"the batch has shapes {_told(shapes)}, and had {_told(self._first)} in the first step, for which the stages' "
                "memory was made",
                where=where,
                remedy="pad it, or make another schedule for it on all ranks",
            )
        try:
            return super().step(*args, target=target, **options)  # type: ignore[misc]
        except RuntimeError as fault:
            if isinstance(fault, RankLost) or not transport_failed(fault):
                raise
            reason = str(fault).splitlines()[0][:160]
            raise RankLost(f"could not send between pipeline stages, as another rank has ended or waits ({reason})") from None


def _told(shapes: dict[str, tuple[Any, ...]]) -> str:
    return " and ".join(str(shape) for found in shapes.values() for shape, _ in found)


class EngineStage(PipelineStage):
    """A stage whose module is an engine."""

    def __init__(self, engine: _Engine, halves: Halves | None, *args: Any, **options: Any) -> None:
        super().__init__(engine, *args, **options)
        self._engine, self._halves = engine, halves

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        """Runs one micro batch's backward as torch's stage does, within the engine's.

        The last stage's loss counts as its part of the accumulation, times the loss scale.
        """
        engine, halves = self._engine, self._halves
        if backward_type == "input" and halves is not None:
            roots = bwd_kwargs["stage_output"]
            if self.is_last:
                roots = (self._scaled(roots[0]),)
            with engine.checks.during_backward(boundary=False):
                found = halves.first(roots, bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
            for root in bwd_kwargs["stage_output"]:  # as they do with what they are given, so that the loss's graph goes
                root.detach_()
            return found
        with engine.during_backward(boundary=last_backward):
            if backward_type == "weight" and halves is not None:
                halves.second(bwd_kwargs["param_groups"])
                found = (), None
            else:
                if self.is_last:
                    bwd_kwargs = {**bwd_kwargs, "stage_output": self._scaled(bwd_kwargs["stage_output"])}
                found = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if not last_backward:
            engine.progress.micro_steps += 1
        return found

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        engine = self._engine
        part = loss / engine.gradient_accumulation_steps()
        if engine.monitor is not None:
            engine.monitor.saw_loss(part)
        scaled: torch.Tensor = part * engine.scaler.scale
        return scaled
