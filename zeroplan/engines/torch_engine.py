"""What FSDP2 and DDP share as engines: every optimizer of torch runs, and one rank stands for all."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from zeroplan.core.cluster import Cluster
from zeroplan.core.versions import TORCH_GPU
from zeroplan.engines.base import Case, Engine
from zeroplan.models.spec import ModelSpec

if TYPE_CHECKING:
    from zeroplan.core.tape import ExpandedTape
    from zeroplan.engines.simulation import HostPhase, Simulation
    from zeroplan.engines.torch_traffic import TorchTraffic
    from zeroplan.simulate.allocator.config import AllocatorConfig
    from zeroplan.simulate.recorder import Recorder


class TorchEngine(Engine):
    """An engine that is part of torch."""

    version = TORCH_GPU
    measured = True

    @abstractmethod
    def record(self, case: Case, tape: ExpandedTape) -> Recorder:
        """The allocations and frees of rank 0, which holds the most."""

    def host(self, case: Case, tape: ExpandedTape) -> tuple[HostPhase, ...]:
        """A rank's buffers on the host by phase: none, unless the engine offloads."""
        return ()

    def simulate(self, case: Case, tape: ExpandedTape, config: AllocatorConfig | None = None) -> Simulation:
        """The run of rank 0."""
        from zeroplan.engines.simulation import Simulation
        from zeroplan.simulate.recorder import simulate

        timeline = simulate(self.record(case, tape), config, device_memory=case.cluster.vram)
        return Simulation(timeline, host=self.host(case, tape))

    def traffic(self, spec: ModelSpec, cluster: Cluster) -> TorchTraffic:
        """See ``zeroplan/engines/torch_traffic.py``."""
        from zeroplan.engines.torch_traffic import TorchTraffic

        return TorchTraffic(spec, cluster)
