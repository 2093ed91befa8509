"""What a script did on its GPU, played through the simulated caching allocator."""

from __future__ import annotations

from typing import Any

from zeroplan.capturing.result import EMPTY_CACHE, WORKSPACE, Captured, sizes_on
from zeroplan.core.buffers import Buffer
from zeroplan.core.gpus import Gpu
from zeroplan.engines.player import CUBLASLT_WORKSPACE
from zeroplan.simulate.recorder import Recorder, simulate
from zeroplan.tape.expanded import Op
from zeroplan.tape.sizes import KernelDevice

#: The first of the marks of a script's spans, and their names; see :mod:`zeroplan.capturing.spans`, which torch needs.
FIRST_MARK = 100
MARKS = ("init", "fwd", "bwd", "step", "eval", "save", "end")
#: What a storage is that no optimizer names, by the phase in which it is made.
_BY_PHASE = (Buffer.UNATTRIBUTED, Buffer.ACTIVATION, Buffer.ACTIVATION_TEMP)
_LABELS = {"optim.state": Buffer.OPTIM_EXP_AVG}


def reserved(out: Any, device: KernelDevice, workspace: int, since: int) -> tuple[int, int]:
    """Return the bytes that torch's allocator has reserved by now, and the most since an event.

    Args:
        out: what the script has recorded by now.
        device: the GPU, as kernels ask for it.
        workspace: bytes of cuBLAS's workspace on it.
        since: the event's number.
    """
    recorder = Recorder()
    sizes = sizes_on([alloc.size for alloc in out.allocs], device)
    handles: dict[int, int] = {}
    for at, (op, arg) in enumerate(zip(out.op, out.arg, strict=True)):
        if at == since:
            recorder.mark("since")
        if op == Op.ALLOC:
            handles[arg] = recorder.alloc(sizes[arg], Buffer.UNATTRIBUTED)
        elif op == Op.FREE:
            recorder.free(handles.pop(arg))
        elif op == WORKSPACE:
            recorder.alloc(workspace if arg < 2 else CUBLASLT_WORKSPACE, Buffer.WORKSPACE)
        elif op == EMPTY_CACHE:
            recorder.empty_cache()
    if since == len(out.op):
        recorder.mark("since")
    recorder.mark("now")
    now = simulate(recorder).marks[-1]
    return now.reserved, now.peak_reserved


def replayed(captured: Captured, gpu: Gpu) -> Recorder:
    """Return the recording of a captured script on a GPU."""
    recorder = Recorder()
    sizes = sizes_on(captured.sizes, KernelDevice.of(gpu))
    handles = [-1] * len(sizes)
    workspaces = [gpu.workspace, gpu.workspace, CUBLASLT_WORKSPACE, CUBLASLT_WORKSPACE]
    alloc, free, mark = int(Op.ALLOC), int(Op.FREE), int(Op.MARK)
    labels, phases = captured.buffers, captured.phases
    notes = [captured.lines[line] for line in captured.line_of] or [""] * len(sizes)
    for op, arg in zip(captured.op, captured.arg, strict=True):
        if op == alloc:
            label = labels.get(arg)
            buffer = _BY_PHASE[phases[arg]] if label is None else _LABELS.get(label) or Buffer(label)
            handles[arg] = recorder.alloc(sizes[arg], buffer, note=notes[arg])
        elif op == free:
            recorder.free(handles[arg])
        elif op == WORKSPACE:
            recorder.alloc(workspaces[arg], Buffer.WORKSPACE, note="cuBLAS, at a thread's first product")
        elif op == EMPTY_CACHE:
            recorder.empty_cache()
        elif op == mark and arg >= FIRST_MARK:
            recorder.mark(MARKS[arg - FIRST_MARK])
    return recorder
