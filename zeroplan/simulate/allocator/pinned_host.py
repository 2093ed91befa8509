"""torch's allocator of page-locked host memory, simulated.

Rules read from torch 2.13's ``ATen/core/CachingHostAllocator.h``: a block is the request rounded up to a power of two, is
never split and never merged, and goes to a free list of its own power of two when freed. What was pinned once stays pinned
until the cache is emptied, which is why 33 GiB of pinned optimizer state occupies 64 GiB.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from zeroplan.simulate.allocator.config import UNLIMITED, parse_mib, split_settings

PAGE = 4096


@dataclass(frozen=True, slots=True)
class PinnedConfig:
    """Settings of PYTORCH_ALLOC_CONF that concern pinned memory, in bytes.

    Attributes:
        max_round_threshold: requests beyond it are not rounded (``pinned_max_round_threshold_mb``).
        max_cached_size: blocks beyond it are neither rounded nor kept when freed (``pinned_max_cached_size_mb``).
        reserve_segment: pinned at the first request; blocks are cut from it, in whole pages and once each, until it is
            used up (``pinned_reserve_segment_size_mb``).
    """

    max_round_threshold: int = UNLIMITED
    max_cached_size: int = UNLIMITED
    reserve_segment: int = 0

    @staticmethod
    def parse(text: str, *, where: str = "PYTORCH_ALLOC_CONF") -> PinnedConfig:
        """Read the settings for pinned memory in a PYTORCH_ALLOC_CONF; :meth:`AllocatorConfig.parse` reads the others.

        Raises:
            BadInput: on an unknown key, or a value that is no whole number of MiB.
        """
        config = PinnedConfig()
        for key, value in split_settings(text, where=where):
            match key:
                case "pinned_max_round_threshold_mb":
                    config = replace(config, max_round_threshold=parse_mib(value, f"{where}: {key}", least=0))
                case "pinned_max_cached_size_mb":
                    config = replace(config, max_cached_size=parse_mib(value, f"{where}: {key}", least=0))
                case "pinned_reserve_segment_size_mb":
                    config = replace(config, reserve_segment=parse_mib(value, f"{where}: {key}", least=0))
        return config

    def block_size(self, nbytes: int) -> int:
        """Return the bytes of the block that a request gets."""
        if nbytes > min(self.max_round_threshold, self.max_cached_size):
            return nbytes
        return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


@dataclass(slots=True)
class PinnedAllocator:
    """A process's pinned memory. All figures in bytes.

    Attributes:
        held: blocks in use or cached, as ``torch.cuda.host_memory_stats()["allocated_bytes.current"]`` counts them.
        active: blocks in use.
        resident: host memory they occupy, in whole pages, the reserve segment included.
        peak_held, peak_resident: the most of either.
    """

    config: PinnedConfig = field(default_factory=PinnedConfig)
    held: int = 0
    active: int = 0
    resident: int = 0
    peak_held: int = 0
    peak_resident: int = 0
    _sizes: list[int] = field(default_factory=list)  # by handle
    _live: set[int] = field(default_factory=set)
    _homes: list[bool] = field(default_factory=list)  # by handle: whether the block lies in the reserve segment
    _cached: dict[int, list[tuple[int, bool]]] = field(default_factory=dict)  # by power of two: (size, home), last freed last
    _reserve_left: int = -1  # -1: not pinned yet

    def alloc(self, nbytes: int) -> int:
        """Allocate pinned memory for `nbytes` and return a handle."""
        size = self.config.block_size(nbytes)
        home = False
        if size:
            cached = self._cached.get(_index(size), [])
            # torch takes the block freed last; one too small for an unrounded request is passed over here.
            if cached and cached[-1][0] >= size:
                size, home = cached.pop()
            else:
                home = self._pin(size)
        self._sizes.append(size)
        self._homes.append(home)
        self._live.add(len(self._sizes) - 1)
        self.active += size
        return len(self._sizes) - 1

    def free(self, handle: int) -> None:
        """Return a block to the cache, or to the system where it is too large to be cached.

        Raises:
            KeyError: when the handle is not live.
        """
        self._live.remove(handle)
        size, home = self._sizes[handle], self._homes[handle]
        self.active -= size
        if size > self.config.max_cached_size:
            self._unpin(size, home)
        elif size:
            self._cached.setdefault(_index(size), []).append((size, home))

    def empty_cache(self) -> None:
        """Return all cached blocks to the system."""
        for blocks in self._cached.values():
            for size, home in blocks:
                self._unpin(size, home)
        self._cached.clear()

    def _pin(self, size: int) -> bool:
        """Pin a block; return whether it lies in the reserve segment."""
        if self._reserve_left < 0:
            self._reserve_left = self.config.reserve_segment
            self.resident += _pages(self.config.reserve_segment)
        home = _pages(size) <= self._reserve_left
        if home:
            self._reserve_left -= _pages(size)
        else:
            self.resident += _pages(size)
        self.held += size
        self.peak_held = max(self.peak_held, self.held)
        self.peak_resident = max(self.peak_resident, self.resident)
        return home

    def _unpin(self, size: int, home: bool) -> None:
        self.held -= size
        if not home:
            self.resident -= _pages(size)


def _index(size: int) -> int:
    return (size - 1).bit_length()


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def pinned_bytes(requests: Iterable[int]) -> int:
    """Bytes that the requests pin while all of them are alive, each in a block of its own."""
    config = PinnedConfig()
    return sum(config.block_size(nbytes) for nbytes in requests)
