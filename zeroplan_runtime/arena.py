"""The Arena: the runtime's only allocator. It accounts for every byte by buffer, unit, place and phase.

Permanent buffers of one kind and dtype are views of one block of memory, so the CUDA caching allocator rounds once a kind and
not once a unit. Temporary ones are :class:`ResizableBuffer`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from zeroplan.core.arena.layout_setup import StateDType
from zeroplan.core.arena.owned_buffers import OwnedBuffer, spaced
from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.workload import DType
from zeroplan_runtime.offload import pinned

DTYPES: dict[DType | StateDType, torch.dtype] = {
    DType.FP32: torch.float32,
    DType.FP16: torch.float16,
    DType.BF16: torch.bfloat16,
    StateDType.UINT8: torch.uint8,
}


Allocator = Callable[[int, torch.dtype, torch.device], torch.Tensor]


@dataclass(slots=True)
class Row:
    """The account of one buffer of one unit in one place: bytes alive now, and the peak of each phase in bytes."""

    buffer: Buffer
    unit: str
    place: Place
    live: int = 0
    peaks: dict[Phase, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """The peak over all phases, in bytes."""
        return max(self.peaks.values(), default=0)


class ResizableBuffer:
    """A buffer whose storage is freed and allocated again, as FSDP2 does with unsharded parameters.

    Its tensor and all views of it keep their shapes in between; using them while the storage is freed is a bug and fails. The
    memory belongs to the stream that is current at :meth:`alloc`. Before :meth:`free` that stream must wait for all other
    streams that use the memory.
    """

    __slots__ = ("_arena", "_bytes", "_empty", "_row", "_tensor", "is_allocated")

    def __init__(self, arena: Arena, row: Row, empty: torch.Tensor, numel: int) -> None:
        self._arena, self._row, self._empty = arena, row, empty
        self._bytes = numel * empty.element_size()
        self._tensor: torch.Tensor | None = None
        self.is_allocated = False

    @property
    def bytes(self) -> int:
        """The size in bytes, allocated or not."""
        return self._bytes

    @property
    def tensor(self) -> torch.Tensor:
        """The 1-D tensor; it exists after the first :meth:`alloc`."""
        assert self._tensor is not None
        return self._tensor

    def alloc(self) -> None:
        """Allocates the memory, uninitialised, unless it is allocated."""
        if self.is_allocated:
            return
        storage = self._empty.untyped_storage()
        self._arena.resize(storage, self._bytes, self._row.buffer)
        if self._tensor is None:
            numel = self._bytes // self._empty.element_size()
            self._tensor = self._empty.set_(storage, 0, (numel,), (1,))
        self.is_allocated = True
        self._arena.record(self._row, self._bytes)

    def free(self) -> None:
        """Returns the memory to torch's allocator, if it is allocated."""
        if not self.is_allocated:
            return
        self._arena.resize(self._empty.untyped_storage(), 0, self._row.buffer)
        self.is_allocated = False
        self._arena.record(self._row, -self._bytes)


class Arena:
    """Allocates the runtime's own buffers of one rank and accounts for them.

    The account holds requested bytes; the allocator's rounding to 512 bytes, once a block of memory, is not in it.

    Args:
        device: this rank's device; buffers of other places lie in host memory or files.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rows: dict[tuple[Buffer, str, Place], Row] = {}
        self._sizes: dict[int, tuple[Row, int]] = {}
        self._phase = Phase.INIT
        self._live: dict[Place, int] = {}
        self._releases: list[pinned.Release] = []  # of blocks in host memory
        self._peaks: dict[tuple[Place, Phase], int] = {}

    @property
    def phase(self) -> Phase:
        """The phase that allocations and peaks are recorded under."""
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        if phase is self._phase:
            return
        self._phase = phase
        for row in self._rows.values():
            row.peaks[phase] = max(row.peaks.get(phase, 0), row.live)
        for place, live in self._live.items():
            self._peaks[place, phase] = max(self._peaks.get((place, phase), 0), live)

    def empty(
        self, buffer: Buffer, numel: int, dtype: torch.dtype, *, unit: str = "", place: Place = Place.HBM
    ) -> torch.Tensor:
        """Allocates an uninitialised 1-D tensor of `numel` elements, recorded under `buffer`, `unit` and `place`.

        Raises:
            BadInput: when host memory cannot be had.
        """
        tensor = self._allocate(numel, dtype, place)
        self._own(tensor, buffer, unit, place)
        return tensor

    def allocate(
        self, wanted: Iterable[OwnedBuffer], allocators: Mapping[Buffer, Allocator] | None = None
    ) -> dict[tuple[Buffer, str], torch.Tensor]:
        """Allocates the permanent buffers of a plan (:func:`~zeroplan.core.arena.owned_buffers.runtime_buffers`), zeroed.

        Rows in files are recorded and not allocated.

        Args:
            wanted: the plan's rows.
            allocators: what allocates a kind of buffer instead of torch: given elements, dtype and device.

        Returns:
            The 1-D tensors by buffer and unit.

        Raises:
            BadInput: when host memory cannot be had.
        """
        made: dict[tuple[Buffer, str], torch.Tensor] = {}
        standing = (row for row in wanted if row.persistent)
        for (buffer, dtype, place), group in groupby(standing, key=lambda row: (row.buffer, row.dtype, row.place)):
            rows: Sequence[OwnedBuffer] = list(group)
            if place is Place.NVME:  # offload.nvme makes the files
                for row in rows:
                    self._add(self._row(buffer, row.unit, place), row.bytes)
                continue
            numel = sum(map(spaced, rows[:-1])) + rows[-1].numel
            own = (allocators or {}).get(buffer) if place is Place.HBM else None
            block = self._allocate(numel, DTYPES[dtype], place) if own is None else own(numel, DTYPES[dtype], self.device)
            if place is Place.HBM:
                block.zero_()
            begin = 0
            for row in rows:
                tensor = block[begin : begin + row.numel]
                begin += spaced(row)
                self._own(tensor, buffer, row.unit, place)
                made[buffer, row.unit] = tensor
        return made

    def resizable(self, wanted: Iterable[OwnedBuffer]) -> dict[tuple[Buffer, str], ResizableBuffer]:
        """Makes a :class:`ResizableBuffer`, not allocated yet, for each temporary buffer of a plan; by buffer and unit."""
        return {
            (row.buffer, row.unit): ResizableBuffer(
                self,
                self._row(row.buffer, row.unit, row.place),
                self._allocate(0, DTYPES[row.dtype], row.place),
                row.numel,
            )
            for row in wanted
            if not row.persistent
        }

    def empty_cache(self) -> None:
        """Returns cached segments to the device: of the model's original parameters, or of what will not come again.

        Activations in those segments would leave holes between them; if the model was made on the device, the segments are as
        large as the model. The host waits for the device.
        """
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def allocate_workspaces(self, dtype: torch.dtype) -> None:
        """Makes cuBLAS allocate the workspaces that it keeps for this thread and for autograd's, before anything else.

        Otherwise the second one would be allocated in the first backward, inside a freed block of logits, and the next logits
        would not fit there.
        """
        if self.device.type == "cuda":
            x = torch.zeros(16, 16, dtype=dtype, device=self.device, requires_grad=True)
            with torch.enable_grad():
                (x @ x).sum().backward()

    def reserve_segment(self, buffers: Iterable[ResizableBuffer]) -> None:
        """Makes torch's allocator cache one segment in which all of `buffers`, which live at the same time, fit.

        The forward's activations use the segment meanwhile and free all of it. In segments of their own they would leave
        holes that are too small for a unit's gradients.
        """
        if self.device.type == "cuda" and not _limits_splits():
            torch.empty(sum(buffer.bytes for buffer in buffers), dtype=torch.uint8, device=self.device)

    def free(self, tensor: torch.Tensor) -> None:
        """Records that `tensor`, a result of :meth:`empty`, is freed; the caller drops the last reference.

        Raises:
            KeyError: when the Arena did not make it or it was freed before.
        """
        row, size = self._sizes.pop(id(tensor))
        self._add(row, -size)

    def resize(self, storage: torch.UntypedStorage, size: int, buffer: Buffer) -> None:
        """Resizes the storage of a ResizableBuffer to `size` bytes; out-of-memory reports read `buffer` from this frame."""
        storage.resize_(size)

    def record(self, row: Row, size: int) -> None:
        """Records `size` more bytes (negative: fewer) of a ResizableBuffer."""
        self._add(row, size)

    def live(self, place: Place = Place.HBM) -> int:
        """Returns the bytes alive in `place` now."""
        return self._live.get(place, 0)

    def peak(self, place: Place = Place.HBM) -> int:
        """Returns the peak of the bytes alive in `place`."""
        return max((peak for (where, _), peak in self._peaks.items() if where is place), default=0)

    def rows(self) -> list[Row]:
        """Returns all rows, in the order of first allocation."""
        return list(self._rows.values())

    def measurement(self) -> list[dict[str, Any]]:
        """Returns the rows as JSON objects: buffer, unit, place, bytes alive, peak in bytes, and peak by phase in bytes."""
        return [
            {
                "buffer": str(row.buffer),
                "unit": row.unit,
                "place": str(row.place),
                "bytes": row.live,
                "peak": row.peak,
                "phases": {str(phase): peak for phase, peak in row.peaks.items()},
            }
            for row in self._rows.values()
        ]

    def release_host(self) -> None:
        """Unpins and frees every block of host memory at once, even if tensors still refer to it."""
        for release in self._releases:
            release()
        self._releases = []

    def _allocate(self, numel: int, dtype: torch.dtype, place: Place) -> torch.Tensor:
        if place is Place.HBM:
            return torch.empty(numel, dtype=dtype, device=self.device)
        block = pinned.allocate(numel, dtype, register=place is Place.PINNED and self.device.type == "cuda")
        self._releases = [release for release in self._releases if release.alive()]
        self._releases.append(pinned.Release(block))
        return block

    def _row(self, buffer: Buffer, unit: str, place: Place) -> Row:
        row = self._rows.setdefault((buffer, unit, place), Row(buffer, unit, place))
        row.peaks.setdefault(self._phase, 0)
        return row

    def _own(self, tensor: torch.Tensor, buffer: Buffer, unit: str, place: Place) -> None:
        row = self._row(buffer, unit, place)
        size = tensor.numel() * tensor.element_size()
        self._sizes[id(tensor)] = (row, size)
        self._add(row, size)

    def _add(self, row: Row, size: int) -> None:
        place, phase = row.place, self._phase
        row.live += size
        live = self._live[place] = self._live.get(place, 0) + size
        if size > 0:
            row.peaks[phase] = max(row.peaks.get(phase, 0), row.live)
            self._peaks[place, phase] = max(self._peaks.get((place, phase), 0), live)


def _limits_splits() -> bool:
    """Returns whether the allocator is configured not to split large blocks, so that one segment cannot serve several
    buffers.
    """
    settings = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any("max_split_size_mb" in text for text in settings)
