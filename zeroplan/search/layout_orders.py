"""Which layouts a search tries: the degrees that the request fixes, and those that divide what these leave.

Note [Fixed degrees]
    A degree that the request says is kept, ``--tp 1`` included; every other one is searched. What the search leaves out for
    being slow may be asked for: matrices shared between nodes, more than 16 stages where fewer fit, rings with few tokens a
    rank, other numbers than powers of two (but for three times as many stages, where a batch is given and the ranks divide by
    three). Bounds are those of the search and not of a layout.

Note [Variants of a layout]
    The same degrees may run otherwise, each way with more memory, so that one is looked at where the layout itself fits and
    taken where it is modelled to be faster by more than such times are off (:data:`LEAST_GAIN`). Stages run interleaved,
    with two chunks a rank, or up to as many as the engine's :class:`~zeroplan.engines.base.SearchedLayouts` says. Without
    stages, parameters stay gathered between forward and backward (ZeRO-2), or the shards of a model lie within a node, or
    within 8 or 64 nodes, which hold replicas (HSDP; torchtitan's of mixtures, too).

    Left out: more chunks of FSDP2, whose parameters torch gathers again and again; GPipe, which waits as long as 1F1B and
    keeps more; DualPipeV, whose gain is the overlap of a forward with a backward, which torch runs one behind the other;
    and whatever halves backwards (ZB1P, ZBV), of which no tape is shipped, so that each model would be traced first. A
    request may fix each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from zeroplan.core.cluster import Cluster, without_count
from zeroplan.core.errors import BadInput
from zeroplan.core.expert_parallel import GROUPED, experts_of
from zeroplan.core.parallel import DEFAULT_SCHEDULE, ParallelLayout
from zeroplan.core.pipeline_order import PipelineSchedule
from zeroplan.core.tensor_parallel import MIXTURES, PLANS
from zeroplan.engines.base import SearchedLayouts
from zeroplan.engines.registry import engine_names, find_engine
from zeroplan.models.spec import ModelSpec
from zeroplan.planner.resolve import Resolved
from zeroplan.run.ask import Ask
from zeroplan.search.policy import EQUALLY_FAST
from zeroplan.search.search_options import AUTO
from zeroplan.techniques.compiled import CompiledTechnique

#: The engine whose layouts are planned where none is named.
ENGINE = "fsdp2"
#: What may be fixed of a layout, as fields of a request.
FIXED = ("tp", "sp", "cp", "pp", "vpp", "ep", "etp", "schedule", "dp_replicate")
#: By how much a variant has to be modelled faster than any layout without one. See Note [Variants of a layout].
LEAST_GAIN = EQUALLY_FAST
#: Schedules of two chunks a rank, whatever else is said.
_OF_TWO_CHUNKS = tuple(one.value for one in PipelineSchedule if one.folded)
#: Micro batches of a step for each pipeline stage, unless the request says how many: a rank then waits for less than a fifth of
#: a step, (pp − 1) / (4 · pp + pp − 1).
MICRO_BATCHES_A_STAGE = 4
#: Pipeline stages and context-parallel ranks that are tried at most.
_MOST_STAGES, _MOST_RING = 16, 16
#: Stages that are tried where nothing fits with fewer.
_MANY_STAGES = 64
#: By how much the nodes differ that hold a replica.
_STEP_OF_NODES = 8
#: Tokens that a rank of a ring keeps at least.
_LEAST_TOKENS = 4096


def fixed_degrees(request: Ask) -> dict[str, Any]:
    """Return the degrees that a request says, by field. See Note [Fixed degrees]."""
    return {name: request.values[name] for name in FIXED if name in request}


def without_degrees(request: Ask) -> Ask:
    """Return the request under data parallelism alone, with nothing fixed."""
    return request.replace(**dict.fromkeys(FIXED), stage=None)


def flags_of(fixed: dict[str, Any]) -> str:
    """Return the flags that fix degrees: ``"--tp 4 --sp"``."""
    words = []
    for name, value in fixed.items():
        flag = name.replace("_", "-")
        words.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {value}")
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class LayoutOrders:
    """The layouts of one model on any ranks.

    Attributes:
        layouts: what the engine's layouts are.
        experts: of a mixture whose ranks may share them, the experts of a block; 0 of others.
        splits_tokens: whether ranks that share its matrices may share the tokens between them.
        global_batch: sequences of a step; None leaves the accumulation to the search.
        most_stages: pipeline stages that are tried at most.
    """

    layouts: SearchedLayouts
    experts: int = 0
    splits_tokens: bool = True
    global_batch: int | None = None
    most_stages: int = _MOST_STAGES

    @classmethod
    def of_model(cls, spec: ModelSpec, layouts: SearchedLayouts, global_batch: int | None = None) -> LayoutOrders:
        """Return those of a model under an engine."""
        plan = {**PLANS, **MIXTURES}.get(spec.model_type)
        experts = experts_of(spec.parameters) if spec.model_type in GROUPED else 0
        return cls(layouts, experts, layouts.splits and (plan is None or plan.splits_tokens), global_batch)

    def with_many_stages(self) -> LayoutOrders:
        """Return those with more stages, too."""
        return replace(self, most_stages=_MANY_STAGES)

    def of(self, request: Ask) -> Iterator[dict[str, Any]]:
        """Yield what to try, those that share less first, as fields of the request; not all of them divide the ranks."""
        fixed = fixed_degrees(request)
        found = [self._whole(request, fixed, shared) for shared in self._shared(request, fixed)]
        found.sort(key=lambda one: (one["tp"] * one["pp"] * one["cp"], one["cp"], one["pp"], one["ep"]))
        yield from found

    def variants(self, asked: Ask, layout: Ask) -> Iterator[dict[str, Any]]:
        """Yield other ways to run a layout, as fields of its request. See Note [Variants of a layout].

        Args:
            asked: the request, which says what is fixed.
            layout: the same with the degrees of one layout.
        """
        fixed = fixed_degrees(asked)
        if layout.pp > 1:
            if layout.vpp == 1 and "vpp" not in fixed:
                yield from ({"vpp": chunks} for chunks in powers(self.layouts.chunks)[1:])
            return
        stages = (3, 2) if asked.stage is None and layout.stage == 3 else (layout.stage,)
        replicas = [layout.dp_replicate, *([] if "dp_replicate" in fixed else _replicas(layout))]
        for count in replicas:
            for stage in stages:
                if (count, stage) != (layout.dp_replicate, layout.stage):
                    yield {"dp_replicate": count, "stage": stage}

    def _shared(self, request: Ask, fixed: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the degrees that divide the model."""
        ranks = request.gpus * request.nodes
        staged = fixed.get("vpp", 1) > 1 or fixed.get("schedule", DEFAULT_SCHEDULE) != DEFAULT_SCHEDULE
        tensors = [1] if self.experts else powers(request.gpus)
        if fixed.get("sp") or fixed.get("etp", 1) > 1:
            tensors = [tp for tp in powers(request.gpus) if tp > 1] or [1]
        for tp in _kept("tp", fixed, tensors):
            stages = powers(min(max(1, ranks // tp), self.most_stages))
            if self.global_batch is not None and ranks % 3 == 0:  # data-parallel ranks that divide the batch leave the three
                stages += [3 * pp for pp in stages if 3 * pp <= min(ranks // tp, self.most_stages)]
            if staged:
                stages = [pp for pp in stages if pp > 1] or [1]
            for pp in _kept("pp", fixed, stages):
                rings = [1] if self.experts else powers(min(max(1, ranks // (tp * pp)), _MOST_RING))
                rings = [cp for cp in rings if cp == 1 or (request.seq_len or 0) // cp >= _LEAST_TOKENS]
                experts = powers(min(max(1, ranks // pp), self.experts)) if self.experts else [1]
                for cp in _kept("cp", fixed, rings):
                    for ep in _kept("ep", fixed, experts):
                        yield {"tp": tp, "cp": cp, "pp": pp, "ep": ep}

    def _whole(self, request: Ask, fixed: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
        """Return the degrees with what follows from them."""
        tp, cp, pp = shared["tp"], shared["cp"], shared["pp"]
        splits = fixed.get("sp", tp > 1 and (pp == 1 or self.layouts.splits_staged) and self.splits_tokens)
        stage = request.stage if request.stage is not None else self.layouts.stage if pp == 1 else self.layouts.staged
        degrees = shared | {"sp": splits, "stage": stage}
        if "vpp" not in fixed and request.schedule in _OF_TWO_CHUNKS:
            degrees["vpp"] = 2
        if request.grad_accum is None:
            samples = max(1, sequences(request.replace(tp=tp, cp=cp, pp=pp)))
            if self.global_batch is not None:
                degrees["grad_accum"] = max(1, self.global_batch // samples)
            elif pp > 1:
                degrees["grad_accum"] = MICRO_BATCHES_A_STAGE * pp
        return degrees


def _replicas(layout: Ask) -> Iterator[int]:
    """Yield into how many replicas a layout's nodes may be divided: of 1 node, 8, 64 and so on, which hold whole groups."""
    nodes, whole = 1, lcm(layout.tp * layout.cp, layout.ep * layout.etp)
    while nodes < layout.nodes:
        if layout.nodes % nodes == 0 and nodes * layout.gpus % whole == 0:
            yield layout.nodes // nodes
        nodes *= _STEP_OF_NODES


def sequences(request: Ask) -> int:
    """Return the sequences of a step."""
    ranks = request.gpus * request.nodes // (request.tp * request.cp * request.pp)
    return ranks * (request.micro_batch or 1) * (request.grad_accum or 1)


def divides(request: Ask) -> bool:
    """Return whether a layout's degrees divide the ranks."""
    ranks, rest = request.gpus * request.nodes, request.pp * request.dp_replicate
    shared = request.tp * request.cp * request.pp
    return ranks % (shared * request.dp_replicate) == 0 and ranks // rest % (request.ep * request.etp) == 0


def least_ranks(request: Ask) -> int:
    """Return the number of which the ranks have to be a multiple, by the degrees that a request fixes."""
    rest = request.pp * request.dp_replicate
    return lcm(rest * request.tp * request.cp, rest * request.ep * request.etp)


def _kept(name: str, fixed: dict[str, Any], others: list[int]) -> list[int]:
    return [fixed[name]] if name in fixed else others


def powers(most: int) -> list[int]:
    """Return the powers of two up to a number."""
    return [1 << power for power in range(most.bit_length())] if most else []


def require_batch(resolved: Resolved, global_batch: int) -> None:
    """Refuse a layout whose ranks do not divide the global batch."""
    work, dp = resolved.workload, resolved.cases[0].layout.dp
    if dp * work.batch.micro_batch * work.batch.grad_accum != global_batch:
        passes = f" × {work.batch.grad_accum} passes" if work.batch.grad_accum > 1 else ""
        what = (
            f"{dp} data-parallel ranks × {work.batch.micro_batch} samples{passes} do not make {global_batch} sequences a step"
        )
        raise BadInput(what, where="--global-batch", remedy=f"use a multiple of {dp * work.batch.micro_batch}")


def checked_request(request: Ask, global_batch: int | None) -> Ask:
    """Return the request for the engine of layouts. Raises BadInput: what a search over layouts does not take."""
    request = request.checked()
    if request.model is None:
        raise BadInput("no model whose matrices could be shared", where="MODEL", remedy="give one id, path or config")
    engine = request.engine if "engine" in request else ENGINE
    if find_engine(engine).layouts is None:
        *others, last = (name for name in engine_names() if find_engine(name).layouts is not None)
        raise BadInput(
            f"layouts are searched for {', '.join(others)} and {last} alone",
            where="--engine",
            remedy=f"leave it out for {ENGINE}",
        )
    if request.vram is None and request.gpu is None:
        raise BadInput("no GPU is named", where="the machine", remedy="give a card, --gpu H100, or --vram 80G")
    for where, device in (("--offload-optimizer", request.offload_optimizer), ("--offload-param", request.offload_param)):
        if device not in (None, "none"):
            raise BadInput("the time of layouts with offload is not modelled", where=where, remedy="leave it out")
    if request[CompiledTechnique.compile] == AUTO:
        raise BadInput("is no choice of a search over layouts", where="--compile auto", remedy="write blocks, or leave it out")
    if global_batch is not None and global_batch < 1:
        raise BadInput(f"{global_batch} is below 1", where="--global-batch", remedy="use a whole number above zero")
    cluster = Cluster.of(gpus=request.gpus, nodes=request.nodes, gpu=request.gpu)
    below: dict[str, Any] = {name: value for name, value in fixed_degrees(request).items() if type(value) is int and value < 1}
    ParallelLayout(**below)  # refuses them
    # Programs that start layouts make each rank's shards, or read them from a distributed checkpoint: no rank holds the model.
    scratch = {} if "from_scratch" in request else {"from_scratch": True}
    machine = {"gpus": cluster.gpus, "nodes": cluster.nodes, "gpu": without_count(request.gpu)}
    return request.replace(engine=engine, offload_optimizer=None, offload_param=None, **machine, **scratch)
