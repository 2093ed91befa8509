"""The Arena: the runtime's only allocator. It names every byte and remembers when it lived.

Buffers of one kind and dtype come from one block of memory, so that the CUDA caching allocator rounds once a kind rather
than once a unit, and neighbouring units can be updated or cleared by one launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        self._peaks: dict[tuple[Place, Phase], int] = {}

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
        self._book(tensor, buffer, unit, place)
        return tensor

    def allocate(self, wanted: Iterable[OwnedBuffer]) -> dict[tuple[Buffer, str], torch.Tensor]:
        """Zeroed tensors for a whole plan (:func:`zeroplan.core.layout.runtime_buffers`), one block of memory a kind.

        Returns:
            The tensors by buffer and unit.
        """
        made: dict[tuple[Buffer, str], torch.Tensor] = {}
        for (buffer, dtype, place), group in groupby(wanted, key=lambda row: (row.buffer, row.dtype, row.place)):
            rows: Sequence[OwnedBuffer] = list(group)
            block = self._allocate(sum(align(row.numel) for row in rows[:-1]) + rows[-1].numel, DTYPES[dtype], place).zero_()
            begin = 0
            for row in rows:
                tensor = block[begin : begin + row.numel]
                begin += align(row.numel, ALIGN)
                self._book(tensor, buffer, row.unit, place)
                made[buffer, row.unit] = tensor
        return made

    def free(self, tensor: torch.Tensor) -> None:
        """Books `tensor`, which :meth:`empty` gave, as gone; the caller drops its last reference.

        Raises:
            KeyError: when the Arena did not make it or it was freed already.
        """
        row, size = self._sizes.pop(id(tensor))
        row.live -= size
        self._live[row.place] -= size

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

    def _allocate(self, numel: int, dtype: torch.dtype, place: Place) -> torch.Tensor:
        if place is Place.HBM:
            return torch.empty(numel, dtype=dtype, device=self.device)
        if place is Place.PINNED:
            return pinned.allocate(numel, dtype, register=self.device.type == "cuda")
        return torch.empty(numel, dtype=dtype)

    def _book(self, tensor: torch.Tensor, buffer: Buffer, unit: str, place: Place) -> None:
        row = self._rows.setdefault((buffer, unit, place), Row(buffer, unit, place))
        size = tensor.numel() * tensor.element_size()
        self._sizes[id(tensor)] = (row, size)
        row.live += size
        row.peaks[self._phase] = max(row.peaks.get(self._phase, 0), row.live)
        live = self._live[place] = self._live.get(place, 0) + size
        key = (place, self._phase)
        self._peaks[key] = max(self._peaks.get(key, 0), live)
