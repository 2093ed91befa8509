"""The Arena: the runtime's only allocator. It names every byte and remembers when it lived.

Standing buffers of one kind and dtype come from one block of memory, so that the CUDA caching allocator rounds once a kind
rather than once a unit, and neighbouring units can be updated or cleared by one launch. Buffers that come and go are leases.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.layout import ALIGN, OwnedBuffer, align
from zeroplan.core.workload import DType
from zeroplan_runtime.offload import pinned

DTYPES: dict[DType, torch.dtype] = {DType.FP32: torch.float32, DType.FP16: torch.float16, DType.BF16: torch.bfloat16}


@dataclass(slots=True)
class Row:
    """What one buffer of one unit in one place holds: live bytes and the most that lived in each phase."""

    buffer: Buffer
    unit: str
    place: Place
    live: int = 0
    peaks: dict[Phase, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """The most bytes that ever lived."""
        return max(self.peaks.values(), default=0)


class ResizableBuffer:
    """A buffer that comes and goes. Its tensor, and every view of it, keep their shapes while the memory is away.

    The memory belongs to the stream that is current at :meth:`alloc`; whoever calls :meth:`free` has made that stream wait for
    all others that use it. Reading the tensor while the memory is away is a fault of the program, and fails.
    """

    __slots__ = ("_arena", "_bytes", "_empty", "_row", "_tensor", "is_allocated")

    def __init__(self, arena: Arena, row: Row, empty: torch.Tensor, numel: int) -> None:
        self._arena, self._row, self._empty = arena, row, empty
        self._bytes = numel * empty.element_size()
        self._tensor: torch.Tensor | None = None
        self.is_allocated = False

    @property
    def bytes(self) -> int:
        """Bytes of the memory, there or not."""
        return self._bytes

    @property
    def tensor(self) -> torch.Tensor:
        """The 1-D tensor. It exists from the first :meth:`alloc` on."""
        assert self._tensor is not None
        return self._tensor

    def alloc(self) -> None:
        """Brings the memory, uninitialised."""
        storage = self._empty.untyped_storage()
        self._arena.resize(storage, self._bytes, self._row.buffer)
        if self._tensor is None:
            numel = self._bytes // self._empty.element_size()
            self._tensor = self._empty.set_(storage, 0, (numel,), (1,))
        self.is_allocated = True
        self._arena.record(self._row, self._bytes)

    def free(self) -> None:
        """Gives the memory back to torch's allocator."""
        self._arena.resize(self._empty.untyped_storage(), 0, self._row.buffer)
        self.is_allocated = False
        self._arena.record(self._row, -self._bytes)


class Arena:
    """Allocates and accounts for the runtime's own buffers on one device.

    Accounted are the bytes asked for; alignment of 512 bytes, which CUDA adds once a block of memory, is not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rows: dict[tuple[Buffer, str, Place], Row] = {}
        self._sizes: dict[int, tuple[Row, int]] = {}
        self._phase = Phase.INIT
        self._live: dict[Place, int] = {}
        self._releases: list[pinned.Release] = []  # of blocks in host memory
        self._peaks: dict[tuple[Place, Phase], int] = {}
        #: Called with the bytes that a lease takes (or gives, negative), for those who count memory that no operator returns.
        self.on_resize: Callable[[int], None] | None = None

    @property
    def phase(self) -> Phase:
        """The phase that allocations and peaks are booked to."""
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
        """An uninitialised 1-D tensor of `numel` elements, booked under `buffer`, `unit` and `place`."""
        tensor = self._allocate(numel, dtype, place)
        self._own(tensor, buffer, unit, place)
        return tensor

    def allocate(self, wanted: Iterable[OwnedBuffer]) -> dict[tuple[Buffer, str], torch.Tensor]:
        """Zeroed tensors for what stands of a plan (:func:`zeroplan.core.layout.runtime_buffers`), one block a kind.

        Returns:
            The tensors by buffer and unit.
        """
        made: dict[tuple[Buffer, str], torch.Tensor] = {}
        standing = (row for row in wanted if row.stands)
        for (buffer, dtype, place), group in groupby(standing, key=lambda row: (row.buffer, row.dtype, row.place)):
            rows: Sequence[OwnedBuffer] = list(group)
            if place is Place.NVME:  # in files, which others make
                for row in rows:
                    self._add(self._row(buffer, row.unit, place), row.bytes)
                continue
            block = self._allocate(sum(align(row.numel) for row in rows[:-1]) + rows[-1].numel, DTYPES[dtype], place)
            if place is Place.HBM:
                block.zero_()
            begin = 0
            for row in rows:
                tensor = block[begin : begin + row.numel]
                begin += align(row.numel, ALIGN)
                self._own(tensor, buffer, row.unit, place)
                made[buffer, row.unit] = tensor
        return made

    def resizable(self, wanted: Iterable[OwnedBuffer]) -> dict[tuple[Buffer, str], ResizableBuffer]:
        """A lease, without memory yet, for each buffer of a plan that comes and goes; by buffer and unit."""
        return {
            (row.buffer, row.unit): ResizableBuffer(
                self,
                self._row(row.buffer, row.unit, row.place),
                self._allocate(0, DTYPES[row.dtype], row.place),
                row.numel,
            )
            for row in wanted
            if not row.stands
        }

    def empty_cache(self) -> None:
        """Gives back to the device what the model's own parameters left in torch's cache.

        Activations would lie in those segments with holes between them, and where the model was made on the device they are as
        many bytes as all of it.
        """
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def allocate_workspaces(self, dtype: torch.dtype) -> None:
        """Lets cuBLAS take the workspace that it keeps for each thread, this one and autograd's, before anything else is there.

        Taken in the first backward, the second would lie in a block that logits had left, which the next logits then lack.
        """
        if self.device.type == "cuda":
            x = torch.zeros(16, 16, dtype=dtype, device=self.device, requires_grad=True)
            with torch.enable_grad():
                (x @ x).sum().backward()  # type: ignore[no-untyped-call]

    def reserve_segment(self, buffers: Iterable[ResizableBuffer]) -> None:
        """Leaves torch's allocator one segment in which all of `leases` fit, for leases that will be there at once.

        What the forward keeps lies there in the meantime and leaves the segment whole. In segments of their own, activations
        would leave holes in which no gradient of a unit fits.
        """
        if self.device.type == "cuda" and not _limits_splits():
            torch.empty(sum(buffer.bytes for buffer in buffers), dtype=torch.uint8, device=self.device)

    def free(self, tensor: torch.Tensor) -> None:
        """Books `tensor`, which :meth:`empty` gave, as gone; the caller drops its last reference.

        Raises:
            KeyError: when the Arena did not make it or it was freed already.
        """
        row, size = self._sizes.pop(id(tensor))
        self._add(row, -size)

    def resize(self, storage: torch.UntypedStorage, size: int, buffer: Buffer) -> None:
        """Brings or takes the memory of a lease; `buffer` names it to who reads the frame of a failed call."""
        storage.resize_(size)

    def record(self, row: Row, size: int) -> None:
        """Books `size` bytes more (or less) under a lease's row."""
        self._add(row, size)
        if self.on_resize is not None:
            self.on_resize(size)

    def live(self, place: Place = Place.HBM) -> int:
        """Bytes now alive in `place`."""
        return self._live.get(place, 0)

    def peak(self, place: Place = Place.HBM) -> int:
        """The most bytes that were ever alive in `place`."""
        return max((peak for (where, _), peak in self._peaks.items() if where is place), default=0)

    def rows(self) -> list[Row]:
        """All rows, in order of first allocation."""
        return list(self._rows.values())

    def measurement(self) -> list[dict[str, Any]]:
        """The rows as plain values: buffer, unit, place, live bytes, peak, and peak by phase. Ready for JSON."""
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
        """Unlocks and empties every block in host memory at once, whoever else still refers to it."""
        if self._releases and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # copies may be on their way
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
    """Whether the allocator has been told not to split large blocks, so that nothing could lie in a large segment."""
    settings = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any("max_split_size_mb" in text for text in settings)
