"""The included runtime as an Engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from zeroplan.core.arena.layout import ArenaLayout, UnitKind
from zeroplan.core.arena.owned_buffers import runtime_buffers
from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.cluster import Cluster
from zeroplan.core.curriculum import CURRICULUM_LEARNING, Curriculum
from zeroplan.core.expert_parallel import experts_of
from zeroplan.core.float8 import Bf16Layers, Float8Recipe
from zeroplan.core.layer_drop import LAYER_DROP, ProgressiveLayerDrop
from zeroplan.core.optimizers import runtime_type
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.quantize_training import QUANTIZE_TRAINING, QuantizeTraining
from zeroplan.core.saving import Saver, Saving, StateDict
from zeroplan.core.sparse_attention import SparseAttention
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import ChunkedHead, Workload
from zeroplan.core.zero_config import OffloadDevice, ZeroConfig, stages_and_offloads
from zeroplan.ds_config.dialect import Dialect
from zeroplan.ds_config.rules_runtime import remark, require_offloadable, require_runnable
from zeroplan.ds_config.runtime_options import RuntimeOptions
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.engines.runtime import lines
from zeroplan.engines.runtime.checkpoints import (
    OffloadedInput,
    host_buffers,
    offloaded_input_sizes,
    offloaded_inputs,
    parts_of,
)
from zeroplan.engines.runtime.layouts import (
    layout_of,
    require_droppable,
    require_exchangeable,
    require_halvable,
    require_quantisable,
    require_sparse_attention,
    require_splittable,
    require_trainable,
    require_whole_samples,
)
from zeroplan.engines.runtime.rank import RuntimeRank
from zeroplan.engines.technique_lines import with_techniques
from zeroplan.engines.verification import OwnedBuffers
from zeroplan.ledger.line import Ledger
from zeroplan.models.spec import ModelSpec

if TYPE_CHECKING:
    from zeroplan.ds_config.reader import DsConfig
    from zeroplan.engines.runtime.traffic import RuntimeTraffic
    from zeroplan.engines.simulation import Simulation
    from zeroplan.interop.forms.configuration import Form
    from zeroplan.simulate.allocator.config import AllocatorConfig
    from zeroplan.tape.expanded import ExpandedTape
    from zeroplan.tape.options import TraceOptions

#: The runtime's memory model; it changes when `zeroplan.core.arena.layout` does.
VERSION = "0.1.0"

#: What a plan says of meshes.
NOT_MEASURED = "what the runtime does on a mesh beside its own buffers, which no GPU has measured"

#: What the figures leave out of a curriculum: blocks that served shorter sequences do not serve longer ones.
GROWING = "what is reserved when sequences grow, and an evaluation of longer ones"
#: What the figures, which are of a step of all layers, leave out of layer dropping.
DROPPING = "what is reserved as the layers of steps differ, and one hidden state more in the backward of a layer that is scaled"


class Runtime(Engine):
    """`zeroplan_runtime`, stages 0 to 3, with optimizer and parameters on the GPU, on the host or in files."""

    name = "zeroplan"
    version = VERSION
    measured = True
    step_buffers_coexist = True
    dialect = Dialect.RUNTIME
    trainer = "zeroplan.engines.runtime.trainer:build"
    takes_modules = True
    verified_degrees = ("tp", "cp", "pp", "ep", "etp")
    casts_modules = True

    def __init__(self, runtime_options: RuntimeOptions | None = None) -> None:
        self.runtime_options = runtime_options or RuntimeOptions()

    def with_ds_config(self, ds_config: DsConfig) -> Runtime:
        """Return the runtime with the keys of the file's ``zeroplan`` section; the same object for the same keys."""
        return self if ds_config.runtime_options == self.runtime_options else _with_keys(ds_config.runtime_options)

    def for_workload(self, workload: Workload) -> Runtime:
        """Return the runtime with the keys that the workload stands for: ``labelled_tokens_only`` where it has a share of them,
        ``chunked_cross_entropy``, ``float8`` and the blocks that it leaves out.
        """
        recipe, options = workload.technique(Float8Recipe), self.runtime_options
        if workload.batch.labelled_share is not None:
            options = replace(options, labelled_tokens_only=True)
        if (head := workload.technique(ChunkedHead)) is not None and not options.chunked_cross_entropy:
            options = replace(options, chunked_cross_entropy=head.tokens)
        if (kept := workload.technique(Bf16Layers)) is not None:
            options = replace(options, num_layers_at_start_in_bf16=kept.at_start, num_layers_at_end_in_bf16=kept.at_end)
        return _with_keys(options if recipe is None else replace(options, float8=str(recipe)))

    def options(self) -> list[ZeroConfig]:
        """Return the four stages, each with the offloads that it allows."""
        return stages_and_offloads(apart=True)

    def require_runnable(self, zero: ZeroConfig) -> None:
        """Refuse what the runtime does not do."""
        require_runnable(zero, self.runtime_options)

    def require_layout(self, layout: ParallelLayout) -> None:
        """Refuse what the runtime does not do, or is not modelled, beside tensor, context, pipeline and expert parallelism."""
        layout.require_data_parallel_only(self.name, but=("tp", "cp", "pp", "vpp", "ep", "etp"))

    def simulates(self, case: Case) -> bool:
        """Return whether the case has no pipeline stages, or such as run plain blocks; of others only the runtime's own buffers
        are planned.
        """
        moves = case.zero.activation_checkpointing.cpu_checkpointing or parts_of(case) > 1
        return case.layout.pp == 1 or not (moves or case.workload.compile is not None)

    def unmodelled(self, case: Case) -> tuple[Unmodelled, ...]:
        """Return what no GPU has measured: layouts beside data parallelism, beside the runtime's own buffers, which are exact,
        and what steps that differ from each other reserve.
        """
        found = []
        layout = case.layout if case.parallel is not None else None
        if layout is not None and not _measured(case, layout):
            flag = next(f"--{name}" for name in ("pp", "cp", "tp") if getattr(layout, name) > 1)
            found.append(Unmodelled(flag, Effect.UNKNOWN, NOT_MEASURED))
        if case.workload.has(Curriculum):
            found.append(Unmodelled(CURRICULUM_LEARNING, Effect.MORE, GROWING))
        if case.workload.has(ProgressiveLayerDrop):
            found.append(Unmodelled(LAYER_DROP, Effect.MORE, DROPPING))
        return tuple(found)

    def require_workload(self, case: Case) -> None:
        """Refuse what the runtime does not train. Raises BadInput: its other optimizers, and mixed kinds of precision."""
        self.require_runnable(case.zero)
        require_trainable(case.workload)
        if case.workload.has(SparseAttention):
            require_sparse_attention(case)
        if case.workload.has(Curriculum):
            require_whole_samples(case)
        if case.workload.has(ProgressiveLayerDrop):
            require_droppable(case)
        if case.workload.has(QuantizeTraining):
            require_quantisable(case)
        require_halvable(case)
        require_exchangeable(case.workload, case.zero, case.layout)
        require_splittable(case, self.runtime_options)
        if case.zero.offload_optimizer:
            require_offloadable(case.workload.numerics.optimizer, case.zero)

    def layout(self, case: Case) -> ArenaLayout:
        """Return the layout by which the Arena will allocate, derived once."""
        options, chunks = self.runtime_options, case.pipeline_chunks
        derive = partial(layout_of, case.spec, case.workload, case.zero, case.layout, options, chunks)
        return case.once((self.name, options), derive)

    def optimizer_device(self, offload_param: str) -> str:
        """Return the host where parameters are offloaded: they leave the device only with their optimizer."""
        moved = offload_param in (OffloadDevice.CPU, OffloadDevice.NVME)
        return OffloadDevice.CPU if moved else OffloadDevice.NONE

    def remark(self, case: Case) -> str:
        """Return a warning about what may surprise the user in this case; an empty string for none."""
        return remark(self.layout(case))

    def unsaved(self, case: Case) -> str:
        """Return other ways of saving than ``save_checkpoint``, which each rank runs piece by piece."""
        saving = case.workload.technique(Saving)
        if saving is not None and (saving.saver is not Saver.LOOP or saving.state_dict is StateDict.FULL):
            return "of saving under zeroplan, save_checkpoint alone is in a figure"
        return ""

    def ledger(self, case: Case) -> tuple[Ledger, Any]:
        """Return the runtime's lines and a rank; all ranks are alike."""
        layout = self.layout(case)
        inputs = offloaded_input_sizes(case, layout)
        workspace, received = case.cluster.gpu.workspace, _received(case)
        rank = RuntimeRank(layout=layout, cublas_workspace=workspace, inputs=inputs, received=received)
        return with_techniques(lines.LEDGER, case.workload), rank

    def offloaded_inputs(self, case: Case, tape: ExpandedTape) -> tuple[OffloadedInput, ...]:
        """Return the checkpointed inputs that leave for pinned memory in one micro batch (``cpu_checkpointing``), or that
        tensor-parallel ranks divide (``partition_activations``).
        """
        to_host, parts = case.zero.activation_checkpointing.cpu_checkpointing, parts_of(case)
        if not to_host and parts == 1:
            return ()
        units = self.layout(case).units
        blocks = {unit.shape.name for unit in units if unit.shape.kind is UnitKind.BLOCK}
        return offloaded_inputs(tape, blocks, parts=parts, to_host=to_host)

    def traced(self, workload: Workload) -> Workload:
        """Return the workload without 8-bit products of uncompiled layers: which are written into its tape, not torchao's."""
        workload = super().traced(workload)
        return workload if workload.compile is not None else workload.without(Float8Recipe)

    def trace_options(self, case: Case) -> TraceOptions:
        """Return the options of the workload as its tape has it."""
        return super().trace_options(replace(case, workload=self.traced(case.workload)))

    def computed_tape(self, case: Case, tape: ExpandedTape) -> ExpandedTape:
        """See :func:`zeroplan.engines.runtime.simulation.computed_tape`."""
        from zeroplan.engines.runtime.simulation import computed_tape

        return computed_tape(case.workload, self.layout(case), self.runtime_options, tape, tp=case.layout.tp)

    def simulate(self, case: Case, tape: ExpandedTape, config: AllocatorConfig | None = None) -> Simulation:
        """Simulate one rank; all ranks own and do the same."""
        from zeroplan.engines.runtime.simulation import simulate_rank

        return simulate_rank(case, self.layout(case), self.runtime_options, self.offloaded_inputs(case, tape), tape, config)

    def traffic(self, spec: ModelSpec, cluster: Cluster) -> RuntimeTraffic:
        """See ``zeroplan/engines/runtime/traffic.py``."""
        from zeroplan.engines.runtime.traffic import RuntimeTraffic

        return RuntimeTraffic(spec, cluster, self.runtime_options)

    def ds_config(self, zero: ZeroConfig, workload: Workload, layout: ParallelLayout) -> dict[str, Any] | None:
        """Return the explicit ds_config, with a ``zeroplan`` section of the keys that differ from their defaults."""
        found = super().ds_config(zero, workload, layout)
        defaults, own = asdict(RuntimeOptions()), asdict(self.runtime_options)
        changed = {name: value for name, value in own.items() if value != defaults[name]}
        if found is None:
            return None
        if own_type := runtime_type(workload.numerics.optimizer):
            found["optimizer"] = {"type": own_type}
        if (sparse := workload.technique(SparseAttention)) is not None:
            found["sparse_attention"] = sparse.as_section()
        if (curriculum := workload.technique(Curriculum)) is not None:
            found[CURRICULUM_LEARNING] = curriculum.as_section()
        if (drop := workload.technique(ProgressiveLayerDrop)) is not None:
            found[LAYER_DROP] = drop.as_section()
        if (rounding := workload.technique(QuantizeTraining)) is not None:
            found[QUANTIZE_TRAINING] = rounding.as_section()
        return {**found, "zeroplan": changed} if changed else found

    def forms(self) -> Mapping[str, Form]:
        """Return the form of a ds_config that ``zeroplan_runtime.initialize`` takes."""
        from zeroplan.interop.forms.explicit import RUNTIME

        return {"explicit": RUNTIME}

    def for_verify(
        self, ds_config: Mapping[str, Any] | None, *, device: str, own_module: bool
    ) -> tuple[Runtime, Mapping[str, Any] | None]:
        """Switch the fused loss off on a CPU and for a user's own module, unless the file asks for it.

        No CPU kernel computes the loss in one pass, and what torch takes in its place is not what a plan for GPUs has. A user's
        own module has its own loss.
        """
        if device != "cpu" and not own_module:
            return self, ds_config
        given = ds_config or {}
        changed = {**given, "zeroplan": {"fused_loss": False, **(given.get("zeroplan") or {})}}
        from zeroplan.ds_config.reader import read_ds_config

        return self.with_ds_config(read_ds_config(changed, dialect=Dialect.RUNTIME)), changed

    def run_config(self, case: Case, ds_config: Mapping[str, Any] | None, timeout: float) -> dict[str, Any]:
        """See :func:`zeroplan.engines.runtime.run_config.run_config`."""
        from zeroplan.engines.runtime.run_config import run_config

        return run_config(case, ds_config or {}, timeout)

    def owned_buffers(self, case: Case, tape: ExpandedTape | None) -> OwnedBuffers:
        """Return the Arena's rows. Without a tape they lack the checkpointed inputs that leave for pinned memory."""
        found = runtime_buffers(self.layout(case))
        rows = {(row.buffer.value, row.unit, row.place.value): row.bytes for row in found}
        if tape is not None:
            buffer, place = Buffer.ACTIVATION_CHECKPOINT.value, Place.PINNED.value
            rows |= {(buffer, unit, place): count for unit, count in host_buffers(self.offloaded_inputs(case, tape)).items()}
        standing = {row.buffer for row in found if row.persistent}
        return OwnedBuffers(rows, frozenset(row.buffer.value for row in found if row.buffer not in standing))


def _received(case: Case) -> int:
    """Return the bytes of what a pipeline stage receives in a step."""
    if case.layout.pp == 1:
        return 0
    from zeroplan.core.pipeline import hidden_bytes_of, received_of

    hidden = hidden_bytes_of(case.workload, case.layout, int(case.spec.config.get("hidden_size") or 0))
    return hidden * received_of(case.pipeline_chunks) * case.workload.batch.grad_accum


def _measured(case: Case, layout: ParallelLayout) -> bool:
    """Whether two GPUs measured such a layout: ep alone, and cp of dense models alone, at stages 2 and 3; tp at stage 2, and of
    a mixture at stage 3, too.
    """
    if layout.cp > 1:
        return max(layout.tp, layout.pp, layout.ep) == 1 and not experts_of(case.spec.parameters)
    return max(layout.pp, parts_of(case)) == 1 and min(layout.tp, layout.ep) == 1


@lru_cache(maxsize=64)
def _with_keys(runtime_options: RuntimeOptions) -> Runtime:
    return Runtime(runtime_options)
