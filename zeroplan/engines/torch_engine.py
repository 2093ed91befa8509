"""What FSDP2 and DDP share as engines: any of torch's optimizers runs, and one rank stands for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from zeroplan.core.tape_options import TraceOptions, options_for
from zeroplan.core.versions import TORCH_GPU
from zeroplan.engines.base import Case

if TYPE_CHECKING:
    from zeroplan.core.tape import ExpandedTape
    from zeroplan.engines.simulation import HostPhase, Simulation
    from zeroplan.simulate.allocator.config import AllocatorConfig
    from zeroplan.simulate.recorder import Recorder


class TorchEngine(ABC):
    """An engine that is part of torch."""

    version = TORCH_GPU

    def require_workload(self, case: Case) -> None:  # noqa: B027  (nothing to refuse)
        """Every optimizer of torch runs, on sharded parameters as well."""

    def trace_options(self, case: Case) -> TraceOptions:
        """As the workload says."""
        return options_for(case.workload)

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
