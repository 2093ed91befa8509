"""The nouns of an answer: a Recommendation, and the SearchResult that holds several with what they were asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.plan import MemoryPlan
from zeroplan.core.plumbing.display import Printable
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.base import Engine
from zeroplan.interop.forms.configuration import Model
from zeroplan.interop.training import NO_TRAINING, Training
from zeroplan.planner.describe import describe_cluster, describe_workload
from zeroplan.search.cost import StepTime
from zeroplan.search.recommend import Ranked, headroom

if TYPE_CHECKING:
    from zeroplan.interop.edits.written import ChangedFiles


@dataclass(frozen=True, slots=True)
class Recommendation(Printable):
    """One configuration with its predicted step time, its memory and its reasons.

    Attributes:
        index: its place in the candidates file (counted from 0), else in the ranking.
        engine: what runs it.
        zero: sharding and offload.
        workload: batches, precision, checkpointing.
        plan: its memory.
        time: its predicted step.
        layout: the parallel degrees.
        alloc_conf: what PYTORCH_ALLOC_CONF should hold.
        reasons: sentences for the user.
    """

    index: int
    engine: Engine
    zero: ZeroConfig
    workload: Workload
    plan: MemoryPlan
    time: StepTime
    layout: ParallelLayout
    alloc_conf: str = ""
    reasons: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether the interval's upper end, the host and the disk are within their limits; None if unknown or unlimited."""
        return self.plan.fits

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all ranks together."""
        return self.time.tokens_per_second

    @property
    def step_seconds(self) -> float:
        """Seconds of one optimizer step."""
        return self.time.total

    def __repr__(self) -> str:
        return f"<Recommendation {self.plan.label}: {self.tokens_per_second:,.0f} tokens/s>"

    def ds_config(self) -> dict[str, Any] | None:
        """Return the explicit ds_config that runs this; None where the engine takes none."""
        return self.engine.ds_config(self.zero, self.workload, self.layout)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; bytes are integers, times seconds."""
        return {
            "index": self.index,
            "fits": self.fits,
            "headroom": headroom(self.plan),
            "tokens_per_second": self.tokens_per_second,
            "step_seconds": self.step_seconds,
            "micro_batch": self.workload.batch.micro_batch,
            "grad_accum": self.workload.batch.grad_accum,
            "gradient_checkpointing": self.workload.gradient_checkpointing,
            **({} if self.workload.compile is None else {"compile": self.workload.compile.value}),
            "alloc_conf": self.alloc_conf,
            "time": {
                "forward": self.time.forward,
                "backward": self.time.backward,
                "step": self.time.step,
                "slow_host_seconds": self.time.slow_host_seconds,
                "bound": self.time.bound.value,
                "lanes": {one.value: seconds for one, seconds in self.time.busy.items() if seconds},
            },
            "reasons": list(self.reasons),
            "ds_config": self.ds_config(),
            "plan": self.plan.model_dump(mode="json"),
        }


def recommendation(engine: Engine, ranked: Ranked, index: int, layout: ParallelLayout) -> Recommendation:
    """Return a ranked candidate as users see it."""
    candidate = ranked.candidate
    place = candidate.index if candidate.index >= 0 else index
    return Recommendation(
        place,
        candidate.engine or engine,
        candidate.zero,
        candidate.workload,
        ranked.plan,
        ranked.time,
        layout,
        candidate.alloc_conf,
    )


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change that makes the model fit, and the best configuration after it."""

    what: str
    best: Recommendation


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration in the picture of memory against speed. `floor` says that `bytes` is a floor, not a simulation."""

    label: str
    bytes: int
    tokens_per_second: float
    fits: bool
    floor: bool


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The answer of ``recommend``. `ranking` is best first; `nearest` is the nearest miss when nothing fits.

    `changed` are the user's files changed to the best, `changed_run` what these are predicted to do; `other_engine` is the best
    of another engine that gains something. `loaded` says where a training script gets the model from, `training` what the run
    in use says beside what a plan holds.
    """

    model: dict[str, Any]
    workload: Workload
    cluster: Cluster
    ranking: tuple[Recommendation, ...]
    nearest: Recommendation | None = None
    changes: tuple[Suggestion, ...] = ()
    current: Recommendation | None = None
    points: tuple[Point, ...] = ()
    warnings: tuple[str, ...] = ()
    considered: int = 0
    simulated: int = 0
    goal: str = "throughput"
    global_batch: int | None = None
    rates: dict[str, Any] = field(default_factory=dict)
    loaded: Model = field(default_factory=Model)
    training: Training = NO_TRAINING
    changed: ChangedFiles | None = None
    changed_run: Recommendation | None = None
    other_engine: Recommendation | None = None

    @property
    def best(self) -> Recommendation | None:
        """The first recommendation that fits; else the first that may, its plan undecided; None if none does."""
        return next((r for r in self.ranking if r.fits is not False), None)

    @staticmethod
    def _patched(changed: ChangedFiles, run: Recommendation) -> dict[str, Any]:
        return {"diff": changed.diff, "left": list(changed.edits.left), "run": run.to_dict()}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "schema": 1,
            "model": self.model,
            "workload": describe_workload(self.workload) | {"global_batch": self.global_batch},
            "cluster": describe_cluster(self.cluster),
            "goal": self.goal,
            "warnings": list(self.warnings),
            "ranking": [r.to_dict() for r in self.ranking],
            "current": None if self.current is None else self.current.to_dict(),
            "nearest": None if self.nearest is None else self.nearest.to_dict(),
            "changes": [{"what": c.what, "best": c.best.to_dict()} for c in self.changes],
            "considered": self.considered,
            "simulated": self.simulated,
            "rates": self.rates,
            **(
                {}
                if self.changed is None or self.changed_run is None
                else {"patched": self._patched(self.changed, self.changed_run)}
            ),
            **({} if self.other_engine is None else {"beside": self.other_engine.to_dict()}),
        }
