"""FSDP2 as an Engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.tape import Stream
from zeroplan.core.tape_options import TraceOptions, options_for
from zeroplan.core.versions import TORCH_GPU
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.base import Case
from zeroplan.engines.deepspeed.player import play
from zeroplan.engines.fsdp2 import lines
from zeroplan.engines.fsdp2.schedule import Fsdp2Schedule
from zeroplan.engines.simulation import Simulation
from zeroplan.engines.torch_step import torch_job
from zeroplan.ledger.line import Ledger
from zeroplan.simulate.allocator_config import AllocatorConfig
from zeroplan.simulate.stream import Recorder, simulate


class Fsdp2:
    """``fully_shard``: stage 3 when parameters are resharded after the forward, stage 2 when they are not."""

    name = "fsdp2"
    version = TORCH_GPU

    def options(self) -> list[ZeroConfig]:
        """Without and with resharding."""
        return [ZeroConfig.of(2), ZeroConfig.of(3)]

    def require_runnable(self, zero: ZeroConfig) -> None:
        """Refuse what `fully_shard` does not do.

        Raises:
            BadInput: other stages, and offload.
        """
        if zero.stage not in (2, 3):
            raise BadInput(f"fsdp2 has no stage {zero.stage}", where="--stage", remedy="use 3, or 2 for no resharding")
        if zero.offload_optimizer or zero.offload_param:
            raise BadInput("fsdp2 is planned without offload", where="--offload-optimizer", remedy="use --engine deepspeed")

    def require_workload(self, case: Case) -> None:
        """Every optimizer of torch runs on sharded parameters."""

    def glossary(self) -> Mapping[str, str]:
        """What each name in the ledger's formulas means."""
        return lines.GLOSSARY

    def ledger(self, case: Case) -> tuple[Ledger, Any]:
        """FSDP2's lines and the facts of rank 0."""
        return lines.LEDGER, lines.facts(
            case.spec,
            case.workload,
            ranks=case.ranks,
            reshard=case.zero.stage == 3,
            cublas_workspace=case.cluster.gpu.workspace,
        )

    def trace_options(self, case: Case) -> TraceOptions:
        """As the workload says."""
        return options_for(case.workload)

    def simulate(self, case: Case, stream: Stream, config: AllocatorConfig | None = None) -> Simulation:
        """The run of rank 0, which holds the most."""
        workspace = case.cluster.gpu.workspace
        job = torch_job(stream, case.workload, ranks=case.ranks, sharded=True, cublas_workspace=workspace)
        recorder = Recorder()
        play(job, stream, recorder, Fsdp2Schedule(job, stream, recorder, reshard=case.zero.stage == 3))
        return Simulation(simulate(recorder, config, device_memory=case.cluster.vram))
