"""Writes events of storages that a tape does not have yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from zeroplan.tape.expanded import Kind, Op, TapeEvent


@dataclass(slots=True)
class EventWriter:
    """Writes events of new storages, of the module at work.

    Attributes:
        last: the last storage that is taken.
        module: the index of the module; -1 outside any.
        events: what was written.
    """

    last: int
    module: int = -1
    events: list[TapeEvent] = field(default_factory=list)

    def alloc(self, size: int, kind: Kind = Kind.TEMP) -> int:
        """Allocate a new storage and return its id."""
        self.last += 1
        self.events.append((Op.ALLOC, self.last, size, kind, self.module))
        return self.last

    def free(self, *storages: int) -> None:
        """Free storages in the order given."""
        self.events += [(Op.FREE, storage, 0, 0, -1) for storage in storages]

    def taken(self) -> list[TapeEvent]:
        """Hand over what was written so far."""
        events, self.events = self.events, []
        return events
