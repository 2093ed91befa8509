"""A pipeline rank's micro batches, played in a schedule's order over its stages' parts of the tape.

Note [Playing a stage]
    A stage holds the gradient that it has sent until it sends the next. Where a rank has several chunks, sends are actions of
    their own, and what was sent is freed at once (``_PipelineScheduleRuntime``), unless the transport holds it: gloo's sends
    do until the step's end, when the schedule waits for all of them. A rank with one chunk also holds the latest micro batch's
    output, on the last stage its logits, until the next forward has returned: a variable of the schedule names it, and nothing
    after the last backward (torch/distributed/pipelining/schedules.py, ``Schedule1F1B``, ``ScheduleGPipe``).

    A rank with several chunks (vpp) has one part of the tape for each. They have a schedule each, whose hooks are called as
    :func:`~zeroplan.core.pipeline_order.with_gathers` orders them.

    Where a rank has two stages that follow one another, as the last rank of a folded schedule, the second is given the first
    one's outputs themselves, and hands gradients back in the same way: they lie in the places of buffers, which are freed when
    they are first replaced, and each stays until the next step's same micro batch replaces it (``set_local_fwd_input``,
    ``set_local_bwd_input``). A rank with both ends of the pipeline has its batch once.

Note [A stage's halves]
    Where a backward runs in two halves, stages behind the first play a tape of such a backward (``ExpandedTape.halves``), cut
    at the same places. The graph stays until the end of the second half, with what it saved; logits go with the first, as the
    loss's part of the graph does. The residual stream's gradient is never added to in place, since a weight's product waits
    for it. The first stage receives nothing, so its whole backward runs in the second half. Gradients of inputs stay on what
    was received (``.grad``) until the next step begins, of every micro batch. A schedule that halves some backwards has, of
    such a stage, a part with halves and one without, and a micro batch is played by one of them.
    Source: torch/distributed/pipelining/stage.py (``backward_one_chunk``, ``clear_runtime_states``), _backward.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zeroplan.core.buffers import Buffer
from zeroplan.core.pipeline import Stage
from zeroplan.core.pipeline_order import Action, Do, PipelineOrder, in_flight, with_gathers
from zeroplan.engines.pipeline_cut import StageTape, cut, passing_on
from zeroplan.engines.player import CuePlayer, EngineSchedule
from zeroplan.engines.script import Cue, cues_of, workspaces_of
from zeroplan.simulate.event_blocks import EventBlocks
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.edit import renumbered
from zeroplan.tape.expanded import ExpandedTape


class PipelineEngineSchedule(EngineSchedule):
    """Hooks in which an engine allocates and frees for one chunk, where micro batches of one step overlap."""

    def unshard(self) -> None:
        """The chunk's parameters are gathered ahead of its use."""

    def wait_for_unshard(self) -> None:
        """They are needed now."""

    def reshard(self) -> None:
        """They are not needed for a while."""

    def reduce(self) -> None:
        """The chunk's last backward of a step has returned, and gradients are reduced."""

    def zero_grad(self) -> None:
        """The optimizer has stepped, and gradients go."""

    def half_begin(self) -> None:
        """The first half of a micro batch's backward begins; engines whose hooks run in it take it for the backward."""
        self.backward_begin(False)

    def half_end(self) -> None:
        """It has ended."""
        self.backward_end(False)

    def weights_begin(self) -> None:
        """The second half begins."""

    def weights_end(self) -> None:
        """It has ended."""


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """The part of a job that is played: a step's micro batches in their order, for so many `steps`. `warm`: the schedule has
    recorded cuBLAS's workspaces. `holds_sent`: a looped schedule's sends hold what they send until the step's end.
    """

    order: PipelineOrder
    steps: int
    cublas_workspace: int = 0
    warm: bool = False
    holds_sent: bool = False


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """One of a rank's chunks.

    Attributes:
        stage: which stage of the pipeline it is.
        part: its part of the tape.
        schedule: its engine's hooks.
        whole: its part of the tape for micro batches whose backward is not halved, where those of `part` are.
    """

    stage: Stage
    part: StageTape
    schedule: PipelineEngineSchedule
    whole: StageTape | None = None


def chunks_of(
    order: PipelineOrder,
    stages: Sequence[Stage],
    tape: ExpandedTape,
    schedule: Callable[[Stage, StageTape], PipelineEngineSchedule],
    *,
    token_parts: int,
    holds_sent: bool,
) -> list[ModelChunk]:
    """Return a rank's chunks, each with its part of a tape. Stages behind the first play the tape with halves where the
    schedule has them, and the whole one as well where it halves some backwards alone.

    Args:
        order: of the rank's micro batches.
        stages: of the rank.
        tape: the whole model's.
        schedule: makes a chunk's hooks.
        token_parts: see :func:`~zeroplan.engines.pipeline_cut.cut`.
        holds_sent: see :class:`PipelineRun`.

    Raises:
        ValueError: a schedule that halves backwards, and a tape without :attr:`ExpandedTape.halves`.
    """
    behind = tape.halves if order.schedule.halves else tape
    if behind is None:
        raise ValueError("a schedule that halves backwards needs the tape of one")
    indices = {stage.index for stage in stages}
    chunks = []
    for stage in stages:
        several = order.schedule.mixed and not stage.is_first
        parts = [
            passing_on(
                cut(of, stage, token_parts=token_parts, holds_output=not order.looped),
                output=stage.index + 1 in indices or (order.looped and holds_sent and not stage.is_last),
                gradient=stage.index - 1 in indices,
            )
            for of in ((behind, tape) if several else (tape if stage.is_first else behind,))
        ]
        chunks.append(ModelChunk(stage, parts[0], schedule(stage, parts[0]), parts[1] if several else None))
    return chunks


def play_pipeline(
    run: PipelineRun, chunks: Sequence[ModelChunk], recorder: Recorder, step_optimizer: Callable[[], None]
) -> None:
    """Record a rank's run: build, initialisation, and `run.steps` steps.

    Marks are ``model``, ``init``, then ``fwd`` and ``bwd`` for the micro batches, ``bwd`` for the reductions, and ``step0``, …

    Args:
        chunks: the rank's chunks, in the pipeline's order.
        step_optimizer: clips and steps, over the parameters of all chunks.
    """
    for chunk in chunks:
        chunk.schedule.build()
    recorder.mark("model")
    for chunk in chunks:
        chunk.schedule.initialize()
    recorder.mark("init")
    count = run.order.micro_batches
    actions = run.order.shortened()
    players = _players(run, chunks, recorder, actions)
    looped = run.order.looped
    if looped:
        actions = with_gathers(actions)
    inputs = max(chunk.part.inputs for chunk in chunks)
    for step in range(run.steps):
        batch = recorder.alloc(inputs * count, Buffer.INPUT) if inputs else -1
        for player in players:
            player.drop(player.received)
        if not step:  # static buffers, for the whole run
            received = [_receive(chunk, count, recorder) for chunk in chunks]
            for at, (before, behind) in enumerate(pairwise(players)):
                if _adjoin(chunks[at], chunks[at + 1]):
                    before.outputs, behind.gradients = received[at + 1][0], received[at][1]
        for action in actions:
            _act(action, players, recorder)
            if looped:  # whose sends are actions of their own, behind which nothing holds what was sent, unless they do
                players[action.chunk].hand_over()
        for player in players:
            if not looped:
                player.schedule.reduce()
            player.drop_sent()
            player.drop(player.handed)
            player.drop(player.held)
        recorder.mark("bwd")
        step_optimizer()
        for chunk in chunks:
            chunk.schedule.zero_grad()
        if batch >= 0:
            recorder.free(batch)
        recorder.mark(f"step{step}")


def _adjoin(before: ModelChunk, behind: ModelChunk) -> bool:
    """Return whether one stage passes on to the other."""
    return before.stage.index + 1 == behind.stage.index


def _receive(chunk: ModelChunk, count: int, recorder: Recorder) -> tuple[dict[int, int], dict[int, int]]:
    """Return the buffers into which a stage receives inputs and gradients, by micro batch."""
    inputs, gradients = (
        {number: recorder.alloc(chunk.part.hidden, Buffer.COMM_PIPELINE) for number in range(count if needed else 0)}
        for needed in (not chunk.stage.is_first, not chunk.stage.is_last)
    )
    return inputs, gradients


def _act(action: Action, players: Sequence[_StagePlayer], recorder: Recorder) -> None:
    player = players[action.chunk]
    if action.do is Do.FORWARD:
        player.forward(action.micro_batch)
        recorder.mark("fwd")
    elif action.do is Do.BACKWARD:
        player.backward(action.micro_batch)
        recorder.mark("bwd")
    elif action.do is Do.INPUT:
        player.backward_input(action.micro_batch)
        recorder.mark("bwd")
    elif action.do is Do.WEIGHT:
        player.backward_weights(action.micro_batch)
        recorder.mark("bwd")
    elif action.do is Do.UNSHARD:
        player.schedule.unshard()
    elif action.do is Do.RESHARD:
        player.schedule.reshard()
    else:
        player.schedule.reduce()


def _players(
    run: PipelineRun, chunks: Sequence[ModelChunk], recorder: Recorder, actions: Sequence[Action]
) -> list[_StagePlayer]:
    """Return a player for each chunk. Their storages are numbered apart; cuBLAS's workspaces are theirs together."""
    blocks, base = EventBlocks(), 0
    players: list[_StagePlayer] = []
    for at, (chunk, flying) in enumerate(zip(chunks, in_flight(actions, len(chunks)), strict=True)):
        whole = frozenset(action.micro_batch for action in actions if action.chunk == at and action.do is Do.BACKWARD)
        player = _StagePlayer(run, chunk, recorder, blocks, flying, base, whole)
        base = player.end
        if players:
            player.workspaces = players[0].workspaces
        elif run.warm:
            player.workspaces[:2] = [0, 0]
        players.append(player)
    return players


class StageCues:
    """A stage's part of the tape, of micro batches in as many slots as are in flight."""

    def __init__(
        self, part: StageTape, blocks: EventBlocks, slots: int, base: int = 0, *, modules: bool = True, workspaces: bool = True
    ) -> None:
        """`base`: what is added to the numbers of its storages; `modules`: whether cues are made of module hooks; `workspaces`:
        whether its products may be the first that take cuBLAS's.
        """
        self.part = part
        width = 1 + max(part.tape.arg, default=0)
        self.bases = range(base, base + slots * width, width)
        self.forwards: list[tuple[Cue, ...]] = []
        self.losses: list[tuple[Cue, ...]] = []
        self.backwards: list[tuple[Cue, ...]] = []
        self.weights: list[tuple[Cue, ...]] = []
        parts = (self.forwards, self.losses, self.backwards, self.weights)
        for slot, begin_of_slot in enumerate(self.bases):
            tape = renumbered(part.tape, begin_of_slot)
            ends = (0, part.returned, part.split, len(tape) if part.weights < 0 else part.weights, len(tape))
            halves = (range(part.split), range(part.split, ends[3])) if workspaces and not slot else ()  # a thread each
            first, second = [workspaces_of(tape, half, thread) for thread, half in enumerate(halves)] or ([], [])
            taken = [one for one in first if one[0] <= part.returned], [one for one in first if one[0] > part.returned]
            for cues, own, (begin, end) in zip(parts, (*taken, second, []), pairwise(ends), strict=True):
                cues.append(cues_of(tape, range(begin, end), own, modules and cues is not self.weights, blocks))


class _StagePlayer(CuePlayer):
    """Plays forwards and backwards of micro batches, each in a slot of storages of its own while it is in flight."""

    def __init__(
        self,
        run: PipelineRun,
        chunk: ModelChunk,
        recorder: Recorder,
        blocks: EventBlocks,
        slots: int,
        base: int,
        whole: frozenset[int],
    ) -> None:
        """`base`: where the numbers of the chunk's storages begin; `whole`: micro batches whose backward is not halved."""
        self.schedule, self.slots, self.end = chunk.schedule, slots, base
        self.cues: list[StageCues] = []
        for part in (chunk.part, chunk.whole):
            if part is not None:
                self.cues.append(StageCues(part, blocks, slots, self.end))
                self.end = self.cues[-1].bases.stop
        self.whole = whole if chunk.whole is not None else frozenset()
        super().__init__(recorder, chunk.schedule, blocks, run.cublas_workspace)
        self.sent = self.latest = -1
        self.held: list[int] = []  # the latest micro batch's output, whose backward has run
        self.received: list[int] = []  # gradients that stay on the inputs of which they are
        self.outputs: dict[int, int] = {}  # by micro batch, what the rank's next stage was given, and the one before
        self.gradients: dict[int, int] = {}
        self.holds_sent = run.holds_sent and run.order.looped
        self.handed: list[int] = []  # what sends hold until the step's end

    def _of(self, number: int) -> tuple[StageCues, int]:
        """Return what a micro batch is played by, and its slot."""
        return self.cues[number in self.whole], number % self.slots

    def forward(self, number: int) -> None:
        """Run a micro batch's forward."""
        cues, slot = self._of(number)
        self.schedule.wait_for_unshard()
        self.schedule.forward_begin()
        self.run(cues.forwards[slot])
        self.drop(self.held)
        self.latest = number
        self.run(cues.losses[slot])
        if self.outputs:
            self._pass_on(self.outputs, number, self.recorder.handle_of(cues.part.output + cues.bases[slot]))
        elif self.holds_sent and cues.part.output >= 0:
            self.handed.append(self.recorder.handle_of(cues.part.output + cues.bases[slot]))

    def _pass_on(self, given: dict[int, int], number: int, handle: int) -> None:
        """Hand a micro batch's tensor to another stage of the rank, in place of what that had."""
        self.recorder.free(given[number])
        given[number] = handle

    def backward(self, number: int) -> None:
        """Run its backward. The gradient of its input is sent, and kept until the next one's is."""
        cues, slot = self._of(number)
        self.schedule.wait_for_unshard()
        self.schedule.backward_begin(False)
        self.run(cues.backwards[slot])
        self.schedule.backward_end(False)
        self.held += [self.recorder.handle_of(storage + cues.bases[slot]) for storage in cues.part.held]
        if number != self.latest:
            self.drop(self.held)
        self.drop_sent()
        if cues.part.sent >= 0:
            handle = self.recorder.handle_of(cues.part.sent + cues.bases[slot])
            if self.gradients:
                self._pass_on(self.gradients, number, handle)
            else:
                self.sent = handle

    def backward_input(self, number: int) -> None:
        """Run the first half of its backward, which the first stage has none of. See Note [A stage's halves]."""
        cues, slot = self._of(number)
        self.schedule.wait_for_unshard()
        if cues.part.weights < 0:
            return
        self.schedule.half_begin()
        self.run(cues.backwards[slot])
        self.schedule.half_end()
        handle = self.recorder.handle_of(cues.part.sent + cues.bases[slot])
        if self.gradients:
            self._pass_on(self.gradients, number, handle)
        else:
            self.received.append(handle)

    def backward_weights(self, number: int) -> None:
        """Run the second half of its backward, all of it on the first stage."""
        cues, slot = self._of(number)
        if cues.part.weights < 0:
            self.backward(number)
        else:
            self.schedule.weights_begin()
            self.run(cues.weights[slot])
            self.schedule.weights_end()

    def drop(self, handles: list[int]) -> None:
        """Free gradients that stayed on inputs of a step's micro batches, outputs that no variable names, or what was sent."""
        self.recorder.free_all(handles)
        handles.clear()

    def hand_over(self) -> None:
        """Free the gradient that was sent, or let its send hold it."""
        if not self.holds_sent:
            self.drop_sent()
        elif self.sent >= 0:
            self.handed.append(self.sent)
            self.sent = -1

    def drop_sent(self) -> None:
        """Free the gradient that was sent last."""
        if self.sent >= 0:
            self.recorder.free(self.sent)
        self.sent = -1
