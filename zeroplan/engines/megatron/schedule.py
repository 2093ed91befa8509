"""Megatron-LM's allocations over a run: buffers, optimizer and pipeline, laid over the chunks' tapes.

Note [Megatron's pipeline]
    A rank receives each micro batch's input into a new tensor, which lives until its backward has run, and each output's
    gradient likewise. An output goes once it is sent (``deallocate_pipeline_outputs``): autograd needs its node alone. Python's
    variables hold the gradients of input and output until the next ones take their places. The interleaved schedule receives
    ahead: the next forward's input before a forward, the next backward's gradient before a backward. The order of forwards and
    backwards is 1F1B's, with several chunks the interleaved one's (core/pipeline_order.py).
    Sources: Megatron-Core 0.16.1, megatron/core/pipeline_parallel/schedules.py (``get_pp_rank_microbatches``,
    ``get_schedule_table``), p2p_communication.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zeroplan.core.buffers import Buffer
from zeroplan.core.pipeline_order import Action, Do, PipelineOrder, PipelineSchedule, in_flight
from zeroplan.engines.megatron.chunk import ChunkTape, chunk_tape
from zeroplan.engines.megatron.rank import MegatronRank
from zeroplan.engines.pipeline import StageCues
from zeroplan.engines.pipeline_cut import StageTape
from zeroplan.engines.player import CuePlayer, EngineSchedule, Run, play
from zeroplan.engines.torch_step import STEPS_UNTIL_STEADY
from zeroplan.simulate.event_blocks import EventBlocks
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.expanded import ExpandedTape
from zeroplan.techniques.table import blocks_of

_FP32 = 4
#: What the layers make once, by the names that :attr:`MegatronRank.kept` has.
_KEPT = {
    "shared": Buffer.COMM_ALL_GATHER,
    "stand-in": Buffer.GRAD_FULL,
    "rotary": Buffer.MODEL_BUFFER,
    "dispatcher": Buffer.MODEL_BUFFER,
}


class MegatronSchedule(EngineSchedule):
    """One rank's model, buffers and optimizer. Gradients are added to the buffer as they come, and go at once."""

    def __init__(self, rank: MegatronRank, recorder: Recorder) -> None:
        self.rank, self.recorder = rank, recorder
        self.alloc, self.free = recorder.alloc, recorder.free
        self.params: list[int] = []
        self.kept = False
        self.stepped = False
        self.held: dict[int, list[int]] = {}

    def build(self) -> None:
        """Allocate each parameter by itself."""
        rank = self.rank
        for chunk in rank.chunks:
            self.params += [self.alloc(rank.made_bytes(p), Buffer.PARAM_FULL) for p in chunk]
        if rank.frozen_numel:
            self.alloc(rank.element * rank.frozen_numel, Buffer.PARAM_FROZEN)

    def initialize(self) -> None:
        """Allocate the buffers, move the parameters into theirs, and make the masters, each from a copy in 16 bits."""
        rank = self.rank
        for buffer in rank.buffers:
            if rank.distributed and buffer.element:
                self.alloc(buffer.element * buffer.numel, Buffer.PARAM_FULL)
            self.alloc(rank.grad_element * buffer.numel, Buffer.GRAD_ACCUM)
        if rank.distributed:
            self.recorder.free_all(self.params)
        for shard in self._shards() if rank.masters else ():
            copied = self.alloc(rank.element * shard, Buffer.INIT_TEMP)
            self.alloc(_FP32 * shard, Buffer.PARAM_MASTER)
            self.free(copied)

    def _shards(self) -> Iterator[int]:
        for buffer in self.rank.buffers:
            yield from buffer.shards

    def forward_begin(self) -> None:
        """Make what the layers make once."""
        if self.kept:
            return
        self.kept = True
        for size in self.rank.quantized:
            self.alloc(size, Buffer.PARAM_FULL)
        if self.rank.history_bytes:
            self.alloc(self.rank.history_bytes, Buffer.MODEL_BUFFER)
        for kind, size in self.rank.kept.items():
            self.alloc(size, _KEPT[kind])
        if self.rank.engine_workspace:
            self.alloc(self.rank.engine_workspace, Buffer.WORKSPACE)

    def grad(self, param: int, handle: int) -> None:
        """Add a gradient to the buffer: nothing stays of it."""
        self.free(handle)

    def hold(self, place: int, handle: int) -> None:
        """A dispatcher's graph holds a block until the layer's next forward."""
        self.held.setdefault(place, []).append(handle)

    def drop(self, place: int) -> None:
        """The layer's forward has come."""
        self.recorder.free_all(self.held.pop(place, ()))

    def step(self, applied: bool) -> None:
        """Copy 16-bit gradients to fp32, and step Adam, whose states are made by the first step."""
        copies = [self.alloc(_FP32 * shard, Buffer.GRAD_MASTER) for shard in self._shards()] if self.rank.grad_copies else []
        if applied and not self.stepped:
            self.stepped = True
            for shard in self._shards():
                for state in self.rank.optimizer.states:
                    self.alloc(state.bytes_of(shard, _FP32), state.buffer)
        self.recorder.free_all(copies)


def record_megatron(rank: MegatronRank, tape: ExpandedTape) -> Recorder:
    """Record a rank without pipeline stages, whose micro batches are those of `tape`."""
    recorder = Recorder()
    run = Run(
        rank.grad_accum,
        STEPS_UNTIL_STEADY,
        cublas_workspace=rank.cublas_workspace,
        detached_loss=True,
        blocks=blocks_of(rank.workload, rank),
    )
    play(run, tape, recorder, MegatronSchedule(rank, recorder))
    return recorder


def record_stages(rank: MegatronRank) -> Recorder:
    """Record a pipeline rank. See Note [Megatron's pipeline]."""
    assert rank.shapes is not None, "stages of a model that is not known"
    recorder = Recorder()
    schedule = MegatronSchedule(rank, recorder)
    schedule.build()
    recorder.mark("model")
    schedule.initialize()
    recorder.mark("init")
    layout = rank.layout
    kind, count = PipelineSchedule.ONE_F_ONE_B, rank.grad_accum
    actions = PipelineOrder(kind, rank.pp_rank, layout.pp, layout.vpp, count, takes_fewer=True).shortened()
    tapes = [chunk_tape(rank.shapes, part) for part in rank.parts]
    pipeline = _Pipeline(rank, tapes, actions, recorder, schedule)
    for step in range(STEPS_UNTIL_STEADY):
        schedule.forward_begin()
        pipeline.step(actions)
        schedule.step(applied=True)
        recorder.mark(f"step{step}")
    return recorder


class _Pipeline:
    """The micro batches of a step, each in a slot of storages of its own while it is in flight."""

    def __init__(
        self,
        rank: MegatronRank,
        tapes: Sequence[ChunkTape],
        actions: Sequence[Action],
        recorder: Recorder,
        schedule: MegatronSchedule,
    ) -> None:
        assert rank.shapes is not None
        self.recorder, self.hidden = recorder, rank.shapes.hidden
        self.parts = rank.parts
        self.ahead = len(rank.parts) > 1  # the interleaved schedule receives ahead
        blocks, base = EventBlocks(), 0
        self.chunks: list[StageCues] = []
        for number, (tape, slots) in enumerate(zip(tapes, in_flight(actions, len(tapes)), strict=True)):
            part = StageTape(tape.tape, tape.split, 0, tape.gradient, self.hidden, tape.split, output=tape.output)
            self.chunks.append(StageCues(part, blocks, slots, base, modules=False, workspaces=not number))
            base = self.chunks[-1].bases.stop
        self.player = CuePlayer(recorder, schedule, blocks, rank.cublas_workspace)
        self.inputs: dict[Action, int] = {}
        self.gradients: dict[Action, int] = {}
        self.sent = self.arrived = -1

    def step(self, actions: Sequence[Action]) -> None:
        """Run the forwards and backwards of a step."""
        for at, action in enumerate(actions):
            self._receive(action)
            if self.ahead:
                following = next((one for one in actions[at + 1 :] if one.do is action.do), None)
                if following is not None:
                    self._receive(following)
            if action.do is Do.FORWARD:
                self._forward(action)
            else:
                self._backward(action)
        self._drop()

    def _receive(self, action: Action) -> None:
        """Allocate what the action needs from another rank."""
        part = self.parts[action.chunk]
        forward = action.do is Do.FORWARD
        held = self.inputs if forward else self.gradients
        if action not in held and not (part.embeds if forward else part.ends):
            held[action] = self.recorder.alloc(self.hidden, Buffer.COMM_PIPELINE)

    def _in_slot(self, action: Action) -> tuple[StageCues, int]:
        """Return what an action's chunk is played by, and the micro batch's slot."""
        cues = self.chunks[action.chunk]
        return cues, action.micro_batch % len(cues.bases)

    def _forward(self, action: Action) -> None:
        cues, slot = self._in_slot(action)
        self.player.run(cues.forwards[slot])
        if cues.part.output >= 0:
            self.recorder.free(self.recorder.handle_of(cues.part.output + cues.bases[slot]))
        self.recorder.mark("fwd")

    def _backward(self, action: Action) -> None:
        cues, slot = self._in_slot(action)
        if self.arrived >= 0:
            self.recorder.free(self.arrived)
        self.arrived = self.gradients.pop(action, -1)
        self.player.run(cues.backwards[slot])
        if self.sent >= 0:
            self.recorder.free(self.sent)
        self.sent = self.recorder.handle_of(cues.part.sent + cues.bases[slot]) if cues.part.sent >= 0 else -1
        received = self.inputs.pop(action._replace(do=Do.FORWARD), -1)
        if received >= 0:
            self.recorder.free(received)
        self.recorder.mark("bwd")

    def _drop(self) -> None:
        for handle in (self.sent, self.arrived):
            if handle >= 0:
                self.recorder.free(handle)
        self.sent = self.arrived = -1
