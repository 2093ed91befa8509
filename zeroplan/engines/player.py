"""Plays a model's tape for as many micro batches and steps as a job takes, with a stage's schedule laid over it.

Note [The kept loss]
    A training loop keeps its last loss until the next one takes its place, and with it what hangs on the loss's graph: the
    scalar itself, and leaves that are no parameters with their gradients, such as the embeddings that LoRA with gradient
    checkpointing makes require one. A tape frees them after BACKWARD_END; here they go when the loop's variable is
    assigned again: after the next micro batch's forward, or after the step that follows it for the last of a window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from zeroplan.core.buffers import Buffer
from zeroplan.core.tape import Kind, Mark, Op, Stream, TapeModule
from zeroplan.core.workload import Workload
from zeroplan.simulate.stream import Recorder

#: By Kind, the name of a tape's allocation.
BUFFER_OF_KIND = {
    Kind.SAVED: Buffer.ACTIVATION,
    Kind.TEMP: Buffer.ACTIVATION_TEMP,
    Kind.GRAD: Buffer.GRAD_FULL,
    Kind.LOGITS: Buffer.LOGITS,
    Kind.LOSS: Buffer.ACTIVATION_TEMP,
    Kind.CHECKPOINT: Buffer.ACTIVATION_CHECKPOINT,
    Kind.CAST: Buffer.ACTIVATION,
    Kind.WORKSPACE: Buffer.WORKSPACE,
    Kind.INPUT: Buffer.INPUT,
    Kind.ACT_GRAD: Buffer.ACTIVATION_TEMP,
}

#: Micro batches of an accumulation window that differ from each other: the first, a later one, and the last.
DISTINCT_MICRO_BATCHES = 3

_WORKSPACE = 99  # beside tape.Op: a thread's first call of cuBLAS or cuBLASLt; arg is an index into workspaces

#: cuBLASLt's workspace, which torch takes for products with a bias (CUDABlas.cpp, gemm_and_bias).
CUBLASLT_WORKSPACE = 1 << 20

Event = tuple[int, int, int, Buffer, int]


class StageSchedule(Protocol):
    """What a stage does at each point of a run. `follows_modules` False leaves out the four module hooks."""

    follows_modules: bool

    def build(self) -> None:
        """The model is made."""

    def add_adapters(self) -> None:
        """peft adds its parameters."""

    def initialize(self) -> None:
        """``deepspeed.initialize``."""

    def forward_begin(self) -> None:
        """A micro batch's forward begins."""

    def enter(self, module: int) -> None:
        """A module's forward begins."""

    def exit(self, module: int) -> None:
        """A module's forward has returned."""

    def backward_begin(self, boundary: bool) -> None:
        """A micro batch's backward begins; `boundary` says that a step follows it."""

    def backward_enter(self, module: int) -> None:
        """The gradient of a module's output has arrived."""

    def backward_exit(self, module: int) -> None:
        """The gradients of a module's inputs have been made."""

    def grad(self, param: int, handle: int) -> None:
        """A parameter's gradient is complete; the schedule owns its block from here on."""

    def backward_end(self, boundary: bool) -> None:
        """The backward has returned and the engine closes the micro batch."""

    def step(self, applied: bool) -> None:
        """``engine.step()``; `applied` False when the loss scaler discards it."""


class PlayedJob(Protocol):
    """What the player reads of a job."""

    @property
    def workload(self) -> Workload:
        """For the number of micro batches in a window."""

    @property
    def steps(self) -> int:
        """Optimizer steps to play."""

    @property
    def skipped_steps(self) -> int:
        """Leading steps that the loss scaler discards."""

    @property
    def cublas_workspace(self) -> int:
        """Bytes of one cuBLAS workspace; 0 leaves cuBLASLt's out, too."""


def play(job: PlayedJob, stream: Stream, recorder: Recorder, schedule: StageSchedule, *, own_linear: bool = False) -> None:
    """Records a whole run: build, initialisation, and `job.steps` steps, each stretch of it ended by a mark.

    Marks are ``model``, ``init``, then ``fwd`` and ``bwd`` for every micro batch and ``step0``, ``step1``, …
    `own_linear` says that the engine put a function of its own in place of ``torch.nn.functional.linear``.
    """
    schedule.build()
    recorder.mark("model")
    schedule.add_adapters()
    schedule.initialize()
    recorder.mark("init")
    forward, backward, tail = split(stream, modules=schedule.follows_modules, own_linear=own_linear)
    player = _Player(stream, recorder, schedule, job.cublas_workspace)
    kept: list[int] = []
    played = min(job.workload.grad_accum, DISTINCT_MICRO_BATCHES)
    for step in range(job.steps):
        previous, kept = kept, []
        for micro in range(played):
            boundary = micro == played - 1
            schedule.forward_begin()
            player.run(forward)
            player.drop(kept)
            recorder.mark("fwd")
            schedule.backward_begin(boundary)
            player.run(backward)
            schedule.backward_end(boundary)
            kept = player.end(tail)
            recorder.mark("bwd")
        schedule.step(step >= job.skipped_steps)
        player.drop(previous)
        recorder.mark(f"step{step}")


def split(stream: Stream, *, modules: bool, own_linear: bool) -> tuple[list[Event], list[Event], list[Event]]:
    """The tape's forward, its backward and what follows it as lists of events, module events only if `modules`.

    Workspace events stand before the first module of each half that multiplies matrices, and before the first that adds
    a bias in the same kernel: cuBLAS and cuBLASLt take a workspace for each thread that calls them, and autograd runs the
    backward (and recomputations within it) in its own. Stage 3's own linear function adds the bias apart (zero/linear.py).
    """
    products = [_multiplies(m.type) for m in stream.modules]
    biased = [_adds_bias(m, stream, own_linear=own_linear) for m in stream.modules]
    parts: tuple[list[Event], list[Event], list[Event]] = ([], [], [])
    half, wanted = 0, [True, True, True, True]  # cuBLAS by half, then cuBLASLt by half
    buffers = [BUFFER_OF_KIND[Kind(kind)] for kind in range(len(Kind))]
    hooks = (Op.ENTER, Op.EXIT, Op.BWD_ENTER, Op.BWD_EXIT)
    for op, arg, aux, kind, module in zip(stream.op, stream.arg, stream.aux, stream.kind, stream.module, strict=True):
        if op == Op.MARK:
            half = {Mark.BACKWARD_BEGIN: 1, Mark.BACKWARD_END: 2}.get(Mark(arg), half)
            continue
        if op in hooks:
            if half < 2 and wanted[half] and op in (Op.ENTER, Op.BWD_ENTER) and products[arg]:
                parts[half].append((_WORKSPACE, half, 0, Buffer.WORKSPACE, arg))
                wanted[half] = False
            if half < 2 and wanted[2 + half] and op == Op.ENTER and biased[arg]:
                parts[half].append((_WORKSPACE, 2 + half, 0, Buffer.WORKSPACE, arg))
                wanted[2 + half] = False
            if not modules:
                continue
        parts[half].append((op, arg, aux, buffers[kind], module))
    for half in (0, 1):
        if wanted[half]:
            parts[half].insert(0, (_WORKSPACE, half, 0, Buffer.WORKSPACE, -1))
    return parts


def _multiplies(module_type: str) -> bool:
    return any(word in module_type for word in ("Linear", "Conv1D", "Rotary"))


def _adds_bias(module: TapeModule, stream: Stream, *, own_linear: bool) -> bool:
    shapes = [len(stream.params[p].shape) for p in module.params]
    linear = "Linear" in module.type and not own_linear
    return (linear or "Conv1D" in module.type) and sorted(shapes) == [1, 2]


class _Player:
    def __init__(self, stream: Stream, recorder: Recorder, schedule: StageSchedule, workspace: int) -> None:
        self.recorder = recorder
        self.workspaces = [workspace, workspace, CUBLASLT_WORKSPACE, CUBLASLT_WORKSPACE] if workspace else [0] * 4
        self.grad = schedule.grad
        self.hooks: dict[int, Callable[[int], None]] = {
            Op.ENTER: schedule.enter,
            Op.EXIT: schedule.exit,
            Op.BWD_ENTER: schedule.backward_enter,
            Op.BWD_EXIT: schedule.backward_exit,
        }
        storages = [arg for op, arg in zip(stream.op, stream.arg, strict=True) if op == Op.ALLOC]
        self.live = [-1] * (max(storages, default=-1) + 1)
        self.inputs = {
            arg
            for op, arg, kind in zip(stream.op, stream.arg, stream.kind, strict=True)
            if op == Op.ALLOC and kind == Kind.INPUT
        }

    def end(self, events: list[Event]) -> list[int]:
        """Frees the inputs; returns the blocks that the loss keeps."""
        kept = []
        for op, arg, *_ in events:
            if op == Op.FREE:
                if arg in self.inputs:
                    self.recorder.free(self.live[arg])
                else:
                    kept.append(self.live[arg])
        return kept

    def drop(self, kept: list[int]) -> None:
        """Frees what an earlier loss kept."""
        for handle in kept:
            self.recorder.free(handle)
        kept.clear()

    def run(self, events: list[Event]) -> None:
        alloc, free, live, hooks = self.recorder.alloc, self.recorder.free, self.live, self.hooks
        op_alloc, op_free, op_grad = int(Op.ALLOC), int(Op.FREE), int(Op.GRAD)
        for op, arg, aux, buffer, module in events:
            if op == op_alloc:
                live[arg] = alloc(aux, buffer, note=module)
            elif op == op_free:
                free(live[arg])
            elif op == op_grad:
                self.grad(arg, live[aux])
            elif op == _WORKSPACE:
                if self.workspaces[arg]:
                    alloc(self.workspaces[arg], buffer, note=module)
                    self.workspaces[arg] = 0
            else:
                hooks[op](arg)
