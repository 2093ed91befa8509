"""DeepSpeed's PipelineModule: one stage's run under stages 0 and 1.

Functions and classes named in brackets are those of DeepSpeed 0.19.8's runtime/pipe/engine.py, unless another file is named.

Note [Buffers of a PipelineEngine]
    A stage has as many slots as micro batches may be in flight there, at least two, and micro batches take them in turn. A slot
    holds until its next use, beyond the end of a step as well, what nothing else removes: the first stage's batch, the last
    stage's labels and logits. What a stage received stays with its gradient until that has been sent
    (``_exec_send_grads``), an output until its backward has run (``_exec_backward_pass``). Logits and loss keep their
    graph, whose leaf is what was received: on the last stage it goes, with its gradient, when the slot's next logits come.

    A stage receives into one tensor for the whole run, clones it into the slot (``_exec_recv_activations``), and runs its
    layers on a clone of the slot (``_exec_forward_pass``). Gradients arrive in a tensor for the whole run, too; since both
    are of one size, they are the same tensor (``_allocate_or_extend_buffers``).

    Backwards end without a reduction. At the end of a step stage 1 puts a second bucket beside the one that the first gradient
    opened (``reduce_gradients`` of runtime/zero/stage_1_and_2.py), and only this second one is filled.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from zeroplan.core.buffers import Buffer
from zeroplan.engines.deepspeed.base import DeepSpeedSchedule
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.engines.deepspeed.schedule import STEPS_UNTIL_STEADY, stage_schedule
from zeroplan.engines.pipeline import StageCues
from zeroplan.engines.pipeline_cut import StageTape, cut
from zeroplan.engines.player import CuePlayer
from zeroplan.simulate.event_blocks import EventBlocks
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.expanded import ExpandedTape
from zeroplan.tape.tied_gradients import with_gradients_apart

#: Bytes of one token's id, and of one label.
_TOKEN = 8
#: Bytes of the tensor that tells a stage the shapes of what it receives (TENSOR_META_SIZE numbers of 32 bits).
_METADATA = 256 * 4
#: Micro batches beyond the number of stages that are played: each further two are like the two before them.
_FURTHER = 3


class StageCommand(Enum):
    """The instructions of a stage that are about one micro batch, by DeepSpeed's names (runtime/pipe/schedule.py)."""

    SEND_GRAD = "SendGrad"
    RECV_ACTIVATION = "RecvActivation"
    RECV_GRAD = "RecvGrad"
    SEND_ACTIVATION = "SendActivation"
    LOAD = "LoadMicroBatch"
    FORWARD = "ForwardPass"
    BACKWARD = "BackwardPass"


class Instruction(NamedTuple):
    """One instruction and the slot that it is about."""

    command: StageCommand
    slot: int


def slots_of(stages: int, stage: int, micro_batches: int) -> int:
    """Return the number of a stage's slots (runtime/pipe/schedule.py, ``num_pipe_buffers``)."""
    return max(2, min(stages - stage, micro_batches))


def train_schedule(stages: int, stage: int, micro_batches: int) -> list[Instruction]:
    """Return one step's instructions of one stage.

    Stage s runs the forward of micro batch k in tick s + 2k and its backward in tick 2p − 1 − s + 2k, of p stages. In ticks of
    a forward's parity it first sends the gradient of the tick before and receives an input; in the others it first receives a
    gradient and sends the output of the tick before. Source: runtime/pipe/schedule.py, ``TrainSchedule``

    Args:
        stage: which one, counted from 0.
    """
    found: list[Instruction] = []
    slots = slots_of(stages, stage, micro_batches)
    before = -1
    for tick in range(2 * (micro_batches + stages - 1)):
        forward = (tick - stage) % 2 == 0
        number = (tick - stage) // 2 if forward else (tick - (2 * stages - 1 - stage)) // 2
        runs, ran = 0 <= number < micro_batches, 0 <= before < micro_batches
        neighbour = stage > 0 if forward else stage < stages - 1
        sends = (
            [Instruction(StageCommand.SEND_GRAD if forward else StageCommand.SEND_ACTIVATION, before % slots)]
            if ran and neighbour
            else []
        )
        receives = (
            [Instruction(StageCommand.RECV_ACTIVATION if forward else StageCommand.RECV_GRAD, number % slots)]
            if runs and neighbour
            else []
        )
        found += sends + receives if forward else receives + sends
        if runs:
            if forward and stage in (0, stages - 1):
                found.append(Instruction(StageCommand.LOAD, number % slots))
            found.append(Instruction(StageCommand.FORWARD if forward else StageCommand.BACKWARD, number % slots))
        before = number
    return found


class _Stage(CuePlayer):
    """One stage, with what its slots hold. See Note [Buffers of a PipelineEngine]."""

    def __init__(self, rank: DeepSpeedRank, part: StageTape, schedule: DeepSpeedSchedule, recorder: Recorder) -> None:
        stage, count = rank.pipeline_stage, rank.grad_accum
        assert stage is not None
        if count > stage.stages + _FURTHER:
            count = stage.stages + _FURTHER + (count - stage.stages - _FURTHER) % 2
        blocks = EventBlocks()
        self.stage, self.part, self.engine = stage, part, schedule
        self.instructions = train_schedule(stage.stages, stage.index, count)
        self.cues = StageCues(part, blocks, slots_of(stage.stages, stage.index, count), modules=False)
        super().__init__(recorder, schedule, blocks, rank.cublas_workspace)
        self.ids = rank.workload.batch.micro_batch * (rank.workload.batch.seq_len or 1) * _TOKEN
        self.received: dict[int, list[int]] = {}  # by slot: what the stage received, and its gradient
        self.leaves: dict[int, list[int]] = {}  # the same, once sent, on the last stage
        self.copies: dict[int, int] = {}  # of the first stage's batch
        self.loaded: dict[int, int] = {}
        self.logits: dict[int, int] = {}
        self.last = -1  # the slot of the last forward
        self.has_buffer = self.has_sent = False

    def step(self) -> None:
        """Run one step's micro batches."""
        for command, slot in self.instructions:
            _ACTIONS[command](self, slot)

    def load(self, slot: int) -> None:
        """Copy a micro batch to the GPU: token ids on the first stage, labels on the last (``_exec_load_micro_batch``)."""
        new = self.recorder.alloc(self.ids, Buffer.INPUT)
        if slot in self.loaded:
            self.recorder.free(self.loaded[slot])
        self.loaded[slot] = new

    def receive_activation(self, slot: int) -> None:
        """Receive an input and clone it into the slot."""
        self._receive(metadata=True)
        self.received[slot] = [self.recorder.alloc(self.part.hidden, Buffer.ACTIVATION)]

    def receive_gradient(self, slot: int) -> None:
        """Receive the gradient of an output, where it stays."""
        del slot
        self._receive(metadata=False)

    def _receive(self, *, metadata: bool) -> None:
        if not self.has_buffer:
            if metadata:
                self.engine.temporary(_METADATA, Buffer.COMM_PIPELINE)
            self.recorder.alloc(self.part.hidden, Buffer.COMM_PIPELINE)
        self.has_buffer = True

    def send_activation(self, slot: int) -> None:
        """Send an output; the first time its shape goes ahead (``_send_tensor_meta``)."""
        del slot
        if not self.has_sent:
            self.engine.temporary(_METADATA, Buffer.COMM_PIPELINE)
        self.has_sent = True

    def send_gradient(self, slot: int) -> None:
        """Send an input's gradient, and drop both."""
        sent = self.received.pop(slot)
        if self.part.logits >= 0:
            self.leaves[slot] = sent
        else:
            self.engine.free_all(sent)

    def forward(self, number: int) -> None:
        """Run a slot's forward, and on the last stage the loss."""
        part, recorder = self.part, self.recorder
        self.engine.forward_begin()
        if self.stage.is_first:
            self.copies[number] = recorder.alloc(self.ids, Buffer.INPUT)
        self.run(self.cues.forwards[number])
        if part.logits >= 0:
            old = self.logits.pop(number, None)
            self.logits[number] = recorder.handle_of(part.logits + self.cues.bases[number])
            if old is not None:
                recorder.free(old)
            if number != self.last:
                self.engine.free_all(self.leaves.pop(number, ()))
        self.run(self.cues.losses[number])
        self.engine.free_all(self.leaves.pop(number, ()))  # the last loss is this slot's, and goes now
        self.last = number
        recorder.mark("fwd")

    def backward(self, number: int) -> None:
        """Run a slot's backward."""
        recorder = self.recorder
        self.engine.backward_begin(False)
        self.run(self.cues.backwards[number])
        self.engine.backward_end(False)
        if self.part.sent >= 0:
            self.received[number].append(recorder.handle_of(self.part.sent + self.cues.bases[number]))
        if number in self.copies:
            recorder.free(self.copies.pop(number))
        recorder.mark("bwd")


_ACTIONS = {
    StageCommand.SEND_GRAD: _Stage.send_gradient,
    StageCommand.RECV_ACTIVATION: _Stage.receive_activation,
    StageCommand.RECV_GRAD: _Stage.receive_gradient,
    StageCommand.SEND_ACTIVATION: _Stage.send_activation,
    StageCommand.LOAD: _Stage.load,
    StageCommand.FORWARD: _Stage.forward,
    StageCommand.BACKWARD: _Stage.backward,
}


def record_stage(rank: DeepSpeedRank, tape: ExpandedTape, *, steps: int | None = None, skipped_steps: int = 0) -> Recorder:
    """Record every allocation and free of one stage's run, in order; arguments as for
    :func:`~zeroplan.engines.deepspeed.schedule.record_deepspeed`.
    """
    assert rank.pipeline_stage is not None
    recorder = Recorder()
    part = cut(with_gradients_apart(tape) if rank.pipeline_stage.tied else tape, rank.pipeline_stage, copies=True)
    schedule = stage_schedule(rank, part.tape, recorder)
    schedule.build()
    recorder.mark("model")
    schedule.initialize()
    recorder.mark("init")
    stage = _Stage(rank, part, schedule, recorder)
    for step in range(STEPS_UNTIL_STEADY + skipped_steps if steps is None else steps):
        stage.step()
        schedule.reduce()
        recorder.mark("bwd")
        schedule.step(step >= skipped_steps)
        recorder.mark(f"step{step}")
    return recorder
