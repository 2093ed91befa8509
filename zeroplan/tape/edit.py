"""Edits of a tape: what a rewrite looks for, and how it puts something else in its place.

Note [Rewrites]
    A rewrite has two halves. Its *pattern* (``_find``) looks a tape over for modules, spans of events and storages, and finds
    nothing where something is not as expected. Its *replacement* drops, replaces and inserts events through a
    :class:`TapeEdit`. Every place is an index into the tape as it was, so edits do not shift each other; nothing changes before
    :meth:`TapeEdit.result` makes the new tape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from zeroplan.tape.expanded import ExpandedTape, Kind, Op, TapeEvent

_HOOKS = frozenset({int(Op.ENTER), int(Op.EXIT), int(Op.BWD_ENTER), int(Op.BWD_EXIT), int(Op.MARK)})
#: Whose `arg` is a storage, and whose `aux` is.
_BY_ARG, _BY_AUX = frozenset({int(Op.ALLOC), int(Op.FREE)}), frozenset({int(Op.GRAD), int(Op.HOLD)})


def fresh_storages(tape: ExpandedTape) -> Iterator[int]:
    """Return numbers that no storage of a tape has, in order."""
    return count(1 + max(tape.arg, default=-1))


@dataclass(slots=True)
class EventWriter:
    """Writes events of new storages, of the module at work.

    Attributes:
        storages: numbers for new storages.
        module: the index of the module; -1 outside any.
        events: what was written.
    """

    storages: Iterator[int]
    module: int = -1
    events: list[TapeEvent] = field(default_factory=list)

    def alloc(self, size: int, kind: Kind = Kind.TEMP, storage: int | None = None) -> int:
        """Allocate a storage, a new one unless `storage` is its number, and return its number."""
        made = next(self.storages) if storage is None else storage
        self.events.append((Op.ALLOC, made, size, kind, self.module))
        return made

    def free(self, *storages: int) -> None:
        """Free storages in this order."""
        self.events += [(Op.FREE, storage, 0, 0, -1) for storage in storages]

    def add(self, op: int, arg: int, aux: int = 0) -> None:
        """Write a hook, a gradient or a mark."""
        self.events.append((op, arg, aux, 0, -1))


class TapeEdit:
    """One rewrite of a tape. See Note [Rewrites].

    Attributes:
        tape: the tape as it is.
        storages: numbers for new storages.
    """

    def __init__(self, tape: ExpandedTape) -> None:
        self.tape = tape
        self.storages = fresh_storages(tape)
        self._inserted: dict[int, list[TapeEvent]] = {}
        self._instead: dict[int, tuple[TapeEvent, ...]] = {}

    @cached_property
    def made(self) -> dict[int, int]:
        """By storage, the event that allocates it."""
        return {arg: at for at, (op, arg) in enumerate(zip(self.tape.op, self.tape.arg, strict=True)) if op == Op.ALLOC}

    @cached_property
    def freed(self) -> dict[int, int]:
        """By storage, the event that frees it."""
        return {arg: at for at, (op, arg) in enumerate(zip(self.tape.op, self.tape.arg, strict=True)) if op == Op.FREE}

    @cached_property
    def hooks(self) -> dict[tuple[int, int], int]:
        """By op and argument, the last event of each module hook and mark."""
        pairs = zip(self.tape.op, self.tape.arg, strict=True)
        return {(op, arg): at for at, (op, arg) in enumerate(pairs) if op in _HOOKS}

    @property
    def gradients(self) -> list[int]:
        """The events that hand over a complete gradient."""
        return [at for at, op in enumerate(self.tape.op) if op == Op.GRAD]

    def first(self, op: Op, arg: int, since: int = 0) -> int | None:
        """Return the first event of this kind from event `since` on; None where there is none."""
        columns = self.tape.op, self.tape.arg
        pairs = zip(*(column[since:] for column in columns), strict=True)
        return next((at for at, pair in enumerate(pairs, since) if pair == (op, arg)), None)

    def event(self, at: int) -> TapeEvent:
        """Return an event of the tape as it is."""
        tape = self.tape
        return tape.op[at], tape.arg[at], tape.aux[at], tape.kind[at], tape.module[at]

    def allocations(self, *spans: range) -> list[int]:
        """Return the events within spans that allocate."""
        return [at for span in spans for at in span if self.tape.op[at] == Op.ALLOC]

    def frees(self, *spans: range) -> list[int]:
        """Return the events within spans that free."""
        return [at for span in spans for at in span if self.tape.op[at] == Op.FREE]

    def storages_of(self, events: Iterable[int]) -> list[int]:
        """Return the storages that these events allocate or free."""
        return [self.tape.arg[at] for at in events]

    def left_by(self, span: range) -> dict[int, int]:
        """Return the storages that a span allocates and leaves, with their bytes."""
        freed = set(self.storages_of(self.frees(span)))
        return {self.tape.arg[at]: self.tape.aux[at] for at in self.allocations(span) if self.tape.arg[at] not in freed}

    def before(self, at: int, module: int = -1) -> EventWriter:
        """Return a writer of events in front of event `at`, behind what other writers have put there."""
        return EventWriter(self.storages, module, self._inserted.setdefault(at, []))

    def behind(self, at: int, module: int = -1) -> EventWriter:
        """Return a writer of events right behind event `at`."""
        return self.before(at + 1, module)

    def replace(self, at: int, *events: TapeEvent) -> None:
        """Put other events in an event's place, or none."""
        self._instead[at] = events

    def drop(self, events: Iterable[int]) -> None:
        """Leave events out."""
        for at in events:
            self._instead[at] = ()

    def drop_storages(self, storages: Collection[int]) -> None:
        """Never make these storages: leave out what allocates and what frees them."""
        self.drop(self.made[one] for one in storages if one in self.made)
        self.drop_frees(storages)

    def drop_frees(self, storages: Collection[int]) -> None:
        """Leave out what frees these storages."""
        self.drop(self.freed[one] for one in storages if one in self.freed)

    def result(self) -> ExpandedTape:
        """Return the edited tape."""
        old = self.tape.columns
        new: tuple[list[int], ...] = tuple([] for _ in old)
        done = 0
        for at in sorted({*self._inserted, *self._instead}):
            for column, source in zip(new, old, strict=True):
                column += source[done:at]
            for event in (*self._inserted.get(at, ()), *self._instead.get(at, ())):
                for column, value in zip(new, event, strict=True):
                    column.append(value)
            done = at + (at in self._instead)
        for column, source in zip(new, old, strict=True):
            column += source[done:]
        return self.tape.with_columns(*new)


def renumbered(tape: ExpandedTape, by: int) -> ExpandedTape:
    """Return a tape whose storages' numbers are `by` higher."""
    if not by:
        return tape
    arg = [value + by if op in _BY_ARG else value for op, value in zip(tape.op, tape.arg, strict=True)]
    aux = [value + by if op in _BY_AUX else value for op, value in zip(tape.op, tape.aux, strict=True)]
    return tape.with_columns(tape.op, arg, aux, tape.kind, tape.module)
