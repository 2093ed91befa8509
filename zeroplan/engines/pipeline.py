"""Pipeline stages: a tape cut at block boundaries, and its micro batches played in a schedule's order.

Note [Cutting a tape]
    A stage runs the events of its own blocks, and what the model does before its first block (masks, positions): every stage
    does that for itself. The embedding is the first stage's, what follows the blocks is the last's. A storage that the whole
    model frees elsewhere lives until the end of the stage's forward or backward, in whichever half that is. What a stage
    receives lies in buffers of its own, so frees of storages that other stages make are left out.

    Autograd adds up the residual stream's gradient in place, in the block of memory in which it arrived. On a stage that is a
    buffer for what it receives, to which nothing may be added, so the first sum is a new tensor.

    torch keeps a micro batch's output until its backward (``fwd_cache``), logits included, and makes buffers for the inputs
    and gradients of all micro batches of a step at once, for the whole run.
    Source: torch/distributed/pipelining/stage.py (``_RecvInfo``, ``forward_one_chunk``, ``backward_one_chunk``).

    A stage holds the gradient that it has sent until it sends the next. Where a rank has several chunks, sends are actions of
    their own, and what was sent is freed at once (``_PipelineScheduleRuntime``).

    A rank with several chunks (vpp) has one part of the tape for each. They have a schedule each, whose hooks are called as
    :func:`~zeroplan.core.pipeline_order.with_gathers` orders them.

Note [A stage's halves]
    Where a backward runs in two halves, stages behind the first play a tape of such a backward (``ExpandedTape.halves``), cut
    at the same places. The graph stays until the end of the second half, with what it saved; logits go with the first, as the
    loss's part of the graph does. The residual stream's gradient is never added to in place, since a weight's product waits
    for it. The first stage receives nothing, so its whole backward runs in the second half. Gradients of inputs stay on what
    was received (``.grad``) until the next step begins, of every micro batch.
    Source: torch/distributed/pipelining/stage.py (``backward_one_chunk``, ``clear_runtime_states``), _backward.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan.core.pipeline import Stage, block_number, holds
from zeroplan.core.pipeline_order import Action, Do, PipelineOrder, in_flight, with_gathers
from zeroplan.core.tape import ExpandedTape, Kind, Mark, Op, TapeModule, blocks_of
from zeroplan.core.tensor_parallel import EMBEDDING
from zeroplan.engines.player import CuePlayer, EngineSchedule
from zeroplan.engines.script import Cue, cues_of, workspaces_of
from zeroplan.simulate.event_blocks import EventBlocks
from zeroplan.simulate.recorder import Recorder

#: The norm in front of the MLP, whose input is the residual stream, in the architectures of which stages are modelled.
_SECOND_NORM = "post_attention_layernorm"
#: The head's name in them.
HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class StageTape:
    """One stage's part of a tape.

    Attributes:
        tape: its modules and parameters, and the events of one micro batch: the forward, then the backward.
        split: where the backward begins.
        weights: where its second half begins; -1 where it has one.
        inputs: bytes of the batch's tensors for one micro batch.
        sent: the storage of the gradient of the stage's input, which is sent to the stage before; -1 on the first.
        hidden: bytes of the hidden states that stages send each other.
        returned: where the last stage's modules have returned the logits, and the loss begins; the split elsewhere.
        logits: the storage of the logits, where the tape leaves it to the player to free them; -1 elsewhere.
    """

    tape: ExpandedTape
    split: int
    inputs: int
    sent: int
    hidden: int
    returned: int = -1
    logits: int = -1
    weights: int = -1


class _Cut:
    """The walk over a whole tape that keeps one stage's events."""

    def __init__(self, tape: ExpandedTape, stage: Stage) -> None:
        self.tape, self.stage = tape, stage
        self.blocks = {index: block_number(tape.modules[index].name) for index in blocks_of(tape.modules)}
        self.inside = self._members()
        self.embedding = {i for i, module in enumerate(tape.modules) if module.name.rpartition(".")[2] == EMBEDDING}
        names = [param.name for param in tape.params]
        homes = tape.parameters.blocks
        self.params = [p for p in range(len(names)) if holds(stage, names[p], homes[p])]
        self.place = {p: at for at, p in enumerate(self.params)}
        self.shared = self._shared()
        self.out = ExpandedTape(self._modules(), tuple(tape.params[p] for p in self.params))
        self.made: dict[int, int] = {}  # kept storages, by their kind
        self.late: list[list[int]] = [[], [], []]  # freed at the end of the forward, of the backward's first half, its second

    def _members(self) -> dict[int, int]:
        """Return the block's number of each module that lies in one."""
        found = dict(self.blocks)
        for index, module in enumerate(self.tape.modules):
            if module.parent in found and index not in found:
                found[index] = found[module.parent]
        return found

    def _shared(self) -> dict[int, int]:
        """Return, by the storage of its gradient that the head makes, a parameter that the head has from the embedding."""
        if not (self.stage.tied and self.stage.is_last):
            return {}
        made = {
            arg: self.tape.modules[module].name
            for op, arg, _, _, module in self.tape.events()
            if op == Op.ALLOC and module >= 0
        }
        grads = [(arg, aux) for op, arg, aux, _, _ in self.tape.events() if op == Op.GRAD and arg in self.place]
        return {aux: arg for arg, aux in grads if made.get(aux, "").rpartition(".")[2] == HEAD}

    def _modules(self) -> tuple[TapeModule, ...]:
        return tuple(
            replace(module, params=tuple(self.place[p] for p in module.params if p in self.place))
            for module in self.tape.modules
        )

    def add(self, op: int, arg: int, aux: int = 0, kind: int = 0, module: int = -1) -> None:
        """Append one event."""
        out = self.out
        for column, value in zip((out.op, out.arg, out.aux, out.kind, out.module), (op, arg, aux, kind, module), strict=True):
            column.append(value)


def cut(tape: ExpandedTape, stage: Stage, *, copies: bool = False) -> StageTape:
    """Cut one stage's micro batch out of a tape. See Note [Cutting a tape].

    Args:
        tape: the whole model's.
        stage: the stage.
        copies: the stage's forward runs on a copy of what it received, and the loss is not the modules' own: its tape begins
            with that copy, and the player frees the logits. DeepSpeed's way.
    """
    walk = _Cut(tape, stage)
    backward = running = False
    weights, halves = -1, (int(Op.MARK), int(Mark.WEIGHTS_BEGIN)) in zip(tape.op, tape.arg, strict=True)
    final = 2 if halves else 1
    last, place, inputs, split = max(walk.blocks.values()), -1, 0, 0  # -1: before the blocks, last + 1: behind them
    in_embedding = False
    sizes: dict[int, int] = {}
    hidden = _hidden_bytes(tape, walk)
    residual, summed = -1, -1 if stage.is_last or not stage.end or halves else _first_sum(tape, walk, hidden)
    made_backward: list[int] = []
    output = logits = head = returned = -1
    copy = _output_of(tape, walk, hidden, stage.first - 1) if copies and not stage.is_first else -1
    if copy >= 0:
        walk.made[copy] = int(Kind.SAVED)
        walk.add(Op.ALLOC, copy, hidden, Kind.SAVED)
    received: set[int] = set()  # gradients of that size that other stages make
    events = tape.events()
    for at, (op, arg, aux, kind, module) in enumerate(events):
        if op == Op.MARK:
            running = running or arg == Mark.FORWARD_BEGIN
            if arg == Mark.BACKWARD_BEGIN:
                _free_late(walk, 0)
                split, backward, place = len(walk.out), True, last + 1
            elif arg == Mark.WEIGHTS_BEGIN:
                _free_late(walk, 1)
                weights, place = len(walk.out), -1
            continue
        if op == (Op.BWD_ENTER if backward else Op.ENTER) and arg in walk.blocks:
            place = walk.blocks[arg]
        elif not backward and op == Op.ENTER and arg in walk.embedding:
            in_embedding = True
        kept = _is_kept(stage, place, last, in_embedding or backward)
        if op == Op.ALLOC:
            if not running:
                inputs += aux if stage.is_first or stage.is_last else 0
            elif kept:
                walk.made[arg] = kind
                sizes[arg] = aux
                walk.add(op, arg, aux, kind, module)
                if backward and weights < 0 and aux == hidden:
                    made_backward.append(arg)
                elif aux == hidden and not stage.is_last and _makes(walk, module, stage.end - 1):
                    output = arg
                elif copies and kind == Kind.LOGITS:
                    logits, head = arg, module
            elif backward and aux == hidden:
                received.add(arg)
        elif op == Op.FREE:
            if arg in walk.made:
                if at == summed:
                    residual = 1 + max(*tape.arg, *walk.made)
                    walk.made[residual] = int(Kind.ACT_GRAD)
                    walk.add(Op.ALLOC, residual, hidden, Kind.ACT_GRAD, module)
                    walk.late[1].append(residual)
                kept_on = not backward and (walk.made[arg] == Kind.LOGITS or arg == output)
                if arg == logits:
                    pass
                elif kept and not kept_on and (backward or arg != copy):
                    walk.add(op, arg)
                elif kept_on:
                    walk.late[final if arg == output else 1].append(arg)
                else:
                    walk.late[(1 if weights < 0 else 2) if backward else 0].append(arg)
            elif kept and arg in received and residual in walk.late[1]:  # what stands for it on this stage
                walk.late[1].remove(residual)
                walk.add(op, residual)
        elif op == Op.GRAD:
            if arg in walk.place and aux in walk.made and aux not in walk.shared:
                walk.add(op, walk.place[arg], aux)
        elif arg not in walk.inside or stage.first <= walk.inside[arg] < stage.end:
            walk.add(op, arg)
        if not backward and op == Op.EXIT:
            if logits >= 0 and arg == head:
                returned = len(walk.out)
            if arg in walk.blocks and walk.blocks[arg] == last:
                place = last + 1
            in_embedding = in_embedding and arg not in walk.embedding
        elif backward and op == Op.BWD_EXIT and tape.modules[arg].name.rpartition(".")[2] == HEAD:
            for storage, param in walk.shared.items():
                walk.add(Op.GRAD, walk.place[param], storage)
        elif backward and op == Op.BWD_EXIT and arg in walk.blocks and walk.blocks[arg] == (0 if weights < 0 else last):
            place = -1 if weights < 0 else last + 1
    made = [s for s in (residual, *made_backward) if s in walk.late[final]]
    sent = made[-1] if made else -1
    if sent < 0 and not stage.is_first:
        raise BadInput("the gradient that a stage sends is not found", where="--pp", remedy="use --pp 1")
    if not stage.is_first:
        walk.late[final].remove(sent)
    _free_late(walk, final)
    return StageTape(
        walk.out, split, inputs, -1 if stage.is_first else sent, hidden, split if returned < 0 else returned, logits, weights
    )


def _makes(walk: _Cut, module: int, block: int) -> bool:
    """Return whether a module's own tensors may be the output of a block; block −1 is the embedding."""
    return module in walk.embedding if block < 0 else walk.blocks.get(module) == block


def _output_of(tape: ExpandedTape, walk: _Cut, hidden: int, block: int) -> int:
    """Return the storage of a block's output: the last of the hidden states' size that its forward makes."""
    found = -1
    for op, arg, aux, module in zip(tape.op, tape.arg, tape.aux, tape.module, strict=True):
        if op == Op.MARK and arg == Mark.BACKWARD_BEGIN:
            break
        if op == Op.ALLOC and aux == hidden and _makes(walk, module, block):
            found = arg
    return found


def _is_kept(stage: Stage, place: int, last: int, first_only: bool) -> bool:
    if place < 0:
        return stage.is_first or not first_only
    return stage.is_last if place > last else stage.first <= place < stage.end


def _free_late(walk: _Cut, half: int) -> None:
    for storage in walk.late[half]:
        walk.add(Op.FREE, storage)


def _first_sum(tape: ExpandedTape, walk: _Cut, hidden: int) -> int:
    """The event at which the residual stream's gradient is first added to in the stage's last block.

    It is the free of what is added: the last tensor of the hidden states' size that the backward of the block's second norm
    makes. -1 where the tape has a new tensor for that sum anyway, as with checkpointing.

    Raises:
        BadInput: when there is no such tensor.
    """
    block = next(index for index, number in walk.blocks.items() if number == walk.stage.end - 1)
    norms = {i for i, module in enumerate(tape.modules) if module.parent == block and module.name.endswith(_SECOND_NORM)}
    added, free, new, backward = -1, -1, False, False
    for at, (op, arg, aux, module) in enumerate(zip(tape.op, tape.arg, tape.aux, tape.module, strict=True)):
        if op == Op.MARK:
            backward = backward or arg == Mark.BACKWARD_BEGIN
        elif backward and op == Op.ALLOC and aux == hidden and module in norms:
            added, free, new = arg, -1, False
        elif added >= 0 and free < 0 and op == Op.ALLOC and aux == hidden and module == block:
            new = True
        elif op == Op.FREE and arg == added:
            free = at
    if free < 0:
        raise BadInput("its blocks have another form than those that are modelled", where="--pp", remedy="use --pp 1")
    return -1 if new else free


def _hidden_bytes(tape: ExpandedTape, walk: _Cut) -> int:
    """Return the bytes of the hidden states: the largest tensor that the embedding's forward makes."""
    largest = 0
    for op, arg, aux, module in zip(tape.op, tape.arg, tape.aux, tape.module, strict=True):
        if op == Op.MARK and arg == Mark.BACKWARD_BEGIN:
            break
        if op == Op.ALLOC and module in walk.embedding:
            largest = max(largest, aux)
    return largest


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


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """The part of a job that is played: a step's micro batches in their order, for so many `steps`."""

    order: PipelineOrder
    steps: int
    cublas_workspace: int = 0


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """One of a rank's chunks: which stage of the pipeline it is, its part of the tape, and its engine's hooks."""

    stage: Stage
    part: StageTape
    schedule: PipelineEngineSchedule


def play_pipeline(
    run: PipelineRun, chunks: Sequence[ModelChunk], recorder: Recorder, step_optimizer: Callable[[], None]
) -> None:
    """Record a rank's run: build, initialisation, and `run.steps` steps.

    Marks are ``model``, ``init``, then ``fwd`` and ``bwd`` for the micro batches, ``bwd`` for the reductions, and ``step0``, …

    Args:
        run: how much is played.
        chunks: the rank's chunks, in the pipeline's order.
        recorder: where it is recorded.
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
    players = _players(run, chunks, recorder, in_flight(actions, len(chunks)))
    looped = run.order.looped
    if looped:
        actions = with_gathers(actions)
    inputs = sum(chunk.part.inputs for chunk in chunks)
    for step in range(run.steps):
        batch = recorder.alloc(inputs * count, Buffer.INPUT) if inputs else -1
        for player in players:
            player.drop_received()
        if not step:  # static buffers, for the whole run
            for chunk in chunks:
                for needed in (not chunk.stage.is_first, not chunk.stage.is_last):
                    for _ in range(count if needed else 0):
                        recorder.alloc(chunk.part.hidden, Buffer.COMM_PIPELINE)
        for action in actions:
            _act(action, players, recorder)
            if looped:  # whose sends are actions of their own, behind which nothing holds what was sent
                players[action.chunk].drop_sent()
        for player in players:
            player.drop_sent()
            if not looped:
                player.schedule.reduce()
        recorder.mark("bwd")
        step_optimizer()
        for chunk in chunks:
            chunk.schedule.zero_grad()
        if batch >= 0:
            recorder.free(batch)
        recorder.mark(f"step{step}")


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


def _players(run: PipelineRun, chunks: Sequence[ModelChunk], recorder: Recorder, slots: Sequence[int]) -> list[_StagePlayer]:
    """Return a player for each chunk. Their storages are numbered apart; cuBLAS's workspaces are theirs together."""
    blocks, base = EventBlocks(), 0
    players: list[_StagePlayer] = []
    for chunk, flying in zip(chunks, slots, strict=True):
        player = _StagePlayer(run, chunk, recorder, blocks, flying, base)
        base += player.width * flying
        if players:
            player.workspaces = players[0].workspaces
        players.append(player)
    return players


class _StagePlayer(CuePlayer):
    """Plays forwards and backwards of micro batches, each in a slot of storages of its own while it is in flight."""

    def __init__(
        self, run: PipelineRun, chunk: ModelChunk, recorder: Recorder, blocks: EventBlocks, slots: int, base: int
    ) -> None:
        """`base`: what is added to the numbers of the chunk's storages."""
        self.part, self.schedule, self.slots, self.base = chunk.part, chunk.schedule, slots, base
        part = chunk.part
        self.width = 1 + max(part.tape.arg, default=0)
        self.forwards: list[tuple[Cue, ...]] = []
        self.backwards: list[tuple[Cue, ...]] = []
        self.weights: list[tuple[Cue, ...]] = []
        halves = (self.forwards, self.backwards, self.weights)
        for slot in range(slots):
            tape = shifted(part.tape, base + slot * self.width)
            ends = (0, part.split, len(tape) if part.weights < 0 else part.weights, len(tape))
            for half, (begin, end) in enumerate(pairwise(ends)):
                taken = workspaces_of(tape, range(begin, end), half) if not slot and half < len(ends) - 2 else []
                halves[half].append(cues_of(tape, range(begin, end), taken, half < len(halves) - 1, blocks))
        super().__init__(recorder, chunk.schedule, blocks, run.cublas_workspace)
        self.sent = -1
        self.received: list[int] = []  # gradients that stay on the inputs of which they are

    def forward(self, number: int) -> None:
        """Run a micro batch's forward."""
        self.schedule.wait_for_unshard()
        self.schedule.forward_begin()
        self.run(self.forwards[number % self.slots])

    def backward(self, number: int) -> None:
        """Run its backward. The gradient of its input is sent, and kept until the next one's is."""
        slot = number % self.slots
        self.schedule.wait_for_unshard()
        self.schedule.backward_begin(False)
        self.run(self.backwards[slot])
        self.schedule.backward_end(False)
        self.drop_sent()
        if self.part.sent >= 0:
            self.sent = self.recorder.handle_of(self.part.sent + self.base + slot * self.width)

    def backward_input(self, number: int) -> None:
        """Run the first half of its backward, which the first stage has none of. See Note [A stage's halves]."""
        slot = number % self.slots
        self.schedule.wait_for_unshard()
        if self.part.weights < 0:
            return
        self.schedule.backward_begin(False)
        self.run(self.backwards[slot])
        self.schedule.backward_end(False)
        self.received.append(self.recorder.handle_of(self.part.sent + self.base + slot * self.width))

    def backward_weights(self, number: int) -> None:
        """Run the second half of its backward, all of it on the first stage."""
        if self.part.weights < 0:
            self.backward(number)
        else:
            self.run(self.weights[number % self.slots])

    def drop_received(self) -> None:
        """Free the gradients of the inputs of a step's micro batches."""
        for handle in self.received:
            self.recorder.free(handle)
        self.received.clear()

    def drop_sent(self) -> None:
        """Free the gradient that was sent last."""
        if self.sent >= 0:
            self.recorder.free(self.sent)
        self.sent = -1


def shifted(tape: ExpandedTape, by: int) -> ExpandedTape:
    """Return the tape with other numbers of its storages."""
    if not by:
        return tape
    stored = (int(Op.ALLOC), int(Op.FREE))
    grad = int(Op.GRAD)
    arg = [value + by if op in stored else value for op, value in zip(tape.op, tape.arg, strict=True)]
    aux = [value + by if op == grad else value for op, value in zip(tape.op, tape.aux, strict=True)]
    return ExpandedTape(tape.modules, tape.params, tape.op, arg, aux, tape.kind, tape.module, buffers=tape.buffers)
