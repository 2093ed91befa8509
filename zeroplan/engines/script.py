"""A tape made ready to be played many times: event blocks that are recorded as a whole, and what an engine does between them.

See Note [Event blocks] in ``zeroplan/simulate/event_blocks.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from zeroplan.core.buffers import Buffer
from zeroplan.simulate.event_blocks import EventBlocks
from zeroplan.tape.edit import renumbered
from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op, TapeModule

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
    Kind.COMM: Buffer.COMM_ACTIVATION,
    Kind.PASSED: Buffer.COMM_PIPELINE,
    Kind.RETURNED: Buffer.ACTIVATION_CHECKPOINT,
}

#: Beside :class:`zeroplan.tape.expanded.Op`: a thread's first call of cuBLAS or cuBLASLt. A cue's `arg` is the workspace's
#: index: cuBLAS's of the forward's and of the backward's thread, then cuBLASLt's of both; `aux` is the module that calls.
WORKSPACE = 99


class Cue(NamedTuple):
    """Hooks that follow an event block of allocations and frees.

    Attributes:
        event_block: what is recorded first, by its number; None for nothing.
        op: a module hook, GRAD, HOLD or DROP of :class:`zeroplan.tape.expanded.Op`, MARK where a reference begins or ends, or
            WORKSPACE; None at the end.
        arg: as in the tape's event.
        aux: as in the tape's event.
    """

    event_block: int | None
    op: int | None = None
    arg: int = 0
    aux: int = 0


@dataclass(frozen=True, slots=True)
class Script:
    """One micro batch. Storages are numbered as in the tape.

    Attributes:
        forward: the forward's cues.
        backward: the backward's.
        inputs: storages of the batch, freed once the backward has returned.
        kept: what the loss keeps until another takes its place, in the order in which it goes.
        event_blocks: what the cues' numbers stand for.
        evaluation: the cues of an evaluation's forward, the batch's own storages included; empty without one.
        shapes: the micro batches that come before this one, of other lengths.
        generation: the cues of what is generated before a step, which no hook follows; empty without any.
        keeps_output: whether the loop keeps the model's output until it has the next one.
        returned: storages that the copying stream makes.
    """

    forward: tuple[Cue, ...]
    backward: tuple[Cue, ...]
    inputs: tuple[int, ...]
    kept: tuple[int, ...]
    event_blocks: EventBlocks
    evaluation: tuple[Cue, ...] = ()
    shapes: tuple[Script, ...] = ()
    generation: tuple[Cue, ...] = ()
    keeps_output: bool = False
    returned: tuple[int, ...] = ()


#: Scripts that are kept: the stages and ranks of a request play the same few tapes.
MOST_SCRIPTS = 4


@lru_cache(maxsize=MOST_SCRIPTS)
def script_of(tape: ExpandedTape, *, modules: bool, own_linear: bool) -> Script:
    """Return the tape's forward and backward, with module hooks only if `modules`.

    Workspace cues stand behind the first result of the first module of each half that multiplies matrices, and of the first
    that adds a bias in the same kernel: cuBLAS and cuBLASLt take a workspace for each thread that calls them, once the result
    has its memory, and autograd runs the backward (and recomputations within it) in its own. Stage 3's own linear function
    adds the bias apart (zero/linear.py).

    Args:
        modules: whether the engine has module hooks.
        own_linear: whether it put a function of its own in place of ``torch.nn.functional.linear``.
    """
    event_blocks = EventBlocks()
    script = _micro_batch(tape, event_blocks, modules=modules, own_linear=own_linear)
    shapes = [
        _micro_batch(renumbered(shape, tape.first_storage(at)), event_blocks, modules=modules, own_linear=own_linear)
        for at, shape in enumerate(tape.shapes)
    ]
    return replace(
        script,
        evaluation=_evaluation_cues(tape, modules, event_blocks),
        shapes=tuple(shapes),
        generation=_generation_cues(tape, event_blocks),
    )


def _micro_batch(tape: ExpandedTape, event_blocks: EventBlocks, *, modules: bool, own_linear: bool) -> Script:
    """One micro batch's cues; arguments as of :func:`script_of`."""
    alloc, free = int(Op.ALLOC), int(Op.FREE)
    ends = (0, tape.marks[Mark.BACKWARD_BEGIN], tape.marks[Mark.BACKWARD_END])
    played = []
    for half, (begin, end) in enumerate(pairwise(ends)):
        workspaces = workspaces_of(tape, range(begin, end), half, own_linear=own_linear)
        played.append(cues_of(tape, range(begin, end), workspaces, modules, event_blocks))
    allocated = {arg: kind for op, arg, kind in zip(tape.op, tape.arg, tape.kind, strict=True) if op == alloc}
    last = [arg for op, arg in zip(tape.op[ends[2] :], tape.arg[ends[2] :], strict=True) if op == free]
    return Script(
        forward=played[0],
        backward=played[1],
        inputs=tuple(arg for arg in last if allocated[arg] == Kind.INPUT),
        kept=tuple(arg for arg in last if allocated[arg] != Kind.INPUT),
        event_blocks=event_blocks,
        keeps_output=int(Mark.OUTPUT) in tape.marks,
        returned=tuple(arg for arg, kind in allocated.items() if kind == Kind.RETURNED),
    )


def _evaluation_cues(tape: ExpandedTape, modules: bool, event_blocks: EventBlocks) -> tuple[Cue, ...]:
    """The cues of the tape's evaluation; its thread has its workspaces."""
    if tape.evaluation is None:
        return ()
    forward = renumbered(tape.evaluation.forward, tape.first_storage(len(tape.shapes)))
    return cues_of(forward, range(len(forward)), [], modules, event_blocks)


def _generation_cues(tape: ExpandedTape, event_blocks: EventBlocks) -> tuple[Cue, ...]:
    if tape.generation is None:
        return ()
    last = len(tape.further_tapes) - 1
    events = renumbered(tape.generation, tape.first_storage(last))
    return cues_of(events, range(len(events)), [], False, event_blocks)


def workspaces_of(tape: ExpandedTape, half: range, number: int, *, own_linear: bool = False) -> list[tuple[int, int, int]]:
    """Before which event of the half a workspace is taken, its index, and the module that calls. See :func:`script_of`."""
    products = [_multiplies(m.type) for m in tape.modules]
    biased = [_adds_bias(m, tape, own_linear=own_linear) for m in tape.modules]
    enters = (int(Op.ENTER), int(Op.BWD_ENTER))
    entries = [at for at in half if tape.op[at] in enters]
    first = next((at for at in entries if products[tape.arg[at]]), None)
    first_biased = next((at for at in entries if biased[tape.arg[at]] and tape.op[at] == Op.ENTER), None)
    found = [(half.start, number, -1) if first is None else (_after_result(tape, first, half), number, tape.arg[first])]
    if first_biased is not None:
        found.append((_after_result(tape, first_biased, half), 2 + number, tape.arg[first_biased]))
    return sorted(found)


def _after_result(tape: ExpandedTape, entry: int, half: range) -> int:
    """Return the event after the result of the first product in the module entered at `entry`, casts of its operands left
    aside.
    """
    for at in range(entry + 1, half.stop):
        if tape.op[at] == Op.ALLOC and tape.kind[at] != Kind.CAST:
            return at + 1
    return entry + 1


def _multiplies(module_type: str) -> bool:
    """Whether a module's forward calls cuBLAS. Rotary angles of a text are a product of matrices, those of an image are made
    element by element (transformers 5.17: 165 of 168 classes, 27 of 30).
    """
    return any(word in module_type for word in ("Linear", "Conv1D")) or (
        "Rotary" in module_type and "VisionRotary" not in module_type
    )


def _adds_bias(module: TapeModule, tape: ExpandedTape, *, own_linear: bool) -> bool:
    shapes = [len(tape.params[p].shape) for p in module.params]
    linear = "Linear" in module.type and not own_linear
    return (linear or "Conv1D" in module.type) and sorted(shapes) == [1, 2]


#: Events that no cue is made of where the engine has no module hooks.
_HOOKS = frozenset({Op.ENTER, Op.EXIT, Op.BWD_ENTER, Op.BWD_EXIT, Op.MARK})


#: The marks that a cue is made of; the last of them also where the engine has no module hooks.
_CUED = frozenset({int(Mark.REFERENCE_BEGIN), int(Mark.REFERENCE_END), int(Mark.OUTPUT)})


def cues_of(
    tape: ExpandedTape, half: range, workspaces: list[tuple[int, int, int]], modules: bool, event_blocks: EventBlocks
) -> tuple[Cue, ...]:
    """The cues of one half of a tape, with module hooks only if `modules`; its event blocks are added to `event_blocks`."""
    buffers = [BUFFER_OF_KIND[Kind(kind)] for kind in range(len(Kind))]
    alloc, free, silent = int(Op.ALLOC), int(Op.FREE), frozenset() if modules else _HOOKS
    cues: list[Cue] = []
    at = half.start
    for end, *workspace in (*workspaces, (half.stop, -1, -1)):
        part = slice(at, end)
        columns = (tape.op, tape.arg, tape.aux, tape.kind, tape.module)
        for op, arg, aux, kind, module in zip(*(column[part] for column in columns), strict=True):
            if op == alloc:
                event_blocks.alloc(arg, aux, buffers[kind], module)
            elif op == free:
                event_blocks.free(arg)
            elif arg in _CUED if op == Op.MARK and (arg == Mark.OUTPUT or op not in silent) else op not in silent:
                cues.append(Cue(event_blocks.close(), op, arg, aux))
        if end < half.stop or workspace[0] >= 0:
            cues.append(Cue(event_blocks.close(), WORKSPACE, *workspace))
        at = end
    return (*cues, Cue(event_blocks.close()))
