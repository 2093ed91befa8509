"""The interface of an engine: everything that zeroplan asks of DeepSpeed, FSDP2, DDP, the included runtime, or one of your own.

An engine is a class that derives from :class:`Engine`, in a folder of its own. The registry (:mod:`zeroplan.engines.registry`)
knows it by name; nothing outside the folder does. Methods without a default are those that no engine can do without.
``docs/extending.md`` tells how to add one.

Engines import their schedule, their traffic and their process figures inside the methods that need them, so that a plan at
formula depth loads a ledger and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from zeroplan.core.buffers import Phase
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.expert_parallel import is_expert
from zeroplan.core.optimizer_row import Optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.unmodelled import Unmodelled
from zeroplan.core.workload import ChunkedHead, Compilation, DType, OptimizerKind, Precision, Workload
from zeroplan.core.zero_config import OffloadDevice, ZeroConfig
from zeroplan.ds_config.dialect import Dialect
from zeroplan.engines.case import Case
from zeroplan.ledger.line import Ledger
from zeroplan.models.spec import ModelSpec

if TYPE_CHECKING:  # a plan from the ledger alone needs no simulator
    from zeroplan.core.pipeline import Stage
    from zeroplan.core.quantization import Base
    from zeroplan.ds_config.reader import DsConfig
    from zeroplan.engines.process import Outside
    from zeroplan.engines.simulation import HostRun, Simulation
    from zeroplan.engines.traffic import Sharing, Traffic
    from zeroplan.engines.verification import OwnedBuffers
    from zeroplan.interop.forms.configuration import Form
    from zeroplan.simulate.allocator.config import AllocatorConfig
    from zeroplan.tape.expanded import ExpandedTape
    from zeroplan.tape.options import TraceOptions


@dataclass(frozen=True, slots=True)
class SearchedLayouts:
    """What a search over an engine's layouts tries.

    Attributes:
        stage: the ZeRO stage where each rank has all blocks.
        staged: the ZeRO stage on pipeline stages.
        splits: whether ranks that share matrices may share the tokens between them, too.
        splits_staged: whether they may on pipeline stages.
        chunks: the most chunks of a pipeline rank.
    """

    stage: int
    staged: int
    splits: bool = True
    splits_staged: bool = False
    chunks: int = 2


class Engine(ABC):
    """An engine whose memory and step time zeroplan predicts.

    Attributes:
        name: what users write after ``--engine``.
        version: of the software whose behaviour the engine's formulas describe.
        measured: whether the engine's process figures (:meth:`outside_torch`, :meth:`host_rss`) were measured. Plans of an
            engine without measurements have a wider interval.
        step_buffers_coexist: whether all of the ledger's buffers of the step are there at one moment, so that their sum is a
            floor of what the step needs. Not so where gradients may be views of other buffers, or gone in part.
        dialect: how the engine reads a ``ds_config.json``; None if it takes none.
        alloc_confs: the allocator settings that a search tries; an empty string for none.
        trainer: ``"module:function"`` that builds the engine on a rank of ``verify``: a function from
            :class:`~zeroplan.engines.verification.TrainingRun` to :class:`~zeroplan.engines.verification.Trainer` in a module
            that may import torch. Empty for an engine that ``verify`` cannot run.
        binds_device: whether ranks join NCCL bound to their GPU, which makes the communicator at once.
        verified_degrees: those of a layout that ``verify`` runs the engine with, beside data parallelism.
        package: the package that ``verify`` runs, where plans of several of its versions differ; empty elsewhere.
        takes_modules: whether ``verify`` may hand the engine a user's own module.
        whole_vocabulary: whether its tensor-parallel ranks gather the logits (:class:`~zeroplan.core.parallel.ParallelLayout`).
        layouts: what a search over its layouts tries; None where layouts of another engine are searched.
        casts_outputs: whether the wrapper around the model makes what it returns fp32 under mixed precision
            (accelerate's ``convert_outputs_to_fp32``).
        partition: how the engine divides a model's layers over pipeline stages unless told otherwise, as DeepSpeed's
            ``partition_method``; empty where it divides blocks evenly and takes no method.
        own_layers: whether it runs layers of its own in place of the model's code. It then writes their tape
            (:meth:`own_tape`) and holds layouts against them itself (:meth:`require_workload`).
        techniques: names of techniques (:mod:`zeroplan.techniques`) that an engine of one's own takes.
        casts_modules: whether the engine casts such a module and its batch to the dtype of the arithmetic.
    """

    name: ClassVar[str]
    version: str
    measured: ClassVar[bool] = False
    step_buffers_coexist: ClassVar[bool] = False
    dialect: ClassVar[Dialect | None] = None
    alloc_confs: ClassVar[tuple[str, ...]] = ("", "expandable_segments:True")
    trainer: ClassVar[str] = ""
    binds_device: ClassVar[bool] = True
    package: ClassVar[str] = ""
    takes_modules: ClassVar[bool] = False
    verified_degrees: ClassVar[tuple[str, ...]] = ()
    casts_modules: ClassVar[bool] = False
    whole_vocabulary: ClassVar[bool] = False
    layouts: ClassVar[SearchedLayouts | None] = None
    casts_outputs: ClassVar[bool] = False
    partition: ClassVar[str] = ""
    own_layers: ClassVar[bool] = False
    techniques: ClassVar[frozenset[str]] = frozenset()

    # --- what it runs -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def options(self) -> list[ZeroConfig]:
        """Return every stage with each offload that the engine allows, in the order in which tables show them."""

    def default(self) -> ZeroConfig:
        """Return the configuration of a program that names the engine and sets nothing else."""
        return self.options()[0]

    @abstractmethod
    def require_runnable(self, zero: ZeroConfig) -> None:
        """Refuse a configuration that the engine cannot run."""

    def require_layout(self, layout: ParallelLayout) -> None:
        """Refuse degrees of parallelism that the engine does not have. The default allows data parallelism alone."""
        layout.require_data_parallel_only(self.name)

    def require_workload(self, case: Case) -> None:
        """Refuse a workload that the engine cannot train in this configuration. The default accepts every workload."""
        del case

    def precision(self, dtype: DType) -> Precision:
        """Return which dtypes the model, its masters and the arithmetic have when ``--dtype`` asks for `dtype`."""
        return Precision.FP32 if dtype is DType.FP32 else Precision.MIXED

    def base_precision(self, dtype: DType, base: Base | None) -> Precision:
        """Return the same for adapters beside a base that is kept as `base` says; None: in the dtype of the arithmetic."""
        return self.precision(dtype)

    def for_optimizer(self, zero: ZeroConfig, optimizer: str) -> ZeroConfig:
        """Return `zero` with the keys that the engine demands before it runs an optimizer, a row's name in the optimizer table.

        Planned and written is the result, wherever zeroplan and not the user's file chooses the configuration.
        """
        return zero

    def optimizer_device(self, offload_param: str) -> str:
        """Return where the optimizer goes if the user offloads parameters to `offload_param` and does not say."""
        return OffloadDevice.CPU if offload_param == OffloadDevice.CPU else OffloadDevice.NONE

    def answers_reference(self, case: Case) -> bool:
        """Return whether a reference model beside the trained one is modelled in this case."""
        return False

    def remark(self, case: Case) -> str:
        """Return a warning about what may surprise the user in this case; an empty string for none."""
        return ""

    def unmodelled(self, case: Case) -> tuple[Unmodelled, ...]:
        """Return the settings of the case that the engine's lines and schedule leave out; nothing by default."""
        return ()

    def unsaved(self, case: Case) -> str:
        """Return what no figure of the case's saving holds, in words; an empty string where they hold all. By default nothing
        of it is modelled.
        """
        return f"saving under {self.name} is in no figure"

    def at_version(self, version: str) -> Self:
        """Return the engine as a version of DeepSpeed is, for the engine that plans several.

        Raises:
            BadInput: another engine, or a text that is no version.
        """
        raise BadInput(f"{self.name} is not DeepSpeed", where="--deepspeed-version", remedy="use --engine deepspeed")

    def configured(self, zero: ZeroConfig) -> ZeroConfig:
        """Return `zero`, of today's defaults, with those of the engine's version. The default changes nothing."""
        return zero

    def with_ds_config(self, ds_config: DsConfig) -> Self:
        """Return the engine with the settings of its own section in a ds_config, read in its :attr:`dialect`."""
        return self

    def for_workload(self, workload: Workload) -> Self:
        """Return the engine with what a workload asks of its own section of a ds_config.

        Raises:
            BadInput: what the engine does not do.
        """
        if workload.batch.labelled_share is not None and not workload.has(ChunkedHead):
            raise BadInput(
                f"{self.name} computes the logits of all tokens", where="--labelled-share", remedy="use --engine zeroplan"
            )
        return self

    def compiled_as(self, workload: Workload) -> Compilation | None:
        """Return what is planned as graphs: of a model compiled as a whole its blocks, unless the engine knows more."""
        return Compilation.BLOCKS if workload.compile is Compilation.MODEL else workload.compile

    def traced(self, workload: Workload) -> Workload:
        """Return the workload as its tape has it: with graphs that are planned, without what the engine writes in itself."""
        return workload.compiled(self.compiled_as(workload))

    # --- memory -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def ledger(self, case: Case) -> tuple[Ledger, Any]:
        """Return the engine's lines and those of techniques (``with_techniques``), and the facts that they read, for rank 0."""

    def trace_options(self, case: Case) -> TraceOptions:
        """Return how the model must be traced to run under this engine."""
        from zeroplan.tape.options import options_for

        return options_for(case.workload, layout=case.layout)

    def graded(self, case: Case) -> frozenset[str]:
        """Return the names of frozen parameters for which the engine has gradients made all the same."""
        return frozenset()

    def own_tape(self, case: Case) -> ExpandedTape | None:
        """Return the tape of one micro batch on the pipeline rank that is looked at, of an engine with layers of its own; None
        where the model's own code runs, which is traced.
        """
        return None

    def blocks(self, case: Case) -> tuple[tuple[int, int], ...]:
        """Return the blocks of each of a pipeline rank's chunks: the first, and the one behind the last."""
        return tuple((chunk.first, chunk.end) for chunk in case.pipeline_chunks)

    def sharing(self, case: Case) -> Sharing:
        """Return how ranks of a layout share their work, which its time depends on."""
        del case
        from zeroplan.engines.traffic import Sharing

        return Sharing()

    def held_elements(self, case: Case, stages: Sequence[Stage]) -> tuple[int, int]:
        """Return the dense elements and the experts' that the case's pipeline rank has before they are sharded."""
        parameters = case.parameters
        if case.layout.pp > 1:
            from zeroplan.core.pipeline import stage_parameters

            parameters = stage_parameters(parameters, stages)
        experts = sum(count for name, count in zip(parameters.names, parameters.numel, strict=True) if is_expert(name))
        return parameters.total - experts, experts

    def computed_tape(self, case: Case, tape: ExpandedTape) -> ExpandedTape:
        """Return `tape` changed where the engine computes in another way than the model's own code. The default changes
        nothing.

        Args:
            case: the configuration.
            tape: the model's tape, expanded for the workload's micro batch and sequence length.
        """
        return tape

    def simulates(self, case: Case) -> bool:
        """Return whether :meth:`simulate` knows the case; else its plan stays at formula depth. The default knows all."""
        del case
        return True

    @abstractmethod
    def simulate(self, case: Case, tape: ExpandedTape, config: AllocatorConfig | None = None) -> Simulation:
        """The engine's allocations laid over the model's tape, on the rank that needs the most.

        Args:
            case: the configuration.
            tape: the model's tape, expanded for the workload's micro batch and sequence length.
            config: settings of the caching allocator; None for its defaults.
        """

    def simulate_host(self, case: Case) -> HostRun | None:
        """Return the host's part of :meth:`simulate`, which takes no tape; None where the engine cannot tell it alone."""
        return None

    def nccl_bytes(self, workload: Workload, zero: ZeroConfig, layout: ParallelLayout) -> int:
        """Bytes of NCCL's buffers and kernels on one GPU beyond those of a first communicator of one rank.

        The default is one communicator of torch's for each process group of several ranks.
        """
        from zeroplan.engines.process import ONE_COMMUNICATOR, SENDING, SPLIT_COMMUNICATOR

        if not layout.communicators:
            return 0
        return ONE_COMMUNICATOR + SPLIT_COMMUNICATOR * (layout.communicators - 1) + SENDING * (layout.pp > 1)

    def calls_collectives(self, workload: Workload, layout: ParallelLayout) -> bool:
        """Whether a rank calls any collective, as a single one does whose program joins a process group."""
        return True

    def other_contexts(self, layout: ParallelLayout) -> int:
        """How many other ranks' processes have a context on the GPU that bears the most of them."""
        return 0

    def outside_torch(
        self, workload: Workload, zero: ZeroConfig, cluster: Cluster, *, pinned: int = 0, layout: ParallelLayout | None = None
    ) -> Outside:
        """Return the bytes of one GPU that lie outside torch's allocator.

        Args:
            workload: decides, with `zero`, which kernels the process loads.
            zero: the stage and the offload.
            pinned: bytes of host memory that the rank pins.
            layout: None for data parallelism alone; with other degrees the engine's figures were not measured.
        """
        from zeroplan.engines.process import outside_torch

        ranks = layout or cluster.layout
        return outside_torch(
            workload,
            nccl=self.nccl_bytes(workload, zero, ranks),
            capability=cluster.gpu.capability,
            pinned=pinned,
            measured=self.measured and layout is None,
            collectives=self.calls_collectives(workload, ranks),
            other_contexts=self.other_contexts(ranks),
        )

    def host_rss(self, workload: Workload, zero: ZeroConfig, *, rotary: bool = True, experts: bool = False) -> dict[Phase, int]:
        """Return the resident bytes of one rank's process by the end of each phase, without the engine's own buffers.

        Args:
            workload: decides, with `zero`, which kernels the process loads.
            zero: the stage and the offload.
            rotary: whether the model has rotary position embeddings.
            experts: whether the model is a mixture of experts.
        """
        from zeroplan.engines.process import TORCH_RSS, host_rss

        return host_rss(TORCH_RSS, workload, zero, rotary=rotary, experts=experts)

    # --- time -------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def traffic(self, spec: ModelSpec, cluster: Cluster) -> Traffic:
        """Return the engine's work for one model on one cluster."""

    # --- search and files -------------------------------------------------------------------------------------------------

    def search_space(self, cluster: Cluster, nvme_path: str) -> list[tuple[ZeroConfig, int]]:
        """Return the configurations that a search tries on this cluster, each with its effort.

        Args:
            cluster: says whether there is a disk, and whether there is more than one rank.
            nvme_path: the folder for swap files.

        Returns:
            Each configuration with how far it is from the engine's defaults. Of two that are equally fast, the search
            recommends the one with the lower effort.
        """
        from zeroplan.engines.search_space import offloads

        return offloads(self.options(), cluster, nvme_path)

    def ds_config(self, zero: ZeroConfig, workload: Workload, layout: ParallelLayout) -> dict[str, Any] | None:
        """The explicit ds_config that runs a configuration; None for an engine that takes no ds_config."""
        if self.dialect is None:
            return None
        from zeroplan.interop.forms.explicit import explicit_ds_config

        return explicit_ds_config(zero, workload, layout)

    def usual_kind(self, optimizer: Optimizer) -> OptimizerKind:
        """Return how an optimizer walks its tensors where nobody says: for an engine that takes a ds_config as what it builds
        for the type that is written there.
        """
        written = None if self.dialect is None else optimizer.written
        fused = optimizer.fused if written is None else written.fused
        return OptimizerKind.FUSED if fused else OptimizerKind.FOREACH

    def forms(self) -> Mapping[str, Form]:
        """The forms in which ``recommend`` can write a configuration, by name, the usual one first; none if it cannot."""
        return {}

    # --- verify -----------------------------------------------------------------------------------------------------------

    def require_verifiable(self, zero: ZeroConfig) -> None:
        """Refuse a configuration that ``verify`` cannot run with this engine."""
        if not self.trainer:
            raise BadInput(f"verify cannot run {self.name}", where="--engine", remedy="use --engine zeroplan")

    def for_verify(
        self, ds_config: Mapping[str, Any] | None, *, device: str, own_module: bool
    ) -> tuple[Self, Mapping[str, Any] | None]:
        """The engine, and the user's ds_config, as a run on this machine can be held against a plan.

        Args:
            ds_config: the user's, or None.
            device: ``cuda`` or ``cpu``.
        """
        return self, ds_config

    def run_config(self, case: Case, ds_config: Mapping[str, Any] | None, timeout: float) -> dict[str, Any]:
        """The ds_config that :attr:`trainer` gets on each rank; empty for an engine that takes none.

        Args:
            ds_config: the user's, or None.
            timeout: seconds without progress after which a rank should give up.
        """
        return {}

    def owned_buffers(self, case: Case, tape: ExpandedTape | None) -> OwnedBuffers | None:
        """Return the buffers that the engine's own account must show after a run; None for an engine without an account.

        Args:
            case: the configuration.
            tape: the model's expanded tape; None where the model cannot be traced.
        """
        return None
