"""DDP as an Engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.tape import Stream
from zeroplan.core.tape_options import TraceOptions, options_for
from zeroplan.core.versions import TORCH_GPU
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.base import Case
from zeroplan.engines.ddp import lines
from zeroplan.engines.ddp.schedule import DdpSchedule
from zeroplan.engines.deepspeed.player import play
from zeroplan.engines.simulation import Simulation
from zeroplan.engines.torch_step import torch_job
from zeroplan.ledger.line import Ledger
from zeroplan.simulate.allocator_config import AllocatorConfig
from zeroplan.simulate.stream import Recorder, simulate


class Ddp:
    """DistributedDataParallel: everything whole on every rank, reported as stage 0."""

    name = "ddp"
    version = TORCH_GPU

    def options(self) -> list[ZeroConfig]:
        """The one there is."""
        return [ZeroConfig.of(0)]

    def require_runnable(self, zero: ZeroConfig) -> None:
        """Refuse sharding and offload.

        Raises:
            BadInput: anything but stage 0.
        """
        if zero.stage or zero.offload_optimizer or zero.offload_param:
            raise BadInput("ddp shards nothing", where="--stage", remedy="use --stage 0, or --engine deepspeed or fsdp2")

    def require_workload(self, case: Case) -> None:
        """Every optimizer of torch runs."""

    def glossary(self) -> Mapping[str, str]:
        """What each name in the ledger's formulas means."""
        return lines.GLOSSARY

    def ledger(self, case: Case) -> tuple[Ledger, Any]:
        """DDP's lines and the facts of any rank."""
        return lines.LEDGER, lines.facts(
            case.spec, case.workload, ranks=case.ranks, cublas_workspace=case.cluster.gpu.workspace
        )

    def trace_options(self, case: Case) -> TraceOptions:
        """As the workload says."""
        return options_for(case.workload)

    def simulate(self, case: Case, stream: Stream, config: AllocatorConfig | None = None) -> Simulation:
        """The run of rank 0, which holds the most."""
        workspace = case.cluster.gpu.workspace
        job = torch_job(stream, case.workload, ranks=case.ranks, sharded=False, cublas_workspace=workspace)
        recorder = Recorder()
        play(job, stream, recorder, DdpSchedule(job, recorder))
        return Simulation(simulate(recorder, config, device_memory=case.cluster.vram))
