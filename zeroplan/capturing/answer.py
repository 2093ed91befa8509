"""The answer to a captured script: its own run as a plan, in the report that ``estimate`` gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeroplan.capturing.replay import replayed
from zeroplan.capturing.result import Captured, info_of
from zeroplan.core.buffers import Buffer
from zeroplan.core.cluster import Cluster
from zeroplan.core.families import family_of
from zeroplan.core.plan import (
    CpuMemory,
    GpuMemory,
    MemoryPlan,
    ModelInfo,
    NvmeMemory,
    PeakShare,
    PlanLine,
    Report,
)
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.engines.process import CONTEXT, FIRST_COMMUNICATOR, FLASH_KERNELS, GUESSED_SPREAD, KERNELS
from zeroplan.engines.simulation import phase_of_mark
from zeroplan.planner.describe import describe_cluster
from zeroplan.planner.fit import LIMIT, decided
from zeroplan.planner.limit import ALLOCATED_SPREAD, RESERVED_SPREAD
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.recorder import simulate
from zeroplan.simulate.timeline import Timeline

if TYPE_CHECKING:
    from zeroplan.planner.simulated import Simulated
    from zeroplan.tape.expanded import ExpandedTape

#: What runs a script that calls no engine.
TORCH = "torch"
_STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class CapturedRun:
    """A report with the simulated run of the script behind it; where an engine is called, those of all plans."""

    report: Report
    timeline: Timeline
    runs: tuple[Simulated, ...] = ()

    @property
    def tape(self) -> ExpandedTape | None:
        """The tape under the engine's schedule."""
        return self.runs[0].tape if self.runs else None


def answer(
    captured: Captured, cluster: Cluster, config: AllocatorConfig | None = None, *, known: Timeline | None = None
) -> CapturedRun:
    """Return the plan of a captured script on a machine.

    Args:
        captured: what the script did.
        cluster: the machine, which may be another than that of the capture.
        config: the caching allocator's settings; None for torch's defaults.
        known: the simulated run on a card whose kernels take the same.
    """
    if captured.engine:
        from zeroplan.capturing.engines.planned import planned

        alloc_conf = str(captured.machine.get("alloc_conf") or "")
        report, runs = planned(captured, cluster, alloc_conf if config is not None else "")
        return CapturedRun(report, runs[0].simulation.timeline, runs)
    timeline = simulate(replayed(captured, cluster.gpu), config) if known is None else known
    outside = _outside(captured)
    unmodelled = _left_out(captured)
    gpu, unsure = _judged_card(timeline, outside, cluster, config)
    unmodelled += unsure
    fields = _fits(gpu, cluster, unmodelled)
    plan = MemoryPlan(
        engine=TORCH,
        engine_version=str(captured.machine.get("torch", "")),
        stage=0,
        offload_optimizer="none",
        offload_param="none",
        depth="captured",
        gpu=gpu,
        cpu=CpuMemory(per_node=0, pinned=0),
        nvme=NvmeMemory(per_node=0),
        lines=_lines(timeline, outside, str(gpu.peak_phase)),
        capture=info_of(captured),
        **fields,
    )
    model = captured.model or {"name": "the script's tensors", "params": 0, "trainable": 0}
    report = Report(
        model=ModelInfo(source="captured", **model),
        workload={"steps": captured.steps, **captured.workload},
        cluster=describe_cluster(cluster),
        warnings=tuple(captured.notes),
        plans=(plan,),
    )
    return CapturedRun(report, timeline)


def _outside(captured: Captured) -> dict[str, int]:
    return {
        "measured: the CUDA context": CONTEXT,
        "measured: kernels that CUDA loads as they are called": KERNELS + FLASH_KERNELS,
        **({"measured: NCCL's kernels and a communicator": FIRST_COMMUNICATOR} if captured.collectives else {}),
    }


def _left_out(captured: Captured) -> tuple[Unmodelled, ...]:
    found = [Unmodelled(key, Effect(effect), says) for key, effect, says in captured.unmodelled]
    if captured.stopped is not None:
        at = captured.stopped
        found.append(Unmodelled(_STOPPED, Effect.MORE, f"{at.file}:{at.line}: {at.why}; the figures end there"))
    elif not captured.sizes:
        found.append(Unmodelled("GPU", Effect.MORE, "the script, as it is started, puts nothing on a GPU"))
    elif captured.steps < 2:
        says = f"the script took {captured.steps} optimizer steps; peaks repeat from the second on"
        found.append(Unmodelled("steps", Effect.MORE, says))
    return tuple(found)


def _judged_card(
    timeline: Timeline, outside: dict[str, int], cluster: Cluster, config: AllocatorConfig | None
) -> tuple[GpuMemory, tuple[Unmodelled, ...]]:
    """Return the GPU's figures, and what is unsure of them at the limit of the card."""
    allocated, reserved = timeline.peak_allocated, timeline.peak_reserved
    beside = sum(outside.values())
    usable = cluster.usable_vram
    unsure = GUESSED_SPREAD + round(RESERVED_SPREAD * reserved)
    low = max(allocated + beside - GUESSED_SPREAD, reserved + beside - unsure)
    high = reserved + beside + unsure
    left_out: tuple[Unmodelled, ...] = ()
    if usable is not None and high > usable:
        room = usable - beside - GUESSED_SPREAD - round(ALLOCATED_SPREAD * allocated)
        through = allocated <= room and timeline.under(room, config, device_memory=cluster.vram).oom is None
        if through:
            says = "the run fills the card, and gets through by emptying its cache: no script's run at that limit was measured"
            left_out = (Unmodelled(LIMIT, Effect.MORE, says),)
            high = usable
        elif allocated <= usable - beside:
            says = "the card has room for what is allocated, but not for the planned fragments"
            left_out = (Unmodelled(LIMIT, Effect.LESS, says),)
            high = max(high, usable + 1)
    phases: dict[str, int] = {}
    for mark in timeline.marks:
        phase = phase_of_mark(mark.name).value if mark.name != "end" else "end"
        phases[phase] = max(phases.get(phase, 0), mark.peak)
    alive = timeline.alive_by_buffer()
    shares: dict[str, int] = {}
    for buffer, count in alive.items():
        name = "other tensors" if buffer is Buffer.UNATTRIBUTED else family_of(buffer).value
        shares[name] = shares.get(name, 0) + count
    kept = [mark.allocated for mark in timeline.marks if mark.name == "step"]
    gpu = GpuMemory(
        model_states=sum(count for buffer, count in alive.items() if buffer.value.startswith(("param", "grad", "optim"))),
        fixed_buffers=0,
        activations=sum(count for buffer, count in alive.items() if buffer.value.startswith(("activation", "logits"))),
        live_after_step=max(kept, default=0),
        peak_allocated=allocated,
        peak_reserved=reserved,
        total=reserved + beside,
        interval=(low, high),
        peak_phase=phase_of_mark(timeline.peak_mark()).value,
        phases=phases,
        outside_torch=beside,
        usable=usable,
        at_peak=tuple(
            PeakShare(what=what, bytes=count) for what, count in sorted(shares.items(), key=lambda one: -one[1]) if count
        ),
    )
    return gpu, left_out


def _fits(gpu: GpuMemory, cluster: Cluster, unmodelled: tuple[Unmodelled, ...]) -> dict[str, Any]:
    """Return the plan's fields that say whether it fits its card, as :func:`zeroplan.planner.fit.judged` has them."""
    assert gpu.interval is not None
    usable = cluster.usable_vram
    low, high = gpu.interval
    broken = ("gpu",) if usable is not None and high > usable else ()
    return decided(unmodelled, limited=usable is not None, certain=usable is not None and low > usable, broken=broken)


def _lines(timeline: Timeline, outside: dict[str, int], phase: str) -> tuple[PlanLine, ...]:
    found = [
        PlanLine(buffer=buffer.value, place="hbm", bytes=count, phases=(phase,), formula="captured, at the peak")
        for buffer, count in timeline.alive_by_buffer().items()
        if count
    ]
    always = ("init", "forward", "backward", "step")
    found += [
        PlanLine(
            buffer=(Buffer.NCCL if "NCCL" in how else Buffer.CONTEXT).value,
            place="hbm",
            bytes=count,
            phases=always,
            formula=how,
        )
        for how, count in outside.items()
    ]
    return tuple(found)
