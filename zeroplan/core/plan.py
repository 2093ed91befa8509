"""The answer of ``estimate``: a MemoryPlan for each configuration, and the Report that holds them with the request.

The JSON form is a contract with users: bytes are integers; fields may be added, but not renamed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from zeroplan.core.plumbing.display import Printable
from zeroplan.core.sizes import format_bytes
from zeroplan.core.unmodelled import Unmodelled
from zeroplan.core.zero_config import sharding_label

SCHEMA_VERSION = 1


class Frozen(BaseModel):
    """The base of every answer's parts: immutable, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Verdict(StrEnum):
    """Whether a plan fits its GPU, host and disk.

    MAY_FIT: the limit lies within the interval of what is needed, or only fragments of the allocator or an assumed size of the
    host stand in the way. UNKNOWN: something that decides is in no figure, or no limit was given.
    """

    FITS = "fits"
    MAY_FIT = "may fit"
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "unknown"

    @property
    def fits(self) -> bool | None:
        """The verdict as ``fits`` in JSON has it: true is a promise, false is certain, and all else is null."""
        return {Verdict.FITS: True, Verdict.DOES_NOT_FIT: False}.get(self)

    @property
    def rank(self) -> int:
        """The place among verdicts, from the best (0) to the worst (3)."""
        return (Verdict.FITS, Verdict.MAY_FIT, Verdict.UNKNOWN, Verdict.DOES_NOT_FIT).index(self)


class PlanLine(Frozen):
    """The bytes of one buffer on the worst rank, the phases in which it is alive, and the formula of its size."""

    buffer: str
    place: str
    bytes: int
    phases: tuple[str, ...]
    formula: str = ""


class PeakShare(Frozen):
    """Bytes of one family of buffers (:class:`zeroplan.core.families.Family`) at the peak of allocated memory."""

    what: str
    bytes: int


class GpuMemory(Frozen):
    """Bytes on the worst rank's GPU. Activations, peaks and total are None at formula depth.

    `peak_allocated` and `peak_reserved` are what ``torch.cuda.max_memory_allocated`` and ``max_memory_reserved`` return
    after training. `total` is the peak of reserved memory plus `outside_torch` (CUDA context, kernels, NCCL); `interval` is
    its lower and upper bound. `usable` is what the card gives to a process.

    `bound`, at formula depth alone, is the total that 19 of 20 models stay below, by an analytic estimate of activations; None
    where the model's widths are not known.

    `at_limit` is true where the run fills its card, so that torch's allocator releases its cache. Per step it then does so
    `cache_emptied` times, in `segments_remapped` driver calls, and frees and allocates `bytes_remapped` bytes again; with
    expandable segments these are `pages_remapped` pages.

    `at_peak` says what is alive when allocated memory peaks, largest first; it adds up to `peak_allocated`.
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
    bound: int | None = None
    at_limit: bool = False
    cache_emptied: int = 0
    segments_remapped: int = 0
    bytes_remapped: int = 0
    pages_remapped: int = 0
    at_peak: tuple[PeakShare, ...] = ()

    @property
    def needed(self) -> int:
        """The total; at formula depth the largest phase, which is without activations."""
        return self.total if self.total is not None else max([self.live_after_step, *self.phases.values()])

    @property
    def at_most(self) -> int:
        """The upper end of the total's interval; what is needed, where it has none."""
        return self.interval[1] if self.interval else self.needed


class HostBuffer(Frozen):
    """Bytes of one buffer in a node's host memory, summed over the node's ranks. `place` is ``dram`` or ``pinned``."""

    buffer: str
    place: str
    bytes: int


class HostPeak(Frozen):
    """The peak of a node's host memory in one phase. `alive`, largest first, adds up to `bytes`."""

    phase: str
    bytes: int
    pinned: int
    alive: tuple[HostBuffer, ...]


class CpuMemory(Frozen):
    """Bytes of one node's host memory, summed over the node's ranks.

    `per_node` is the peak of loading, initialisation and training, pinned memory included; it is reached in `peak_phase`.
    Loading is that of pretrained weights (phase ``weights``), or for a run from scratch that of the model alone (``load``).
    `peaks`, and `phases` with their bytes alone, also hold saving and resuming. All three are empty at formula depth.
    """

    per_node: int
    pinned: int
    phases: dict[str, int] = Field(default_factory=dict)
    peak_phase: str | None = None
    peaks: tuple[HostPeak, ...] = ()


class NvmeMemory(Frozen):
    """Bytes of one node's swap files."""

    per_node: int


class PeerFigures(Frozen):
    """Figures of DeepSpeed's own estimator: bytes on each GPU, and bytes in each node's host memory."""

    gpu: int
    cpu: int


class StageMemory(Frozen):
    """One pipeline rank: the range of blocks of each of its chunks, and bytes on its GPU. Peaks and total are None at formula
    depth.
    """

    stage: int
    blocks: tuple[tuple[int, int], ...]
    model_states: int
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    total: int | None = None
    verdict: Verdict = Verdict.UNKNOWN
    fits: bool | None = None


class CaptureInfo(Frozen):
    """How a plan was captured: by an engine's schedule (``engine``) or allocation by allocation (``loop``).

    `stopped` is where the script could not go on: ``file``, ``line``, ``why``. `ended` is the line of a loop that was ended
    after its steps; empty where the script ended by itself.
    """

    way: str
    command: str
    steps: int
    stopped: dict[str, Any] | None = None
    ended: str = ""


class MemoryPlan(Printable, Frozen):
    """The memory of one configuration.

    `verdict` is over GPU, host and disk, and `fits` the same as true, false or None. `decides` is the one fact behind a verdict
    that is neither; `settle` says what would tell. `misfits` names the limits that the upper bounds exceed: ``gpu``, ``cpu``,
    ``nvme``. `unmodelled` lists what no figure holds.
    `stages` are the pipeline stages, the one that needs the most first; the plan's figures are that one's. Without pipeline
    parallelism there are none, and JSON has no such key; nor has it `capture` unless a script's own run was captured.
    """

    engine: str
    engine_version: str
    stage: int
    offload_optimizer: str
    offload_param: str
    depth: str
    gpu: GpuMemory
    cpu: CpuMemory
    nvme: NvmeMemory
    verdict: Verdict = Verdict.UNKNOWN
    fits: bool | None = None
    decides: str = ""
    misfits: tuple[str, ...] = ()
    unmodelled: tuple[Unmodelled, ...] = ()
    settle: str = ""
    deepspeed_estimator: PeerFigures | None = None
    lines: tuple[PlanLine, ...] = ()
    warnings: tuple[str, ...] = ()
    stages: tuple[StageMemory, ...] = ()
    capture: CaptureInfo | None = None

    @model_serializer(mode="wrap")
    def _without_empty_parts(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = whole(self)
        if not self.stages:
            data.pop("stages", None)
        if self.capture is None:
            data.pop("capture", None)
        return data

    @property
    def undecided(self) -> bool:
        """Whether limits were given, and the plan neither fits them for certain nor misses them for certain."""
        return bool(self.settle)

    @property
    def label(self) -> str:
        """``"stage 3, optimizer cpu, parameters cpu"``."""
        return sharding_label(self.stage, self.offload_optimizer, self.offload_param)

    def __repr__(self) -> str:
        return f"<MemoryPlan {self.engine} {self.label}: {format_bytes(self.gpu.needed)} a GPU>"


def _exceeds_bound(plan: MemoryPlan) -> bool:
    """Return whether a plan's bound, or where it has none what is known to be needed, is above the usable memory."""
    gpu = plan.gpu
    return gpu.usable is not None and (gpu.bound or gpu.needed) > gpu.usable


class ModelInfo(Frozen):
    """The model: its name, the number of its parameters, how many of them are trained, and where the shapes came from."""

    name: str
    params: int
    trainable: int
    source: str


class Relief(Frozen):
    """A knob that lowers a plan's GPU memory: what to turn, the flags for it, the bytes it saves, and the new total.

    `adapters`: whether it trains adapters in place of all weights, which is no knob of the same training.
    """

    what: str
    flags: str
    saves: int
    total: int
    fits: bool | None = None
    adapters: bool = Field(default=False, exclude=True)


class Report(Frozen):
    """The plans of one request, with the request. ``--json`` prints it.

    `setup` is what files said of the run, where any were given: ``program``, ``files``, ``method``, ``task``, ``assumed``.
    `reliefs` are knobs of the plan that the answer is about (:attr:`decisive`), the cheapest in speed first.
    """

    schema_version: int = Field(default=SCHEMA_VERSION, alias="schema")
    model: ModelInfo
    workload: dict[str, Any]
    cluster: dict[str, Any]
    setup: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    plans: tuple[MemoryPlan, ...] = ()
    reliefs: tuple[Relief, ...] = ()

    # The command line adds its version and command.
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    @property
    def opened(self) -> int | None:
        """The index of the plan that an answer shows: the decisive one, else that of the least need; None without plans."""
        decisive, plans = self.decisive, self.plans
        if decisive is None:
            return min(range(len(plans)), key=lambda at: plans[at].gpu.needed, default=None)
        return next(at for at, plan in enumerate(plans) if plan is decisive)

    @property
    def decisive(self) -> MemoryPlan | None:
        """The plan that the answer is about.

        The first that fits, which saves the least. If none fits for certain, the first that may fit; then the first of those of
        which that is unknown, by their bound if any has one within the card; then the one that exceeds its tightest limit by
        the smallest factor. None where several plans are listed and no limit was given.
        """
        if len(self.plans) == 1:
            return self.plans[0]
        for verdict in (Verdict.FITS, Verdict.MAY_FIT):
            found = next((plan for plan in self.plans if plan.verdict is verdict), None)
            if found is not None:
                return found
        open_ = [plan for plan in self.plans if plan.undecided]
        judged = [plan for plan in self.plans if plan.fits is False]
        return min(open_, key=_exceeds_bound, default=None) or min(judged, key=self._excess, default=None)

    def _excess(self, plan: MemoryPlan) -> float:
        """The largest of what a plan needs over its limit: GPU, host and disk."""
        needs = (
            (plan.gpu.needed, plan.gpu.usable),
            (plan.cpu.per_node, self.cluster["usable_cpu_ram"]),
            (plan.nvme.per_node, self.cluster["nvme"]),
        )
        return max((need / limit for need, limit in needs if limit), default=0.0)

    def to_json(self) -> str:
        """Return the report as JSON text, indented by two."""
        return self.model_dump_json(by_alias=True, indent=2, exclude=None if self.setup else {"setup"})
