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

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zeroplan.core.errors import BadInput
from zeroplan.core.pipeline import Stage, block_number, holds
from zeroplan.core.tensor_parallel import EMBEDDING
from zeroplan.tape.edit import EventWriter, TapeEdit, fresh_storages
from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op, TapeEvent, blocks_of

#: The norm in front of the MLP, whose input is the residual stream, in the architectures of which stages are modelled.
_SECOND_NORM = "post_attention_layernorm"
#: Events within which the copy of a gradient is followed by the block whose product takes it, in a backward's second half.
_FREES = 16
#: The head's name in them.
HEAD = "lm_head"
_HOOKS = frozenset({int(Op.ENTER), int(Op.EXIT), int(Op.BWD_ENTER), int(Op.BWD_EXIT)})


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


class _StagePattern:
    """What a stage's part is cut by, found in the whole tape.

    Attributes:
        tape, stage: what is cut, and for whom.
        blocks: by a block's module, the block's number.
        inside: likewise by each module that lies in one.
        last: the last block's number.
        embedding: the embedding's modules.
        params: the stage's parameters.
        place: by each of them, its index on the stage.
        shared: by the storage of its gradient that the head makes, a parameter that the head has from the embedding.
        begin, turn, weights: the events with which the forward, the backward and its second half begin; `weights` is the
            length of a tape that has none.
        hidden: bytes of the hidden states that stages send each other.
        output: the storage of the stage's output; -1 on the last.
    """

    def __init__(self, tape: ExpandedTape, stage: Stage, token_parts: int) -> None:
        self.tape, self.stage = tape, stage
        self.blocks = {index: block_number(tape.modules[index].name) for index in blocks_of(tape.modules)}
        self.inside = self._members()
        self.last = max(self.blocks.values())
        self.embedding = {i for i, module in enumerate(tape.modules) if module.name.rpartition(".")[2] == EMBEDDING}
        homes = tape.parameters.blocks
        self.params = [p for p, param in enumerate(tape.params) if holds(stage, param.name, homes[p])]
        self.place = {p: at for at, p in enumerate(self.params)}
        self.shared = self._shared()
        self.begin, self.turn = tape.marks[Mark.FORWARD_BEGIN], tape.backward
        self.weights = tape.marks.get(Mark.WEIGHTS_BEGIN, len(tape))
        self.hidden = self._hidden_bytes() // token_parts
        self.output = -1 if stage.is_last else self.output_of(stage.end - 1)

    @property
    def halved(self) -> bool:
        """Whether the backward has a second half."""
        return self.weights < len(self.tape)

    def half(self, at: int) -> int:
        """Return whether an event is the forward's (0), the backward's (1) or its second half's (2)."""
        return int(at >= self.turn) + int(at >= self.weights)

    def _members(self) -> dict[int, int]:
        found = dict(self.blocks)
        for index, module in enumerate(self.tape.modules):
            if module.parent in found and index not in found:
                found[index] = found[module.parent]
        return found

    def _shared(self) -> dict[int, int]:
        if not (self.stage.tied and self.stage.is_last):
            return {}
        edit = TapeEdit(self.tape)
        made = {self.tape.arg[at]: self.tape.module[at] for at in edit.made.values() if self.tape.module[at] >= 0}
        heads = {storage for storage, module in made.items() if self.is_head(module)}
        grads = ((self.tape.arg[at], self.tape.aux[at]) for at in edit.gradients)
        return {storage: param for param, storage in grads if param in self.place and storage in heads}

    def is_head(self, module: int) -> bool:
        """Return whether a module is the language model's head."""
        return self.tape.modules[module].name.rpartition(".")[2] == HEAD

    def _hidden_bytes(self) -> int:
        """Return the bytes of all tokens' hidden states: the largest tensor that the embedding's forward makes."""
        made = zip(self.tape.op[: self.turn], self.tape.aux, self.tape.module, strict=False)
        return max((aux for op, aux, module in made if op == Op.ALLOC and module in self.embedding), default=0)

    def output_of(self, block: int) -> int:
        """Return the storage of a block's output: the last of the hidden states' size that its forward makes. Block -1 is the
        embedding.
        """
        makers = self.embedding if block < 0 else {module for module, number in self.blocks.items() if number == block}
        tape = self.tape
        made = range(self.turn - 1, -1, -1)
        found = (at for at in made if tape.op[at] == Op.ALLOC and tape.aux[at] == self.hidden and tape.module[at] in makers)
        return next((tape.arg[at] for at in found), -1)

    def logits(self) -> list[int]:
        """Return the events that make logits on this stage."""
        if not self.stage.is_last:
            return []
        tape = self.tape
        return [at for at in range(self.begin, self.turn) if tape.op[at] == Op.ALLOC and tape.kind[at] == Kind.LOGITS]

    def kept(self) -> list[bool]:
        """Return of each event whether this stage runs what happens there."""
        stage, behind = self.stage, self.last + 1
        # Of what is done before the blocks every stage has the forward, but for the embedding; nobody but the first the rest.
        runs = [stage.first <= block < stage.end for block in range(behind)]
        forward, backward = ([*runs, stage.is_last, before] for before in (True, stage.is_first))
        places = self._places()
        found = [forward[place] for place in places[: self.turn]] + [backward[place] for place in places[self.turn :]]
        if not stage.is_first:
            for begin, end in self._embedding_spans():
                found[begin:end] = [places[at] >= 0 and found[at] for at in range(begin, end)]
        return found

    def _embedding_spans(self) -> list[tuple[int, int]]:
        """Return where the embedding's forward begins and ends."""
        hooks = [at for at in range(self.turn) if self.tape.op[at] in _HOOKS and self.tape.arg[at] in self.embedding]
        begins = (at for at in hooks if self.tape.op[at] == Op.ENTER)
        return [(at, next((end for end in hooks if end > at and self.tape.op[end] == Op.EXIT), self.turn)) for at in begins]

    def _places(self) -> list[int]:
        """Return of each event the block in which it happens; -1 before the blocks, one more than the last behind them."""
        last, behind = self.last, self.last + 1
        return [
            *self._walk(range(self.turn), Op.ENTER, Op.EXIT, -1, (last, behind)),
            *self._walk(range(self.turn, self.weights), Op.BWD_ENTER, Op.BWD_EXIT, behind, (0, -1)),
            *self._walk(range(self.weights, len(self.tape)), Op.BWD_ENTER, Op.BWD_EXIT, -1, (last, behind)),
        ]

    def _walk(self, span: range, enter: int, leave: int, place: int, final: tuple[int, int]) -> Iterator[int]:
        """Yield the places of a span that begins at `place`: `final` is its last block, and the place behind that."""
        tape, blocks, block, after = self.tape, self.blocks, *final
        enter, leave, alloc = int(enter), int(leave), int(Op.ALLOC)
        ahead = span.start == self.weights
        for at, op, arg in zip(span, tape.op[span.start : span.stop], tape.arg[span.start : span.stop], strict=True):
            if op == enter and arg in blocks:
                place = blocks[arg]
            following = self._entered_next(at) if ahead and op == alloc else None
            yield place if following is None else following
            if op == leave and blocks.get(arg) == block:
                place = after

    def _entered_next(self, at: int) -> int | None:
        """Return the block that is entered right behind an event: what is made for it there is copied by no module."""
        tape = self.tape
        for op, arg in zip(tape.op[at + 1 : at + 1 + _FREES], tape.arg[at + 1 : at + 1 + _FREES], strict=True):
            if op == Op.BWD_ENTER and arg in self.blocks:
                return self.blocks[arg]
            if op not in (Op.FREE, Op.BWD_EXIT, Op.BWD_ENTER) or (op == Op.BWD_ENTER and arg in self.inside):
                break
        return None

    def first_sum(self) -> int:
        """The event at which the residual stream's gradient is first added to in the stage's last block.

        It is the free of what is added: the last tensor of the hidden states' size that the backward of the block's second
        norm makes. -1 where the tape has a new tensor for that sum anyway, as with checkpointing, and where nothing is summed.

        Raises:
            BadInput: when there is no such tensor.
        """
        if self.stage.is_last or not self.stage.end or self.halved:
            return -1
        tape, edit = self.tape, TapeEdit(self.tape)
        block = next(index for index, number in self.blocks.items() if number == self.stage.end - 1)
        norms = {i for i, module in enumerate(tape.modules) if module.parent == block and module.name.endswith(_SECOND_NORM)}
        made = [at for at in edit.allocations(range(self.turn, len(tape))) if tape.aux[at] == self.hidden]
        added = next((at for at in reversed(made) if tape.module[at] in norms), -1)
        freed = edit.first(Op.FREE, tape.arg[added], added) if added >= 0 else None
        if freed is None:
            raise BadInput("its blocks have another form than those that are modelled", where="--pp", remedy="use --pp 1")
        return -1 if any(added < at < freed and tape.module[at] == block for at in made) else freed


class _Cut:
    """Writes one stage's part of a tape. See :func:`cut`."""

    def __init__(self, pattern: _StagePattern, copies: bool, holds_output: bool) -> None:
        self.pattern, self.stage, self.tape = pattern, pattern.stage, pattern.tape
        self.copies, self.holds_output = copies, holds_output
        self.kept = pattern.kept()
        self.summed = pattern.first_sum()
        logits = pattern.logits()
        self.head = self.tape.module[logits[-1 if copies else 0]] if logits else -1
        self.logits = self.tape.arg[logits[-1]] if copies and logits else -1
        self.copy = pattern.output_of(self.stage.first - 1) if copies and not self.stage.is_first else -1
        self.root = next((index for index, module in enumerate(self.tape.modules) if module.parent < 0), -1)
        self.write = EventWriter(fresh_storages(self.tape))
        self.made: dict[int, int] = {}  # this stage's storages, by their kind
        self.received: set[int] = set()  # gradients of the hidden states' size that other stages make
        self.made_backward: list[int] = []  # this stage's
        self.late: tuple[list[int], ...] = ([], [], [])  # freed at the end of the forward, of the backward's halves
        self.final = 2 if pattern.halved else 1
        self.residual = self.split = self.weights = self.returned = -1
        self.inputs = 0
        self.held: list[int] = []

    def part(self) -> StageTape:
        """Return the stage's part."""
        if self.copy >= 0:
            self.made[self.copy] = int(Kind.SAVED)
            self.write.alloc(self.pattern.hidden, Kind.SAVED, self.copy)
        # An enumeration's members are slow to read.
        alloc, free, grad, mark = int(Op.ALLOC), int(Op.FREE), int(Op.GRAD), int(Op.MARK)
        first, end = self.stage.first, self.stage.end
        others = {module for module, block in self.pattern.inside.items() if not first <= block < end}
        for at, event in enumerate(self.tape.events()):
            op = event[0]
            if op == alloc:
                self._alloc(at, event)
            elif op == free:
                self._free(at, event)
            elif op == grad:
                self._grad(event)
            elif op == mark:
                self._mark(at)
            elif event[1] not in others:
                self._hook(at, event)
        made = [one for one in (self.residual, *self.made_backward) if one in self.late[self.final]]
        sent = made[-1] if made and not self.stage.is_first else -1
        if sent >= 0:
            self.late[self.final].remove(sent)
        elif not self.stage.is_first:
            raise BadInput("the gradient that a stage sends is not found", where="--pp", remedy="use --pp 1")
        self.write.free(*self.late[self.final])
        return StageTape(
            self._events(),
            self.split,
            self.inputs,
            sent,
            self.pattern.hidden,
            self.split if self.returned < 0 else self.returned,
            self.logits,
            self.weights,
            self.pattern.output,
            tuple(self.held),
        )

    def _events(self) -> ExpandedTape:
        place = self.pattern.place
        modules = (replace(one, params=tuple(place[p] for p in one.params if p in place)) for one in self.tape.modules)
        part = ExpandedTape(tuple(modules), tuple(self.tape.params[p] for p in self.pattern.params))
        return part.with_events(self.write.events)

    def _mark(self, at: int) -> None:
        if at == self.pattern.turn:
            self.write.free(*self.late[0])
            self.split = len(self.write.events)
        elif at == self.pattern.weights:
            self.write.free(*self.late[1])
            self.weights = len(self.write.events)

    def _alloc(self, at: int, event: TapeEvent) -> None:
        _, storage, nbytes, kind, _ = event
        if at < self.pattern.begin:
            self.inputs += nbytes if self.stage.is_first or self.stage.is_last else 0
        elif self.kept[at]:
            self.made[storage] = kind
            self.write.events.append(event)
            if nbytes == self.pattern.hidden and self.pattern.half(at) == 1:
                self.made_backward.append(storage)
        elif at > self.pattern.turn and nbytes == self.pattern.hidden:
            self.received.add(storage)

    def _free(self, at: int, event: TapeEvent) -> None:
        storage, half = event[1], self.pattern.half(at)
        if storage not in self.made:
            if self.kept[at] and storage in self.received and self.residual in self.late[1]:
                self.late[1].remove(self.residual)  # what stands for it on this stage
                self.write.free(self.residual)
            return
        if at == self.summed:
            self.residual = self.write.alloc(self.pattern.hidden, Kind.ACT_GRAD)
            self.late[1].append(self.residual)
        is_output = storage == self.pattern.output
        if storage == self.logits:
            return
        if not half and (is_output or self.made[storage] == Kind.LOGITS):
            (self.held if self.holds_output else self.late[self.final if is_output else 1]).append(storage)
        elif self.kept[at] and (half or storage != self.copy):
            self.write.free(storage)
        else:
            self.late[half].append(storage)

    def _grad(self, event: TapeEvent) -> None:
        _, param, storage, _, _ = event
        if param in self.pattern.place and storage in self.made and storage not in self.pattern.shared:
            self.write.add(Op.GRAD, self.pattern.place[param], storage)

    def _hook(self, at: int, event: TapeEvent) -> None:
        op, module, *_ = event
        if op == Op.EXIT and module == self.root and self.returned >= 0:
            return  # the loss is none of its own
        self.write.events.append(event)
        if op == Op.EXIT and module == self.head and at < self.pattern.turn:
            if not self.copies:
                self.write.add(Op.EXIT, self.root)
            self.returned = len(self.write.events)
        elif op == Op.BWD_EXIT and at > self.pattern.turn and self.pattern.is_head(module):
            for storage, param in self.pattern.shared.items():
                self.write.add(Op.GRAD, self.pattern.place[param], storage)


def cut(
    tape: ExpandedTape, stage: Stage, *, token_parts: int = 1, copies: bool = False, holds_output: bool = False
) -> StageTape:
    """Cut one stage's micro batch out of a tape. See Note [Cutting a tape].

    Args:
        tape: the whole model's.
        token_parts: ranks that share the tokens between blocks (:attr:`~zeroplan.core.parallel.ParallelLayout.token_parts`).
        copies: the stage's forward runs on a copy of what it received, and the loss is not the modules' own: its tape begins
            with that copy, and the player frees the logits. DeepSpeed's way.
        holds_output: the player frees the stage's output.

    Raises:
        BadInput: blocks whose residual stream is not found.
    """
    return _Cut(_StagePattern(tape, stage, token_parts), copies, holds_output).part()


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
    passed = {*((part.output,) if output else ()), *((part.sent,) if gradient and part.sent >= 0 else ())}
    tape = part.tape
    edit = TapeEdit(tape)
    edit.drop_frees(passed)
    for storage in passed:
        op, arg, aux, _, module = edit.event(edit.made[storage])
        edit.replace(edit.made[storage], (op, arg, aux, int(Kind.PASSED), module))
    return replace(part, tape=edit.result())
