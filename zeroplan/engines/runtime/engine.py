"""The included runtime as an Engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zeroplan.core.buffers import Phase
from zeroplan.core.cluster import Cluster
from zeroplan.core.layout import Layout, UnitKind
from zeroplan.core.tape import ExpandedTape
from zeroplan.core.workload import DType
from zeroplan.core.zero_config import OffloadDevice, ZeroConfig
from zeroplan.ds_config.dialect import Dialect
from zeroplan.ds_config.knobs import Knobs
from zeroplan.ds_config.rules_runtime import remark, require_offloadable, require_runnable
from zeroplan.engines.base import Case, Engine
from zeroplan.engines.player import play
from zeroplan.engines.runtime import lines
from zeroplan.engines.runtime.checkpoints import Moved, host_buffers, leaving_inputs, moved_inputs, with_moved_inputs
from zeroplan.engines.runtime.fused_loss import with_fused_loss
from zeroplan.engines.runtime.host import checkpoint_phases, host_phases
from zeroplan.engines.runtime.job import layout_of, require_trainable
from zeroplan.engines.runtime.schedule import RuntimeJob, RuntimeSchedule, with_direct_gradients
from zeroplan.engines.simulation import Simulation
from zeroplan.ledger.line import Ledger
from zeroplan.models.spec import ModelSpec
from zeroplan.simulate.allocator.config import UNLIMITED, AllocatorConfig
from zeroplan.simulate.recorder import Recorder, simulate

if TYPE_CHECKING:
    from zeroplan.ds_config.reader import DsConfig
    from zeroplan.engines.runtime.traffic import RuntimeTraffic
    from zeroplan.interop.forms import Form

#: Stages with optimizer and parameter offload, in the order in which they are shown.
OPTIONS = (
    (0, "none", "none"),
    (1, "none", "none"),
    (1, "cpu", "none"),
    (2, "none", "none"),
    (2, "cpu", "none"),
    (3, "none", "none"),
    (3, "cpu", "none"),
    (3, "cpu", "cpu"),
    (3, "nvme", "none"),
    (3, "cpu", "nvme"),
    (3, "nvme", "cpu"),
    (3, "nvme", "nvme"),
)

#: The runtime's memory model; it changes when `zeroplan.core.layout` does.
VERSION = "0.1.0"


class Runtime(Engine):
    """`zeroplan_runtime`, stages 0 to 3, with optimizer and parameters on the GPU, on the host or in files."""

    name = "zeroplan"
    version = VERSION
    measured = True
    step_buffers_coexist = True
    dialect = Dialect.RUNTIME

    def __init__(self, knobs: Knobs | None = None) -> None:
        self.knobs = knobs or Knobs()

    def with_ds_config(self, ds_config: DsConfig) -> Runtime:
        """The runtime with the knobs of the file's ``zeroplan`` section."""
        return Runtime(ds_config.knobs)

    def options(self) -> list[ZeroConfig]:
        """The four stages, and the offloads that each allows."""
        return [ZeroConfig.of(stage, optimizer, param) for stage, optimizer, param in OPTIONS]

    def require_runnable(self, zero: ZeroConfig) -> None:
        """Refuse what the runtime does not do.

        Raises:
            BadInput: with the remedy.
        """
        require_runnable(zero, self.knobs)

    def require_workload(self, case: Case) -> None:
        """Refuse what the runtime does not train.

        Raises:
            BadInput: its other optimizers, and mixed kinds of precision.
        """
        self.require_runnable(case.zero)
        require_trainable(case.workload)
        if case.zero.offload_optimizer:
            require_offloadable(case.workload.optimizer)

    def glossary(self) -> Mapping[str, str]:
        """What each name in the ledger's formulas means."""
        return lines.GLOSSARY

    def layout(self, case: Case) -> Layout:
        """What the Arena will allocate by."""
        return layout_of(case.spec, case.workload, case.zero, case.layout, self.knobs)

    def optimizer_device(self, offload_param: str) -> str:
        """Parameters leave the device only with their optimizer."""
        moved = offload_param in (OffloadDevice.CPU, OffloadDevice.NVME)
        return OffloadDevice.CPU if moved else OffloadDevice.NONE

    def remark(self, case: Case) -> str:
        """What may surprise whoever asked for this case; an empty string where nothing does."""
        return remark(self.layout(case))

    def ledger(self, case: Case) -> tuple[Ledger, Any]:
        """The runtime's lines and the facts of any rank."""
        layout = self.layout(case)
        inputs = leaving_inputs(case, layout)
        return lines.LEDGER, lines.facts(layout, cublas_workspace=case.cluster.gpu.workspace, inputs=inputs)

    def moved(self, case: Case, tape: ExpandedTape) -> tuple[Moved, ...]:
        """The checkpointed inputs that leave for pinned memory in one micro batch (``cpu_checkpointing``)."""
        if not case.zero.activation_checkpointing.cpu_checkpointing:
            return ()
        units = self.layout(case).units
        return moved_inputs(tape, {unit.shape.name for unit in units if unit.shape.kind is UnitKind.BLOCK})

    def simulate(self, case: Case, expanded: ExpandedTape, config: AllocatorConfig | None = None) -> Simulation:
        """The run of any rank: all own and do the same."""
        layout = self.layout(case)
        skipped = 1 if case.workload.dtype is DType.FP16 else 0
        room = config is None or config.max_split_size == UNLIMITED
        job = RuntimeJob(case.workload, layout, case.cluster.gpu.workspace, room, skipped_steps=skipped)
        setup = layout.setup
        whole = setup.reduce_dtype if setup.shards_grads else setup.whole_grad_dtype
        # On a GPU a product of 16-bit factors may be written in fp32, but not the other way round.
        direct = self.knobs.direct_linear and whole in (setup.param_dtype, DType.FP32)
        recorder = Recorder()
        moved = self.moved(case, expanded)
        tape = with_moved_inputs(expanded, moved) if moved else expanded
        tape = with_direct_gradients(tape) if direct else tape
        if self.knobs.fused_loss:
            rows = case.workload.micro_batch * (case.workload.seq_len or 0)
            tape = with_fused_loss(tape, rows=rows, itemsize=setup.param_dtype.bytes)
        play(job, tape, recorder, RuntimeSchedule(job, tape, recorder), warm=True)
        host = host_phases(layout, case.spec.params * case.workload.param_bytes, host_buffers(moved))
        timeline = simulate(recorder, config, device_memory=case.cluster.vram)
        found = Simulation(timeline, host=host, moved=tuple(one.bytes for one in moved))
        after = [found.held_after(phase) or 0 for phase in (Phase.INIT, Phase.STEP)]
        return replace(found, checkpoint=checkpoint_phases(layout, host, after_init=after[0], after_step=after[1]))

    def traffic(self, spec: ModelSpec, cluster: Cluster) -> RuntimeTraffic:
        """See ``zeroplan/engines/runtime/traffic.py``."""
        from zeroplan.engines.runtime.traffic import RuntimeTraffic

        return RuntimeTraffic(spec, cluster)

    def forms(self) -> Mapping[str, Form]:
        """A ds_config, as ``zeroplan_runtime.initialize`` takes it."""
        from zeroplan.interop.forms import explicit

        return {"explicit": explicit}
