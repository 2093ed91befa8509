"""The included runtime's traffic: DeepSpeed's lines, read with the facts of an engine that hooks units."""

from __future__ import annotations

from dataclasses import replace

from zeroplan.core.cluster import Cluster
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.compute_traffic import ComputeFacts
from zeroplan.engines.deepspeed.traffic import DeepSpeedTraffic
from zeroplan.engines.deepspeed.traffic_facts import TrafficFacts
from zeroplan.models.spec import ModelSpec


class RuntimeTraffic(DeepSpeedTraffic):
    """The runtime's traffic for one model on one cluster."""

    def __init__(self, spec: ModelSpec, cluster: Cluster) -> None:
        super().__init__(spec, cluster)
        self._units = sum(unit.count for unit in spec.units)

    def facts(self, compute: ComputeFacts, workload: Workload, zero: ZeroConfig) -> TrafficFacts:
        """The facts of any rank: the runtime hooks units, never parameters or modules."""
        own = super().facts(compute, workload, zero)
        again = self._units if workload.gradient_checkpointing else 0
        stays = min(own.params_on_disk, zero.offload_param.max_in_cpu)
        return replace(
            own,
            trained_tensors=self._units,
            tensors=self._units,
            forward_modules=self._units,
            recomputed_modules=again,
            backward_modules=self._units,
            owned_tensors=self._units,
            overlaps=True,
            params_on_disk=own.params_on_disk - stays,
            params_on_host=own.params_on_host + stays,
        )

    def overlaps(self, zero: ZeroConfig) -> bool:
        """Whether collectives overlap the computation: the runtime always overlaps them."""
        return True
