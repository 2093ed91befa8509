"""A pipeline stage's part of a tape, cut at block boundaries.

Note [Cutting a tape]
    A stage runs the events of its own blocks, and what the model does before its first block (masks, positions): every stage
    does that for itself. The embedding is the first stage's, what follows the blocks is the last's. A storage that the whole
    model frees elsewhere lives until the end of the stage's forward or backward, in whichever half that is. What a stage
    receives lies in buffers of its own, so frees of storages that other stages make are left out.

    Autograd adds up the residual stream's gradient in place, in the block of memory in which it arrived. On a stage that is a
    buffer for what it receives, to which nothing may be added, so the first sum is a new tensor.

    torch keeps a micro batch's output until its backward (``fwd_cache``), logits included, and makes buffers for the inputs
    and gradients of all micro batches of a step at once, for the whole run. The loss is not the stage's module's own, whose
    hooks have run before it.
    Source: torch/distributed/pipelining/stage.py (``_RecvInfo``, ``forward_one_chunk``, ``backward_one_chunk``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeroplan.core.errors import BadInput
from zeroplan.core.pipeline import Stage, block_number, holds
from zeroplan.core.tensor_parallel import EMBEDDING
from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op, TapeModule, blocks_of

#: The norm in front of the MLP, whose input is the residual stream, in the architectures of which stages are modelled.
_SECOND_NORM = "post_attention_layernorm"
#: Events within which the copy of a gradient is followed by the block whose product takes it, in a backward's second half.
_FREES = 16
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
        output: the storage of the stage's output, which the tape frees unless :func:`passing_on` has left it to the player; -1
            on the last.
        held: storages of its output that variables of the schedule name, and the player frees; empty where the tape does.
    """

    tape: ExpandedTape
    split: int
    inputs: int
    sent: int
    hidden: int
    returned: int = -1
    logits: int = -1
    weights: int = -1
    output: int = -1
    held: tuple[int, ...] = ()


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


def cut(
    tape: ExpandedTape, stage: Stage, *, token_parts: int = 1, copies: bool = False, holds_output: bool = False
) -> StageTape:
    """Cut one stage's micro batch out of a tape. See Note [Cutting a tape].

    Args:
        tape: the whole model's.
        stage: the stage.
        token_parts: ranks that share the tokens between blocks (:attr:`~zeroplan.core.parallel.ParallelLayout.token_parts`).
        copies: the stage's forward runs on a copy of what it received, and the loss is not the modules' own: its tape begins
            with that copy, and the player frees the logits. DeepSpeed's way.
        holds_output: the player frees the stage's output.
    """
    walk = _Cut(tape, stage)
    backward = running = False
    weights, halves = -1, (int(Op.MARK), int(Mark.WEIGHTS_BEGIN)) in zip(tape.op, tape.arg, strict=True)
    final = 2 if halves else 1
    last, place, inputs, split = max(walk.blocks.values()), -1, 0, 0  # -1: before the blocks, last + 1: behind them
    in_embedding = False
    sizes: dict[int, int] = {}
    hidden = _hidden_bytes(tape, walk) // token_parts
    residual, summed = -1, -1 if stage.is_last or not stage.end or halves else _first_sum(tape, walk, hidden)
    made_backward: list[int] = []
    held: list[int] = []
    output = logits = head = returned = -1
    copy = _output_of(tape, walk, hidden, stage.first - 1) if copies and not stage.is_first else -1
    if copy >= 0:
        walk.made[copy] = int(Kind.SAVED)
        walk.add(Op.ALLOC, copy, hidden, Kind.SAVED)
    root = next((index for index, module in enumerate(tape.modules) if module.parent < 0), -1)
    received: set[int] = set()  # gradients of that size that other stages make
    events = tape.events()
    # An enumeration's members are slow to read.
    alloc, free, grad, mark = int(Op.ALLOC), int(Op.FREE), int(Op.GRAD), int(Op.MARK)
    enter, leave, into, out_of = int(Op.ENTER), int(Op.EXIT), int(Op.BWD_ENTER), int(Op.BWD_EXIT)
    of_logits = int(Kind.LOGITS)
    for at, (op, arg, aux, kind, module) in enumerate(events):
        if op == mark:
            running = running or arg == Mark.FORWARD_BEGIN
            if arg == Mark.BACKWARD_BEGIN:
                _free_late(walk, 0)
                split, backward, place = len(walk.out), True, last + 1
            elif arg == Mark.WEIGHTS_BEGIN:
                _free_late(walk, 1)
                weights, place = len(walk.out), -1
            continue
        if op == (into if backward else enter) and arg in walk.blocks:
            place = walk.blocks[arg]
        elif not backward and op == enter and arg in walk.embedding:
            in_embedding = True
        here = _entered_next(walk, at) if weights >= 0 and op == alloc else None
        kept = _is_kept(stage, place if here is None else here, last, in_embedding or backward)
        if op == alloc:
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
                elif kind == of_logits and (copies or head < 0):
                    logits, head = arg if copies else -1, module
            elif backward and aux == hidden:
                received.add(arg)
        elif op == free:
            if arg in walk.made:
                if at == summed:
                    residual = 1 + max(*tape.arg, *walk.made)
                    walk.made[residual] = int(Kind.ACT_GRAD)
                    walk.add(alloc, residual, hidden, Kind.ACT_GRAD, module)
                    walk.late[1].append(residual)
                kept_on = not backward and (walk.made[arg] == of_logits or arg == output)
                if arg == logits:
                    pass
                elif kept and not kept_on and (backward or arg != copy):
                    walk.add(op, arg)
                elif kept_on and holds_output:
                    held.append(arg)
                elif kept_on:
                    walk.late[final if arg == output else 1].append(arg)
                else:
                    walk.late[(1 if weights < 0 else 2) if backward else 0].append(arg)
            elif kept and arg in received and residual in walk.late[1]:  # what stands for it on this stage
                walk.late[1].remove(residual)
                walk.add(op, residual)
        elif op == grad:
            if arg in walk.place and aux in walk.made and aux not in walk.shared:
                walk.add(op, walk.place[arg], aux)
        elif arg == root and op == leave and returned >= 0:
            pass  # the loss is none of its own
        elif arg not in walk.inside or stage.first <= walk.inside[arg] < stage.end:
            walk.add(op, arg)
        if not backward and op == leave:
            if arg == head and stage.is_last:
                if not copies:
                    walk.add(leave, root)
                returned = len(walk.out)
            if arg in walk.blocks and walk.blocks[arg] == last:
                place = last + 1
            in_embedding = in_embedding and arg not in walk.embedding
        elif backward and op == out_of and tape.modules[arg].name.rpartition(".")[2] == HEAD:
            for storage, param in walk.shared.items():
                walk.add(grad, walk.place[param], storage)
        elif backward and op == out_of and arg in walk.blocks and walk.blocks[arg] == (0 if weights < 0 else last):
            place = -1 if weights < 0 else last + 1
    made = [s for s in (residual, *made_backward) if s in walk.late[final]]
    sent = made[-1] if made else -1
    if sent < 0 and not stage.is_first:
        raise BadInput("the gradient that a stage sends is not found", where="--pp", remedy="use --pp 1")
    if not stage.is_first:
        walk.late[final].remove(sent)
    _free_late(walk, final)
    return StageTape(
        walk.out,
        split,
        inputs,
        -1 if stage.is_first else sent,
        hidden,
        split if returned < 0 else returned,
        logits,
        weights,
        output,
        tuple(held),
    )


def passing_on(part: StageTape, *, output: bool, gradient: bool) -> StageTape:
    """Return a stage's part whose output, or the gradient of whose input, goes to another stage of its rank.

    What the other stage is given stays in place of the buffer into which it would be received, until a later step's takes its
    place. Source: torch/distributed/pipelining/stage.py (``set_local_fwd_input``, ``set_local_bwd_input``)

    Raises:
        BadInput: a stage whose output is not found.
    """
    if not (output or gradient):
        return part
    if output and part.output < 0:
        raise BadInput("the hidden states that a stage passes on are not found", where="--schedule", remedy="use zero-bubble")
    passed = {*((part.output,) if output else ()), *((part.sent,) if gradient else ())}
    tape = part.tape
    kept = ExpandedTape(tape.modules, tape.params, buffers=tape.buffers)
    for op, arg, aux, kind, module in tape.events():
        if op == Op.FREE and arg in passed:
            continue
        named = int(Kind.PASSED) if op == Op.ALLOC and arg in passed else kind
        for column, value in zip(
            (kept.op, kept.arg, kept.aux, kept.kind, kept.module), (op, arg, aux, named, module), strict=True
        ):
            column.append(value)
    return replace(part, tape=kept)


def parts_on(
    stage: Stage,
    stages: Sequence[Stage],
    tape: ExpandedTape,
    behind: ExpandedTape,
    *,
    token_parts: int,
    mixed: bool,
    holds_output: bool,
    holds_sent: bool = False,
) -> tuple[StageTape, StageTape | None]:
    """Return a stage's part of a tape, and the one by which it plays backwards that are not halved, where others are.

    Args:
        stage: the stage.
        stages: all of its rank's.
        tape: the whole model's.
        behind: the one that stages behind the first play, with halves where the schedule has them.
        token_parts: see :func:`cut`.
        mixed: the schedule halves some backwards alone.
        holds_output: see :func:`cut`.
        holds_sent: see :class:`~zeroplan.engines.pipeline.PipelineRun`.
    """
    indices = {one.index for one in stages}
    several = mixed and not stage.is_first
    parts = [
        passing_on(
            cut(of, stage, token_parts=token_parts, holds_output=holds_output),
            output=stage.index + 1 in indices or (holds_sent and not stage.is_last),
            gradient=stage.index - 1 in indices,
        )
        for of in ((behind, tape) if several else (tape if stage.is_first else behind,))
    ]
    return parts[0], parts[1] if several else None


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


def _entered_next(walk: _Cut, at: int) -> int | None:
    """Return the block that is entered right behind an event: what is made for it there is copied by no module."""
    tape = walk.tape
    for op, arg in zip(tape.op[at + 1 : at + 1 + _FREES], tape.arg[at + 1 : at + 1 + _FREES], strict=True):
        if op == Op.BWD_ENTER and arg in walk.blocks:
            return walk.blocks[arg]
        if op not in (Op.FREE, Op.BWD_EXIT, Op.BWD_ENTER) or (op == Op.BWD_ENTER and arg in walk.inside):
            break
    return None


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
    added, free, new = -1, -1, False
    begin = list(zip(tape.op, tape.arg, strict=True)).index((int(Op.MARK), int(Mark.BACKWARD_BEGIN)))
    alloc, end = int(Op.ALLOC), int(Op.FREE)
    events = zip(tape.op[begin:], tape.arg[begin:], tape.aux[begin:], tape.module[begin:], strict=True)
    for at, (op, arg, aux, module) in enumerate(events, begin):
        if op == alloc:
            if aux == hidden and module in norms:
                added, free, new = arg, -1, False
            elif added >= 0 and free < 0 and aux == hidden and module == block:
                new = True
        elif op == end and arg == added:
            free = at
    if free < 0:
        raise BadInput("its blocks have another form than those that are modelled", where="--pp", remedy="use --pp 1")
    return -1 if new else free


def _hidden_bytes(tape: ExpandedTape, walk: _Cut) -> int:
    """Return the bytes of all tokens' hidden states: the largest tensor that the embedding's forward makes."""
    largest = 0
    for op, arg, aux, module in zip(tape.op, tape.arg, tape.aux, tape.module, strict=True):
        if op == Op.MARK and arg == Mark.BACKWARD_BEGIN:
            break
        if op == Op.ALLOC and module in walk.embedding:
            largest = max(largest, aux)
    return largest
