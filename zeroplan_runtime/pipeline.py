"""Pipeline stages under the engine: torch's schedules run its forwards and backwards.

Note [Pipelines]
    Each rank of ``pp`` gives its stage's module to ``initialize()``; the engine shards it over the ranks that have the same
    stage. A schedule of :mod:`torch.distributed.pipelining` sends activations and gradients between the stages and calls
    forwards and backwards of micro batches in its order. The micro batches are the accumulation's: gradients add up, and are
    reduced as for an accumulation, in the step's last backward at stages 0 and 1 and in each from stage 2 on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B, get_schedule_class

from zeroplan.core.errors import BadInput
from zeroplan_runtime.comm import transport_failed
from zeroplan_runtime.pytree import tensors_of
from zeroplan_runtime.watchdog import RankLost

_WHERE = "engine.pipeline_schedule"
_Engine = Any  # zeroplan_runtime.engine.Engine, which imports this file


def make_schedule(
    engine: _Engine, kind: type[PipelineScheduleSingle] | str, loss_fn: Callable[..., torch.Tensor], **options: Any
) -> PipelineScheduleSingle:
    """Makes a torch schedule of this rank's stage, with as many micro batches as the config accumulates.

    Call its ``step(inputs, target=labels)`` as torch says, then ``engine.step()``.

    Args:
        engine: an engine on a mesh with ``pp``, whose model is this rank's stage.
        kind: ``ScheduleGPipe``, ``Schedule1F1B``, or their names (``"GPipe"``, ``"1F1B"``).
        loss_fn: given the last stage's output and a micro batch's target, the mean loss of the micro batch.
        options: further arguments of torch's ``PipelineStage``, such as ``input_args``.

    Returns:
        The schedule.

    Raises:
        BadInput: without ``pp``, for schedules with several stages a rank, what is no loss, and fewer micro batches than 1F1B
            has stages.
    """
    pp, mesh = engine.ranks.pp, engine.ranks.mesh
    if pp is None or mesh is None:
        raise BadInput("the mesh has no pp", where=_WHERE, remedy="give initialize() a mesh with a dimension pp")
    try:
        chosen = get_schedule_class(kind) if isinstance(kind, str) else kind
    except ValueError:
        raise BadInput(f"torch has no schedule {kind!r}", where=_WHERE, remedy="use GPipe or 1F1B") from None
    if not issubclass(chosen, PipelineScheduleSingle):
        raise BadInput(
            f"{chosen.__name__} gives a rank several stages, of which an engine has one",
            where=_WHERE,
            remedy="use ScheduleGPipe or Schedule1F1B",
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
    engine.progress.boundary = True  # each engine.step() follows all micro batches
    stage = EngineStage(engine, pp.rank, pp.world_size, engine.device, group=mesh.get_group("pp"), **options)
    made: Any = type(chosen.__name__, (_EvenSteps, chosen), {})
    schedule: PipelineScheduleSingle = made(stage, n_microbatches=micros, loss_fn=loss_fn, scale_grads=False)
    return schedule


class _EvenSteps:
    """A schedule of torch's whose steps take batches that divide into equal micro batches, of one shape in all steps.

    torch's stages receive into memory that is made in the first step. A smaller micro batch would leave another's rows in it.
    """

    _stage: Any
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
        if self._stage.is_first and not args and not given:
            raise BadInput("the first stage was given no inputs", where=where, remedy="call step(inputs) on its ranks")
        if self._stage.is_last and self._has_backward and target is None:
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

    def __init__(self, engine: _Engine, *args: Any, **options: Any) -> None:
        super().__init__(engine, *args, **options)
        self._engine = engine

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        """Runs one micro batch's backward as torch's stage does, within the engine's.

        The last stage's loss counts as its part of the accumulation, times the loss scale.

        Raises:
            BadInput: for schedules that run a backward in two halves.
        """
        engine = self._engine
        if backward_type != "full":
            raise BadInput("a backward in two halves is not supported", where=_WHERE, remedy="use GPipe or 1F1B")
        with engine.during_backward(boundary=last_backward):
            if self.is_last:
                loss = bwd_kwargs["stage_output"] / engine.gradient_accumulation_steps()
                bwd_kwargs = {**bwd_kwargs, "stage_output": loss * engine.scaler.scale}
                if engine.monitor is not None:
                    engine.monitor.saw_loss(loss)
            found = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if not last_backward:
            engine.progress.micro_steps += 1
        return found
