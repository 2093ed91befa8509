"""FSDP2 as an Engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from zeroplan.core.errors import BadInput
from zeroplan.core.expert_parallel import experts_of
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.parameters import Parameters
from zeroplan.core.sizes import MIB
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.zero_config import OffloadDevice, ZeroConfig
from zeroplan.engines.base import SearchedLayouts
from zeroplan.engines.case import Case
from zeroplan.engines.fsdp2.lines import LEDGER
from zeroplan.engines.fsdp2.rank import Fsdp2Rank
from zeroplan.engines.quantized_base import packed_kernels, require_stored, stored
from zeroplan.engines.torch_engine import TorchEngine

if TYPE_CHECKING:
    from zeroplan.core.cluster import Cluster
    from zeroplan.core.workload import Compilation, Workload
    from zeroplan.engines.process import Outside
    from zeroplan.interop.forms.configuration import Form
    from zeroplan.simulate.recorder import Recorder
    from zeroplan.tape.expanded import ExpandedTape
    from zeroplan.tape.options import TraceOptions

#: Qwen3-MoE was measured with tp, sp and cp among data-parallel ranks. DeepSeek's attention is whole on every tp rank.
_SHARED_MIXTURE = "{0} of DeepSeek's mixtures, or of mixtures beside ep or stages, which no GPU has measured"
_SHARED_TOKENS = "sequence parallelism on pipeline stages, which no GPU has measured"

#: Where accelerate loads weights on one rank alone (``cpu_ram_efficient_loading``), that one sends each rank its shards, for
#: which NCCL connects pairs: 116 to 372 MiB more on two GPUs (accelerate_fsdp2 and trl_sft_fsdp2, benchmarks/from_files).
_SCATTERED = 372 * MIB


class Fsdp2(TorchEngine[Fsdp2Rank]):
    """``fully_shard``: stage 3 when parameters are resharded after the forward, stage 2 when they are not."""

    name = "fsdp2"
    lines = LEDGER
    layouts = SearchedLayouts(stage=3, staged=2)
    trainer = "zeroplan.engines.fsdp2.trainer:build"
    verified_degrees = ("tp", "cp", "pp", "ep", "etp", "dp_replicate")
    gathers_in_half = True

    def trace_options(self, case: Case) -> TraceOptions:
        """Return the options of a trace, with reentrant checkpoints where they are run."""
        options = super().trace_options(case)
        return options.reentrant if case.workload.reentrant else options

    def compiled_as(self, workload: Workload) -> Compilation | None:
        """Return what is asked for: between hooks a whole model's graphs are known."""
        return workload.compile

    def options(self) -> list[ZeroConfig]:
        """Return stage 2, without resharding after the forward, and stage 3, with it."""
        return [ZeroConfig.of(2), ZeroConfig.of(3)]

    def default(self) -> ZeroConfig:
        """Return stage 3: ``reshard_after_forward`` is true unless the program says otherwise."""
        return ZeroConfig.of(3)

    def require_runnable(self, zero: ZeroConfig) -> None:
        """Refuse what `fully_shard` does not do.

        Raises:
            BadInput: other stages, and offload of parameters or states alone or to NVMe.
        """
        if zero.stage not in (2, 3):
            raise BadInput(f"fsdp2 has no stage {zero.stage}", where="--stage", remedy="use 3, or 2 for no resharding")
        moved = {zero.offload_optimizer.device, zero.offload_param.device}
        if moved != {OffloadDevice.NONE} and moved != {OffloadDevice.CPU}:
            raise BadInput(
                "fsdp2's CPUOffloadPolicy moves parameters, gradients and optimizer states, all of them to the host",
                where="--offload-optimizer",
                remedy="use --offload-optimizer cpu --offload-param cpu, or --engine deepspeed",
            )

    def require_layout(self, layout: ParallelLayout) -> None:
        """Refuse what is not modelled beside tensor, context and pipeline parallelism, and replicas of the shards."""
        layout.require_data_parallel_only(self.name, but=("tp", "cp", "pp", "vpp", "ep", "etp", "dp_replicate"))
        if layout.dp_replicate > 1 and layout.shard_group == 1:
            raise BadInput(
                f"{layout.dp_replicate} replicas leave no ranks to shard over",
                where="--dp-replicate",
                remedy="use --engine ddp",
            )

    def require_workload(self, case: Case) -> None:
        """Refuse what does not run, or is not modelled, on pipeline stages, and quantised bases that are not sharded.

        Raises:
            BadInput: resharding after the forward, or a base that FSDP2 takes no part of.
        """
        require_stored(case.workload, "FSDP2")
        if case.workload.quantize is not None and case.zero.offloads_param:
            raise BadInput(
                "a quantised base that is offloaded is not modelled",
                where="--offload-param",
                remedy="use --engine fsdp, or leave it on the GPU",
            )
        if case.layout.pp > 1 and case.zero.stage == 3:
            raise BadInput(
                "on a pipeline stage fsdp2 keeps parameters gathered for all micro batches of a step",
                where="--stage",
                remedy="use --stage 2",
            )

    def unmodelled(self, case: Case) -> tuple[Unmodelled, ...]:
        """Return what no GPU has measured: the kernels of GPTQ's and AWQ's weights; some ways to share matrices or tokens of
        mixtures; tokens that are shared on pipeline stages; and Adafactor's row and column sums of distributed tensors.
        """
        found = packed_kernels(case.workload)
        layout = case.layout
        shared = next((name for name in ("tp", "cp") if getattr(layout, name) > 1), None)
        measured = layout.ep == 1 and layout.pp == 1 and not case.spec.model_type.startswith("deepseek")
        if shared is not None and not measured and experts_of(case.spec.parameters):
            found = (*found, Unmodelled(f"--{shared}", Effect.UNKNOWN, _SHARED_MIXTURE.format(shared)))
        if layout.sp and layout.pp > 1:
            found = (*found, Unmodelled("--sp", Effect.UNKNOWN, _SHARED_TOKENS))
        factored = any(state.factored for state in find_optimizer(case.workload.numerics.optimizer).states)
        if not factored or case.layout.shard_group == 1:
            return found
        return (
            *found,
            Unmodelled("--optimizer", Effect.UNKNOWN, "Adafactor's factors of sharded matrices; whole states are counted"),
        )

    def derive_rank(self, case: Case, parameters: Parameters) -> Fsdp2Rank:
        """Return rank 0 of a pipeline rank's data-parallel ranks, which holds the largest shards."""
        chunks = case.pipeline_chunks
        if chunks:
            from zeroplan.core.pipeline import stage_parameters

            parameters = stage_parameters(parameters, chunks)
        return Fsdp2Rank(
            workload=case.workload,
            parameters=stored(parameters, case.workload),
            layout=case.layout,
            cublas_workspace=case.cluster.gpu.workspace,
            reshard=case.zero.stage == 3,
            offload=case.zero.offloads_param,
            pipeline_chunks=chunks,
            pipeline=case.pipeline,
            pp_rank=case.pp_rank,
            holds_sent=case.cluster.gpu.holds_sent,
            hidden_size=int(case.spec.config.get("hidden_size") or 0) if chunks else 0,
        )

    def outside_torch(
        self, workload: Workload, zero: ZeroConfig, cluster: Cluster, *, pinned: int = 0, layout: ParallelLayout | None = None
    ) -> Outside:
        """See :meth:`zeroplan.engines.base.Engine.outside_torch`; the interval holds what handing out weights may take."""
        found = super().outside_torch(workload, zero, cluster, pinned=pinned, layout=layout)
        scattered = workload.loop.accelerate_units and (layout or cluster.layout).world_size > 1
        return replace(found, spread=found.spread + _SCATTERED) if scattered else found

    def record(self, rank: Fsdp2Rank, tape: ExpandedTape) -> Recorder:
        """See ``zeroplan/engines/fsdp2/schedule.py``, and ``pipeline.py`` beside it."""
        if rank.pipeline_chunks:
            from zeroplan.engines.fsdp2.pipeline import record_fsdp2_stages

            return record_fsdp2_stages(rank, tape)
        from zeroplan.engines.fsdp2.schedule import Fsdp2Schedule
        from zeroplan.engines.torch_step import record

        return record(rank, tape, lambda recorder: Fsdp2Schedule(rank, tape, recorder))

    def forms(self) -> Mapping[str, Form]:
        """Return the forms: a program that calls `fully_shard` itself, which reads no file, and accelerate's file."""
        from zeroplan.interop.forms.torch import FSDP2, FSDP2_BY_ACCELERATE

        return {"torch": FSDP2, "accelerate-fsdp2": FSDP2_BY_ACCELERATE}

    def require_verifiable(self, zero: ZeroConfig) -> None:
        """Refuse offload: ``verify`` runs FSDP2 on the GPU alone. Raises BadInput: offload."""
        if zero.offload_optimizer or zero.offload_param:
            raise BadInput("verify runs fsdp2 without offload", where="--offload-param", remedy="leave the offload flags out")
