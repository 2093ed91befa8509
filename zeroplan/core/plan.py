"""The answer: a MemoryPlan, and the Report that holds several with what they were asked for.

The JSON form is the outward contract (DESIGN, "JSON"): bytes are integers, additions are fine, renaming is not.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from zeroplan.core.display import Printable
from zeroplan.core.units import format_bytes

SCHEMA_VERSION = 1


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PlanLine(_Frozen):
    """One buffer's bytes on the worst rank."""

    buffer: str
    place: str
    bytes: int
    phases: tuple[str, ...]
    formula: str = ""


class GpuMemory(_Frozen):
    """Bytes on the worst rank's GPU. None where the depth does not tell.

    `at_limit` says that these are the figures of a run that fills its card: its allocator empties its cache, in each step
    `cache_emptied` times, with `segments_remapped` calls of the driver and `bytes_remapped` in segments given up and taken;
    `pages_remapped` of them where segments are expandable.
    """

    model_states: int
    fixed_buffers: int
    activations: int | None = None
    live_after_step: int
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    total: int | None = None
    interval: tuple[int, int] | None = None
    peak_phase: str | None = None
    phases: dict[str, int] = Field(default_factory=dict)
    outside_torch: int | None = None
    usable: int | None = None
    at_limit: bool = False
    cache_emptied: int = 0
    segments_remapped: int = 0
    bytes_remapped: int = 0
    pages_remapped: int = 0

    @property
    def needed(self) -> int:
        """The total, or where activations are not known the largest phase without them."""
        return self.total if self.total is not None else max([self.live_after_step, *self.phases.values()])


class HostBuffer(_Frozen):
    """Bytes of one buffer in a node's host memory, over its ranks."""

    buffer: str
    place: str
    bytes: int


class HostPeak(_Frozen):
    """The most of a node's host memory in one phase, and what is alive there, largest first; it adds up to `bytes`."""

    phase: str
    bytes: int
    pinned: int
    alive: tuple[HostBuffer, ...]


class CpuMemory(_Frozen):
    """Bytes of one node's host memory, over its ranks; `per_node` includes `pinned`.

    `per_node` is the most over initialisation and training, which is in `peak_phase`; `peaks` (and `phases`, the bytes alone)
    also tell of saving and resuming. Both are empty at formula depth.
    """

    per_node: int
    pinned: int
    phases: dict[str, int] = Field(default_factory=dict)
    peak_phase: str | None = None
    peaks: tuple[HostPeak, ...] = ()


class NvmeMemory(_Frozen):
    """Bytes of one node's disk."""

    per_node: int


class PeerFigures(_Frozen):
    """What DeepSpeed's own estimator says: bytes a GPU, bytes a node's host."""

    gpu: int
    cpu: int


class MemoryPlan(Printable, _Frozen):
    """The memory of one configuration. `fits` is None when no limit was given."""

    engine: str
    engine_version: str
    stage: int
    offload_optimizer: str
    offload_param: str
    depth: str
    gpu: GpuMemory
    cpu: CpuMemory
    nvme: NvmeMemory
    fits: bool | None = None
    misfits: tuple[str, ...] = ()
    deepspeed_estimator: PeerFigures | None = None
    lines: tuple[PlanLine, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """``"stage 3, optimizer cpu, parameters cpu"``."""
        text = f"stage {self.stage}"
        if self.offload_optimizer != "none":
            text += f", optimizer {self.offload_optimizer}"
        if self.offload_param != "none":
            text += f", parameters {self.offload_param}"
        return text

    def __repr__(self) -> str:
        return f"<MemoryPlan {self.engine} {self.label}: {format_bytes(self.gpu.needed)} a GPU>"


class ModelInfo(_Frozen):
    """Which model the plans are of."""

    name: str
    params: int
    trainable: int
    source: str


class Report(_Frozen):
    """What one command answers, as ``--json`` prints it."""

    schema_version: int = Field(default=SCHEMA_VERSION, alias="schema")
    model: ModelInfo
    workload: dict[str, Any]
    cluster: dict[str, Any]
    warnings: tuple[str, ...] = ()
    plans: tuple[MemoryPlan, ...] = ()

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def to_json(self) -> str:
        """The contract's JSON, indented."""
        return self.model_dump_json(by_alias=True, indent=2)
