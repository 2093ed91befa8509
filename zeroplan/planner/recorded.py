"""Tapes that a captured script's own micro batches gave, in place of those of a model that is traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zeroplan.engines.base import Case, Engine
from zeroplan.planner.tapes import ExpandedTapes, NoTapeError
from zeroplan.tape.expanded import ExpandedTape
from zeroplan.tape.format import Tape
from zeroplan.tape.sizes import KernelDevice

#: Two ways in which a micro batch was run: as the model's code has it, and through the hooks of DeepSpeed's stage 3.
PLAIN, ZERO3 = "plain", "zero3"


@dataclass(frozen=True)
class RecordedRun:
    """Micro batches as a script ran them.

    Attributes:
        tapes: by the way they were run, the first micro batches of other shapes, then the largest.
        beside: bytes on the GPU beside the model's parameters all the time, its registered buffers among them.
    """

    tapes: Mapping[str, tuple[Tape, ...]]
    beside: int = 0


class RecordedTapes(ExpandedTapes):
    """The tapes of one recorded run, whatever the case asks for."""

    def __init__(self, engine: Engine, recorded: RecordedRun) -> None:
        super().__init__(engine)
        self._asked, self._recorded = engine, recorded
        self._expanded: dict[str, ExpandedTape] = {}

    def of(self, case: Case) -> ExpandedTape:
        """Return the tape; see :meth:`ExpandedTapes.of`."""
        way = ZERO3 if self._asked.trace_options(case).zero3 else PLAIN
        if way not in self._recorded.tapes:
            raise NoTapeError("no micro batch was recorded in this way", remedy="capture more steps (--steps)")
        if way not in self._expanded:
            batch, device = case.workload.batch, KernelDevice.of(case.cluster.gpu)
            *first, largest = (
                tape.expand(batch.micro_batch, batch.seq_len or 1, None, device=device) for tape in self._recorded.tapes[way]
            )
            self._expanded[way] = replace(largest, shapes=tuple(first), buffers=self._recorded.beside)
        return self._expanded[way]
