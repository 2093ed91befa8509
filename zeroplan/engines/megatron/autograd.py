"""Autograd without numbers: tensors that are only bytes, from whose lives a tape is written.

Note [Sizes without numbers]
    Megatron-Core's model code is not transformers', and needs Megatron, Apex or TransformerEngine to be traced. Its layers are
    described here instead, as short functions over :class:`Value`: what an operator allocates, what it saves for the backward,
    and what its backward makes. A storage is freed when nothing refers to it any more, as torch frees a tensor's memory: so the
    variables of a description live as long as those of Megatron's code, and its scopes follow Megatron's.

    The backward runs the nodes as torch's engine does: of those whose gradients are complete, the one made last comes first;
    a node's saved tensors go once it has run; where two gradients of one value meet, the later is added to the earlier in place
    if nothing else refers to that, else the sum is a new tensor. Gradients of parameters are added to the gradient buffer by
    the hook of Megatron's DDP, and go at once.
    Sources: torch/csrc/autograd/engine.cpp (``evaluate_function``), input_buffer.cpp (``accumulate``); Megatron-Core 0.16.1,
    megatron/core/distributed/distributed_data_parallel.py (``_make_backward_post_hook``).
"""

from __future__ import annotations

import contextlib
import heapq
import sys
from collections.abc import Callable, Iterator, Sequence

from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op, TapeModule


class Storage:
    """One block of memory. Its FREE is written when the last reference to it goes."""

    __slots__ = ("_writer", "ident", "nbytes")

    def __init__(self, writer: TapeWriter, ident: int, nbytes: int) -> None:
        self._writer, self.ident, self.nbytes = writer, ident, nbytes

    def __del__(self) -> None:
        self._writer.freed(self.ident)


Gradients = list["Storage | None"]
#: From the gradients of a node's outputs to those of its inputs.
Backward = Callable[[tuple["Storage", ...], Gradients], Gradients]


class Node:
    """What an operator leaves in the graph: its backward, what it saved, and where its inputs came from."""

    __slots__ = ("backward", "inputs", "module", "number", "outputs", "saved")

    def __init__(
        self,
        number: int,
        module: int,
        inputs: tuple[tuple[Node, int] | None, ...],
        outputs: int,
        saved: tuple[Storage, ...],
        backward: Backward,
    ) -> None:
        self.number, self.module, self.inputs, self.outputs = number, module, inputs, outputs
        self.saved, self.backward = saved, backward

    def __lt__(self, other: Node) -> bool:
        return self.number > other.number  # the one made last runs first


class Value:
    """A tensor: its storage, its own bytes, and the node that made it. A view of all of a tensor is the same value."""

    __slots__ = ("nbytes", "node", "slot", "storage")

    def __init__(self, storage: Storage, node: Node | None = None, slot: int = 0, nbytes: int | None = None) -> None:
        self.storage, self.node, self.slot = storage, node, slot
        self.nbytes = storage.nbytes if nbytes is None else nbytes

    @property
    def is_part(self) -> bool:
        """Whether it is a view of a part of its storage."""
        return self.nbytes != self.storage.nbytes


class TapeWriter:
    """Writes the tape of one micro batch while a description runs.

    Attributes:
        modules: the modules, as the tape lists them; the root is the first.
        recording: whether operators leave nodes; not so within a checkpointed forward.
        split: the event at which the backward begins.
        mask: attention's mask of the micro batch, which checkpoints keep with their inputs.
        kept: bytes of the buffers that live for the whole run, which are not the tape's.
        layer: the number of the transformer layer that is described.
        attributes: storages that attributes of modules hold from one use to the next, by their names.
        holder: the layer that was the last to take hold of its graph, and so of the leaves that this begins with; -1 for none.
        held: such leaves and their gradients, by that layer; they live on until it takes hold of another graph.
    """

    def __init__(self, root: str) -> None:
        self.modules = [TapeModule("", root, -1)]
        self._known = {("", root): 0}
        self._inside = [0]
        self.recording = True
        self._made = 0
        self._numbers = 0
        self._backward = False
        self._tape = ExpandedTape((), ())
        self._allocated: dict[int, int] = {}  # by storage, the event
        self._hints: dict[int, Kind] = {}
        self._outside: set[int] = set()
        self._buffers: list[Storage] = []
        self.split = 0
        self.mask: Storage | None = None
        self.kept: dict[tuple[str, tuple[int, ...]], int] = {}
        self.layer = 0
        self.attributes: dict[tuple[str, int], list[Storage]] = {}
        self.holder = -1
        self.held: dict[int, list[Storage]] = {}

    def keep(self, key: tuple[str, tuple[int, ...]], nbytes: int) -> None:
        """Note a buffer that is made once for a whole run, as large as its largest use."""
        if nbytes > self.kept.get(key, 0):
            self.kept[key] = nbytes

    # --- events -----------------------------------------------------------------------------------------------------------

    def _event(self, op: Op, arg: int, aux: int = 0, module: int = -1) -> None:
        tape = self._tape
        for column, value in zip((tape.op, tape.arg, tape.aux, tape.module), (int(op), arg, aux, module), strict=True):
            column.append(value)

    def empty(self, nbytes: int, kind: Kind | None = None) -> Storage:
        """Allocate; `kind` says what it is where its life does not."""
        ident = self._made
        self._made += 1
        self._allocated[ident] = len(self._tape.op)
        if kind is not None:
            self._hints[ident] = kind
        self._event(Op.ALLOC, ident, nbytes, self._inside[-1])
        return Storage(self, ident, nbytes)

    def fresh(self, *sizes: int, kind: Kind | None = None) -> Backward:
        """Return a backward that makes a new gradient of so many bytes for each input."""
        return lambda saved, g: [self.empty(nbytes, kind) for nbytes in sizes]

    def outside(self, nbytes: int) -> Storage:
        """Return a storage that is not the tape's, such as what a stage receives."""
        ident = -1 - len(self._outside)
        self._outside.add(ident)
        return Storage(self, ident, nbytes)

    def shared(self, nbytes: int) -> Storage:
        """Return a part of a buffer that lives for the whole run, to which no gradient is added in place."""
        part = self.outside(nbytes)
        self._buffers.append(part)
        return part

    def freed(self, ident: int) -> None:
        """Write the FREE of a storage; called by the storage itself."""
        if ident >= 0:
            self._event(Op.FREE, ident)

    def drop(self, layer: int) -> None:
        """Write that the graph goes which a layer has held on to."""
        self._event(Op.DROP, layer)

    @contextlib.contextmanager
    def module(self, name: str, kind: str, *, block: bool = False) -> Iterator[None]:
        """Run what follows inside a module; `name` is relative to the one around it, in full for a `block`."""
        around = self.modules[self._inside[-1]]
        full = name if block or not around.name else f"{around.name}.{name}"
        key = (full, kind)
        if key not in self._known:
            self._known[key] = len(self.modules)
            self.modules.append(TapeModule(full, kind, self._inside[-1]))
        index = self._known[key]
        self._inside.append(index)
        self._event(Op.BWD_ENTER if self._backward else Op.ENTER, index)
        yield
        self._event(Op.BWD_EXIT if self._backward else Op.EXIT, index)
        self._inside.pop()

    # --- operators --------------------------------------------------------------------------------------------------------

    def apply(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[Storage],
        saved: Sequence[Storage],
        backward: Backward,
        sizes: Sequence[int] = (),
    ) -> list[Value]:
        """Return an operator's outputs.

        Args:
            inputs: the tensors that it reads and that may have gradients.
            saved: the storages that it saves for the backward.
            backward: gets what was saved and the outputs' gradients, and returns a gradient for each of `inputs`, then those of
                parameters; it holds no storage itself.
            sizes: bytes of each output, where they are views of parts.
        """
        own = list(sizes) or [storage.nbytes for storage in outputs]
        if not self.recording:
            return [Value(storage, nbytes=size) for storage, size in zip(outputs, own, strict=True)]
        edges = tuple(None if value.node is None else (value.node, value.slot) for value in inputs)
        node = Node(self._numbers, self._inside[-1], edges, len(outputs), tuple(saved), backward)
        self._numbers += 1
        return [Value(storage, node, slot, own[slot]) for slot, storage in enumerate(outputs)]

    def leaf(self, storage: Storage, nbytes: int | None = None) -> Value:
        """Return a value whose gradient is kept (``retain_grad`` of a leaf that requires one)."""
        node = Node(self._numbers, self._inside[-1], (), 1, (), _keep)
        self._numbers += 1
        return Value(storage, node, 0, nbytes)

    @contextlib.contextmanager
    def without_graph(self) -> Iterator[None]:
        """Run what follows under ``torch.no_grad``."""
        before, self.recording = self.recording, False
        yield
        self.recording = before

    @contextlib.contextmanager
    def with_graph(self) -> Iterator[None]:
        """Run what follows under ``torch.enable_grad``."""
        before, self.recording = self.recording, True
        yield
        self.recording = before

    # --- the engine -------------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """End the forward."""
        self.split = len(self._tape.op)
        self._backward = True

    def backward(self, output: Value, gradients: Gradients, leaves: Sequence[Value]) -> Gradients:
        """Run the graph of `output` and return the gradients of `leaves`; the list of `gradients` is emptied first."""
        root = output.node
        assert root is not None, "an output without a graph"
        waiting = _dependencies(root)
        arriving: Gradients = [None] * root.outputs
        arriving[output.slot] = gradients.pop()
        buffers: dict[Node, Gradients] = {root: arriving}
        del arriving
        ready = [root]
        kept: Gradients = [None] * len(leaves)
        places = {leaf.node: at for at, leaf in enumerate(leaves)}
        while ready:
            node = heapq.heappop(ready)
            arrived = buffers.pop(node)
            if node in places:
                kept[places[node]] = arrived.pop()
                continue
            self._enter(node.module)
            made = node.backward(node.saved, arrived)
            while arrived:
                arrived.pop(0)  # in order, as a vector's elements go
            node.saved = ()
            for at, edge in enumerate(node.inputs):
                gradient, made[at] = made[at], None
                if edge is None:
                    continue
                into, slot = edge
                if gradient is not None:
                    self._accumulate(buffers.setdefault(into, [None] * into.outputs), slot, gradient)
                waiting[into] -= 1
                if not waiting[into] and into in buffers:
                    heapq.heappush(ready, into)
                del gradient
            made.clear()  # the gradients of parameters go once the hook has added them to the buffer
            self._leave()
        return kept

    def _accumulate(self, buffer: Gradients, slot: int, gradient: Storage) -> None:
        held = buffer[slot]
        if held is None:
            buffer[slot] = gradient
        elif sys.getrefcount(held) > _ALONE:
            buffer[slot] = self.empty(held.nbytes, Kind.ACT_GRAD)

    def _enter(self, module: int) -> None:
        self._inside.append(module)
        self._event(Op.BWD_ENTER, module)

    def _leave(self) -> None:
        self._event(Op.BWD_EXIT, self._inside.pop())

    # --- the result -------------------------------------------------------------------------------------------------------

    def tape(self, outlive: tuple[int, ...] = ()) -> tuple[ExpandedTape, int]:
        """Return what was written, and where the backward begins; storages of `outlive` are freed by who plays it."""
        kept = ((layer, storage.ident) for layer, storages in self.held.items() for storage in storages)
        held = [(layer, ident) for layer, ident in kept if ident >= 0 and ident not in outlive]
        outlive = (*outlive, *(ident for _, ident in held))
        self.held.clear()
        source = self._tape
        ends = {arg: at for at, (op, arg) in enumerate(zip(source.op, source.arg, strict=True)) if op == Op.FREE}
        out = ExpandedTape(tuple(self.modules), ())
        split = 0

        def add(op: int, arg: int, aux: int = 0, kind: int = 0, module: int = -1) -> None:
            for column, value in zip(
                (out.op, out.arg, out.aux, out.kind, out.module), (op, arg, aux, kind, module), strict=True
            ):
                column.append(value)

        add(Op.MARK, Mark.FORWARD_BEGIN)
        for at, (op, arg, aux, module) in enumerate(zip(source.op, source.arg, source.aux, source.module, strict=True)):
            if at == self.split:
                add(Op.MARK, Mark.FORWARD_END)
                split = len(out)
                add(Op.MARK, Mark.BACKWARD_BEGIN)
            if op == Op.ALLOC:
                add(op, arg, aux, self._kind(arg, at, ends.get(arg, len(source.op))), module)
            elif op != Op.FREE or arg not in outlive:
                add(op, arg, aux)
        for layer, storage in held:
            add(Op.HOLD, layer, storage)
        add(Op.MARK, Mark.BACKWARD_END)
        return out, split

    def _kind(self, storage: int, begin: int, end: int) -> int:
        if storage in self._hints:
            return int(self._hints[storage])
        if begin >= self.split:
            return int(Kind.ACT_GRAD)
        return int(Kind.SAVED if end >= self.split else Kind.TEMP)


def _keep(saved: tuple[Storage, ...], gradients: Gradients) -> Gradients:
    raise AssertionError("a leaf has no backward")


def _dependencies(root: Node) -> dict[Node, int]:
    """Return for each node below `root` the number of edges that lead to it."""
    found: dict[Node, int] = {}
    seen, open_nodes = {root}, [root]
    while open_nodes:
        for edge in open_nodes.pop().inputs:
            if edge is None:
                continue
            found[edge[0]] = found.get(edge[0], 0) + 1
            if edge[0] not in seen:
                seen.add(edge[0])
                open_nodes.append(edge[0])
    return found


def _references_of_one_held_alone() -> int:
    """Count the references that :meth:`TapeWriter._accumulate` sees of a storage that only its buffer holds."""
    buffer = [object()]

    def count(entries: list[object], slot: int) -> int:
        held = entries[slot]
        return sys.getrefcount(held)

    return count(buffer, 0)


_ALONE = _references_of_one_held_alone()
