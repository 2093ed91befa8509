"""A run's measurement, and the comparison of plans with measurements. All sizes are bytes."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from zeroplan.core.plan import Frozen, MemoryPlan, ModelInfo
from zeroplan.core.plumbing.display import Printable

SCHEMA_VERSION = 1


class MeasuredRow(Frozen):
    """One buffer of one unit, on the rank with most of it: a row of the Arena's account, or tensors found in an engine."""

    buffer: str
    unit: str
    place: str
    bytes: int


class RankOutOfMemory(Frozen):
    """An out-of-memory error on a rank: phase, buffer, bytes requested, and bytes allocated by then."""

    rank: int
    phase: str
    buffer: str
    requested: int | None
    allocated: int | None
    message: str


class Measurement(Frozen):
    """The memory of one run on the worst rank. A figure is None where the machine does not tell it.

    Attributes:
        owned: whether `rows` are the engine's account of every byte that it owns, as the Arena's is.
        tensors_counted: whether `peak_allocated` counts the tensors that operators returned, as on a CPU, and not the caching
            allocator's blocks.
        total: the process's device memory, by `total_source`.
        host: the sum of a node's ranks' peaks of resident memory; `host_phases` is the same by phase, `host_before` the part
            before the model was built.
        pinned: a node's page-locked bytes with torch's cache of them; on a CPU, which locks nothing, those that a GPU's run
            would lock.
        files: bytes of a node's swap files.
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
    out_of_memory: RankOutOfMemory | None = None
    failure: str = ""
    versions: dict[str, str] = Field(default_factory=dict)


class DriftRow(Frozen):
    """One buffer or total, planned and measured.

    `judged` is ``exact``, ``tolerance``, or empty for a row that only informs. `stands` is False for a buffer that comes and
    goes: its figures are the most of it, and at the peak it is among the other allocations.
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


class Comparison(Frozen):
    """One configuration's plan and measurement, with a row for each buffer and total.

    `unattributed` are the bytes of the measured total that no measured row explains. `verdict` is one line with the reason for
    `within`.

    Ranks of a pipeline hold different parts of the model. `stages` then has a comparison for each pipeline rank, in the
    pipeline's order, of that rank's own plan with what the ranks that share its stages used. The plan, the measurement and the
    rows here are those of one of them, `pp_rank`: the first that is outside, else the one that used the most. Without pipeline
    parallelism, and where a run ended early, there are none.
    """

    plan: MemoryPlan
    measurement: Measurement
    rows: tuple[DriftRow, ...]
    totals: tuple[DriftRow, ...]
    unattributed: int | None
    mismatches: tuple[str, ...]
    within: bool
    verdict: str
    pp_rank: int | None = None
    stages: tuple[Comparison, ...] = ()

    @property
    def parts(self) -> tuple[Comparison, ...]:
        """The comparisons of the pipeline's ranks; without a pipeline this one."""
        return self.stages or (self,)


class Drift(Printable, Frozen):
    """The answer of ``verify``: a comparison for each configuration that was run."""

    schema_version: int = Field(default=SCHEMA_VERSION, alias="schema")
    model: ModelInfo
    workload: dict[str, Any]
    machine: dict[str, Any]
    tolerance: float
    warnings: tuple[str, ...] = ()
    within: bool
    comparisons: tuple[Comparison, ...]

    # The command line adds its version and command.
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    def to_json(self) -> str:
        """Return the report as one JSON object, indented."""
        return self.model_dump_json(by_alias=True, indent=2)
