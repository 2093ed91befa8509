"""A Case: one run, decided, as engines plan it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from zeroplan.core.cluster import Cluster
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.unmodelled import Unmodelled
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.models.spec import ModelSpec

if TYPE_CHECKING:
    from zeroplan.core.parameters import Parameters
    from zeroplan.core.pipeline import Stage

D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class Case:
    """One model, trained in one way, on one cluster, sharded in one way.

    `parallel` None means data parallelism over the whole cluster. `zero_init` says whether DeepSpeed's stage 3 gets a model
    that was built under ``deepspeed.zero.Init``; without it the whole model passes over each GPU.
    With pipeline parallelism, `pipeline` is the order of micro batches
    (:class:`~zeroplan.core.pipeline_order.PipelineSchedule`), `pp_rank` the pipeline rank that is looked at, and `partition`
    how layers are divided: empty for blocks of equal weight, else DeepSpeed's ``partition_method``.
    `unreached` are names of trainable parameters that no micro batch gives a gradient, as the tape tells.
    `unmodelled` are keys of files that no field here holds; an engine adds its own (``Engine.unmodelled``).
    """

    spec: ModelSpec
    workload: Workload
    cluster: Cluster
    zero: ZeroConfig
    parallel: ParallelLayout | None = None
    zero_init: bool = True
    unmodelled: tuple[Unmodelled, ...] = ()
    pipeline: str = "1f1b"
    pp_rank: int = 0
    partition: str = ""
    unreached: frozenset[str] = frozenset()
    _derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Hashable, derive: Callable[[], D]) -> D:
        """Return what `derive` makes of this case, made at the first call with that key: its rank, which the ledger, the
        schedule and the host's figures read.
        """
        if key not in self._derived:
            self._derived[key] = derive()
        found: D = self._derived[key]
        return found

    @property
    def pipeline_chunks(self) -> tuple[Stage, ...]:
        """The stages of the pipeline rank that is looked at, one for each of its chunks; none without pipeline parallelism."""
        if self.layout.pp == 1:
            return ()
        from zeroplan.core.pipeline import chunks_of, layer_stages
        from zeroplan.core.pipeline_order import schedule_of

        if self.partition:
            return (layer_stages(self.spec.parameters, self.layout.pp, self.partition)[self.pp_rank],)
        layout, blocks = self.layout, self.spec.parameters.block_count
        return chunks_of(blocks, layout.pp, layout.vpp, self.pp_rank, schedule_of(self.pipeline))

    @property
    def halves(self) -> bool:
        """Whether pipeline stages run a backward in two halves: gradients of activations, then those of weights."""
        if self.layout.pp == 1:
            return False
        from zeroplan.core.pipeline_order import schedule_of

        return schedule_of(self.pipeline).halves

    @property
    def layout(self) -> ParallelLayout:
        """Division of the work among the ranks: `parallel`, or data parallelism over the whole cluster."""
        return self.parallel or self.cluster.layout

    @property
    def parameters(self) -> Parameters:
        """The model's parameters that one rank has before an engine shards them over data-parallel ranks."""
        return self.once("parameters", self._local_parameters)

    def _local_parameters(self) -> Parameters:
        if self.layout.auto_ep:
            from zeroplan.core.auto_ep import with_auto_ep

            return with_auto_ep(self.spec.parameters, self.spec.model_type, self.layout.ep)
        if self.layout.tp == self.layout.ep == 1:
            return self.spec.parameters.reached_but(self.unreached)
        from zeroplan.core.expert_parallel import with_local_experts
        from zeroplan.core.tensor_parallel import local_parameters

        layout = self.layout
        shared = local_parameters(
            self.spec.parameters,
            self.spec.model_type,
            layout.tp,
            whole_vocabulary=layout.whole_vocabulary,
            whole_experts=layout.experts_across,
        )
        return with_local_experts(shared, layout.ep).reached_but(self.unreached)
