"""What a run used (Measurement), and plan beside measurement (Comparison, Drift). All sizes are bytes."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from zeroplan.core.display import Printable
from zeroplan.core.plan import MemoryPlan, ModelInfo

SCHEMA_VERSION = 1


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MeasuredRow(_Frozen):
    """One buffer of one unit on the rank that holds most of it: a row of the Arena, or tensors found in an engine."""

    buffer: str
    unit: str
    place: str
    bytes: int


class OutOfMemory(_Frozen):
    """Where a rank ran out: the phase, the buffer it was making, what it asked for and what was allocated by then."""

    rank: int
    phase: str
    buffer: str
    requested: int | None
    allocated: int | None
    message: str


class Measurement(_Frozen):
    """What one run used, on the worst rank. None where the machine does not tell.

    `owned` says whether `rows` are the engine's own account of every byte that it owns (the Arena's). `total` is the
    process's device memory by `total_source`; `tensors_counted` says that `peak_allocated` counts the tensors that operators
    returned (CPU) and not what a caching allocator handed out. `host` is one node's resident peak over its ranks,
    `host_phases` the same by phase, `host_before` the part that was there before the model was made. `pinned` are a node's
    bytes of page-locked memory, torch's cache of it included (on a CPU, which locks nothing, those that would be), and
    `files` those of its swap files.
    """

    device: str
    ranks: int
    rows: tuple[MeasuredRow, ...] = ()
    owned: bool = False
    live_after_step: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    tensors_counted: bool = False
    context: int | None = None
    total: int | None = None
    total_source: str = ""
    phases: dict[str, int] = Field(default_factory=dict)
    host: int = 0
    host_before: int = 0
    host_phases: dict[str, int] = Field(default_factory=dict)
    pinned: int | None = None
    files: int | None = None
    steps: int = 0
    step_seconds: float | None = None
    out_of_memory: OutOfMemory | None = None
    failure: str = ""
    versions: dict[str, str] = Field(default_factory=dict)


class DriftRow(_Frozen):
    """One buffer or total, planned and measured. `judged` is ``exact``, ``tolerance`` or empty where it only informs.

    `stands` False: the buffer comes and goes; the figures are its most, and at the peak it is part of what lies beside.
    """

    name: str
    place: str
    planned: int | None
    measured: int | None
    judged: str = ""
    within: bool | None = None
    note: str = ""
    stands: bool = True

    @property
    def difference(self) -> int | None:
        """Measured less planned."""
        return None if self.planned is None or self.measured is None else self.measured - self.planned


class Comparison(_Frozen):
    """One configuration: its plan, its measurement, and the rows of both side by side.

    `unattributed` is what the measured total holds beyond every measured row. `verdict` is one line that says why
    `within` is what it is.
    """

    plan: MemoryPlan
    measurement: Measurement
    rows: tuple[DriftRow, ...]
    totals: tuple[DriftRow, ...]
    unattributed: int | None
    mismatches: tuple[str, ...]
    within: bool
    verdict: str


class Drift(Printable, _Frozen):
    """What ``verify`` answers: every configuration that was run."""

    schema_version: int = Field(default=SCHEMA_VERSION, alias="schema")
    model: ModelInfo
    workload: dict[str, Any]
    machine: dict[str, Any]
    tolerance: float
    warnings: tuple[str, ...] = ()
    within: bool
    comparisons: tuple[Comparison, ...]

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def to_json(self) -> str:
        """One JSON object, indented."""
        return self.model_dump_json(by_alias=True, indent=2)
