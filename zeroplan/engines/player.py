"""Plays a model's tape for as many micro batches and steps as a job takes, with an engine's schedule laid over it.

Note [The kept loss]
    A training loop keeps its last loss until the next one takes its place, and with it what hangs on the loss's graph: the
    scalar itself, and leaves that are no parameters with their gradients, such as the embeddings that LoRA with gradient
    checkpointing makes require one. A tape frees them after BACKWARD_END; here they go when the loop's variable is
    assigned again: after the next micro batch's forward, or after the step that follows it for the last of a window. The HF
    Trainer keeps the detached loss, so that all of it goes with the backward (transformers 5.17, trainer.py, training_step).
    A loop that also keeps the output by name, as LitGPT's does its logits, has it beside the next micro batch until the model
    has returned: a tape marks that point (``Mark.OUTPUT``), where all goes. Where batches differ in length the longest one
    comes after such as are drawn, never after itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zeroplan.core.buffers import Buffer
from zeroplan.engines.script import WORKSPACE, Cue, Script, script_of
from zeroplan.simulate.event_blocks import EventBlocks
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.expanded import EvaluationTape, ExpandedTape, Mark, Op
from zeroplan.techniques.base import KeptBlocks

#: Micro batches of an accumulation window that differ from each other: the first, a later one, and the last.
DISTINCT_MICRO_BATCHES = 3

#: Steps that are played after an evaluation or a save: the first may still use what it left, the second repeats.
STEPS_AFTERWARDS = 2

#: cuBLASLt's workspace, which torch takes for products with a bias (CUDABlas.cpp, gemm_and_bias).
CUBLASLT_WORKSPACE = 1 << 20

#: The stream that copies checkpointed inputs back, beyond those that engines number.
COPYING = 64


class EngineSchedule:
    """Hooks in which an engine allocates and frees at each point of a run. A hook that a subclass leaves out does nothing.

    Attributes:
        follows_modules: whether the four module hooks (`enter`, `exit`, `backward_enter`, `backward_exit`) are called. An
            engine without them is played faster.
    """

    follows_modules: bool = False

    def build(self) -> None:
        """The program makes the model."""

    def add_adapters(self) -> None:
        """peft adds its parameters to the model."""

    def initialize(self) -> None:
        """The program hands the model to the engine."""

    def forward_begin(self) -> None:
        """A micro batch's forward begins."""

    def enter(self, module: int) -> None:
        """A module's forward begins."""

    def exit(self, module: int) -> None:
        """A module's forward has returned."""

    def reference_begin(self) -> None:
        """A reference model's forward begins, whose modules are entered and left until :meth:`reference_end`."""

    def reference_end(self) -> None:
        """A reference model's forward has returned."""

    def backward_begin(self, boundary: bool) -> None:
        """A micro batch's backward begins; `boundary` says that an optimizer step follows it."""

    def backward_enter(self, module: int) -> None:
        """The gradient of a module's output has arrived."""

    def backward_exit(self, module: int) -> None:
        """The gradients of a module's inputs have been made."""

    def grad(self, param: int, handle: int) -> None:
        """A parameter's gradient is complete; from here on the schedule owns its block and has to free it."""

    def hold(self, place: int, handle: int) -> None:
        """A place of the model holds a block of the tape from here on, until :meth:`drop`."""

    def drop(self, place: int) -> None:
        """What a place of the model holds goes."""

    def backward_end(self, boundary: bool) -> None:
        """The backward has returned, and the engine closes the micro batch."""

    def graph_kept(self) -> object:
        """Return what the micro batch's graph still holds after its backward, which :meth:`graph_gone` will be given."""

    def graph_gone(self, held: object) -> None:
        """The last loss of a graph has gone, and with it the graph and what it held."""

    def step(self, applied: bool) -> None:
        """The optimizer steps; `applied` is False when the loss scaler discards the step."""

    def evaluation_begin(self) -> None:
        """A forward of an evaluation begins: without gradients, and without a backward after it."""
        self.forward_begin()

    def evaluation_end(self) -> None:
        """A forward of an evaluation has returned."""

    def generation_begin(self) -> None:
        """The program generates by the model, before a step."""

    def generation_end(self) -> None:
        """It has generated."""

    def save(self) -> None:
        """The program saves, between two steps, what the workload says."""


class CuePlayer:
    """Records event blocks, and calls a schedule's hooks between them."""

    def __init__(self, recorder: Recorder, schedule: EngineSchedule, event_blocks: EventBlocks, workspace: int) -> None:
        """`workspace`: bytes of one cuBLAS workspace; 0 leaves cuBLASLt's out, too."""
        self.recorder, self.grad, self.hold = recorder, schedule.grad, schedule.hold
        self.workspaces = [workspace, workspace, CUBLASLT_WORKSPACE, CUBLASLT_WORKSPACE] if workspace else [0] * 4
        self.hooks: dict[int, Callable[[int], None]] = {
            Op.ENTER: schedule.enter,
            Op.EXIT: schedule.exit,
            Op.BWD_ENTER: schedule.backward_enter,
            Op.BWD_EXIT: schedule.backward_exit,
            Op.MARK: self._mark,
            Op.DROP: schedule.drop,
        }
        self.marked: dict[int, Callable[[], None]] = {
            Mark.REFERENCE_BEGIN: schedule.reference_begin,
            Mark.REFERENCE_END: schedule.reference_end,
        }
        recorder.follow(event_blocks)

    def run(self, cues: Sequence[Cue]) -> None:
        """Record the cues' event blocks, each followed by its hook."""
        played, handle_of, hooks, grad = self.recorder.play, self.recorder.handle_of, self.hooks, int(Op.GRAD)
        for event_block, op, arg, aux in cues:
            if event_block is not None:  # hooks mostly follow one another
                played(event_block)
            if op == grad:
                self.grad(arg, handle_of(aux))
            elif op == WORKSPACE:
                self._workspace(arg, aux)
            elif op == Op.HOLD:
                self.hold(arg, handle_of(aux))
            elif op is not None:
                hooks[op](arg)

    def _mark(self, mark: int) -> None:
        self.marked[mark]()

    def _workspace(self, index: int, module: int) -> None:
        """A workspace is allocated by the first call and never freed."""
        if self.workspaces[index]:
            self.recorder.alloc(self.workspaces[index], Buffer.WORKSPACE, note=module)
            self.workspaces[index] = 0


@dataclass(slots=True)
class _Kept:
    """What a loss keeps: blocks of the tape, and what the schedule says that its graph holds."""

    blocks: list[int] = field(default_factory=list)
    held: object = None


@dataclass(frozen=True, slots=True)
class Run:
    """The part of a job that is played.

    Attributes:
        grad_accum: micro batches a step.
        steps: optimizer steps to play.
        skipped_steps: leading steps that the loss scaler discards.
        cublas_workspace: bytes of one cuBLAS workspace; 0 leaves cuBLASLt's out, too.
        detached_loss: the loop keeps the loss without its graph.
        saves: whether it saves, between two steps.
        longest_first: of micro batches that differ in length the first is the longest, and no later one is.
        blocks: what techniques keep beside the engine.
    """

    grad_accum: int
    steps: int
    skipped_steps: int = 0
    cublas_workspace: int = 0
    detached_loss: bool = False
    saves: bool = False
    longest_first: bool = False
    blocks: tuple[KeptBlocks, ...] = ()


def play(
    run: Run,
    tape: ExpandedTape,
    recorder: Recorder,
    schedule: EngineSchedule,
    *,
    own_linear: bool = False,
    warm: bool = False,
) -> None:
    """Records a whole run: build, initialisation, and `run.steps` steps, each event block of it ended by a mark.

    Marks are ``model``, ``init``, then ``fwd`` and ``bwd`` for every micro batch and ``step0``, ``step1``, …; before each
    step's, ``gen`` where the program generates. A tape's evaluation comes after those steps, ended by the mark ``eval``, then a
    save, ended by ``save``; two more steps follow, which repeat.

    Args:
        own_linear: the engine put a function of its own in place of ``torch.nn.functional.linear``.
        warm: cuBLAS has its workspaces from the initialisation on; the schedule has recorded them.
    """
    for nbytes in tape.buffers:
        recorder.alloc(nbytes, Buffer.MODEL_BUFFER)
    schedule.build()
    recorder.mark("model")
    schedule.add_adapters()
    schedule.initialize()
    for one in run.blocks:
        for nbytes in one.kept:
            recorder.alloc(nbytes, one.buffer)
    recorder.mark("init")
    script = script_of(tape, modules=schedule.follows_modules, own_linear=own_linear)
    player = _Player(script, recorder, schedule, run.cublas_workspace)
    if warm:
        player.workspaces[:2] = [0, 0]
    kept = _Kept()
    played = min(run.grad_accum, DISTINCT_MICRO_BATCHES)
    evaluation, order = tape.evaluation, [*script.shapes, script]
    if run.longest_first and script.shapes:
        order = [script, *script.shapes]
    steps = run.steps + -(-len(script.shapes) // played)  # lengths that change first, then the longest as often as any
    passed = 0
    afterwards = STEPS_AFTERWARDS if evaluation is not None or run.saves else 0
    for step in range(steps + afterwards):
        if evaluation is not None and step == steps:
            _evaluate(player, schedule, evaluation)
            recorder.mark("eval")
        if run.saves and step == steps:
            schedule.save()
            recorder.mark("save")
        if script.generation:
            schedule.generation_begin()
            player.run(script.generation)
            schedule.generation_end()
            recorder.mark("gen")
        previous, kept = kept, _Kept()
        for micro in range(played):
            boundary = micro == played - 1
            again = script.keeps_output and not run.longest_first
            micro_batch = order[passed % len(order) if again else min(passed, len(order) - 1)]
            passed += 1
            schedule.forward_begin()
            player.kept = (previous, kept)
            player.run(micro_batch.forward)
            player.drop(kept)
            recorder.mark("fwd")
            schedule.backward_begin(boundary)
            player.run(micro_batch.backward)
            player.place_returned(micro_batch)
            schedule.backward_end(boundary)
            kept = player.end(micro_batch)
            if run.detached_loss:
                player.drop(kept)
            recorder.mark("bwd")
        schedule.step(step >= run.skipped_steps)
        for one in run.blocks if step else ():
            for nbytes in one.passing:
                recorder.free_all([recorder.alloc(nbytes, one.temporary) for _ in range(one.together)])
        player.drop(previous)
        recorder.mark(f"step{step}")


def _evaluate(player: _Player, schedule: EngineSchedule, evaluation: EvaluationTape) -> None:
    """Record an evaluation: one batch, or as many as the loop joins before it takes their logits to the host.

    The first batch's logits are what is kept. A later one's are joined to it, which makes a third tensor; the last ones
    gathered stay by name until the next are there. Source: transformers 5.17, ``trainer_pt_utils.py`` (``EvalLoopContainer``).
    """
    alloc, free = player.recorder.alloc, player.recorder.free
    joined = last = -1
    for batch in range(evaluation.batches):
        schedule.evaluation_begin()
        player.run(player.script.evaluation)
        schedule.evaluation_end()
        if not evaluation.logits:
            continue
        made = alloc(evaluation.logits, Buffer.LOGITS)  # where the forward had them
        if evaluation.returned != evaluation.logits:
            cast = alloc(evaluation.returned, Buffer.LOGITS)
            free(made)
            made = cast
        size = evaluation.gathered or evaluation.returned
        if evaluation.gathered:
            whole = alloc(size, Buffer.LOGITS)
            free(made)
            made = whole
        if batch == 0:
            joined = made
            continue
        if last >= 0:
            free(last)
        last = made
        longer = alloc((batch + 1) * size, Buffer.LOGITS)
        free(joined)
        joined = longer
    for handle in (joined, last):
        if handle >= 0:
            free(handle)


class _Player(CuePlayer):
    """Plays one script again and again."""

    def __init__(self, script: Script, recorder: Recorder, schedule: EngineSchedule, workspace: int) -> None:
        super().__init__(recorder, schedule, script.event_blocks, workspace)
        self.script, self.schedule = script, schedule
        self.kept: tuple[_Kept, ...] = ()
        self.marked[Mark.OUTPUT] = self._drop_all

    def end(self, script: Script) -> _Kept:
        """Frees the inputs of a micro batch; returns what its loss keeps."""
        for storage in script.inputs:
            self.recorder.free(self.recorder.handle_of(storage))
        return _Kept([self.recorder.handle_of(storage) for storage in script.kept], self.schedule.graph_kept())

    def place_returned(self, script: Script) -> None:
        """Put what has come back from the host on the stream that copies it."""
        for storage in script.returned:
            self.recorder.place(self.recorder.handle_of(storage), COPYING)

    def _drop_all(self) -> None:
        for kept in self.kept:
            self.drop(kept)

    def drop(self, kept: _Kept) -> None:
        """Frees what an earlier loss kept."""
        self.recorder.free_all(kept.blocks)
        kept.blocks.clear()
        if kept.held is not None:
            self.schedule.graph_gone(kept.held)
            kept.held = None
