"""DeepSpeed as an Engine: its options and its ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zeroplan.core.buffers import Phase
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.versions import parse_version, version_text
from zeroplan.core.workload import ChunkedHead, GradientCheckpointing, Reference, TiledLoss, TiledMlp, Workload
from zeroplan.core.zero_config import DEEPSPEED_VERSION, ZeroConfig, stages_and_offloads
from zeroplan.ds_config.dialect import Dialect
from zeroplan.engines.base import Engine, SearchedLayouts
from zeroplan.engines.case import Case
from zeroplan.engines.deepspeed.job import rank_of, require_pipeline
from zeroplan.engines.deepspeed.lines import LEDGER
from zeroplan.engines.deepspeed.moe import require_moe
from zeroplan.engines.deepspeed.versions import as_wrapped, require_wrapper, unmodelled_by_version, version_remark
from zeroplan.engines.quantized_base import packed_kernels, require_stored, unmeasured_base
from zeroplan.engines.technique_lines import with_techniques
from zeroplan.ledger.line import Ledger
from zeroplan.models.spec import ModelSpec

if TYPE_CHECKING:
    from zeroplan.engines.deepspeed.simulation import Simulator
    from zeroplan.engines.deepspeed.traffic import DeepSpeedTraffic
    from zeroplan.engines.simulation import HostRun, Simulation
    from zeroplan.engines.traffic import Sharing
    from zeroplan.interop.forms.configuration import Form
    from zeroplan.simulate.allocator.config import AllocatorConfig
    from zeroplan.tape.expanded import ExpandedTape
    from zeroplan.tape.options import TraceOptions


#: Keys of quantized communication (ZeRO++), with their effect on memory. Source: runtime/zero/partition_parameters.py,
#: runtime/comm/coalesced_collectives.py
_QUANTIZED = {
    "zero_quantized_weights": (Effect.MORE, "8-bit copies and scales of what is gathered stand beside the 16-bit weights"),
    "zero_quantized_nontrainable_weights": (Effect.UNKNOWN, "frozen weights are kept in 8 bits, and dequantized when gathered"),
    "zero_quantized_gradients": (Effect.MORE, "gradients are quantized and dequantized in buffers of their own"),
}
_ZENFLOW = "the gradient columns that the GPU updates have masters and states there"
_REFERENCE = "the figures hold the reference model as TRL's source makes it; no run was measured"
_FULLEST = "where no tokens are dropped, the fullest expert of all ranks decides how large all are; even ones are planned"
_DIVIDED = "at stage 3 DeepSpeed gathers and divides each layer when the engine is made, which is in no figure"
#: R12 (benchmarks/mesh): its second rank allocated 12 % more. Source: runtime/utils.py, get_flattened_grad_norm
_MASKED = "at stage 0 the ranks behind the first mask what all hold out of the gradients' norm, which takes copies of them"
_WHOLE_LOGITS = "all logits of a rank's tokens, if TRL computes head and loss apart where ranks share samples"
_ONE_CONTEXT = (
    "--offload-checkpoints: the program makes one context and enters it for each micro batch; one that makes a context each "
    "time reserves what comes back on up to 32 streams"
)
_TILES = "stage 3 fetches and releases what runs in tiles for every tile, which was not compared with DeepSpeed's order"
_SUPER_OFFLOAD = "gradients and states move between GPU and host in buckets of their own"


class DeepSpeed(Engine):
    """DeepSpeed's ZeRO, stages 0 to 3."""

    name = "deepspeed"
    whole_vocabulary = True
    partition = "parameters"
    measured = True
    step_buffers_coexist = True
    dialect = Dialect.DEEPSPEED
    trainer = "zeroplan.engines.deepspeed.trainer:build"
    verified_degrees = ("tp", "ulysses", "ep", "pp")
    layouts = SearchedLayouts(stage=3, staged=1, splits=False, chunks=1)
    package = "deepspeed"
    binds_device = False  # its own start-up names no device, so the first collective makes the communicator

    def __init__(self, version: str = DEEPSPEED_VERSION, *, on_cpu: bool = False) -> None:
        self._simulator: Simulator | None = None  # made by the first simulation, which alone imports it
        self.version, self.on_cpu = version, on_cpu

    def at_version(self, version: str) -> DeepSpeed:
        """Return DeepSpeed of that version, whose differences versions.py lists."""
        return DeepSpeed(version_text(parse_version(version, "--deepspeed-version")))

    def configured(self, zero: ZeroConfig) -> ZeroConfig:
        """Return `zero`, of today's defaults, with those of this engine's version."""
        if self.version == DEEPSPEED_VERSION:
            return zero
        from zeroplan.ds_config.versions import as_read_by

        return as_read_by(zero, parse_version(self.version))

    def options(self) -> list[ZeroConfig]:
        """Return stages 0 to 3, each with the offloads that it allows."""
        return [self.configured(zero) for zero in stages_and_offloads()]

    def require_runnable(self, zero: ZeroConfig) -> None:
        """Refuse impossible combinations."""
        zero.require_possible()

    def for_optimizer(self, zero: ZeroConfig, optimizer: str) -> ZeroConfig:
        """`zero` with what DeepSpeed demands of an optimizer that ZeRO was not tested with, and of Muon at stage 3.

        Source: runtime/engine.py, _do_optimizer_sanity_check; runtime/zero/stage3.py, __init__
        """
        if not zero.stage:
            return zero
        written = find_optimizer(optimizer).written
        untested = written is None or not written.tested
        gathers_whole = written is not None and written.splits and zero.stage == 3
        return zero.but(
            zero_allow_untested_optimizer=zero.step.zero_allow_untested_optimizer or untested,
            reduce_scatter=zero.buckets.reduce_scatter and not gathers_whole,
        )

    def require_layout(self, layout: ParallelLayout) -> None:
        """Refuse what is not modelled beside AutoTP's tensor parallelism, Ulysses' sequence parallelism and PipelineModule."""
        layout.require_data_parallel_only(self.name, but=("tp", "ulysses", "pp", "ep"))
        if layout.pp > 1 and max(layout.tp, layout.ulysses) > 1:
            raise BadInput(
                "deepspeed's PipelineModule is modelled beside data parallelism alone",
                where="--pp",
                remedy="leave --tp and --ulysses at 1",
            )
        if layout.sp:
            raise BadInput(
                "deepspeed has data parallelism and tp and ulysses and pp and ep only, and no sp",
                where="--sp",
                remedy="leave it out, or use --engine fsdp2",
            )

    def require_workload(self, case: Case) -> None:
        """Refuse optimizers that DeepSpeed does not combine with ZeRO, and what is not modelled of a layout."""
        require_wrapper(case.zero, case.workload)
        if case.workload.quantize is not None:
            _require_base(case)
        if case.layout.pp > 1:
            require_pipeline(case)
        if case.spec.own_experts is not None:
            require_moe(case)
        elif case.layout.auto_ep:
            from zeroplan.engines.deepspeed.auto_ep import require_auto_ep

            require_auto_ep(case)
        optimizer = find_optimizer(case.workload.numerics.optimizer)
        if optimizer.until is not None and parse_version(self.version) >= optimizer.until:
            raise BadInput(
                f"DeepSpeed {self.version} has no {optimizer.name}: {version_text(optimizer.until)} removed it",
                where="--optimizer",
                remedy="use --engine zeroplan, which has it, or adamw; --deepspeed-version plans for an older one",
            )
        if case.zero.stage and not optimizer.zero:
            raise BadInput(
                f"{optimizer.name} does not run with ZeRO stage {case.zero.stage}",
                where="--optimizer",
                remedy="use --stage 0, or adamw",
            )

    def unsaved(self, case: Case) -> str:
        """Return what is not modelled of saving: further kinds of parallelism, and experts that are taken apart."""
        from zeroplan.engines.saved_files import EXPERTS_APART, rewrites_experts

        if case.parallel is not None:
            return "saving with further kinds of parallelism is in no figure"
        return EXPERTS_APART if rewrites_experts(case.workload, case.spec.parameters) else ""

    def unmodelled(self, case: Case) -> tuple[Unmodelled, ...]:
        """Return the settings of the case that no line or schedule covers."""
        frozen = not all(case.spec.parameters.trainable)
        return (
            *_unmodelled_keys(case.zero),
            *self._unmodelled_techniques(case),
            *self._unmodelled_mesh(case),
            *(packed_kernels(case.workload) or unmeasured_base(case.workload, case.zero.stage)),
            *unmodelled_by_version(case.zero, case.workload, frozen=frozen),
        )

    def _unmodelled_techniques(self, case: Case) -> list[Unmodelled]:
        found: list[Unmodelled] = []
        stage, work = case.zero.stage, case.workload
        if work.objective.reference is not None and self.answers_reference(case) and stage < 3:
            found.append(Unmodelled("reference", Effect.UNKNOWN, _REFERENCE))
        if case.layout.ulysses > 1 and work.has(ChunkedHead):
            found.append(Unmodelled("loss", Effect.MORE, _WHOLE_LOGITS))
        if stage == 3:
            tiled = [name for name, kind in (("mlp", TiledMlp), ("loss", TiledLoss)) if work.has(kind)]
            found += [Unmodelled(f"--tiled-{name}", Effect.UNKNOWN, _TILES) for name in tiled]
        if work.checkpoints_on_host and self.version != DEEPSPEED_VERSION:
            found.append(Unmodelled("--offload-checkpoints", Effect.UNKNOWN, f"only {DEEPSPEED_VERSION}'s context was read"))
        return found

    def _unmodelled_mesh(self, case: Case) -> list[Unmodelled]:
        found: list[Unmodelled] = []
        if case.layout.ulysses > 1 and self.version != DEEPSPEED_VERSION:
            found.append(Unmodelled("--ulysses", Effect.UNKNOWN, f"only {DEEPSPEED_VERSION}'s exchange was read"))
        if case.spec.own_experts is not None and not case.spec.own_experts.drops_tokens:
            found.append(Unmodelled("drop_tokens", Effect.MORE, _FULLEST))
        if case.layout.auto_ep:
            from zeroplan.engines.deepspeed.auto_ep import unmodelled_auto_ep

            found += [one for one in (unmodelled_auto_ep(case, self.version),) if one is not None]
        if case.layout.tp > 1 and case.zero.stage == 3:
            found.append(Unmodelled("tensor_parallel", Effect.UNKNOWN, _DIVIDED))
        if case.layout.tp > 1 and case.zero.stage == 0:
            found.append(Unmodelled("tensor_parallel", Effect.MORE, _MASKED))
        return found

    def remark(self, case: Case) -> str:
        """Return what this version does that its users may not expect."""
        return version_remark(case.zero, case.workload) or (_ONE_CONTEXT if case.workload.checkpoints_on_host else "")

    def answers_reference(self, case: Case) -> bool:
        """Return whether the reference is one that TRL makes below stage 3, whole on every rank, or sharded beside a model that
        stage 3 shards over all ranks and leaves on the GPU.

        With adapters the reference is a second forward of the same engine, which breaks its trace, and so is KTO's for its KL
        term. Source: TRL 1.16, models/utils.py, prepare_deepspeed
        """
        work, zero = case.workload, case.zero
        if zero.stage < 3:
            return True
        plain = case.zero_init and not zero.offloads_param and zero.stage3.zero_hpz_partition_size == 1
        return plain and work.objective.reference is Reference.MODEL and not work.objective.kl_batch

    def ledger(self, case: Case) -> tuple[Ledger, Any]:
        """Return DeepSpeed's lines, and rank 0."""
        case = self._as_run(case)
        return with_techniques(LEDGER, case.workload), rank_of(case, case.parameters)

    def trace_options(self, case: Case) -> TraceOptions:
        """Return how to trace the model: stage 3 runs it through its own hooks and linear function."""
        from zeroplan.tape.options import options_for

        options = options_for(case.workload, zero3=case.zero.stage == 3, layout=case.parallel)
        if case.workload.reentrant and case.zero.stage < 3:  # hooks of stage 3 are laid over a tape without
            options = options.reentrant
        again = case.workload.technique(GradientCheckpointing)
        if again is None or again.interval == 1 or case.layout.pp == 1:
            return options
        from zeroplan.core.pipeline import recomputed_groups

        (stage,) = case.pipeline_chunks
        return replace(options, grouped=recomputed_groups(stage, again.interval))

    def simulate(self, case: Case, tape: ExpandedTape, config: AllocatorConfig | None = None) -> Simulation:
        """Simulate the stage's schedule on each rank that may need the most memory."""
        from zeroplan.engines.deepspeed.simulation import Simulator

        if self._simulator is None:
            self._simulator = Simulator()
        return self._simulator.simulate(self._as_run(case), tape, config)

    def simulate_host(self, case: Case) -> HostRun:
        """Return the host's buffers by phase, which no event on the GPU decides."""
        from zeroplan.engines.deepspeed.simulation import host_of

        return host_of(rank_of(self._as_run(case), case.parameters))

    def nccl_bytes(self, workload: Workload, zero: ZeroConfig, layout: ParallelLayout) -> int:
        """See :func:`zeroplan.engines.deepspeed.process.nccl_bytes`."""
        from zeroplan.engines.deepspeed.process import nccl_bytes

        return nccl_bytes(workload, zero, layout)

    def other_contexts(self, layout: ParallelLayout) -> int:
        """AutoTP sends the first batch of each group's first rank to the others, as objects: its tensors are made again on that
        rank's GPU, in the others' processes (engine.py, ``check_dataloader_inputs_same_across_ranks``).
        """
        return layout.tp - 1

    def host_rss(self, workload: Workload, zero: ZeroConfig, *, rotary: bool = True, experts: bool = False) -> dict[Phase, int]:
        """See :func:`zeroplan.engines.deepspeed.process.host_rss`."""
        from zeroplan.engines.deepspeed.process import host_rss

        return host_rss(workload, zero, rotary=rotary, experts=experts)

    def traffic(self, spec: ModelSpec, cluster: Cluster) -> DeepSpeedTraffic:
        """See ``zeroplan/engines/deepspeed/traffic.py``."""
        from zeroplan.engines.deepspeed.traffic import DeepSpeedTraffic

        return DeepSpeedTraffic(spec, cluster)

    def sharing(self, case: Case) -> Sharing:
        """Return the way of AutoTP's layers, which are plain modules, and of each stage; buckets below stage 3 are all-reduced,
        which sends twice the bytes of a reduce-scatter. See ``zeroplan/engines/deepspeed/traffic.py``.
        """
        from zeroplan.engines.traffic import Hooks, Sharing

        zero = case.zero
        if zero.stage == 3:
            return Sharing(
                reduced_bytes=2, cast_bytes=0, packed_bytes=6 * 2, dispatches=False, hooks=Hooks.MODULES, own_step=True
            )
        return Sharing(
            gathers_once=True,
            overlaps=zero.overlaps_comm,
            reduced_bytes=2 * 2,
            reduces_each=zero.stage == 2,
            gathers_logits=True,
            dispatches=False,
            hooks=Hooks.GRADIENTS,
            own_step=True,
        )

    def search_space(self, cluster: Cluster, nvme_path: str) -> list[tuple[ZeroConfig, int]]:
        """Return every stage and offload with every set of bucket sizes."""
        return _with_buckets(super().search_space(cluster, nvme_path), cluster)

    def forms(self) -> Mapping[str, Form]:
        """Return the forms of a ds_config: DeepSpeed's own, and those of the programs that start DeepSpeed."""
        from zeroplan.interop.forms.explicit import ACCELERATE, DEEPSPEED
        from zeroplan.interop.forms.lightning import LIGHTNING
        from zeroplan.interop.forms.trainer import TRAINER, TRL

        return {"explicit": DEEPSPEED, "trainer": TRAINER, "trl": TRL, "lightning": LIGHTNING, "accelerate": ACCELERATE}

    def for_verify(
        self, ds_config: Mapping[str, Any] | None, *, device: str, own_module: bool
    ) -> tuple[DeepSpeed, Mapping[str, Any] | None]:
        """Plan torch's Adam on a CPU, in the place of DeepSpeed's own. See Note [DeepSpeed on a CPU] in run_config.py."""
        return DeepSpeed(self.version, on_cpu=device == "cpu"), ds_config

    def run_config(self, case: Case, ds_config: Mapping[str, Any] | None, timeout: float) -> dict[str, Any]:
        """See :func:`zeroplan.engines.deepspeed.run_config.run_config`."""
        from zeroplan.engines.deepspeed.run_config import run_config

        return run_config(case, ds_config, on_cpu=self.on_cpu)

    def _as_run(self, case: Case) -> Case:
        """Return the case as today's DeepSpeed wraps it, with the optimizer that it has where it runs."""
        return case.once(("as run", self.on_cpu), lambda: self._derive_run(case))

    def _derive_run(self, case: Case) -> Case:
        case = _as_wrapped(case)
        return replace(case, workload=case.workload.but(torch_adam=True)) if self.on_cpu else case


def _unmodelled_keys(zero: ZeroConfig) -> list[Unmodelled]:
    """Return the keys of quantized communication, ZenFlow and SuperOffload."""
    asked = [name for name in _QUANTIZED if zero.leaf(name)] if zero.stage == 3 else []
    found = [Unmodelled(f"zero_optimization.{name}", *_QUANTIZED[name]) for name in asked]
    if zero.zenflow is not None:
        found.append(Unmodelled("zero_optimization.zenflow", Effect.MORE, _ZENFLOW))
    if zero.offload_optimizer.super_offload and zero.stage == 3:
        found.append(Unmodelled("zero_optimization.offload_optimizer.super_offload", Effect.UNKNOWN, _SUPER_OFFLOAD))
    return found


def _require_base(case: Case) -> None:
    """Refuse quantised bases in what DeepSpeed would not partition, or would cast.

    Raises:
        BadInput: int8 at stage 3, offloaded parameters, or an arithmetic in which the module is not cast to 16 bits.
    """
    if case.zero.stage == 3:
        require_stored(case.workload, "stage 3")
    if case.workload.numerics.param_bytes != 2:
        raise BadInput(
            "beside a quantised base DeepSpeed is modelled with bf16 or fp16 alone", where="--dtype", remedy="use --dtype bf16"
        )
    if case.zero.offloads_param:
        raise BadInput(
            "a quantised base that is offloaded is not modelled", where="--offload-param", remedy="leave it on the GPU"
        )


def _as_wrapped(case: Case) -> Case:
    """Return the case with the config that has the same wrapper and effects in 0.19.8, whatever the version.

    AutoTP's layers multiply without stage 3's own linear function. Where ranks share samples, gradients travel in a dtype of
    its own key. Sources: module_inject/layers.py; runtime/engine.py, _configure_distributed_model
    """
    zero = as_wrapped(case.zero, case.workload, zero_init=case.zero_init)
    if case.layout.tp > 1:
        zero = zero.but(memory_efficient_linear=False)
    if case.layout.ulysses > 1:
        zero = zero.but(communication_data_type=zero.step.seq_parallel_communication_data_type)
    if case.layout.pp > 1:
        zero = zero.but(overlap_comm=False)  # runtime/engine.py, _configure_zero_optimizer
    return case if zero is case.zero else replace(case, zero=zero)


#: Stages 1 and 2: DeepSpeed's own buckets; a tenth, which saves 1.8 GB a bucket; and overlap with small ones, because
#: `overlap_comm` keeps two.
_STAGES_1_2: tuple[dict[str, Any], ...] = (
    {},
    {"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000},
    {"overlap_comm": True, "reduce_bucket_size": 100_000_000, "allgather_bucket_size": 100_000_000},
)
#: Stage 3: DeepSpeed's own; and a tenth of what it prefetches, keeps alive and reduces at once.
_STAGE_3: tuple[dict[str, Any], ...] = (
    {},
    {
        "reduce_bucket_size": 50_000_000,
        "prefetch_bucket_size": 5_000_000,
        "max_live_parameters": 100_000_000,
        "sub_group_size": 100_000_000,
    },
)
_BUCKET_EFFORT = 2


def _with_buckets(offloads: list[tuple[ZeroConfig, int]], cluster: Cluster) -> list[tuple[ZeroConfig, int]]:
    """Return each configuration with each set of bucket sizes that its stage has."""
    found = []
    for zero, effort in offloads:
        sets = _STAGE_3 if zero.stage == 3 else _STAGES_1_2 if zero.stage else ({},)
        if cluster.layout.dp == 1 and zero.stage in (1, 2):
            sets = sets[:2]  # one rank has nothing to overlap
        found += [(zero.but(**buckets), effort + _BUCKET_EFFORT * bool(buckets)) for buckets in sets]
    return found
