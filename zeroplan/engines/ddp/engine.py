"""DDP as an Engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zeroplan.core.errors import BadInput
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.base import Case
from zeroplan.engines.ddp import lines
from zeroplan.engines.torch_engine import TorchEngine
from zeroplan.ledger.line import Ledger

if TYPE_CHECKING:
    from zeroplan.core.tape import ExpandedTape
    from zeroplan.simulate.recorder import Recorder


class Ddp(TorchEngine):
    """DistributedDataParallel: everything whole on every rank, reported as stage 0."""

    name = "ddp"

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

    def glossary(self) -> Mapping[str, str]:
        """What each name in the ledger's formulas means."""
        return lines.GLOSSARY

    def ledger(self, case: Case) -> tuple[Ledger, Any]:
        """DDP's lines and the facts of any rank."""
        return lines.LEDGER, lines.facts(
            case.spec, case.workload, ranks=case.ranks, cublas_workspace=case.cluster.gpu.workspace
        )

    def record(self, case: Case, tape: ExpandedTape) -> Recorder:
        """See :func:`zeroplan.engines.ddp.schedule.record_ddp`."""
        from zeroplan.engines.ddp.schedule import record_ddp

        return record_ddp(case, tape)
