"""The modelled time of a step under a parallel layout, of FSDP2 over tensor, context, pipeline and expert parallelism.

Note [Time of a layout]
    The computation is that of :mod:`zeroplan.engines.compute_traffic` over the machine's rates, with the parts of matrices
    and tokens that a rank has. What lies on the critical path is added to it: the collectives of tensor parallelism, the
    exchanges of experts, and of a ring what its attention does not hide. Where the host takes longer to issue all that, the
    host's time counts, and `compute` has the difference. Gathers and reductions of FSDP2 run beside the computation, unit by
    unit (:mod:`zeroplan.search.unit_time`). On pipeline stages they come once a step, before the first forward and behind the
    last backward, and hide nothing. A pipeline's waits are those of its schedule, which is played with the stages' times.
    Blocks count alike: of a mixture, a token's share of the experts.

    Replicas of the shards (HSDP) sum what each shard's ranks have reduced, behind each reduction. Stages of more chunks than
    stay gathered gather them again.

    Collectives take what NCCL's own model says (search/collectives.py): a group of ranks that fits into a node, or into an
    NVLink domain, uses the links between its GPUs; any other the adapters of those GPUs of each node that belong to it. Gathers
    and reductions are of one block each. Collectives of different kinds of groups do not slow each other down.

    What the host does for DTensors and for each gathered parameter is in :mod:`zeroplan.search.layout_host`. The page on
    parallelism holds this model against published runs and two GPUs.
    Sources: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 3.2 (bytes of
    tensor parallelism); Korthikanti et al. 2022, section 4.2 (sequence parallelism moves as many).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

from zeroplan.core.buffers import Phase
from zeroplan.core.expert_parallel import of_experts
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.pipeline import Stage, chunks_of, even_stages
from zeroplan.core.pipeline_order import GATHERED_CHUNKS, Do, PipelineOrder, schedule_of, with_gathers
from zeroplan.core.rates import Rates
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.engines.compute_traffic import COMPUTE, ComputeFacts
from zeroplan.engines.traffic import Sharing
from zeroplan.ledger.traffic import Executor, Resource, WorkItem, work_items
from zeroplan.ledger.work import Counts, Matrices, matrices
from zeroplan.models.facts import experts_a_token, spec_facts
from zeroplan.search.collectives import Collective, RankGroup, fabric_of
from zeroplan.search.layout_host import call_seconds, dispatch_seconds, hook_seconds, input_sums, step_seconds
from zeroplan.search.pipeline_time import StageTime, play
from zeroplan.search.unit_time import ShardedUnit, UnitPass, UnitStep

_GIGA, _TERA = 1e9, 1e12
#: Bytes of an element in the exchanges, which are in 16 bits.
_HALF = 2


@dataclass(frozen=True, slots=True)
class LayoutTime:
    """Seconds of one step, on the rank that has the most to do, and what they are made of.

    Attributes:
        compute: the model's own computation, and issuing it.
        tensor: collectives of tensor parallelism.
        ring: what a ring's attention does not hide of its exchange.
        experts: exchanges of tokens.
        waiting: the rank waits for other pipeline stages.
        sharding: gathers and reductions of FSDP2 that nothing hides.
        optimizer: the update.
        tokens_per_second: of all ranks.
        utilization: operations of the model without recomputation, of what the cards' data sheets promise (MFU).
    """

    compute: float
    tensor: float
    ring: float
    experts: float
    waiting: float
    sharding: float
    optimizer: float
    tokens_per_second: float
    utilization: float

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what they are spent on."""
        names = ("compute", "tensor", "ring", "experts", "waiting", "sharding", "optimizer")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def bubble(self) -> float:
        """The part of a step in which the rank waits for other pipeline stages."""
        return self.waiting / self.total

    def to_dict(self) -> dict[str, float]:
        """Return what the JSON holds of it."""
        return {"step_seconds": self.total, "tokens_per_second": self.tokens_per_second, "bubble": self.bubble}


@dataclass(frozen=True, slots=True)
class Link:
    """A group of ranks and what lies between them.

    Attributes:
        group: tp, cp, ep, pp, shards or replicas.
        ranks: of the group.
        inside: whether it lies within a node, or an NVLink domain.
        gbs: 10^9 bytes a second: the bus bandwidth of a ring; of cp, ep and pp what one GPU sends.
    """

    group: str
    ranks: int
    inside: bool
    gbs: float


@dataclass(frozen=True, slots=True)
class _PassSeconds:
    """Seconds of a forward or a backward of one micro batch, by what they are spent on."""

    compute: float = 0.0
    tensor: float = 0.0
    ring: float = 0.0
    experts: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.ring + self.experts

    def issued_in(self, seconds: float) -> _PassSeconds:
        """Return the pass where the host needs so many seconds to issue it."""
        return replace(self, compute=max(self.compute, seconds - self.tensor - self.ring - self.experts))

    def times(self, count: float) -> _PassSeconds:
        return _PassSeconds(self.compute * count, self.tensor * count, self.ring * count, self.experts * count)

    def plus(self, other: _PassSeconds) -> _PassSeconds:
        return _PassSeconds(
            self.compute + other.compute, self.tensor + other.tensor, self.ring + other.ring, self.experts + other.experts
        )


class LayoutCost:
    """Models the step of one case.

    Args:
        case: model, workload, cluster and layout.
        counts: kernels and bytes of a rank's micro batch, over all blocks of the model.
        rates: of the machine.
        engine: whose ranks share the work.
        sharing: how they do, where it is not the engine's usual way.
    """

    def __init__(self, case: Case, counts: Counts, rates: Rates, engine: Engine, sharing: Sharing | None = None) -> None:
        self.case, self.counts, self.rates, self.engine = case, counts, rates, engine
        self.sharing = sharing or engine.sharing(case)
        self.fabric = fabric_of(rates, case.cluster.gpu)
        self.layout, self.work = case.layout, case.workload
        self.whole: Matrices = matrices(case.spec)
        self.facts = spec_facts(case.spec)
        self.blocks = case.spec.parameters.block_count or 1
        self.tokens = self.work.batch.rows * (self.work.batch.seq_len or 0) // self.layout.cp
        self.hidden_bytes = _HALF * self.tokens * int(case.spec.config.get("hidden_size") or 0)
        self.again = 0 if self.work.recomputation is None or self.work.recomputation.selective else 1

    def time(self, micro_batches: int | None = None) -> LayoutTime:
        """Return the time of a step of so many micro batches, the run's if left out. See Note [Time of a layout]."""
        micro_batches = micro_batches or self.work.batch.grad_accum
        ranks = [self._passes(stages) for stages in self._chunks]
        busy = [sum(f.total + b.total for f, b in chunks) * micro_batches for chunks in ranks]
        worst = max(range(len(busy)), key=busy.__getitem__)
        spent = _PassSeconds()
        for forward, backward in ranks[worst]:
            spent = spent.plus(forward.plus(backward).times(micro_batches))
        waiting = self._pipeline(ranks, micro_batches) - busy[worst] if self.layout.pp > 1 else 0.0
        sharding = self._sharding(worst, ranks[worst], micro_batches)
        if sharding < 0:  # the host's lead in the forward makes up for the backward
            spent, sharding = replace(spent, compute=spent.compute + sharding), 0.0
        optimizer = self._optimizer(worst)
        total = spent.total + waiting + sharding + optimizer
        read = self.work.batch.micro_batch * (self.work.batch.seq_len or 0) * micro_batches * self.layout.dp
        return LayoutTime(
            *(spent.compute, spent.tensor, spent.ring, spent.experts, waiting, sharding, optimizer),
            tokens_per_second=read / total,
            utilization=self._operations * read / (total * self.layout.world_size * self.case.cluster.gpu.bf16_tflops * _TERA),
        )

    @cached_property
    def _operations(self) -> float:
        """Operations a token of forward and backward, without recomputation: six a matrix element, and attention's."""
        scores = (2 if self.whole.causal else 4) * self.whole.attention * (self.work.batch.seq_len or 0)
        return 6 * self.whole.all + 3 * scores

    @cached_property
    def _chunks(self) -> list[tuple[Stage, ...]]:
        """The stages of each pipeline rank."""
        pp, vpp = self.layout.pp, self.layout.vpp
        if pp == 1:
            return [(Stage(0, 1, 0, self.blocks),)]
        if self.case.partition:
            return [replace(self.case, pp_rank=rank).pipeline_chunks for rank in range(pp)]
        if self.sharing.even_stages:
            stages = even_stages(self.blocks, pp * vpp)
            return [tuple(stages[chunk * pp + rank] for chunk in range(vpp)) for rank in range(pp)]
        return [chunks_of(self.blocks, pp, vpp, rank, schedule_of(self.case.pipeline)) for rank in range(pp)]

    # --- one micro batch --------------------------------------------------------------------------------------------------

    def _passes(self, stages: tuple[Stage, ...]) -> list[tuple[_PassSeconds, _PassSeconds]]:
        """Return the forward and the backward of each stage of a rank."""
        forward, backward = (one.issued_in(issued) for one, issued in zip(self._block, self._issued, strict=True))
        found = []
        for stage in stages:
            count = stage.end - stage.first
            head = self._head if stage.is_last else 0.0
            logits = self._logits if stage.is_last else 0.0
            found.append(
                (forward.times(count).plus(_PassSeconds(head, logits)), backward.times(count).plus(_PassSeconds(2 * head)))
            )
        return found

    @cached_property
    def _head(self) -> float:
        """Seconds of the head's product in the forward."""
        return 2 * (self.whole.all - self.whole.blocks) * self.tokens / (self.layout.tp * self.rates.matmul_tflops * _TERA)

    @cached_property
    def _logits(self) -> float:
        """Seconds in which tensor-parallel ranks gather each other's logits."""
        size = self.sharing.gathers_logits * _HALF * self.tokens * int(self.case.spec.config.get("vocab_size") or 0)
        return self.fabric.seconds(Collective.ALL_GATHER, size, self._group(self.layout.tp))

    @cached_property
    def _items(self) -> list[WorkItem]:
        """A rank's work for all blocks of the model."""
        tp = self.layout.tp
        part = self.whole.blocks // tp
        local = replace(self.whole, all=part, trained=part, blocks=part, attention=self.whole.attention // tp)
        local = replace(local, inputs=self.whole.inputs // tp, outputs=self.whole.outputs // tp)
        facts = ComputeFacts(local, self.counts, self.work, cp=self.layout.cp)
        return work_items(COMPUTE, facts, self.rates)

    @cached_property
    def _issued(self) -> tuple[float, float]:
        """Seconds in which the host issues a mean block's forward and backward."""
        return self._host(Phase.FORWARD), self._host(Phase.BACKWARD)

    @cached_property
    def _block(self) -> tuple[_PassSeconds, _PassSeconds]:
        """What the GPU does for one block's forward and backward."""
        items = self._items
        first, second = (self._spent(phase, Executor.GPU) for phase in (Phase.FORWARD, Phase.BACKWARD))
        attention = [
            sum(item.seconds for item in items if item.name.startswith("attention") and item.phase is phase) / self.blocks
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        ]
        tensor, ring, exchange = self._tensor(), self._ring(), self._exchange()
        beside = [0.0, 0.0]
        if self.sharing.pipelines_tensor and self.layout.sp:
            beside = [_products(items, phase) / self.blocks for phase in (Phase.FORWARD, Phase.BACKWARD)]
        repeats = 1 + self.again
        exchanges = [exchange, repeats * exchange]
        if self.sharing.hides_exchange:
            exchanges = [max(0.0, one - other) for one, other in zip(exchanges, (first, second), strict=True)]
        forward = _PassSeconds(
            first, self._shown(tensor, beside[0]), max(0.0, ring - attention[0] / self.layout.cp), exchanges[0]
        )
        hidden = max(0.0, ring * (repeats + 2) - attention[1])  # again the gather, and gradients in fp32
        sums = self._shown(self.again * tensor + self._tensor_back(tensor), beside[1])
        backward = _PassSeconds(second, sums, hidden, exchanges[1])
        return forward, backward

    def _spent(self, phase: Phase, executor: Executor) -> float:
        """Return the seconds that a mean block's work takes of an executor in a phase."""
        found = (item.seconds for item in self._items if item.phase is phase and item.resource.executor is executor)
        return sum(found) / self.blocks

    def _host(self, phase: Phase) -> float:
        """Return the host's seconds for a mean block in a phase."""
        own = dispatch_seconds(self.case, phase, self.rates, self.again) if self.sharing.dispatches else 0.0
        own += call_seconds(self.case, phase, self.rates, self.again) if self.sharing.dispatches else 0.0
        hooks = hook_seconds(self.case, self.counts, phase, self.rates, self.sharing.hooks)
        return self._spent(phase, Executor.PYTHON) + own + hooks

    def _shown(self, sums: float, products: float) -> float:
        """Return what products do not hide of a block's sums that run beside them in as many parts as ranks: at least a part.

        Source: TransformerEngine, transformer_engine/pytorch/module/base.py (initialize_ub: a ring of tp chunks)
        """
        return max(sums / self.layout.tp, sums - products) if products else sums

    def _tensor(self) -> float:
        """Seconds of a block's two sums in one pass, which with sequence parallelism are gathers and scatters."""
        group = self._group(self.layout.tp)
        if self.layout.sp:
            both = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
            return 2 * sum(self.fabric.seconds(one, self.hidden_bytes, group) for one in both)
        return 2 * self.fabric.seconds(Collective.ALL_REDUCE, self.hidden_bytes, group)

    def _tensor_back(self, forward: float) -> float:
        """Seconds of a block's sums in the backward without recomputation, given those of its forward."""
        group = self._group(self.layout.tp)
        if self.layout.sp:
            again = self.fabric.seconds(Collective.ALL_GATHER, self.hidden_bytes, group) if self.sharing.gathers_again else 0.0
            return forward + 2 * again
        return forward if self.sharing.sums_jointly else forward * input_sums(self.case) / 2

    def _ring(self) -> float:
        """Seconds in which a block's keys and values come from the other ranks of the ring, one after the other."""
        cp = self.layout.cp
        if cp == 1:
            return 0.0
        width = (self.facts.kv_heads or self.facts.heads or 0) * (self.facts.head_dim or 0) // self.layout.tp
        inside = cp * self.layout.tp <= self.case.cluster.domain
        return (cp - 1) * self.fabric.send(2 * _HALF * width * self.tokens, inside=inside)

    def _exchange(self) -> float:
        """Seconds of a block's two exchanges in one pass; of a model whose first blocks are dense, a mean block's."""
        ep, config = self.layout.ep, self.case.spec.config
        if ep == 1:
            return 0.0
        routed = self.hidden_bytes * (experts_a_token(config) or 1)
        if self.layout.experts_across:
            routed //= self.layout.tp  # each of them has its part of the tokens
        names = zip(self.case.spec.parameters.names, self.case.spec.parameters.blocks, strict=True)
        mixtures = len({block for name, block in names if of_experts(name)})
        return 2 * self.fabric.exchange(routed, self._group(ep)) * mixtures / self.blocks

    def _group(self, ranks: int, stride: int = 1) -> RankGroup:
        """Return the group of so many ranks, each `stride` behind the one before it."""
        domain = self.case.cluster.domain
        if ranks * stride <= domain:
            return RankGroup(ranks, ranks)
        return RankGroup(ranks, gcd(ranks, max(1, domain // stride)))

    # --- a step -----------------------------------------------------------------------------------------------------------

    def _pipeline(self, ranks: list[list[tuple[_PassSeconds, _PassSeconds]]], micro_batches: int) -> float:
        pp, vpp = self.layout.pp, self.layout.vpp
        schedule = schedule_of(self.case.pipeline)
        orders = [PipelineOrder(schedule, rank, pp, vpp, micro_batches).actions() for rank in range(pp)]
        placed = {schedule.stage_of(chunk, rank, pp): ranks[rank][chunk] for rank in range(pp) for chunk in range(vpp)}
        inside = self.layout.world_size // pp < self.case.cluster.domain
        times = [StageTime(forward.total, backward.total) for _, (forward, backward) in sorted(placed.items())]
        sent = self.hidden_bytes // (self.layout.tp if self.layout.sp else 1)  # ranks that split tokens send their own
        return play(orders, times, self.fabric.send(sent, inside=inside), schedule)

    def _held(self, rank: int) -> tuple[int, int]:
        """Return the elements that a pipeline rank has before they are sharded: dense ones, and experts'."""
        return self.engine.held_elements(replace(self.case, pp_rank=rank), self._chunks[rank])

    def _sharding(self, rank: int, passes: list[tuple[_PassSeconds, _PassSeconds]], count: int) -> float:
        """Seconds of gathers and reductions beyond the computation that they run beside."""
        dense, experts = self._held(rank)
        layout = self.layout
        whole = not self.case.zero.stage  # each rank keeps all, and gathers nothing
        gather = 0.0 if whole else self._sharded(Collective.ALL_GATHER, rank, _HALF)
        reduces = Collective.ALL_REDUCE if whole else Collective.REDUCE_SCATTER
        reduction = self._sharded(reduces, rank, self._reduced_bytes) + self._replicas(dense, experts)
        forward, backward = (sum(one[half].total for one in passes) for half in (0, 1))
        if self.sharing.gathers_once:
            hidden = (forward, backward) if self.sharing.overlaps else (0.0, 0.0)
            reductions = count if self.sharing.reduces_each else 1
            return max(0.0, gather - hidden[0]) + reductions * max(0.0, reduction - hidden[1])
        if layout.pp > 1:
            copies, packed = self._copies(dense, experts)
            return (gather + copies) * self._gathers(rank, count) + reduction + packed
        step = self._units(dense, experts)
        update = UnitPass(self._optimizer(rank), step_seconds(self.case, self.rates, self.sharing.hooks))
        played = (count - 1) * step.seconds(reduces=False) + step.seconds(reduces=True, update=update)
        return played - update.busy - count * (forward + backward)

    def _units(self, dense: int, experts: int) -> UnitStep:
        """Return a micro batch of FSDP2's units; `dense` and `experts` are the elements of them all."""
        parameters = self.case.spec.parameters
        names = zip(parameters.blocks, parameters.numel, strict=True)
        outside = sum(count for block, count in names if not block) // self.layout.tp
        mixture = self.whole.grouped / max(1, self.whole.blocks)
        passes = []
        for one, issued, phase in zip(self._block, self._issued, (Phase.FORWARD, Phase.BACKWARD), strict=True):
            waits = (1 if phase is Phase.FORWARD else self.again) if self.layout.ep > 1 else 0
            passes.append(UnitPass(one.total, issued, mixture * _products(self._items, phase) / self.blocks, waits))
        block = self._unit((dense - outside) / self.blocks, experts / self.blocks)
        return UnitStep(
            root=self._unit(outside, 0.0),
            block=replace(block, forward=passes[0], backward=passes[1]),
            blocks=self.blocks,
            head=(UnitPass(self._head), UnitPass(2 * self._head)),
            taken=(self.fabric.taken(self._shards[0]), self._taken_by_reductions(dense, experts)),
            resharded=self.case.zero.stage == 3,
        )

    def _taken_by_reductions(self, dense: int, experts: int) -> float:
        """Return the part of the multiprocessors that reductions keep in the mean: over shards, and over their replicas."""
        shards = self._collective(Collective.REDUCE_SCATTER, self._reduced_bytes, dense, experts)
        replicas = self._replicas(dense, experts)
        if not shards + replicas:
            return 0.0
        kept = shards * self.fabric.taken(self._shards[0]) + replicas * self.fabric.taken(self._replica_group)
        return kept / (shards + replicas)

    def _unit(self, dense: float, experts: float) -> ShardedUnit:
        """Return the collectives and copies of a unit of so many elements."""
        copied, packed = self._copies(dense, experts)
        whole = not self.case.zero.stage  # each rank keeps all, and gathers nothing
        reduces = Collective.ALL_REDUCE if whole else Collective.REDUCE_SCATTER
        return ShardedUnit(
            gather=0.0 if whole else self._collective(Collective.ALL_GATHER, _HALF, dense, experts),
            copied=0.0 if whole else copied,
            reduce=self._collective(reduces, self._reduced_bytes, dense, experts) + self._replicas(dense, experts),
            packed=packed,
        )

    def _copies(self, dense: float, experts: float) -> tuple[float, float]:
        """Seconds that the casts and copies take which a gather, and a reduction, need in memory."""
        shards, whole = zip((dense, experts), self._shards, strict=True), dense + experts
        cast = self.sharing.cast_bytes * sum(held / group.ranks for held, group in shards)
        moved = cast + self.sharing.copied_bytes * whole, self.sharing.packed_bytes * whole
        return moved[0] / (self.rates.hbm_gbs * _GIGA), moved[1] / (self.rates.hbm_gbs * _GIGA)

    @property
    def _reduced_bytes(self) -> int:
        """Bytes of a gradient element on its way."""
        asked = self.work.numerics.reduce_dtype
        return self.sharing.reduced_bytes if asked is None else asked.bytes

    @property
    def _shards(self) -> tuple[RankGroup, RankGroup]:
        """The ranks over which dense parameters are sharded, and those of experts."""
        layout = self.layout
        dense = self._group(layout.shard_group, layout.tp)
        return dense, self._group(layout.expert_shard_group, layout.ep * layout.etp) if layout.ep > 1 else dense

    @property
    def _replica_group(self) -> RankGroup:
        """The ranks that have the same shard."""
        return self._group(self.layout.dp_replicate, self.layout.shard_group * self.layout.tp)

    def _sharded(self, collective: Collective, rank: int, width: int) -> float:
        """Seconds of a collective over all of a rank's parameters, `width` bytes an element, block by block."""
        units = max(1, sum(stage.end - stage.first for stage in self._chunks[rank]))
        return units * self._collective(collective, width, *(held / units for held in self._held(rank)))

    def _collective(self, collective: Collective, width: int, dense: float, experts: float) -> float:
        """Seconds of a collective over a unit of so many elements, `width` bytes each."""
        sizes = zip((dense, experts), self._shards, strict=True)
        return sum(self.fabric.seconds(collective, width * held, group) for held, group in sizes)

    def _replicas(self, dense: float, experts: float) -> float:
        """Seconds in which a unit's reduced gradients are summed over its shard's replicas."""
        shard = sum(held / shards.ranks for held, shards in zip((dense, experts), self._shards, strict=True))
        return self.fabric.seconds(Collective.ALL_REDUCE, self._reduced_bytes * shard, self._replica_group)

    def _gathers(self, rank: int, micro_batches: int) -> float:
        """How often a pipeline rank gathers each of its chunks in a step: once, unless it has more than stay gathered."""
        vpp = self.layout.vpp
        if vpp <= GATHERED_CHUNKS:
            return 1.0
        order = PipelineOrder(schedule_of(self.case.pipeline), rank, self.layout.pp, vpp, micro_batches)
        return sum(action.do is Do.UNSHARD for action in with_gathers(order.actions())) / vpp

    @property
    def links(self) -> tuple[Link, ...]:
        """What each group of ranks sends over."""
        layout, domain = self.layout, self.case.cluster.domain
        groups = {"tp": self._group(layout.tp), "cp": self._group(layout.cp, layout.tp), "ep": self._group(layout.ep)}
        staged = layout.world_size // layout.pp >= domain
        groups["pp"] = RankGroup(layout.pp, 1 if staged else min(layout.pp, domain * layout.pp // layout.world_size))
        groups |= {"shards": self._shards[0], "replicas": self._replica_group}
        found = []
        for name, group in groups.items():
            inside = group.nodes == 1
            sent = self.fabric.link_gbs if inside else self.fabric.adapter_gbs
            rate = sent if name in ("cp", "ep", "pp") else self.fabric.bus_gbs(group)
            found.append(Link(name, group.ranks, inside, rate))
        return tuple(link for link in found if link.ranks > 1)

    def _optimizer(self, rank: int) -> float:
        """Seconds of the update, of clipping before it, and of what the host does for them while the GPU waits."""
        if self.sharing.own_step and self.layout.pp == 1:
            traffic = self.engine.traffic(self.case.spec, self.case.cluster)
            facts = traffic.facts(ComputeFacts(self.whole, self.counts, self.work), self.work, self.case.zero)
            items = work_items(traffic.ledger, facts, self.rates)
            own = (Executor.GPU, Executor.PYTHON)
            found = (one for one in items if one.phase is Phase.STEP and one.resource.executor in own)
            return sum(one.seconds for one in found if not (one.ahead and one.resource.executor is Executor.PYTHON))
        dense, experts = self._held(rank)
        shards = self.layout.shard_group
        group = self.layout.expert_shard_group if self.layout.ep > 1 else shards
        updated = dense / shards + experts / group if self.case.zero.stage else dense + experts
        states = 2 * find_optimizer(self.work.numerics.optimizer).bytes_per_element(0.0)
        clipped = updated * (4 + 8) / (self.rates.hbm_gbs * _GIGA)
        return clipped + updated * (4 + 8 + states) / (self.rates.adam_gbs * _GIGA)


def _products(items: list[WorkItem], phase: Phase) -> float:
    """Return the seconds of a phase's matrix products."""
    kinds = (Resource.MATMUL, Resource.FP8_MATMUL, Resource.FP32_MATMUL)
    return sum(item.seconds for item in items if item.phase is phase and item.resource in kinds)
