"""The tape's consumer side: one micro batch's forward and backward as a flat stream of events.

Note [Tape]
    A tape holds what the *model's own computation* allocates and frees: activations, temporaries, logits, gradients at
    the moment autograd makes them. It holds no parameter: engines differ in where parameters live, so their schedules lay
    parameters, buckets and states over the tape. A gradient belongs to the tape until its ``GRAD`` event and to the
    engine afterwards (the tape never frees it).

    The stored form is compact (sizes as monomials of micro batch, sequence length and LoRA rank; one block for all that
    are alike) and is expanded to a :class:`ExpandedTape` for given numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property

from zeroplan.core.parameters import Parameters

#: Layers that autocast runs in 16 bits. Source: DeepSpeed 0.19.8, runtime/torch_autocast.py, LOWER_PRECISION_SAFE_MODULES.
AUTOCAST_LAYERS = frozenset({"Linear", "Linear4bit", "Linear4bitSingle", "Conv1d", "Conv2d", "Conv3d"})
#: The classes of layers whose weight is quantised.
QUANTIZED_LAYERS = frozenset(
    {"Linear4bit", "Linear4bitSingle", "Linear8bitLt", "PackedLinear", "ChannelInt8Linear", "Experts4bit", "Experts4bitSingle"}
)
#: How the classes of embeddings are called: ``torch.nn.Embedding`` and what transformers derives from it.
_TABLE = "Embedding"
_BLOCK = re.compile(r"^(?:[a-zA-Z_]\w*\.)+\d+$")


#: A row of an expanded tape: op, arg, aux, kind, module.
TapeEvent = tuple[int, int, int, int, int]


class Op(IntEnum):
    """Kinds of events. The columns `arg`, `aux` of :class:`ExpandedTape` mean, for each:"""

    ALLOC = 0  # arg: storage id, aux: bytes (as requested, not rounded)
    FREE = 1  # arg: storage id
    ENTER = 2  # arg: module index; its forward begins (again in a checkpoint's recomputation)
    EXIT = 3  # arg: module index; its forward has returned
    BWD_ENTER = 4  # arg: module index; the gradient of its output has arrived
    BWD_EXIT = 5  # arg: module index; the gradients of its inputs have been made
    GRAD = 6  # arg: parameter index, aux: storage id of the complete gradient, from here on the engine's
    MARK = 7  # arg: a Mark
    HOLD = 8  # arg: a place of the model, aux: a storage that lives on there, beyond its micro batch
    DROP = 9  # arg: a place of the model; what it holds goes


class Mark(IntEnum):
    """Points of a micro batch."""

    FORWARD_BEGIN = 0
    FORWARD_END = 1
    BACKWARD_BEGIN = 2
    BACKWARD_END = 3
    REFERENCE_BEGIN = 4  # until the next mark, modules are those of a reference model, which an engine shards, too
    REFERENCE_END = 5
    WEIGHTS_BEGIN = 6  # of a backward in two halves: the gradients of inputs are made, those of weights follow
    OUTPUT = 7  # the loop's variable has the model's output; the last micro batch's goes, where the tape keeps one


class Kind(IntEnum):
    """Kinds of a tape's allocations, where traced."""

    SAVED = 0  # kept by autograd for the backward
    TEMP = 1  # dies within its phase
    GRAD = 2  # becomes a parameter's gradient
    LOGITS = 3
    LOSS = 4
    CHECKPOINT = 5  # a checkpointed block's saved input
    CAST = 6  # autocast's 16-bit copy of a weight
    WORKSPACE = 7
    INPUT = 8
    ACT_GRAD = 9  # gradient of an activation
    COMM = 10  # the output of a collective between tensor-parallel ranks
    PASSED = 11  # what a pipeline stage passes on to another stage of its rank
    RETURNED = 12  # a checkpointed input that has come back from the host, by a stream of its own


@dataclass(frozen=True, slots=True)
class TapeModule:
    """A module of the traced model: full name, class name, index of its parent (-1 for the root), own parameters."""

    name: str
    type: str
    parent: int
    params: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TapeParam:
    """A parameter of the traced model: full name, shape, whether it gets a gradient, bytes an element as traced."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    itemsize: int


@dataclass(frozen=True, slots=True)
class EvaluationTape:
    """An evaluation's forward, and the logits that its loop keeps.

    Attributes:
        forward: the events of one batch, whose halves are its forward and nothing.
        logits: bytes of one batch's logits as the model returns them; 0 where the loop keeps none.
        returned: their bytes once the wrapper around the model has cast them.
        gathered: bytes of all ranks' together; 0 where there is one rank, which gathers nothing.
        batches: batches that are joined before they go to the host, 1 where none are kept.
    """

    forward: ExpandedTape
    logits: int = 0
    returned: int = 0
    gathered: int = 0
    batches: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """What decides how it is recorded: the forward's events, and the loop's own sizes."""
        return self.forward.shape, self.logits, self.returned, self.gathered, self.batches


@dataclass(eq=False)
class ExpandedTape:
    """An expanded tape: five columns of equal length (struct of arrays, because a 405B model has 10^5 events).

    `kind` and `module` describe ALLOC events (the innermost module running, -1 outside any) and are 0 and -1 elsewhere.
    Nobody changes a tape after it is expanded, so what follows from its columns is computed once, when it is first asked for.
    A tape is equal to itself alone: caches hold it as a key without comparing its columns.
    `evaluation` is the forward of another batch, which the same modules run between two steps; `generation` what they generate
    before each. `shapes` are the micro batches of the first steps where batches differ in length; this tape is the last of
    them. `halves` is the same micro batch with its backward in two halves (:mod:`zeroplan.trace.run`), for pipelines that
    run them apart. `buffers` are bytes of each of the model's registered buffers, which lie beside its parameters all the time.
    """

    modules: tuple[TapeModule, ...]
    params: tuple[TapeParam, ...]
    op: list[int] = field(default_factory=list)
    arg: list[int] = field(default_factory=list)
    aux: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    module: list[int] = field(default_factory=list)
    evaluation: EvaluationTape | None = None
    shapes: tuple[ExpandedTape, ...] = ()
    generation: ExpandedTape | None = None
    halves: ExpandedTape | None = None
    buffers: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.op)

    def events(self) -> Iterator[TapeEvent]:
        """Yield every event as a row of the five columns."""
        return zip(*self.columns, strict=True)

    @property
    def columns(self) -> tuple[list[int], ...]:
        """The five columns, in the order of a :data:`TapeEvent`."""
        return self.op, self.arg, self.aux, self.kind, self.module

    def with_columns(self, op: list[int], arg: list[int], aux: list[int], kind: list[int], module: list[int]) -> ExpandedTape:
        """Return a tape of the same modules, parameters and tapes around it with other events."""
        return replace(self, op=op, arg=arg, aux=aux, kind=kind, module=module, halves=None)

    def with_events(self, events: Iterable[TapeEvent]) -> ExpandedTape:
        """As :meth:`with_columns`, from rows."""
        columns = [list(column) for column in zip(*events, strict=True)] or [[] for _ in self.columns]
        return self.with_columns(*columns)

    @cached_property
    def marks(self) -> dict[int, int]:
        """By mark, the first event that sets it."""
        found: dict[int, int] = {}
        for at, (op, arg) in enumerate(zip(self.op, self.arg, strict=True)):
            if op == Op.MARK:
                found.setdefault(arg, at)
        return found

    @property
    def backward(self) -> int:
        """The event with which the backward begins; the length of a tape that has none."""
        return self.marks.get(Mark.BACKWARD_BEGIN, len(self))

    @cached_property
    def parameters(self) -> Parameters:
        """The parameters of the traced model."""
        products = {p for module in self.modules if module.type in AUTOCAST_LAYERS for p in module.params}
        homes = block_of_each(self.modules, len(self.params))
        tables = {p for module in self.modules if module.type.endswith(_TABLE) for p in module.params}
        packed = {p for module in self.modules if module.type in QUANTIZED_LAYERS for p in module.params}
        reached = {arg for op, arg in zip(self.op, self.arg, strict=True) if op == Op.GRAD}
        tells = Mark.BACKWARD_BEGIN in self.marks  # which a forward alone does not
        return Parameters(
            names=tuple(param.name for param in self.params),
            shapes=tuple(param.shape for param in self.params),
            trainable=tuple(param.trainable for param in self.params),
            autocast=tuple(p in products for p in range(len(self.params))),
            blocks=tuple(self.modules[home].name if home >= 0 else "" for home in homes),
            modules=tuple(module.params for module in self.modules),
            embeddings=tuple(p in tables for p in range(len(self.params))),
            quantized=tuple(p in packed and len(param.shape) >= 2 for p, param in enumerate(self.params)),
            unreached=frozenset(p for p, param in enumerate(self.params) if tells and param.trainable and p not in reached),
        )

    @cached_property
    def activation_peak(self) -> int:
        """The most bytes that the model's own computation holds at once, gradients of parameters left out."""
        sizes: dict[int, int] = {}
        now = peak = 0
        alloc, free, grad = int(Op.ALLOC), int(Op.FREE), int(Kind.GRAD)
        for op, arg, aux, kind in zip(self.op, self.arg, self.aux, self.kind, strict=True):
            if op == alloc and kind != grad:
                sizes[arg] = aux
                now += aux
                peak = max(peak, now)
            elif op == free:
                now -= sizes.pop(arg, 0)
        return peak

    @cached_property
    def storage_bytes(self) -> list[int]:
        """Bytes of each storage id, 0 for one that is never allocated; then those of each tape of :attr:`further_tapes`."""
        found = list(self._own_bytes)
        for tape in self.further_tapes:
            found += tape.storage_bytes
        return found

    @cached_property
    def _own_bytes(self) -> list[int]:
        made = {arg: aux for op, arg, aux in zip(self.op, self.arg, self.aux, strict=True) if op == Op.ALLOC}
        return [made.get(storage, 0) for storage in range(1 + max(made, default=0))]

    @property
    def further_tapes(self) -> tuple[ExpandedTape, ...]:
        """The tapes that are played with this one: its shapes, its evaluation's forward, then what is generated."""
        evaluation = () if self.evaluation is None else (self.evaluation.forward,)
        return (*self.shapes, *evaluation, *(() if self.generation is None else (self.generation,)))

    def first_storage(self, place: int) -> int:
        """The number from which the storages of :attr:`further_tapes` at `place` count on."""
        return len(self._own_bytes) + sum(len(tape.storage_bytes) for tape in self.further_tapes[:place])

    @cached_property
    def shape(self) -> int:
        """A hash of all that is not a size: two tapes of equal shape hold the same events in the same order."""
        columns = (tuple(self.op), tuple(self.arg), tuple(self.kind), tuple(self.module))
        evaluation = None if self.evaluation is None else self.evaluation.shape
        generation = None if self.generation is None else self.generation.shape
        shapes = tuple(tape.shape for tape in self.shapes)
        return hash((columns, self.modules, self.params, evaluation, shapes, generation, self.buffers))


def blocks_of(modules: Sequence[TapeModule]) -> list[int]:
    """Return the indices of the blocks: entries of a module list that no other such entry holds."""
    found: list[int] = []
    inside: set[int] = set()
    for index, module in enumerate(modules):
        if module.parent in inside:
            inside.add(index)
        elif _BLOCK.match(module.name):
            found.append(index)
            inside.add(index)
    return found


def block_of_each(modules: Sequence[TapeModule], params: int) -> list[int]:
    """Return, for each of `params` parameters, the index of the block that its first owner lies in, or -1."""
    inside = {block: block for block in blocks_of(modules)}
    home = [-1] * params
    known = [False] * params
    for index, module in enumerate(modules):
        block = inside.get(index, inside.get(module.parent, -1))
        if block >= 0:
            inside[index] = block
        for p in module.params:
            if not known[p]:
                home[p], known[p] = block, True
    return home
