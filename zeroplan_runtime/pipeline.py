"""Pipeline stages under the engine: torch's schedules run its forwards and backwards.

Note [Pipelines]
    Each rank of ``pp`` gives its stage's module to ``initialize()``; the engine shards it over the ranks that have the same
    stage. A schedule of :mod:`torch.distributed.pipelining` sends activations and gradients between the stages and calls
    forwards and backwards of micro batches in its order. The micro batches are the accumulation's: gradients add up, and are
    reduced as for an accumulation, in the step's last backward at stages 0 and 1 and in each from stage 2 on. Zero-bubble
    schedules run a backward in halves: Note [Halves] in pipeline_halves.py.

Note [Chunks]
    A looped or a folded schedule gives a rank several of the pipeline's stages, its chunks. They are parts of one module under
    one engine, whose forward takes the number of a chunk, so that they have one norm, one optimizer and slots in turns. A
    chunk's backward reduces the units that its forward runs and the root's, which may be of several chunks; what is reduced
    once a step is reduced in the last backward of all chunks. Each chunk has an order of execution of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from zeroplan.core.errors import BadInput
from zeroplan_runtime.comm import transport_failed
from zeroplan_runtime.monitors.monitor import make_monitor
from zeroplan_runtime.pipeline_halves import Halves
from zeroplan_runtime.pipeline_kinds import WHERE, TorchSchedule, chosen_schedule, is_folded, is_halved, require_micro_batches
from zeroplan_runtime.pytree import tensors_of
from zeroplan_runtime.watchdog import RankLost

_Engine = Any  # zeroplan_runtime.engine.Engine, which imports this file


def make_schedule(
    engine: _Engine,
    kind: type[TorchSchedule] | str,
    loss_fn: Callable[..., torch.Tensor],
    *,
    chunks: int = 1,
    **options: Any,
) -> TorchSchedule:
    """Makes a torch schedule of this rank's stage or chunks, with as many micro batches as the config accumulates.

    Call its ``step(inputs, target=labels)`` as torch says, then ``engine.step()``.

    Args:
        engine: an engine on a mesh with ``pp``, whose model is this rank's stage, or has its chunks.
        kind: ``ScheduleGPipe``, ``Schedule1F1B``, ``ScheduleInterleavedZeroBubble``, with several chunks
            ``ScheduleInterleaved1F1B``, ``ScheduleLoopedBFS``, ``ScheduleZBVZeroBubble`` or ``ScheduleDualPipeV``, or their
            names (``"GPipe"``, ``"1F1B"``, …).
        loss_fn: given the last stage's output and a micro batch's target, the mean loss of the micro batch.
        chunks: how many of the pipeline's stages the rank has. With several the model's forward takes the number of one as
            ``chunk``, counted from 0 in the pipeline's order.
        options: further arguments of torch's ``PipelineStage``, such as ``input_args``; with several chunks lists of one each.

    Returns:
        The schedule.

    Raises:
        BadInput: without ``pp``, for chunks that the schedule does not have, what is no loss, micro batches that the schedule
            does not take, and where a backward does not run in halves.
    """
    pp, mesh = engine.ranks.pp, engine.ranks.mesh
    if pp is None or mesh is None:
        raise BadInput("the mesh has no pp", where=WHERE, remedy="give initialize() a mesh with a dimension pp")
    chosen = chosen_schedule(kind, chunks)
    if not callable(loss_fn):
        raise BadInput(
            f"a {type(loss_fn).__name__} is no loss",
            where=WHERE,
            remedy="give a function of the last stage's output and the target",
        )
    if chunks > 1:
        _require_chunks(engine.module)
    micros = engine.gradient_accumulation_steps()
    require_micro_batches(chosen, micros, pp.world_size)
    halves = Halves(engine.schedule, engine.module, WHERE) if is_halved(chosen) else None
    engine.progress.boundary = True  # each engine.step() follows all micro batches
    folded, backwards = is_folded(chosen), _Backwards(chunks * micros)
    if folded:
        _move_monitor(engine)
    stages = []
    for chunk in range(chunks):
        index = 2 * pp.world_size - 1 - pp.rank if folded and chunk else chunk * pp.world_size + pp.rank
        own = {name: value[chunk] if chunks > 1 and isinstance(value, list) else value for name, value in options.items()}
        module = engine if chunks == 1 else _Chunk(engine, chunk)
        own |= {"group": mesh.get_group("pp")}
        stages.append(EngineStage(engine, halves, backwards, module, index, chunks * pp.world_size, engine.device, **own))
    made: Any = type(chosen.__name__, (_EvenSteps, chosen), {"stages": stages, "backwards": backwards})
    given: Any = stages[0] if issubclass(chosen, PipelineScheduleSingle) else stages
    schedule: TorchSchedule = made(given, n_microbatches=micros, loss_fn=loss_fn, scale_grads=False)
    return schedule


def _require_chunks(module: nn.Module) -> None:
    """Checks that a model can run one of its chunks.

    Raises:
        BadInput: where its forward takes no ``chunk``.
    """
    named = inspect.signature(module.forward).parameters.values()
    if not any(one.name == "chunk" or one.kind is one.VAR_KEYWORD for one in named):
        raise BadInput(
            f"forward() of a {type(module).__name__} takes no chunk",
            where=WHERE,
            remedy="give initialize() a module with all of this rank's chunks, whose forward(x, chunk) runs one of them",
        )


def _move_monitor(engine: _Engine) -> None:
    """Lets the first rank show the run's progress, which sees the loss of a folded pipeline, and no other."""
    if not engine.settings.monitors:
        return
    if engine.monitor is not None:
        engine.monitor.close()
    first = engine.ranks.leads_stage and engine.ranks.pp.rank == 0
    engine.monitor = make_monitor(engine.settings, engine.device, rank=0 if first else 1, ranks=engine.ranks.samples)


class _Chunk(nn.Module):
    """One of an engine's chunks, as the module of a stage; the parameters are the engine's. See Note [Chunks]."""

    def __init__(self, engine: _Engine, chunk: int) -> None:
        super().__init__()
        self._run, self._choose, self._number = engine.__call__, engine.schedule.choose_chunk, chunk

    def choose(self) -> None:
        """Lets the next forward or backward be this chunk's."""
        self._choose(self._number)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chunk."""
        self.choose()
        return self._run(*args, chunk=self._number, **kwargs)


class _Backwards:
    """Counts the micro batches' backwards of a step, of all chunks."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0

    def begin(self) -> None:
        """Begins a step."""
        self._done = 0

    def is_last(self) -> bool:
        """Counts one; returns whether the optimizer steps behind it."""
        self._done += 1
        return self._done == self._total


class _EvenSteps:
    """A schedule of torch's whose steps take batches that divide into equal micro batches, of one shape in all steps.

    torch's stages receive into memory that is made in the first step. A smaller micro batch would leave another's rows in it.
    """

    stages: list[EngineStage]
    backwards: _Backwards
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
        if any(stage.is_first for stage in self.stages) and not args and not given:
            raise BadInput("the first stage was given no inputs", where=where, remedy="call step(inputs) on its ranks")
        if any(stage.is_last for stage in self.stages) and self._has_backward and target is None:
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
                f"the batch has shapes {_shapes(shapes)}, and had {_shapes(self._first)} in the first step, "
                "for which the stages' memory was made",
                where=where,
                remedy="pad it, or make another schedule for it on all ranks",
            )
        self.backwards.begin()
        try:
            return super().step(*args, target=target, **options)  # type: ignore[misc]
        except RuntimeError as fault:
            if isinstance(fault, RankLost) or not transport_failed(fault):
                raise
            reason = str(fault).splitlines()[0][:160]
            raise RankLost(f"could not send between pipeline stages, as another rank has ended or waits ({reason})") from None


def _shapes(shapes: dict[str, tuple[Any, ...]]) -> str:
    return " and ".join(str(shape) for found in shapes.values() for shape, _ in found)


class EngineStage(PipelineStage):
    """A stage whose module is an engine, or one of its chunks."""

    def __init__(
        self,
        engine: _Engine,
        halves: Halves | None,
        backwards: _Backwards,
        module: nn.Module,
        *args: Any,
        **options: Any,
    ) -> None:
        super().__init__(module, *args, **options)
        self._engine, self._halves, self._backwards = engine, halves, backwards
        self._chunk = module if isinstance(module, _Chunk) else None

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        """Runs one micro batch's backward as torch's stage does, within the engine's.

        The last stage's loss counts as its part of the accumulation, times the loss scale.
        """
        engine, halves = self._engine, self._halves
        if self._chunk is not None:
            self._chunk.choose()
        if backward_type == "input" and halves is not None:
            roots = bwd_kwargs["stage_output"]
            if self.is_last:
                roots = (self._scaled(roots[0]),)
            with engine.checks.during_backward(boundary=False):
                found = halves.first(roots, bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
            for root in bwd_kwargs["stage_output"]:  # as they do with what they are given, so that the loss's graph goes
                root.detach_()
            return found
        with engine.during_backward(boundary=self._backwards.is_last()):
            if backward_type == "weight" and halves is not None:
                halves.second(bwd_kwargs["param_groups"])
                found = (), None
            else:
                if self.is_last:
                    bwd_kwargs = {**bwd_kwargs, "stage_output": self._scaled(bwd_kwargs["stage_output"])}
                found = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if not last_backward and self.stage_index < self.group_size:  # of one of the chunks
            engine.progress.micro_steps += 1
        return found

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        engine = self._engine
        part = loss / engine.gradient_accumulation_steps()
        if engine.monitor is not None:
            engine.monitor.saw_loss(part)
        scaled: torch.Tensor = part * engine.scaler.scale
        return scaled
