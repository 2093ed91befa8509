"""What a script did on its GPU, played through the simulated caching allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    played = _played(recorder, out.op, out.arg, sizes, workspace, lambda _: (Buffer.UNATTRIBUTED, ""))
    for at, _ in enumerate(played):
        if at == since:
            recorder.mark("since")
    if since == len(out.op):
        recorder.mark("since")
    recorder.mark("now")
    now = simulate(recorder).marks[-1]
    return now.reserved, now.peak_reserved


def replayed(captured: Captured, gpu: Gpu) -> Recorder:
    """Return the recording of a captured script on a GPU."""
    recorder = Recorder()
    sizes = sizes_on(captured.sizes, KernelDevice.of(gpu))
    mark, labels, phases = int(Op.MARK), captured.buffers, captured.phases
    notes = [captured.lines[line] for line in captured.line_of] or [""] * len(sizes)

    def about(storage: int) -> tuple[Buffer, str]:
        label = labels.get(storage)
        buffer = _BY_PHASE[phases[storage]] if label is None else _LABELS.get(label) or Buffer(label)
        return buffer, notes[storage]

    for op, arg in _played(recorder, captured.op, captured.arg, sizes, gpu.workspace, about):
        if op == mark and arg >= FIRST_MARK:
            recorder.mark(MARKS[arg - FIRST_MARK])
    return recorder


def _played(
    recorder: Recorder,
    ops: Sequence[int],
    args: Sequence[int],
    sizes: Sequence[int],
    workspace: int,
    about: Callable[[int], tuple[Buffer, str]],
) -> Iterator[tuple[int, int]]:
    """Play a script's events into a recorder, and yield each before it is played.

    Args:
        sizes: bytes of each storage.
        workspace: bytes of cuBLAS's workspace on the GPU.
        about: what a storage is, and where it was made.
    """
    handles = [-1] * len(sizes)
    workspaces = [workspace, workspace, CUBLASLT_WORKSPACE, CUBLASLT_WORKSPACE]
    alloc, free = int(Op.ALLOC), int(Op.FREE)
    for op, arg in zip(ops, args, strict=True):
        yield op, arg
        if op == alloc:
            buffer, note = about(arg)
            handles[arg] = recorder.alloc(sizes[arg], buffer, note=note)
        elif op == free:
            recorder.free(handles[arg])
        elif op == WORKSPACE:
            recorder.alloc(workspaces[arg], Buffer.WORKSPACE, note="cuBLAS, at a thread's first product")
        elif op == EMPTY_CACHE:
            recorder.empty_cache()
