"""The base of FSDP 1, FSDP2 and DDP as engines: every optimizer of torch runs, and one rank stands for all."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from zeroplan.core.buffers import Buffer, Phase
from zeroplan.core.cluster import Cluster
from zeroplan.core.parameters import Parameters
from zeroplan.core.saving import Saver, Saving
from zeroplan.core.versions import TORCH_GPU
from zeroplan.core.workload import DType, Precision
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.engines.quantized_base import read_at_once
from zeroplan.engines.saved_files import EXPERTS_APART, rewrites_experts, save_phase
from zeroplan.engines.technique_lines import with_techniques
from zeroplan.engines.torch_rank import TorchRank
from zeroplan.ledger.derive import pow2
from zeroplan.ledger.line import Ledger
from zeroplan.models.spec import ModelSpec
from zeroplan.tape.options import Arithmetic, TraceOptions

if TYPE_CHECKING:
    from zeroplan.core.quantization import Base
    from zeroplan.engines.simulation import HostRun, Simulation
    from zeroplan.engines.torch_traffic import TorchTraffic
    from zeroplan.simulate.allocator.config import AllocatorConfig
    from zeroplan.simulate.recorder import Recorder
    from zeroplan.tape.expanded import ExpandedTape

R = TypeVar("R", bound=TorchRank)


class TorchEngine(Engine, Generic[R]):
    """An engine that is part of torch.

    Attributes:
        lines: its ledger, without those of techniques.
        saves_by_lightning: whether Lightning's way of saving is in its figures.
        gathers_in_half: whether every parameter, adapters included, is gathered in the dtype of the arithmetic.
        made_on_host: whether a model is made whole on every rank's host, pretrained or not.
    """

    lines: ClassVar[Ledger]
    saves_by_lightning: ClassVar[bool] = False
    version = TORCH_GPU
    measured = True
    gathers_in_half = False
    made_on_host = False

    def trace_options(self, case: Case) -> TraceOptions:
        """Return the options of a trace, with parameters in the dtype in which they are gathered."""
        options = super().trace_options(case)
        if self.gathers_in_half and options.arithmetic is Arithmetic.HALF_AUTOCAST:
            base = None if options.base is None else replace(options.base, half_adapters=False)
            return replace(options, arithmetic=Arithmetic.HALF, base=base)
        return options

    def base_precision(self, dtype: DType, base: Base | None) -> Precision:
        """Return 16 bits for all but the adapters where weights are sharded: a unit's frozen parameters have one dtype."""
        half = self.gathers_in_half and (base is not None or dtype is not DType.FP32)
        return Precision.HALF_AUTOCAST if half else self.precision(dtype)

    def rank(self, case: Case, parameters: Parameters) -> R:
        """Return the rank that holds the most, derived once for a case and the list of parameters."""
        return case.once((self.name, parameters), lambda: self.derive_rank(case, parameters))

    def ledger(self, case: Case) -> tuple[Ledger, Any]:
        """Return the engine's lines, and rank 0."""
        return with_techniques(self.lines, case.workload), self.rank(case, case.parameters)

    @abstractmethod
    def derive_rank(self, case: Case, parameters: Parameters) -> R:
        """Derive that rank."""

    @abstractmethod
    def record(self, rank: R, tape: ExpandedTape) -> Recorder:
        """Record the allocations and frees of a rank that :meth:`rank` returned."""

    def unsaved(self, case: Case) -> str:
        """Return what is not modelled of saving: Lightning's way where weights are sharded, layouts beside data parallelism,
        states whose parts are no parts of tensors, and experts that are taken apart.
        """
        saving, rank = case.workload.technique(Saving), self.rank(case, case.parameters)
        if saving is not None and saving.saver is Saver.LIGHTNING and not self.saves_by_lightning:
            return "Lightning's way of saving shards is in no figure"
        if case.parallel is not None:
            return "saving with further kinds of parallelism is in no figure"
        row = rank.optimizer
        if (
            saving is not None
            and saving.optimizer
            and rank.ranks > 1
            and (row.least_8bit or any(s.factored for s in row.states))
        ):
            return f"saving the sharded states of {row.name} is in no figure"
        return EXPERTS_APART if rewrites_experts(case.workload, rank.parameters) else ""

    def simulate(self, case: Case, tape: ExpandedTape, config: AllocatorConfig | None = None) -> Simulation:
        """Simulate the rank that holds the most."""
        from zeroplan.engines.simulation import Simulation, with_pinned
        from zeroplan.simulate.recorder import simulate

        rank = self.rank(case, tape.parameters)
        timeline = simulate(self.record(rank, tape), config, device_memory=case.cluster.vram)
        moved: tuple[int, ...] = ()
        if case.workload.checkpoints_on_host:
            from zeroplan.tape.offloaded_checkpoints import on_host_by_function

            moved = tuple(pow2(size) for size in on_host_by_function(tape))
        run = self._host_run(case, rank)
        host = with_pinned(run.host, Buffer.ACTIVATION_CHECKPOINT, sum(moved)) if moved else run.host
        return Simulation(timeline, host=host, checkpoint=run.checkpoint, moved=moved)

    def simulate_host(self, case: Case) -> HostRun:
        """Return the host's buffers by phase, which no event on the GPU decides."""
        return self._host_run(case, self.rank(case, case.spec.parameters))

    def _host_run(self, case: Case, rank: R) -> HostRun:
        """Return the host's phases. ``from_pretrained`` reads the whole model on every rank's host first. A model that is made
        there has a matrix of its own in each place, until those that are one are tied (transformers 5.17, ``post_init``).
        """
        from zeroplan.engines.simulation import CheckpointPhase, HostRun

        host = rank.host_phases()
        beside = sum(sum(one.kept.values()) for one in host if one.phase is Phase.LOAD)
        read = rank.original_bytes * rank.trainable + rank.frozen_bytes * rank.frozen
        if case.workload.quantize is not None and not (case.workload.base_on_host or case.zero.offloads_param):
            read = read_at_once(case.spec.parameters.numel)
        if self.made_on_host and case.workload.loop.from_scratch:
            again = Counter(rank.parameters.entries)
            read += sum((count - 1) * rank.numel[p] * rank.width(p) for p, count in again.items())
        weights = CheckpointPhase(Phase.WEIGHTS, 0, beside + read, inevitable=self.made_on_host)
        saving = case.workload.technique(Saving)
        if saving is None:
            return HostRun(host, (weights,))
        held = sum(sum(one.kept.values()) for one in host if one.phase is Phase.STEP)
        return HostRun(host, (weights, save_phase(held, *rank.parts_of_save(saving))))

    def traffic(self, spec: ModelSpec, cluster: Cluster) -> TorchTraffic:
        """See ``zeroplan/engines/torch_traffic.py``."""
        from zeroplan.engines.torch_traffic import TorchTraffic

        return TorchTraffic(spec, cluster, lambda case: self.rank(case, case.parameters))
