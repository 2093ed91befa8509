"""The layout that shares the least and fits: tensor, context and pipeline parallelism beside FSDP2's sharding.

Note [Order of layouts]
    Layouts are tried in one order, and the first that fits is the answer; step times of layouts are not predicted. Whatever
    splits a model over more ranks adds communication, so fewer ranks a replica come first. Among as many, tensor parallelism
    comes before pipeline stages as long as its group lies within a node, where links are fast and no rank waits in a bubble;
    pipeline stages come before context parallelism, which only long samples need. Checkpointing, which repeats the forward, is
    tried with a layout where nothing fits without it. Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model
    Training on GPU Clusters", section 3 (takeaways 1 to 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.plan import MemoryPlan
from zeroplan.engines.registry import DEFAULT_ENGINE, find_engine
from zeroplan.planner.describe import describe_layout
from zeroplan.planner.estimate import plan_case
from zeroplan.planner.formula import formula_plan
from zeroplan.planner.request import Request
from zeroplan.planner.resolve import Resolved, resolve
from zeroplan.planner.tapes import ExpandedTapes

#: The engine whose layouts are planned.
ENGINE = "fsdp2"
#: Micro batches of a step for each pipeline stage, unless the request says how many: a rank then waits for less than a fifth of
#: a step, (pp − 1) / (4 · pp + pp − 1).
MICRO_BATCHES_A_STAGE = 4
#: Pipeline stages and context-parallel ranks that are tried at most.
_MOST_STAGES, _MOST_RING = 16, 16
#: Tokens that a rank of a ring keeps at least.
_LEAST_TOKENS = 4096
#: Nodes that are tried at most, where the smallest cluster is asked for.
MOST_NODES = 1024


@dataclass(frozen=True, slots=True)
class LaidOut:
    """One layout with its plan.

    Attributes:
        request: the request with the layout's degrees, as ``zeroplan estimate`` takes it.
        layout: the layout.
        plan: its memory; at formula depth where the model states alone exceed the card.
    """

    request: Request
    layout: ParallelLayout
    plan: MemoryPlan

    @property
    def flags(self) -> str:
        """The flags of ``zeroplan estimate`` that ask for the layout."""
        request = self.request
        words = [f"--nodes {request.nodes}"] if request.nodes > 1 else []
        words += [f"--{name} {getattr(request, name)}" for name in ("tp", "cp", "pp") if getattr(request, name) > 1]
        words += ["--sp"] if request.sp else []
        words += [f"--grad-accum {request.grad_accum}"] if request.grad_accum and request.grad_accum > 1 else []
        words += ["--gradient-checkpointing"] if request.gradient_checkpointing else []
        return " ".join([*words, f"--engine {request.engine}", f"--stage {self.plan.stage}"])

    def to_dict(self) -> dict[str, Any]:
        """Return what the JSON of ``recommend --layouts`` holds of it; sizes in bytes."""
        gpu = self.plan.gpu
        return {
            "nodes": self.request.nodes,
            "layout": describe_layout(self.layout),
            "stage": self.plan.stage,
            "grad_accum": self.request.grad_accum or 1,
            "gradient_checkpointing": self.request.gradient_checkpointing,
            "model_states": gpu.model_states,
            "total": gpu.total,
            "interval": gpu.interval,
            "usable": gpu.usable,
            "fits": self.plan.fits,
            "flags": self.flags,
        }


@dataclass(frozen=True, slots=True)
class LayoutAnswer:
    """What a search over layouts found.

    Attributes:
        best: the first layout that fits; None where none does.
        tried: the layouts before it, in their order.
        warnings: what the plans warn of.
    """

    best: LaidOut | None
    tried: tuple[LaidOut, ...]
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as JSON's values."""
        return {
            "best": None if self.best is None else self.best.to_dict(),
            "tried": [one.to_dict() for one in self.tried],
            "warnings": list(self.warnings),
        }


def search_layouts(request: Request, checkpointing: bool | None = None) -> LayoutAnswer:
    """Return the layout of the request's cluster that shares the least and fits. See Note [Order of layouts].

    Args:
        request: the question; its degrees and stage are not read.
        checkpointing: whether blocks are recomputed; None tries without first.

    Raises:
        BadInput: a request that no layout can be planned for.
    """
    request = _asked(request)
    tried: list[LaidOut] = []
    warnings: list[str] = []
    tapes = ExpandedTapes(find_engine(ENGINE))
    too_large: list[dict[str, Any]] = []  # degrees whose model states exceed the card
    for again in (False, True) if checkpointing is None else (checkpointing,):
        for degrees in _orders(request):
            if degrees in too_large:
                continue
            one = replace(request, gradient_checkpointing=again, **degrees)
            try:
                resolved = resolve(one)
            except BadInput:
                if degrees["tp"] * degrees["cp"] * degrees["pp"] == 1:
                    raise  # no degree is to blame
                continue
            found = _laid_out(one, resolved, tapes, warnings)
            if found.plan.fits:
                warnings += [text for text in resolved.warnings if text not in warnings]
                return LayoutAnswer(found, tuple(tried), tuple(warnings))
            if found.plan.fits is False and found.plan.gpu.total is None:
                too_large.append(degrees)
            tried.append(found)
    return LayoutAnswer(None, tuple(tried), tuple(warnings))


def smallest_cluster(request: Request, checkpointing: bool | None = None) -> LayoutAnswer:
    """Return the layout of the fewest nodes, doubled from one on, that trains the model; nodes of the request are not read.

    Args:
        request: the question.
        checkpointing: as of :func:`search_layouts`.

    Raises:
        BadInput: a request that no layout can be planned for.
    """
    tried: list[LaidOut] = []
    warnings: tuple[str, ...] = ()
    nodes = 1
    while nodes <= MOST_NODES:
        found = search_layouts(replace(request, nodes=nodes), checkpointing)
        warnings = found.warnings
        if found.best is not None:
            return replace(found, tried=(*tried, *found.tried))
        tried += found.tried
        nodes *= 2
    return LayoutAnswer(None, tuple(tried), warnings)


def _asked(request: Request) -> Request:
    if request.engine not in (DEFAULT_ENGINE, ENGINE):
        raise BadInput(f"layouts are planned for {ENGINE} alone", where="--engine", remedy="leave it out")
    if request.vram is None and request.gpu is None:
        raise BadInput("no limit to fit", where="--gpu", remedy="name the GPU, or give --vram 80G")
    return replace(request, engine=ENGINE, stage=None, depth=None)


def _orders(request: Request) -> Iterator[dict[str, Any]]:
    """Yield the degrees to try, in their order, as fields of a request."""
    ranks = request.gpus * request.nodes
    found: list[tuple[tuple[int, int, int], dict[str, Any]]] = []
    for tp in _powers(request.gpus):
        for pp in _powers(min(ranks // tp, _MOST_STAGES)):
            for cp in _powers(min(ranks // (tp * pp), _MOST_RING)):
                if cp > 1 and (request.seq_len or 0) // cp < _LEAST_TOKENS:
                    continue
                degrees: dict[str, Any] = {"tp": tp, "sp": tp > 1 and pp == 1, "cp": cp, "pp": pp, "stage": 3 if pp == 1 else 2}
                if pp > 1 and request.grad_accum is None:
                    degrees["grad_accum"] = MICRO_BATCHES_A_STAGE * pp
                found.append(((tp * pp * cp, cp, pp), degrees))
    for _, degrees in sorted(found, key=lambda one: one[0]):
        yield degrees


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())] if most else []


def _laid_out(request: Request, resolved: Resolved, tapes: ExpandedTapes, warnings: list[str]) -> LaidOut:
    """Plan one layout; by formulas alone where its model states do not fit."""
    case = resolved.cases[0]
    usable = case.cluster.usable_vram or 0
    plan = formula_plan(resolved.engine, case)
    if plan.gpu.model_states <= usable:
        plan, _ = plan_case(plan, case, resolved, tapes, None, warnings)
    elif plan.fits is None:
        plan = plan.model_copy(update={"fits": False})
    return LaidOut(request, case.layout, plan)
