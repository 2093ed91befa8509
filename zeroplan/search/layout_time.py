"""The modelled time of a step under a parallel layout, of FSDP2 over tensor, context, pipeline and expert parallelism.

Note [Time of a layout]
    The computation is that of :mod:`zeroplan.engines.compute_traffic` over the machine's rates, with the parts of matrices
    and tokens that a rank has. What lies on the critical path is added to it: the collectives of tensor parallelism, the
    exchanges of experts, and of a ring what its attention does not hide. Gathers and reductions of FSDP2 run beside the
    computation; on pipeline stages they come once a step, before the first forward and behind the last backward, and hide
    nothing. A pipeline's waits are those of its schedule, which is played with the stages' times. Blocks count alike: of a
    mixture, a token's share of the experts.

    Replicas of the shards (HSDP) sum what each shard's ranks have reduced, behind each reduction. Stages of more chunks than
    stay gathered gather them again.

    A group of ranks that fits into a node uses the links between its GPUs, any other the network. Rings attain one rate
    whatever their size, and collectives of different groups do not slow each other down.

    This is a model: no layout's time was measured here. The page on parallelism holds it against published runs.
    Sources: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 3.2 (bytes of
    tensor parallelism); Korthikanti et al. 2022, section 4.2 (sequence parallelism moves as many).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from zeroplan.core.buffers import Phase
from zeroplan.core.expert_parallel import is_expert
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.pipeline import Stage, chunks_of
from zeroplan.core.pipeline_action import Do
from zeroplan.core.pipeline_order import GATHERED_CHUNKS, PipelineOrder, schedule_of, with_gathers
from zeroplan.core.rates import Rates
from zeroplan.engines.base import Case
from zeroplan.engines.compute_traffic import COMPUTE, compute_facts
from zeroplan.ledger.traffic import Executor, WorkItem, work_items
from zeroplan.ledger.work import Counts, Matrices, matrices
from zeroplan.models.facts import spec_facts
from zeroplan.search.pipeline_time import StageTime, play

_GIGA, _TERA = 1e9, 1e12
#: Bytes of an element in the exchanges, which are in 16 bits, and of a reduced gradient.
_HALF, _SINGLE = 2, 4


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
        inside: whether it lies within a node.
        gbs: 10^9 bytes a second, one way, a GPU.
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
    """

    def __init__(self, case: Case, counts: Counts, rates: Rates) -> None:
        self.case, self.counts, self.rates = case, counts, rates
        self.layout, self.work = case.layout, case.workload
        self.whole: Matrices = matrices(case.spec)
        self.facts = spec_facts(case.spec)
        self.blocks = len({block for block in case.spec.parameters.blocks if block}) or 1
        self.tokens = self.work.batch.rows * (self.work.batch.seq_len or 0) // self.layout.cp
        self.hidden_bytes = _HALF * self.tokens * int(case.spec.config.get("hidden_size") or 0)
        self.again = 0 if self.work.recomputation is None or self.work.recomputation.selective else 1

    def time(self) -> LayoutTime:
        """Return the time of a step. See Note [Time of a layout]."""
        micro_batches = self.work.batch.grad_accum
        ranks = [self._passes(stages) for stages in self._chunks]
        busy = [sum(f.total + b.total for f, b in chunks) * micro_batches for chunks in ranks]
        worst = max(range(len(busy)), key=busy.__getitem__)
        spent = _PassSeconds()
        for forward, backward in ranks[worst]:
            spent = spent.plus(forward.plus(backward).times(micro_batches))
        waiting = self._pipeline(ranks) - busy[worst] if self.layout.pp > 1 else 0.0
        sharding = self._sharding(worst, ranks[worst])
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
        return [chunks_of(self.blocks, pp, vpp, rank, schedule_of(self.case.pipeline)) for rank in range(pp)]

    # --- one micro batch --------------------------------------------------------------------------------------------------

    def _passes(self, stages: tuple[Stage, ...]) -> list[tuple[_PassSeconds, _PassSeconds]]:
        """Return the forward and the backward of each stage of a rank."""
        forward, backward = self._block
        found = []
        for stage in stages:
            count = stage.end - stage.first
            head = self._head if stage.is_last else 0.0
            found.append((forward.times(count).plus(_PassSeconds(head)), backward.times(count).plus(_PassSeconds(2 * head))))
        return found

    @cached_property
    def _head(self) -> float:
        """Seconds of the head's product in the forward."""
        return 2 * (self.whole.all - self.whole.blocks) * self.tokens / (self.layout.tp * self.rates.matmul_tflops * _TERA)

    @cached_property
    def _block(self) -> tuple[_PassSeconds, _PassSeconds]:
        """One block's forward and backward."""
        tp = self.layout.tp
        part = self.whole.blocks // tp
        local = replace(self.whole, all=part, trained=part, blocks=part, attention=self.whole.attention // tp)
        facts = replace(compute_facts(local, self.counts, self.work), tokens=self.tokens)
        items = work_items(COMPUTE, facts, self.rates)
        first, second = (_device(items, phase) / self.blocks for phase in (Phase.FORWARD, Phase.BACKWARD))
        attention = [
            sum(item.seconds for item in items if item.name.startswith("attention") and item.phase is phase) / self.blocks
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        ]
        tensor, ring, exchange = self._tensor(), self._ring(), self._exchange()
        forward = _PassSeconds(first, tensor, max(0.0, ring - attention[0] / self.layout.cp), exchange)
        repeats = 1 + self.again
        hidden = max(0.0, ring * (repeats + 2) - attention[1])  # again the gather, and gradients in fp32
        gathers = self._link(self.hidden_bytes * (tp - 1) // tp, tp) * 2 if self.layout.sp else 0.0
        backward = _PassSeconds(second, repeats * tensor + gathers, hidden, repeats * exchange)
        return forward, backward

    def _tensor(self) -> float:
        """Seconds of a block's two sums in one pass: each moves 2 (t − 1) / t of the hidden states."""
        tp = self.layout.tp
        if tp == 1:
            return 0.0
        return 2 * (self._link(2 * self.hidden_bytes * (tp - 1) // tp, tp) + self.rates.collective_us * tp / 1e6)

    def _ring(self) -> float:
        """Seconds in which a block's keys and values come from the other ranks of the ring."""
        cp = self.layout.cp
        width = (self.facts.kv_heads or self.facts.heads or 0) * (self.facts.head_dim or 0) // self.layout.tp
        return self._link(2 * _HALF * width * self.tokens * (cp - 1), cp * self.layout.tp) if cp > 1 else 0.0

    def _exchange(self) -> float:
        """Seconds of a block's two exchanges in one pass; of a model whose first blocks are dense, a mean block's."""
        ep, config = self.layout.ep, self.case.spec.config
        if ep == 1:
            return 0.0
        routed = self.hidden_bytes * int(config.get("num_experts_per_tok") or 1)
        if self.layout.experts_across:
            routed //= self.layout.tp  # each of them has its part of the tokens
        inside = min(ep, self.layout.gpus)
        near = routed * (inside - 1) / ep / (self.rates.link_gbs * _GIGA)
        far = routed * (ep - inside) / ep / (self.rates.node_gbs * _GIGA)
        latency = self.rates.collective_us * ep / 1e6
        names = zip(self.case.spec.parameters.names, self.case.spec.parameters.blocks, strict=True)
        mixtures = len({block for name, block in names if is_expert(name)})
        return 2 * (max(near, far) + latency) * mixtures / self.blocks

    def _link(self, count: float, span: int) -> float:
        """Seconds of bytes between ranks of which the first and the last are `span` apart."""
        rate = self.rates.link_gbs if span <= self.layout.gpus else self.rates.node_gbs
        return count / (rate * _GIGA)

    # --- a step -----------------------------------------------------------------------------------------------------------

    def _pipeline(self, ranks: list[list[tuple[_PassSeconds, _PassSeconds]]]) -> float:
        pp, vpp = self.layout.pp, self.layout.vpp
        schedule = schedule_of(self.case.pipeline)
        orders = [PipelineOrder(schedule, rank, pp, vpp, self.work.batch.grad_accum).actions() for rank in range(pp)]
        placed = {schedule.stage_of(chunk, rank, pp): ranks[rank][chunk] for rank in range(pp) for chunk in range(vpp)}
        span = self.layout.world_size // pp + 1
        times = [StageTime(forward.total, backward.total) for _, (forward, backward) in sorted(placed.items())]
        return play(orders, times, self._link(self.hidden_bytes, span), schedule)

    def _held(self, rank: int) -> tuple[int, int]:
        """Return the elements that a pipeline rank has before they are sharded: dense ones, and experts'."""
        parameters = replace(self.case, pp_rank=rank).parameters
        if self.layout.pp > 1:
            from zeroplan.core.pipeline import stage_parameters

            parameters = stage_parameters(parameters, self._chunks[rank])
        experts = sum(count for name, count in zip(parameters.names, parameters.numel, strict=True) if is_expert(name))
        return parameters.total - experts, experts

    def _sharding(self, rank: int, passes: list[tuple[_PassSeconds, _PassSeconds]]) -> float:
        """Seconds of gathers and reductions beyond the computation that they run beside."""
        dense, experts = self._held(rank)
        layout, count = self.layout, self.work.batch.grad_accum
        shared = layout.ep > 1
        rest = (layout.shard_group - 1) / layout.shard_group
        replicas = self._replicas(dense / layout.shard_group + experts / layout.expert_shard_group)
        same = (layout.expert_shard_group - 1) / layout.expert_shard_group if shared else rest
        moved = dense * rest + experts * same
        rate = (self.rates.link_gbs if layout.shards_on_one_node else self.rates.node_gbs) * _GIGA
        copied = (dense + experts) / (self.rates.hbm_gbs * _GIGA)
        gather, reduction = _HALF * moved / rate, _SINGLE * moved / rate + replicas
        cast, packed = (_SINGLE + 3 * _HALF) * copied, (2 * _HALF + 2 * _SINGLE) * copied
        if layout.pp > 1:
            return (gather + cast) * self._gathers(rank) + reduction + packed
        forward, backward = (sum(one[half].total for one in passes) for half in (0, 1))
        again = gather if self.case.zero.stage == 3 else 0.0
        beyond = max(0.0, gather - forward) + max(0.0, again - backward)
        last = max(0.0, again + reduction - backward) - max(0.0, again - backward)
        return count * (beyond + cast) + last + packed

    def _replicas(self, shard: float) -> float:
        """Seconds in which a shard's reduced gradients are summed over its replicas: each moves 2 (r − 1) / r of them."""
        count = self.layout.dp_replicate
        moved = 2 * _SINGLE * shard * (count - 1) / count
        return self._link(moved, self.layout.shard_group * self.layout.tp * count) if count > 1 else 0.0

    def _gathers(self, rank: int) -> float:
        """How often a pipeline rank gathers each of its chunks in a step: once, unless it has more than stay gathered."""
        vpp = self.layout.vpp
        if vpp <= GATHERED_CHUNKS:
            return 1.0
        order = PipelineOrder(schedule_of(self.case.pipeline), rank, self.layout.pp, vpp, self.work.batch.grad_accum)
        return sum(action.do is Do.UNSHARD for action in with_gathers(order.actions())) / vpp

    @property
    def links(self) -> tuple[Link, ...]:
        """What each group of ranks sends over."""
        layout = self.layout
        spans = {"tp": (layout.tp, layout.tp), "cp": (layout.cp, layout.cp * layout.tp), "ep": (layout.ep, layout.ep)}
        spans["pp"] = (layout.pp, layout.world_size if layout.pp > 1 else 1)
        spans["shards"] = (layout.shard_group, 1 if layout.shards_on_one_node else layout.world_size)
        spans["replicas"] = (layout.dp_replicate, layout.shard_group * layout.tp * layout.dp_replicate)
        return tuple(
            Link(name, count, span <= layout.gpus, self.rates.link_gbs if span <= layout.gpus else self.rates.node_gbs)
            for name, (count, span) in spans.items()
            if count > 1
        )

    def _optimizer(self, rank: int) -> float:
        dense, experts = self._held(rank)
        group = self.layout.expert_shard_group if self.layout.ep > 1 else self.layout.shard_group
        updated = dense / self.layout.shard_group + experts / group
        states = 2 * find_optimizer(self.work.numerics.optimizer).bytes_per_element(0.0)
        return updated * (4 + 8 + 4 + 8 + states) / (self.rates.hbm_gbs * _GIGA)


def _device(items: list[WorkItem], phase: Phase) -> float:
    """Return the longer of what the GPU does and of what the host issues in a phase."""
    busy = dict.fromkeys((Executor.GPU, Executor.PYTHON), 0.0)
    for item in items:
        if item.phase is phase and item.resource.executor in busy:
            busy[item.resource.executor] += item.seconds
    return max(busy.values())
