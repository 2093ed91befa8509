"""Plays a model's tape for as many micro batches and steps as a job takes, with an engine's schedule laid over it.

Note [The kept loss]
    A training loop keeps its last loss until the next one takes its place, and with it what hangs on the loss's graph: the
    scalar itself, and leaves that are no parameters with their gradients, such as the embeddings that LoRA with gradient
    checkpointing makes require one. A tape frees them after BACKWARD_END; here they go when the loop's variable is
    assigned again: after the next micro batch's forward, or after the step that follows it for the last of a window. The HF
    Trainer keeps the detached loss, so that all of it goes with the backward (transformers 5.17, trainer.py, training_step).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeroplan.core.buffers import Buffer
from zeroplan.core.tape import ExpandedTape, Op
from zeroplan.engines.script import WORKSPACE, Cue, Script, Scripts
from zeroplan.simulate.event_blocks import EventBlocks
from zeroplan.simulate.recorder import Recorder

#: Micro batches of an accumulation window that differ from each other: the first, a later one, and the last.
DISTINCT_MICRO_BATCHES = 3

#: cuBLASLt's workspace, which torch takes for products with a bias (CUDABlas.cpp, gemm_and_bias).
CUBLASLT_WORKSPACE = 1 << 20


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

    def backward_begin(self, boundary: bool) -> None:
        """A micro batch's backward begins; `boundary` says that an optimizer step follows it."""

    def backward_enter(self, module: int) -> None:
        """The gradient of a module's output has arrived."""

    def backward_exit(self, module: int) -> None:
        """The gradients of a module's inputs have been made."""

    def grad(self, param: int, handle: int) -> None:
        """A parameter's gradient is complete; from here on the schedule owns its block and has to free it."""

    def backward_end(self, boundary: bool) -> None:
        """The backward has returned, and the engine closes the micro batch."""

    def step(self, applied: bool) -> None:
        """The optimizer steps; `applied` is False when the loss scaler discards the step."""


class CuePlayer:
    """Records event blocks, and calls a schedule's hooks between them."""

    def __init__(self, recorder: Recorder, schedule: EngineSchedule, event_blocks: EventBlocks, workspace: int) -> None:
        """`workspace`: bytes of one cuBLAS workspace; 0 leaves cuBLASLt's out, too."""
        self.recorder, self.grad = recorder, schedule.grad
        self.workspaces = [workspace, workspace, CUBLASLT_WORKSPACE, CUBLASLT_WORKSPACE] if workspace else [0] * 4
        self.hooks: dict[int, Callable[[int], None]] = {
            Op.ENTER: schedule.enter,
            Op.EXIT: schedule.exit,
            Op.BWD_ENTER: schedule.backward_enter,
            Op.BWD_EXIT: schedule.backward_exit,
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
            elif op is not None:
                hooks[op](arg)

    def _workspace(self, index: int, module: int) -> None:
        """A workspace is allocated by the first call and never freed."""
        if self.workspaces[index]:
            self.recorder.alloc(self.workspaces[index], Buffer.WORKSPACE, note=module)
            self.workspaces[index] = 0


@dataclass(frozen=True, slots=True)
class Run:
    """The part of a job that is played.

    Attributes:
        grad_accum: micro batches a step.
        steps: optimizer steps to play.
        skipped_steps: leading steps that the loss scaler discards.
        cublas_workspace: bytes of one cuBLAS workspace; 0 leaves cuBLASLt's out, too.
        detached_loss: the loop keeps the loss without its graph.
    """

    grad_accum: int
    steps: int
    skipped_steps: int = 0
    cublas_workspace: int = 0
    detached_loss: bool = False


def play(
    run: Run,
    tape: ExpandedTape,
    recorder: Recorder,
    schedule: EngineSchedule,
    *,
    own_linear: bool = False,
    warm: bool = False,
    scripts: Scripts | None = None,
) -> None:
    """Records a whole run: build, initialisation, and `run.steps` steps, each event block of it ended by a mark.

    Marks are ``model``, ``init``, then ``fwd`` and ``bwd`` for every micro batch and ``step0``, ``step1``, …

    Args:
        run: how much is played.
        tape: the expanded tape.
        recorder: where it is recorded.
        schedule: what the engine does.
        own_linear: the engine put a function of its own in place of ``torch.nn.functional.linear``.
        warm: cuBLAS has its workspaces from the initialisation on; the schedule has recorded them.
        scripts: the scripts of other runs of the same tape.
    """
    schedule.build()
    recorder.mark("model")
    schedule.add_adapters()
    schedule.initialize()
    recorder.mark("init")
    script = (scripts or Scripts()).of(tape, modules=schedule.follows_modules, own_linear=own_linear)
    player = _Player(script, recorder, schedule, run.cublas_workspace)
    if warm:
        player.workspaces[:2] = [0, 0]
    kept: list[int] = []
    played = min(run.grad_accum, DISTINCT_MICRO_BATCHES)
    for step in range(run.steps):
        previous, kept = kept, []
        for micro in range(played):
            boundary = micro == played - 1
            schedule.forward_begin()
            player.run(script.forward)
            player.drop(kept)
            recorder.mark("fwd")
            schedule.backward_begin(boundary)
            player.run(script.backward)
            schedule.backward_end(boundary)
            kept = player.end()
            if run.detached_loss:
                player.drop(kept)
            recorder.mark("bwd")
        schedule.step(step >= run.skipped_steps)
        player.drop(previous)
        recorder.mark(f"step{step}")


class _Player(CuePlayer):
    """Plays one script again and again."""

    def __init__(self, script: Script, recorder: Recorder, schedule: EngineSchedule, workspace: int) -> None:
        super().__init__(recorder, schedule, script.event_blocks, workspace)
        self.script = script

    def end(self) -> list[int]:
        """Frees the inputs; returns the blocks that the loss keeps."""
        for storage in self.script.inputs:
            self.recorder.free(self.recorder.handle_of(storage))
        return [self.recorder.handle_of(storage) for storage in self.script.kept]

    def drop(self, kept: list[int]) -> None:
        """Frees what an earlier loss kept."""
        for handle in kept:
            self.recorder.free(handle)
        kept.clear()
