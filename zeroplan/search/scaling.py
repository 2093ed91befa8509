"""One model on more and more GPUs: the best configuration at each number of ranks, and how speed a GPU grows or falls.

Note [Superlinear]
    Sharded states shrink with the ranks. What they leave holds a larger micro batch, or states that were on the host, and so
    one GPU does more a second than it did among fewer: the whole grows faster than the ranks (ZeRO's paper, figure 3). It ends
    where the micro batch has all that it needs, and traffic between nodes takes its share.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from zeroplan.core.cluster import MOST_RANKS, Cluster, no_node_of, without_count
from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.display import Printable
from zeroplan.core.plumbing.progress import working
from zeroplan.core.workload import Workload
from zeroplan.planner.describe import describe_cluster, describe_workload
from zeroplan.planner.options import HardwareArguments, RunOptions
from zeroplan.run.ask import Ask
from zeroplan.search.cost import CostModel
from zeroplan.search.memory import Memory
from zeroplan.search.policy import EQUALLY_FAST
from zeroplan.search.recommend import Ranked, search
from zeroplan.search.results import Recommendation, recommendation
from zeroplan.search.search_options import (
    ResolvedSearch,
    SearchOptions,
    candidates_of,
    resolve_search,
)
from zeroplan.search.space import MOST_MICRO_BATCH, Candidate
from zeroplan.search.suggestions import nearest_miss
from zeroplan.search.whole_training import Budget, WholeTraining, training_on

#: Points of an answer at most: each is a search.
MOST_POINTS = 24


class ScaleOptions(RunOptions, HardwareArguments, total=False):
    """The keyword arguments of ``scale`` beside its GPUs: the run, one node, and what the search may not choose."""

    gpus_per_node: int | None
    alloc_conf: str
    stage: int | None
    gradient_checkpointing: bool | None
    compile: str | None
    global_batch: int | None
    profile: str | os.PathLike[str] | None
    nvme_path: str
    tokens: int | str | None
    price: float | str | None


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """The best configuration on one number of ranks.

    Attributes:
        cluster: the nodes and their GPUs.
        best: the fastest that fits, or of which that is unknown; None where nothing fits.
        nearest: the nearest miss, where nothing fits.
        largest_micro_batch: the largest power of two with which `best` still fits; None where a batch was given.
    """

    cluster: Cluster
    best: Recommendation | None
    nearest: Recommendation | None
    largest_micro_batch: int | None

    @property
    def ranks(self) -> int:
        """All GPUs."""
        return self.cluster.layout.world_size

    @property
    def shown(self) -> Recommendation:
        """The best, else the nearest miss."""
        one = self.best or self.nearest
        assert one is not None  # a search gives one of the two
        return one

    @property
    def rank_tokens_per_second(self) -> float | None:
        """Predicted tokens a second of one GPU; None where nothing fits."""
        return None if self.best is None else self.best.tokens_per_second / self.ranks


@dataclass(frozen=True, slots=True)
class Scaling(Printable):
    """The answer of ``scale``: a point for each number of ranks, fewest first."""

    model: dict[str, Any]
    workload: Workload
    points: tuple[ScalePoint, ...]
    global_batch: int | None = None
    warnings: tuple[str, ...] = ()
    rates: dict[str, Any] = field(default_factory=dict)
    budget: Budget | None = None

    def training(self, point: ScalePoint) -> WholeTraining | None:
        """Return the whole training on so many ranks; None without a budget of tokens, and where nothing fits."""
        sizes = {"params": self.model["trainable"], "write_gbs": self.rates["write_gbs"]}
        return training_on(self.budget, point.cluster, point.best, **sizes)

    @property
    def first(self) -> ScalePoint | None:
        """The fewest ranks on which something fits, or may; None if there are none."""
        return next((point for point in self.points if point.best is not None), None)

    @property
    def peak(self) -> ScalePoint | None:
        """The point of the most tokens a second of one GPU, the fewest ranks among equals."""
        return max((p for p in self.points if p.best is not None), key=lambda p: p.rank_tokens_per_second or 0.0, default=None)

    def efficiency(self, point: ScalePoint) -> float | None:
        """Return a GPU's speed over its speed on the fewest ranks that fit: above 1 is superlinear. None where nothing fits."""
        first, speed = self.first, point.rank_tokens_per_second
        base = None if first is None else first.rank_tokens_per_second
        return None if speed is None or not base else speed / base

    @property
    def superlinear(self) -> tuple[ScalePoint, ...]:
        """The points at which a GPU is faster than on the fewest ranks by more than predicted times are off."""
        return tuple(point for point in self.points if (self.efficiency(point) or 0.0) > 1 + EQUALLY_FAST)

    def __repr__(self) -> str:
        return f"<Scaling of {self.model['name']}: {len(self.points)} points>"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; bytes are integers, times seconds. `speedup` and `efficiency` are over the first point
        that fits.
        """
        superlinear = {point.ranks for point in self.superlinear}
        first = self.first
        points: list[dict[str, Any]] = []
        for point in self.points:
            efficiency, training = self.efficiency(point), self.training(point)
            points.append(
                ({} if training is None else {"training": training.to_dict()})
                | {
                    "ranks": point.ranks,
                    "cluster": describe_cluster(point.cluster),
                    "fits": False if point.best is None else point.best.fits,
                    "tokens_per_second": None if point.best is None else point.best.tokens_per_second,
                    "rank_tokens_per_second": point.rank_tokens_per_second,
                    "speedup": None if efficiency is None or first is None else efficiency * point.ranks / first.ranks,
                    "efficiency": efficiency,
                    "superlinear": point.ranks in superlinear,
                    "largest_micro_batch": point.largest_micro_batch,
                    "best": None if point.best is None else point.best.to_dict(),
                    "nearest": None if point.nearest is None else point.nearest.to_dict(),
                }
            )
        return {
            "schema": 1,
            "model": self.model,
            "workload": describe_workload(self.workload) | {"global_batch": self.global_batch},
            **({} if self.budget is None else {"tokens": self.budget.tokens}),
            "warnings": list(self.warnings),
            "points": points,
            "rates": self.rates,
        }


def parse_ranks(gpus: str | int | Iterable[int]) -> tuple[int, ...]:
    """Read numbers of ranks: ``"8..1024"`` doubles from 8 on, ``"8,24,64"`` are these, and so are integers.

    Returns:
        The numbers, ascending, each once.

    Raises:
        BadInput: text of another form, or numbers out of range.
    """
    if isinstance(gpus, str):
        text = gpus.replace(" ", "").replace("_", "")
        if (span := re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", text)) is not None:
            low, high = int(span[1]), int(span[2])
            _require_ranks((low, high))
            if low > high:
                raise BadInput(f"{low}..{high} holds no number", where="--gpus", remedy=f"write {high}..{low}")
            found = {low << power for power in range((high // low).bit_length())}
        elif re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
            found = {int(word) for word in text.split(",")}
        else:
            remedy = "write 8..1024, which doubles, or numbers by comma"
            raise BadInput(f"{gpus[:40]!r} is no range of GPUs", where="--gpus", remedy=remedy)
    else:
        found = {gpus} if isinstance(gpus, int) else set(gpus)
    _require_ranks(found)
    if not 1 <= len(found) <= MOST_POINTS:
        raise BadInput(f"{len(found)} numbers of GPUs", where="--gpus", remedy=f"give 1 to {MOST_POINTS}")
    return tuple(sorted(found))


def _require_ranks(found: Iterable[int]) -> None:
    for count in found:
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_RANKS:
            raise BadInput(f"{count!r} is out of range", where="--gpus", remedy=f"use 1 to {MOST_RANKS:,}")


def run_scaling(
    request: Ask,
    ranks: Iterable[int],
    options: SearchOptions | None = None,
    *,
    gpus_per_node: int | None = None,
) -> Scaling:
    """Find the best configuration of a request at each number of ranks, as :func:`~zeroplan.search.api.run_search` does.

    Args:
        request: model, workload and card; `cpu_ram` and `nvme` are those of one node, its `gpus` and `nodes` are not read.
        ranks: numbers of GPUs. Those of more than a node must be whole nodes.
        options: of each search; candidates and a source are not among them.
        gpus_per_node: GPUs of a node; None takes the count of ``--gpu 4xA100``, else a usual node's.

    Raises:
        BadInput: a value that cannot be used.
    """
    options = options or SearchOptions()
    counts = tuple(ranks)
    named = Cluster.of(gpu=request.gpu)
    usual = named.gpus if named.gpus > 1 else named.gpu.node
    node = usual if gpus_per_node is None else gpus_per_node
    clusters = shapes_of(counts, node)
    resolved = resolve_search(request.replace(gpus=node, nodes=1, gpu=without_count(request.gpu)), options)
    if resolved.cluster.gpus != node:
        raise no_node_of(node, named.gpu, where="--gpus-per-node", remedy=f"use {resolved.cluster.gpus}")
    memory = Memory(resolved.engine, resolved.spec, resolved.cluster, depth=request.depth)
    points = []
    for done, (gpus, nodes) in enumerate(clusters):
        working(f"searching on {gpus * nodes} GPUs", done, len(clusters))
        cluster = resolved.cluster.resized(gpus) if resolved.cluster.assumes_host else replace(resolved.cluster, gpus=gpus)
        here = replace(resolved, cluster=replace(cluster, nodes=nodes))
        memory = memory.on(here.cluster)
        points.append(_point(here, request, options, memory))
    warnings = list(resolved.warnings)
    if memory.no_tape:
        warnings.insert(0, f"formula depth: {memory.no_tape}; nothing is known to fit")
    spec = resolved.spec
    return Scaling(
        model={"name": spec.name, "params": spec.params, "trainable": spec.trainable, "source": spec.source},
        workload=resolved.workload,
        points=tuple(points),
        global_batch=options.global_batch,
        warnings=tuple(warnings),
        rates=resolved.rates.as_dict(),
    )


def shapes_of(counts: Iterable[int], node: int) -> list[tuple[int, int]]:
    """Return GPUs a node, and nodes, of each number of ranks on nodes of so many GPUs.

    Raises:
        BadInput: ranks of more than one node that are not whole nodes.
    """
    return [_shape(count, node) for count in counts]


def _shape(ranks: int, node: int) -> tuple[int, int]:
    if not 1 <= node <= MOST_RANKS:
        raise BadInput(f"{node} is out of range", where="--gpus-per-node", remedy=f"use 1 to {MOST_RANKS:,}")
    if ranks > node and ranks % node:
        remedy = f"use {-(-ranks // node) * node}, or another --gpus-per-node"
        raise BadInput(f"{ranks} GPUs are not whole nodes of {node}", where="--gpus", remedy=remedy)
    return (ranks, 1) if ranks <= node else (node, ranks // node)


def _point(resolved: ResolvedSearch, request: Ask, options: SearchOptions, memory: Memory) -> ScalePoint:
    cluster, engine = resolved.cluster, resolved.engine
    cost = CostModel(engine, resolved.spec, cluster, resolved.rates)
    space = candidates_of(resolved, request, options)
    ranking = search(space, memory, cost, shown=options.shown).ranking
    if not ranking:
        miss = nearest_miss(space, memory, cost)
        return ScalePoint(cluster, None, recommendation(engine, miss, 0, cluster.layout), None)
    best = ranking[0]
    open_ = options.global_batch is None and request.micro_batch is None
    largest = _largest(best, memory) if open_ else None
    return ScalePoint(cluster, recommendation(engine, best, 0, cluster.layout), None, largest)


def _largest(best: Ranked, memory: Memory) -> int:
    """The largest micro batch, doubling from the best's own, with which the same configuration may fit."""
    micro = best.candidate.workload.batch.micro_batch
    for larger in _doubled(best.candidate):
        if memory.cannot_fit(larger) or not memory.may_fit(memory.plan(larger), larger):
            break
        micro = larger.workload.batch.micro_batch
    return micro


def _doubled(candidate: Candidate) -> Iterator[Candidate]:
    micro = 2 * candidate.workload.batch.micro_batch
    while micro <= MOST_MICRO_BATCH:
        yield replace(candidate, workload=candidate.workload.but(micro_batch=micro))
        micro *= 2
