"""DDP as an Engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zeroplan.core.buffers import Phase
from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.parameters import Parameters
from zeroplan.core.quantization import Base, PackedWeights, Quantization
from zeroplan.core.sizes import MIB
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import Compilation, DType, Precision, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.ddp.lines import LEDGER
from zeroplan.engines.ddp.rank import DdpRank
from zeroplan.engines.quantized_base import kernels_of
from zeroplan.engines.torch_engine import TorchEngine

if TYPE_CHECKING:
    from zeroplan.interop.forms.configuration import Form
    from zeroplan.simulate.recorder import Recorder
    from zeroplan.tape.expanded import ExpandedTape


#: NCCL's buffers and kernels, and resident MiB of a rank by the end of each phase: as in ``zeroplan/engines/process.py``.
_NCCL = 283 * MIB
_RSS = {Phase.LOAD: 1390, Phase.INIT: 1390, Phase.FORWARD: 1780, Phase.BACKWARD: 1840, Phase.STEP: 1935}


class Ddp(TorchEngine[DdpRank]):
    """DistributedDataParallel: everything whole on every rank, reported as stage 0."""

    name = "ddp"
    lines = LEDGER
    saves_by_lightning = True
    casts_outputs = True
    trainer = "zeroplan.engines.ddp.trainer:build"
    takes_modules = True

    def options(self) -> list[ZeroConfig]:
        """Return stage 0, the only configuration."""
        return [ZeroConfig.of(0)]

    def require_runnable(self, zero: ZeroConfig) -> None:
        """Refuse sharding and offload."""
        if zero.stage or zero.offload_optimizer or zero.offload_param:
            raise BadInput("ddp shards nothing", where="--stage", remedy="use --stage 0, or --engine deepspeed or fsdp2")

    def precision(self, dtype: DType) -> Precision:
        """Return autocast for 16 bits: DDP keeps fp32 parameters and autocast casts the operands of each operation."""
        return Precision.FP32 if dtype is DType.FP32 else Precision.AUTOCAST

    def base_precision(self, dtype: DType, base: Base | None) -> Precision:
        """Return 16 bits for all but the adapters over weights that are not quantised, and over GPTQ's and torchao's, which
        ``prepare_model_for_kbit_training`` leaves so.
        """
        stays = base is None or (isinstance(base, PackedWeights) and base.method in ("gptq", "torchao"))
        return Precision.HALF_AUTOCAST if stays and dtype is not DType.FP32 else self.precision(dtype)

    def answers_reference(self, case: Case) -> bool:
        """Return true: a second model lies beside the first, whole."""
        return True

    def unmodelled(self, case: Case) -> tuple[Unmodelled, ...]:
        """Return the outliers of LLM.int8(), since how many columns have some is up to the data, and compiled blocks."""
        if case.workload.compile in (Compilation.BLOCKS, Compilation.CHECKPOINTED):
            return (Unmodelled("--compile", Effect.MORE, "no GPU has measured compiled blocks under autocast"),)
        if isinstance(case.workload.quantize, PackedWeights):
            return kernels_of(case.workload.quantize, case.workload.quantized_by)
        if case.workload.quantize is not Quantization.INT8:
            return ()
        says = "columns with outliers, whose number is up to the data, are kept once more"
        key = case.workload.quantized_by
        return (Unmodelled("--quantize int8" if key == "--quantize" else key, Effect.MORE, says),)

    def derive_rank(self, case: Case, parameters: Parameters) -> DdpRank:
        """Return a rank; all ranks are alike."""
        workspace = case.cluster.gpu.workspace
        return DdpRank(workload=case.workload, parameters=parameters, layout=case.layout, cublas_workspace=workspace)

    def record(self, rank: DdpRank, tape: ExpandedTape) -> Recorder:
        """See ``zeroplan/engines/ddp/schedule.py``."""
        from zeroplan.engines.ddp.schedule import DdpSchedule
        from zeroplan.engines.torch_step import record

        return record(rank, tape, lambda recorder: DdpSchedule(rank, recorder))

    def nccl_bytes(self, workload: Workload, zero: ZeroConfig, layout: ParallelLayout) -> int:
        """Return the bytes of one communicator that all-reduces; 0 for one rank."""
        return _NCCL if layout.world_size > 1 else 0

    def calls_collectives(self, workload: Workload, layout: ParallelLayout) -> bool:
        """Whether a rank calls any: transformers' Trainer wraps no model in DDP for one rank (37 runs of one GPU,
        benchmarks/from_files: 742 to 784 MiB outside torch's allocator).
        """
        return layout.world_size > 1 or not workload.loop.in_trainer

    def host_rss(self, workload: Workload, zero: ZeroConfig, *, rotary: bool = True, experts: bool = False) -> dict[Phase, int]:
        """Measured with DDP; otherwise as :meth:`zeroplan.engines.base.Engine.host_rss`."""
        from zeroplan.engines.process import host_rss

        return host_rss(_RSS, workload, zero, rotary=rotary, experts=experts)

    def forms(self) -> Mapping[str, Form]:
        """Return one form: plain torch, whose script reads no config file."""
        from zeroplan.interop.forms.torch import DDP

        return {"torch": DDP}
