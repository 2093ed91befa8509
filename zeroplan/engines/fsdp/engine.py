"""FSDP 1 as an Engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parameters import Parameters
from zeroplan.core.saving import Saver, Saving, StateDict
from zeroplan.core.unmodelled import UNMEASURED, Effect, Unmodelled
from zeroplan.core.zero_config import OffloadDevice, ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.fsdp.lines import LEDGER
from zeroplan.engines.fsdp.rank import FsdpRank
from zeroplan.engines.quantized_base import packed_kernels, require_stored, stored
from zeroplan.engines.torch_engine import TorchEngine

if TYPE_CHECKING:
    from zeroplan.core.saving import Saving
    from zeroplan.interop.forms.configuration import Form
    from zeroplan.simulate.recorder import Recorder
    from zeroplan.tape.expanded import ExpandedTape


class Fsdp(TorchEngine[FsdpRank]):
    """``FullyShardedDataParallel``: stage 3 is FULL_SHARD, 2 SHARD_GRAD_OP, 0 NO_SHARD; each block is a unit."""

    name = "fsdp"
    lines = LEDGER
    casts_outputs = True
    measured = False
    gathers_in_half = True
    made_on_host = True

    def options(self) -> list[ZeroConfig]:
        """Return NO_SHARD, SHARD_GRAD_OP and FULL_SHARD."""
        return [ZeroConfig.of(0), ZeroConfig.of(2), ZeroConfig.of(3)]

    def default(self) -> ZeroConfig:
        """Return FULL_SHARD."""
        return ZeroConfig.of(3)

    def require_runnable(self, zero: ZeroConfig) -> None:
        """Refuse what FSDP 1 has not: stage 1, and offload of parameters or states alone or to NVMe.

        Raises:
            BadInput: naming the flag.
        """
        if zero.stage == 1:
            raise BadInput(
                "fsdp has no stage 1", where="--stage", remedy="use 3 (FULL_SHARD), 2 (SHARD_GRAD_OP) or 0 (NO_SHARD)"
            )
        moved = {zero.offload_optimizer.device, zero.offload_param.device}
        if moved not in ({OffloadDevice.NONE}, {OffloadDevice.CPU}):
            raise BadInput(
                "CPUOffload moves parameters and the optimizer to the CPU together",
                where="--offload-optimizer",
                remedy="use --offload-optimizer cpu --offload-param cpu, or --engine deepspeed",
            )

    def require_workload(self, case: Case) -> None:
        """Refuse optimizers that need whole matrices, and quantised bases that no flat parameter holds.

        Raises:
            BadInput: Muon, an int8 base, or one that is stored in bytes.
        """
        require_stored(case.workload, "FSDP 1")
        if case.zero.offloads_param and case.layout.shard_group == 1:
            raise BadInput(
                "one rank shards nothing, and offload without shards is not modelled",
                where="--offload-param",
                remedy="use --gpus 2 or more, or leave it out",
            )
        if case.workload.quantize is not None and case.workload.whole_base:
            raise BadInput(
                "FSDP 1 flattens no integers, in which the base's 4-bit weights are stored",
                where="bnb_4bit_quant_storage",
                remedy="set it to bfloat16, or use FSDP 2",
            )
        if find_optimizer(case.workload.numerics.optimizer).rest:
            raise BadInput(
                f"{case.workload.numerics.optimizer} steps matrices, of which FSDP 1's ranks hold parts in flat form",
                where="--optimizer",
                remedy="use --engine fsdp2",
            )

    def unmodelled(self, case: Case) -> tuple[Unmodelled, ...]:
        """Return what stands beside the figure. With adapters: reported runs of older versions of torch took up to 15 % more in
        all (``fms-…`` in docs/reported.md), and the cause is not known; runs measured with torch 2.11 are met (X05 and X10 of
        ``benchmarks/ground_truth/tasks.jsonl``). With offload: five runs of torch 2.11 are met to 0.005 % in allocated memory
        (FO01 to FO05 of ``benchmarks/ground_truth/beside_adapters.jsonl``), FO01 reserved 4 % more, and a reported run of 2023
        ran out where the figure fits (``alpaca-280-batch-3``).
        """
        found = packed_kernels(case.workload)
        if case.zero.offloads_param:
            says = "torch 2.11 reserved up to 4 % more with CPUOffload, and a reported run of torch 2.0 ran out where this fits"
        elif case.workload.lora_rank is not None and self.rank(case, case.parameters).sharded:
            says = "reported runs with adapters, of older versions of torch, took up to 15 % more in all than the figure"
        else:
            return found
        return (*found, Unmodelled(UNMEASURED, Effect.MORE, says))

    def unsaved(self, case: Case) -> str:
        """Return what is not modelled of saving: also parts on the host, and a sharded state dict without shards."""
        saving = case.workload.technique(Saving)
        if case.zero.offloads_param:
            return "a save of parts on the host is in no figure"
        sharded = saving is not None and saving.saver is not Saver.LIGHTNING and saving.state_dict is StateDict.SHARDED
        if sharded and not self.rank(case, case.parameters).sharded:
            return "FSDP 1 makes a sharded state dict of shards alone, and here are none"
        return super().unsaved(case)

    def derive_rank(self, case: Case, parameters: Parameters) -> FsdpRank:
        """Return rank 0; one rank alone is not sharded, whatever the strategy."""
        return FsdpRank(
            workload=case.workload,
            parameters=stored(parameters, case.workload),
            layout=case.layout,
            cublas_workspace=case.cluster.gpu.workspace,
            sharded=case.zero.stage > 0 and case.layout.shard_group > 1,
            reshard=case.zero.stage == 3,
            offload=case.zero.offloads_param,
        )

    def graded(self, case: Case) -> frozenset[str]:
        """Return what lies frozen in a unit that is trained. See Note [Units that mix trained and frozen weights]."""
        rank = self.rank(case, case.parameters)
        return frozenset(rank.parameters.names[p] for p in rank.with_gradient)

    def record(self, rank: FsdpRank, tape: ExpandedTape) -> Recorder:
        """See ``zeroplan/engines/fsdp/schedule.py``."""
        from zeroplan.engines.fsdp.schedule import FsdpSchedule
        from zeroplan.engines.torch_step import record
        from zeroplan.tape.tied_gradients import with_gradients_apart

        tape = with_gradients_apart(tape)
        return record(rank, tape, lambda recorder: FsdpSchedule(rank, tape, recorder))

    def forms(self) -> Mapping[str, Form]:
        """Return no form: programs write FSDP 2."""
        return {}
