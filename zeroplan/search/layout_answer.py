"""What a search over layouts found: the layout, those before it, and those that counts alone rule out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.plan import MemoryPlan, Verdict
from zeroplan.planner.describe import describe_layout
from zeroplan.run.ask import Ask
from zeroplan.search.layout_orders import FIXED, flags_of
from zeroplan.search.layout_recomputation import recomputed
from zeroplan.search.layout_time import LayoutTime, Link


@dataclass(frozen=True, slots=True, repr=False)
class LaidOut:
    """One layout with its plan.

    Attributes:
        request: the request with the layout's degrees, as ``zeroplan estimate`` takes it.
        layout: the layout.
        plan: its memory; at formula depth where the model cannot be traced here.
        time: its modelled time.
        compared: tokens a second by which layouts are compared, of steps of as many sequences (Note [Order of layouts]).
        links: what its groups of ranks send over.
        simpler: of a variant, the time of the same degrees run plainly: 1F1B with one chunk a rank, ZeRO-3 over all ranks.
        slow_host_seconds: of a step, on the slowest host that was calibrated.
    """

    request: Ask
    layout: ParallelLayout
    plan: MemoryPlan
    time: LayoutTime
    compared: float
    links: tuple[Link, ...]
    simpler: LayoutTime | None
    slow_host_seconds: float

    def __repr__(self) -> str:
        return f"<LaidOut {self.flags}: {self.tokens_per_second:,.0f} tokens/s>"

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None if something that decides is in no figure."""
        return self.plan.fits

    @property
    def tokens_per_second(self) -> float:
        """Modelled tokens a second of all ranks together."""
        return self.time.tokens_per_second

    @property
    def step_seconds(self) -> float:
        """Modelled seconds of one optimizer step."""
        return self.time.total

    @property
    def flags(self) -> str:
        """The flags of ``zeroplan estimate`` that ask for the layout."""
        request = self.request
        words = [f"--gpus {request.gpus}"] + ([f"--nodes {request.nodes}"] if request.nodes > 1 else [])
        words += [flags_of(one)] if (one := {name: request.values[name] for name in FIXED if name in request.chosen}) else []
        words += [f"--grad-accum {request.grad_accum}"] if request.grad_accum and request.grad_accum > 1 else []
        words += ["--gradient-checkpointing"] if (policy := recomputed(request)) else []
        words += [f"--checkpoint-policy {policy}"] if policy not in ("", "full") else []
        words += [f"--compile {compiled}"] if (compiled := request.value("compile")) else []
        return " ".join([*words, f"--engine {request.engine}", f"--stage {self.plan.stage}"])

    def to_dict(self) -> dict[str, Any]:
        """Return what the JSON of ``recommend --layouts`` holds of it; sizes in bytes."""
        gpu = self.plan.gpu
        return {
            "nodes": self.request.nodes,
            "layout": describe_layout(self.layout),
            "schedule": self.request.schedule if self.request.pp > 1 else None,
            "stage": self.plan.stage,
            "grad_accum": self.request.grad_accum or 1,
            "gradient_checkpointing": self.request.value("gradient_checkpointing"),
            "checkpoint_policy": recomputed(self.request) or None,
            "model_states": gpu.model_states,
            "total": gpu.total,
            "interval": gpu.interval,
            "usable": gpu.usable,
            "fits": self.plan.fits,
            "modelled": {
                "step_seconds": self.time.total,
                "slow_host_seconds": self.slow_host_seconds,
                "tokens_per_second": self.time.tokens_per_second,
                "compared_tokens_per_second": self.compared,
                "mfu": self.time.utilization,
                "seconds": self.time.parts,
                "bubble": self.time.bubble,
                "links": [asdict(one) for one in self.links],
                "simpler": None if self.simpler is None else self.simpler.to_dict(),
            },
            "flags": self.flags,
        }


@dataclass(frozen=True, slots=True)
class TooLarge:
    """Layouts of one cluster that need more than the card by what follows from counts alone.

    Attributes:
        nodes: of the cluster.
        gpus: of a node.
        layouts: how many there are.
        least: bytes that the worst rank of the smallest of them has at least.
        usable: bytes of the card.
    """

    nodes: int
    gpus: int
    layouts: int
    least: int
    usable: int


@dataclass(frozen=True, slots=True)
class LayoutAnswer:
    """What a search over layouts found.

    Attributes:
        best: the fastest layout that fits; None where none does.
        tried: the layouts that were simulated and are not known to fit; of the best one's cluster these would be faster.
        warnings: what the plans warn of.
        too_large: by cluster, the layouts that were not simulated.
        fixed: the flags of the degrees that the search kept to.
        plainest: of the layouts that fit and are slower than the best by less than such times are off, the plainest; None where
            the best is it.
        without_checkpointing: where the best recomputes blocks, the bytes a GPU that its degrees need at least without that, if
            counts alone rule that out.
        may: where none is known to fit, the fastest whose figures are within the card's, though they leave something out.
    """

    best: LaidOut | None
    tried: tuple[LaidOut, ...]
    warnings: tuple[str, ...] = ()
    too_large: tuple[TooLarge, ...] = ()
    fixed: str = ""
    may: LaidOut | None = None
    plainest: LaidOut | None = None
    without_checkpointing: int | None = None

    def with_straddling(self) -> LayoutAnswer:
        """Return the answer with the fastest layout whose interval reaches below the card's memory as what may fit; those come
        first that are expected below it.
        """

        def place(one: LaidOut) -> tuple[bool, float]:
            return one.plan.gpu.needed <= (one.plan.gpu.usable or 0), one.compared

        return replace(
            self, may=max((one for one in self.tried if one.plan.verdict is Verdict.MAY_FIT), key=place, default=None)
        )

    @property
    def chosen(self) -> LaidOut | None:
        """The answer: the best, else the first that may fit."""
        return self.best or self.may

    @property
    def listed(self) -> tuple[LaidOut, ...]:
        """The answer, and behind it the others that were simulated."""
        chosen = self.chosen
        return (*(() if chosen is None else (chosen,)), *(one for one in self.tried if one is not chosen))

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as JSON's values."""
        chosen = self.chosen
        return {
            "schema": 1,
            "ranking": [] if chosen is None else [_ranked(chosen)],
            "best": None if self.best is None else self.best.to_dict(),
            "plainest": None if self.plainest is None else self.plainest.to_dict(),
            "without_checkpointing": self.without_checkpointing,
            "may_fit": None if self.may is None else self.may.to_dict(),
            "fixed": self.fixed,
            "tried": [one.to_dict() for one in self.tried],
            "too_large": [asdict(one) for one in self.too_large],
            "warnings": list(self.warnings),
        }


def _ranked(one: LaidOut) -> dict[str, Any]:
    """Return a layout as ``recommend --json`` shows every configuration of a ranking."""
    return {
        "index": 0,
        "fits": one.fits,
        "tokens_per_second": one.tokens_per_second,
        "step_seconds": one.step_seconds,
        "plan": one.plan.model_dump(mode="json"),
    }
