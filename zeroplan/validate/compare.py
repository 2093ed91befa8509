"""Compares a plan with a measurement: buffers row by row, totals, bytes that no row explains, and the verdict.

Note [What is judged]
    Buffers that the runtime owns must be equal, unit by unit. On GPUs the total (the process's device memory, or without NVML
    the allocator's reserved memory) must be within the tolerance. A CPU has no caching allocator, no CUDA context and no NCCL.
    There the tensors that are alive between steps and at the peak of training are compared with the plan's requested bytes,
    without workspaces and rounding. With offload they are not compared, since host and device are one memory. Peaks are judged
    only where a CPU's kernels keep the tensors that CUDA's keep: not for fp32 attention and dropout. A run that ends out of
    memory agrees with a plan that does not fit.
    What the worst rank has for a known reason beyond the planned one is allowed (Note [Ranks of a ring] in
    zeroplan/planner/simulated.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.sizes import format_bytes
from zeroplan.core.sparse_attention import SparseAttention
from zeroplan.core.workload import Attention, DType
from zeroplan.engines.verification import Key
from zeroplan.validate.planned import Planned
from zeroplan.validate.results import Comparison, DriftRow, Measurement

#: Phases of training; a CPU holds the model's first copy in the same memory while the engine initialises.
_TRAINING = ("forward", "backward", "step")
#: The place of a device's memory in the rows.
_MEMORY = {"cuda": "hbm", "cpu": "dram"}
#: A difference of fewer bytes on a CPU is due to scalars.
_FEW = 1 << 14
_BESIDE = "activations, temporaries, workspaces"


def compare(planned: Planned, measured: Measurement, tolerance: float) -> Comparison:
    """Compare one configuration's plan and measurement; `tolerance` is a fraction of the planned total."""
    mismatches = _mismatches(planned, measured)
    ended = measured.failure or measured.out_of_memory is not None
    rows = _buffer_rows(planned, measured)
    totals = [] if ended else _totals(planned, measured, tolerance)
    if not ended:
        rows += _torch_rows(planned, measured)
    unattributed = None if ended else _unattributed(rows, measured)
    within, verdict = _verdict(planned, measured, mismatches, totals)
    return Comparison(
        plan=planned.plan,
        measurement=measured,
        rows=tuple(rows),
        totals=tuple(totals),
        unattributed=unattributed,
        mismatches=tuple(mismatches),
        within=within,
        verdict=verdict,
    )


def _by_buffer(rows: Iterable[tuple[Key, int]], device: str) -> dict[tuple[str, str], int]:
    """Bytes by buffer and place; on a CPU all places but files are one."""
    totals: dict[tuple[str, str], int] = {}
    for (buffer, _, place), count in rows:
        key = (buffer, place if device == "cuda" or place == Place.NVME else _MEMORY[device])
        totals[key] = totals.get(key, 0) + count
    return totals


def _measured_keys(planned: Planned, measured: Measurement) -> dict[Key, int]:
    """The measured rows; without those of checkpointed inputs where there is no tape to predict them."""
    return {
        (row.buffer, row.unit, row.place): row.bytes
        for row in measured.rows
        if row.buffer != Buffer.ACTIVATION_CHECKPOINT or not planned.not_simulated
    }


def _mismatches(planned: Planned, measured: Measurement) -> list[str]:
    """List the owned buffers that differ, unit by unit."""
    if planned.owned is None or not measured.owned:
        return []
    found = _measured_keys(planned, measured)
    out = []
    for key in dict.fromkeys([*planned.owned.rows, *found]):
        want, have = planned.owned.rows.get(key, 0), found.get(key, 0)
        if want != have:
            out.append(f"{key[0]} of {key[1]} ({key[2]}): planned {want:,}, measured {have:,} bytes")
    return out


def _buffer_rows(planned: Planned, measured: Measurement) -> list[DriftRow]:
    """Return a row for each buffer of the engine: judged exactly where the engine accounts for it, else for information."""
    found = _by_buffer(_measured_keys(planned, measured).items(), measured.device)
    if planned.owned is not None:
        wanted, exact = _by_buffer(planned.owned.rows.items(), measured.device), measured.owned
    else:
        lines = (((line.buffer, "", line.place), line.bytes) for line in planned.plan.lines)
        lined = _by_buffer(lines, measured.device)
        wanted, exact = {key: count for key, count in lined.items() if key in found}, False
    passing = planned.owned.passing if planned.owned is not None else frozenset()
    rows = []
    for key in dict.fromkeys([*wanted, *found]):
        want, have = wanted.get(key, 0), found.get(key, 0)
        rows.append(
            DriftRow(
                name=key[0],
                place=key[1],
                planned=want,
                measured=have if measured.rows else None,
                judged="exact" if exact else "",
                within=want == have if exact else None,
                note="comes and goes: at its most" if key[0] in passing else "",
                stands=key[0] not in passing,
            )
        )
    return rows


def _offloads(planned: Planned) -> bool:
    moves = planned.case.zero.activation_checkpointing.cpu_checkpointing
    return planned.plan.offload_optimizer != "none" or planned.plan.offload_param != "none" or moves


def _kept(rows: Iterable[DriftRow], device: str) -> tuple[int, int]:
    on_device = [row for row in rows if row.place == _MEMORY[device] and row.stands]
    return sum(row.planned or 0 for row in on_device), sum(row.measured or 0 for row in on_device)


def _training_peak(measured: Measurement) -> int | None:
    return max((measured.phases[phase] for phase in _TRAINING if phase in measured.phases), default=None)


def _torch_rows(planned: Planned, measured: Measurement) -> list[DriftRow]:
    """Return the rows of torch's other allocations, of its cache, and of memory outside torch."""
    gpu = planned.plan.gpu
    want, have = _kept(_buffer_rows(planned, measured), measured.device)
    peak = measured.peak_allocated if measured.device == "cuda" else _training_peak(measured)
    plan_peak = gpu.peak_allocated if measured.device == "cuda" else None if _offloads(planned) else planned.requested
    rows = [
        DriftRow(
            name=_BESIDE,
            place=_MEMORY[measured.device],
            planned=None if plan_peak is None else plan_peak - want,
            measured=None if peak is None else peak - have,
            note="at the peak, beside what stands",
        )
    ]
    if measured.device == "cuda":
        rows.append(
            DriftRow(
                name="allocator.fragmentation",
                place="hbm",
                planned=_less(gpu.peak_reserved, gpu.peak_allocated),
                measured=_less(measured.peak_reserved, measured.peak_allocated),
                note="reserved beyond allocated",
            )
        )
        rows.append(DriftRow(name="device.context", place="hbm", planned=planned.context, measured=measured.context))
    else:
        rows.append(
            DriftRow(name="host.process", place="dram", planned=None, measured=measured.host_before, note="before the model")
        )
    return rows


def _less(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a - b


def _totals(planned: Planned, measured: Measurement, tolerance: float) -> list[DriftRow]:
    gpu = planned.plan.gpu
    if measured.device == "cpu":
        return [*_cpu_totals(planned, measured, tolerance), *_host_totals(planned, measured)]
    beyond = planned.beyond
    rows = [
        DriftRow(name="live after a step", place="hbm", planned=gpu.live_after_step, measured=measured.live_after_step),
        DriftRow(name="peak allocated", place="hbm", planned=gpu.peak_allocated, measured=measured.peak_allocated),
    ]
    if measured.total is None:
        rows.append(
            _judged("peak reserved", gpu.peak_reserved, measured.peak_reserved, tolerance, "no NVML here", beyond=beyond)
        )
    else:
        rows.append(DriftRow(name="peak reserved", place="hbm", planned=gpu.peak_reserved, measured=measured.peak_reserved))
        rows.append(_judged("total", gpu.total, measured.total, tolerance, measured.total_source, beyond=beyond))
    return [*rows, *_host_totals(planned, measured)]


def _host_totals(planned: Planned, measured: Measurement) -> list[DriftRow]:
    """Return the rows of a node's resident memory (the peak, and by phase), its pinned memory and its swap files.

    The plan's resident memory is that of a process that uses CUDA, so on a CPU it is not compared.
    """
    cpu, nvme = planned.plan.cpu, planned.plan.nvme
    told = planned.requested is not None and measured.device == "cuda"
    note = "all ranks of a node"
    if planned.case.layout.pp > 1:  # the plan takes all ranks of the node for such
        gpus = planned.case.cluster.gpus
        ranks = min(measured.ranks, gpus)
        share = {phase: count * ranks // gpus for phase, count in cpu.phases.items()}
        cpu = cpu.model_copy(
            update={"per_node": cpu.per_node * ranks // gpus, "pinned": cpu.pinned * ranks // gpus, "phases": share}
        )
        nvme = nvme.model_copy(update={"per_node": nvme.per_node * ranks // gpus})
        note = "this stage's ranks of a node"
    rows = [
        DriftRow(
            name="resident memory", place="dram", planned=cpu.per_node if told else None, measured=measured.host, note=note
        )
    ]
    for phase, count in measured.host_phases.items():
        want = cpu.phases.get(phase) if told else None
        rows.append(DriftRow(name=f"resident in {phase}", place="dram", planned=want, measured=count, note=note))
    if measured.pinned is not None and (measured.pinned or cpu.pinned):
        rows.append(DriftRow(name="pinned memory", place="pinned", planned=cpu.pinned, measured=measured.pinned, note=note))
    if measured.files is not None and (measured.files or nvme.per_node):
        rows.append(DriftRow(name="swap files", place="nvme", planned=nvme.per_node, measured=measured.files, note=note))
    return rows


def _cpu_totals(planned: Planned, measured: Measurement, tolerance: float) -> list[DriftRow]:
    """Rows of the tensors alive on a CPU; judged unless part of them is offloaded."""
    live, peak = measured.live_after_step, _training_peak(measured)
    if _offloads(planned):
        note = "not compared: host and device are one memory on a CPU"
        return [
            DriftRow(name="live after a step", place="dram", planned=None, measured=live, note=note),
            DriftRow(name="peak of tensors", place="dram", planned=None, measured=peak, note=note),
        ]
    row = _judged(
        "peak of tensors", planned.requested, peak, tolerance, "in forward, backward and step", _FEW, beyond=planned.beyond
    )
    if not _same_kernels(planned):
        note = "not judged: a CPU's kernels keep other tensors than CUDA's"
        row = row.model_copy(update={"judged": "", "within": None, "note": note})
    rows = [_judged("live after a step", planned.requested_live, live, tolerance, "tensors", _FEW), row]
    return [row.model_copy(update={"place": "dram"}) for row in rows]


def _same_kernels(planned: Planned) -> bool:
    """Return whether a CPU's kernels keep the tensors that CUDA's keep: fused attention in 16 bits, no dropout."""
    work = planned.case.workload
    return (
        work.numerics.dtype is not DType.FP32
        and work.numerics.attn is Attention.SDPA
        and not (work.technique(SparseAttention) or planned.cpu_differs)
    )


def _judged(
    name: str, want: int | None, have: int | None, tolerance: float, note: str, slack: int = 0, *, beyond: int = 0
) -> DriftRow:
    known = want is not None and have is not None
    within = None
    if want is not None and have is not None:
        far = max(tolerance * want, slack)
        within = -far <= have - want <= far + beyond
    if beyond:
        note = f"{note}; up to {format_bytes(beyond)} more on the first ranks of a sample"
    return DriftRow(
        name=name,
        place="hbm",
        planned=want,
        measured=have,
        judged="tolerance" if known else "",
        within=within,
        note=note,
    )


def _unattributed(rows: list[DriftRow], measured: Measurement) -> int | None:
    """Return the bytes of the measured total (on a CPU: of resident memory) that no measured row explains."""
    if measured.device == "cpu":
        per_rank = [row.measured or 0 for row in rows if row.name != "host.process" and row.stands]
        # Tensors are counted on the worst rank, resident memory over all of them.
        return measured.host - measured.host_before - measured.ranks * sum(per_rank) if measured.tensors_counted else None
    if measured.total is None:
        return None
    return measured.total - sum(row.measured or 0 for row in rows if row.place == "hbm" and row.stands)


def _verdict(planned: Planned, measured: Measurement, mismatches: list[str], totals: list[DriftRow]) -> tuple[bool, str]:
    if measured.failure:
        return False, measured.failure
    if measured.out_of_memory is not None:
        return _out_of_memory(planned, measured)
    if mismatches:
        return False, f"{len(mismatches)} owned buffers differ; first: {mismatches[0]}"
    for row in totals:
        if row.within is False and row.planned and row.measured is not None:
            share = (row.measured - row.planned) / row.planned
            return False, f"{row.name} is off by {share:+.1%}"
    exact = "owned buffers exact" if measured.owned else "run complete"
    judged = [row for row in totals if row.judged and row.planned and row.measured is not None]
    parts = [f"{row.name} {((row.measured or 0) - (row.planned or 0)) / (row.planned or 1):+.2%}" for row in judged]
    if not parts:
        parts = [f"totals not judged: {planned.not_simulated}" if planned.not_simulated else "totals not judged"]
    return True, ", ".join([exact, *parts])


def _out_of_memory(planned: Planned, measured: Measurement) -> tuple[bool, str]:
    out = measured.out_of_memory
    assert out is not None
    wanted = f"{format_bytes(out.requested)} more" if out.requested is not None else "more"
    had = f" with {format_bytes(out.allocated)} allocated" if out.allocated is not None else ""
    text = f"out of memory in {out.phase} on rank {out.rank}: {out.buffer} wanted {wanted}{had}"
    peak = planned.plan.gpu.peak_allocated
    if peak is not None:
        text += f"; the plan's peak is {format_bytes(peak)}"
        if out.allocated is not None and out.requested is not None:
            reached = out.allocated + out.requested
            text += f", {format_bytes(abs(peak - reached))} {'more' if peak >= reached else 'less'} than it would have had"
    if planned.plan.fits is False:
        return True, f"{text}; the plan said that it does not fit"
    return False, text
