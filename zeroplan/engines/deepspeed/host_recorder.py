"""A process's large host buffers: pageable ones as requested, pinned ones as torch's cache of pinned blocks holds them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.engines.simulation import HostBytes, HostPhase
from zeroplan.simulate.allocator.pinned_host import PAGE, PinnedAllocator, PinnedConfig


@dataclass(frozen=True, slots=True)
class HostMark:
    """Bytes at the end of a phase, and the most of their sum within it; of both, what they are of.

    `locked` is the part of `pinned` that torch does not hold.
    """

    phase: Phase
    pageable: int
    pinned: int
    peak: int
    alive: HostBytes
    kept: HostBytes
    locked: int = 0

    def host_phase(self) -> HostPhase:
        """Return this mark as the :class:`HostPhase` that an engine's simulation returns."""
        return HostPhase(self.phase, self.peak, self.pinned, self.alive, self.kept, self.locked)

    def repeated(self, step: HostMark) -> HostPhase:
        """This phase in later steps: its temporaries on top of what the first step left, whose end is the mark `step`."""
        passing = {key: self.alive.get(key, 0) - self.kept.get(key, 0) for key in {**self.alive, **self.kept}}
        return replace(HostPhase.of(self.phase, step.kept, passing), pinned=step.pinned, unmapped=step.locked)


class HostRecorder:
    """Adds up host buffers as they come and go, phase by phase.

    Attributes:
        marks: the phases so far.
        buffers: by buffer and whether it is pinned, the most bytes alive at once, as requested.
    """

    def __init__(self, config: PinnedConfig | None = None) -> None:
        self.pins = PinnedAllocator(config or PinnedConfig())
        self.marks: list[HostMark] = []
        self.buffers: dict[tuple[Buffer, bool], int] = {}
        self._alive: dict[tuple[Buffer, bool], int] = {}
        self._blocks: list[tuple[Buffer, int, int]] = []  # (buffer, bytes, handle of the pinned allocator or -1)
        self._pageable = 0
        self._locked = 0
        self._peak = 0
        self._at_peak: HostBytes = {}

    def lock(self, nbytes: int, buffer: Buffer) -> None:
        """Allocate whole pages that stay locked and are no block of torch's pinned cache."""
        self._locked += -(-nbytes // PAGE) * PAGE
        self._add(nbytes, (buffer, True))

    def alloc(self, nbytes: int, buffer: Buffer, *, pinned: bool = False) -> int:
        """Allocate a block and return its handle."""
        if pinned:
            block = self.pins.alloc(nbytes)
        else:
            block = -1
            self._pageable += nbytes
        self._add(nbytes, (buffer, pinned))
        self._blocks.append((buffer, nbytes, block))
        return len(self._blocks) - 1

    @property
    def _pinned(self) -> int:
        return self.pins.resident + self._locked

    def _add(self, nbytes: int, key: tuple[Buffer, bool]) -> None:
        self._alive[key] = self._alive.get(key, 0) + nbytes
        self.buffers[key] = max(self.buffers.get(key, 0), self._alive[key])
        if self._pageable + self._pinned > self._peak:
            self._peak, self._at_peak = self._pageable + self._pinned, self._now()

    def free(self, handle: int) -> None:
        """Gives pageable memory back to the system, a pinned block to torch's cache, where it stays resident."""
        buffer, nbytes, block = self._blocks[handle]
        if block < 0:
            self._pageable -= nbytes
        else:
            self.pins.free(block)
        self._alive[(buffer, block >= 0)] -= nbytes

    def pin(self, handle: int) -> int:
        """``tensor.pin_memory()``: a copy in pinned memory, beside the original until that is freed."""
        buffer, nbytes, _ = self._blocks[handle]
        return self.alloc(nbytes, buffer, pinned=True)

    def mark(self, phase: Phase) -> None:
        """Note the bytes at the end of a phase; the next phase begins."""
        kept = self._now()
        self.marks.append(HostMark(phase, self._pageable, self._pinned, self._peak, self._at_peak, kept, self._locked))
        self._peak, self._at_peak = self._pageable + self._pinned, kept

    def _now(self) -> HostBytes:
        """Return the bytes alive, as requested; the rest of the pinned blocks is the allocator's rounding and freed blocks."""
        found = {(buffer, _place(pinned)): count for (buffer, pinned), count in self._alive.items() if count}
        spare = self._pinned - sum(count for (_, place), count in found.items() if place is Place.PINNED)
        return found | ({(Buffer.FRAGMENTATION, Place.PINNED): spare} if spare else {})


def _place(pinned: bool) -> Place:
    return Place.PINNED if pinned else Place.DRAM
