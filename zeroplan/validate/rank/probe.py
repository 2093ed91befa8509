"""Measures memory on one rank: torch's allocator and NVML on a GPU, the tensors alive on a CPU, and resident memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_STATUS = "/proc/self/status"


def resident() -> tuple[int, int]:
    """Return the bytes of this process's resident memory: now, and the most since :func:`reset_resident`."""
    try:
        with open(_STATUS) as lines:
            pairs = dict(line.split(":", 1) for line in lines)
        return int(pairs["VmRSS"].split()[0]) * 1024, int(pairs["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return most, most


def reset_resident() -> None:
    """Reset the kernel's peak of resident memory, where it allows that."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def give_back_freed() -> None:
    """Collect garbage and have the C library return free memory to the system, so that resident memory is memory in use."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def page_locked() -> int:
    """Return the bytes of page-locked memory that torch holds, freed blocks in its cache included, and that ``mlock`` holds."""
    locked = 0
    with contextlib.suppress(OSError), open(_STATUS) as lines:
        locked = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmLck:")), 0)
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)) + locked


def bytes_written(folders: Iterable[str], since: float) -> int:
    """Bytes of the files under the folders that were written after a time, locks apart; folders may be the same or nested."""
    found: dict[tuple[int, int], int] = {}
    for where, _, names in chain.from_iterable(map(os.walk, folders)):
        for name in names:
            with contextlib.suppress(OSError):  # gone in the meantime
                state = os.stat(os.path.join(where, name))
                if state.st_mtime >= since and name != "lock":
                    found[state.st_dev, state.st_ino] = state.st_size
    return sum(found.values())


class Nvml:
    """One GPU's memory by NVML, which needs no CUDA context. Every figure is None where NVML is not available."""

    def __init__(self, local_rank: int | None) -> None:
        self._handle: Any = None
        if local_rank is None:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
            name = visible[local_rank] if visible else str(local_rank)
            by_index = name.isdigit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else pynvml.nvmlDeviceGetHandleByUUID(name)
            self._nvml = pynvml
        except Exception:  # no library, no permission, no such device: the total is then not measured
            self._handle = None

    def used(self) -> int | None:
        """Return the bytes in use on the device, by all processes."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used) if self._handle is not None else None

    def by_process(self) -> int | None:
        """Bytes that NVML attributes to this process; None where it cannot tell (as in most containers)."""
        if self._handle is None:
            return None
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return None
        mine = [p.usedGpuMemory for p in running if p.pid == os.getpid()]
        return int(mine[0]) if mine and mine[0] else None


class TensorCount(TorchDispatchMode):
    """Counts the bytes of the CPU tensors that operators return, by storage, while they live.

    Of a tensor that holds others, such as a DTensor, the ones inside are counted. Allocations within an operator are not seen,
    and autograd does not add gradients in place while a dispatch mode is on. Storages that Python resizes, as FSDP2 does, count
    what they hold. Memory that is first seen in an operator's arguments is no operator's: gloo's copies of what it reduces.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, tuple[int, Any]] = {}

    def __enter__(self) -> TensorCount:
        """Count, and see storages that are resized."""
        count, resize = self, torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            count.resized(storage)
            return found

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        """Leave storages as they were."""
        super().__exit__(*raised)
        del torch.UntypedStorage.resize_

    def follow(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key in self._alive or tensor.device.type != "cpu":
            return
        size = storage.nbytes()

        def dead(_: object, key: int = key) -> None:
            held, _ref = self._alive.pop(key)
            self.now -= held

        self._alive[key] = (size, weakref.ref(storage, dead))
        self._add(size)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count what a followed storage holds now."""
        key = int(storage._cdata)
        if key in self._alive:
            before, seen = self._alive[key]
            self._alive[key] = (storage.nbytes(), seen)
            self._add(storage.nbytes() - before)

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it runs the operator on the tensors inside, and those calls come here again
        given = {int(one.untyped_storage()._cdata) for one in _flat(args) if type(one) is torch.Tensor}
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, tuple | list) else (out,):
            if type(item) is torch.Tensor and int(item.untyped_storage()._cdata) not in given:
                self.follow(item)
        return out


def _flat(args: Iterable[Any]) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, tuple | list):
            yield from arg
        else:
            yield arg


@dataclass(slots=True)
class RankDevice:
    """One rank's device.

    Attributes:
        device: the GPU, or the CPU.
        nvml: its memory by NVML.
        used_before: bytes in use before this process's first CUDA call.
        context: bytes of the CUDA context.
    """

    device: torch.device
    nvml: Nvml
    used_before: int | None = None
    context: int | None = None

    @classmethod
    def of(cls, device: str, local_rank: int) -> RankDevice:
        """Return the device of a local rank. On a GPU this makes the process's first CUDA call and measures its context."""
        if device != "cuda":
            return cls(torch.device("cpu"), Nvml(None))
        nvml = Nvml(local_rank)
        before = nvml.used()
        where = torch.device("cuda", local_rank)
        torch.cuda.set_device(where)
        torch.zeros(1, device=where)
        torch.cuda.synchronize(where)
        torch.cuda.empty_cache()
        after = nvml.used()
        return cls(where, nvml, before, after - before if after is not None and before is not None else None)


class Probe:
    """Measures a run's peaks by phase."""

    def __init__(self, place: RankDevice) -> None:
        self.place, self.device, self.cuda = place, place.device, place.device.type == "cuda"
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        self.tensors = None if self.cuda else TensorCount()
        self.phases: dict[str, int] = {}
        self.host_phases: dict[str, int] = {}
        self.peak = self.reserved = 0
        self.phase = "load"
        give_back_freed()
        reset_resident()
        self.host_before = resident()[0]

    def counting(self) -> AbstractContextManager[object]:
        """Return a context that counts tensors, on a CPU."""
        return self.tensors if self.tensors is not None else nullcontext()

    def allocated(self) -> int:
        """Bytes allocated now."""
        return self.tensors.now if self.tensors is not None else int(torch.cuda.memory_allocated(self.device))

    def end(self, phase: str, following: str) -> None:
        """End a phase, whose peaks are read, and begin `following`. Waits for the device."""
        self.phase = following
        if self.cuda:
            torch.cuda.synchronize(self.device)
        self.host_phases[phase] = max(self.host_phases.get(phase, 0), resident()[1])
        reset_resident()
        if self.tensors is not None:
            peak, self.tensors.peak = self.tensors.peak, self.tensors.now
        else:
            peak = int(torch.cuda.max_memory_allocated(self.device))
            self.reserved = max(self.reserved, int(torch.cuda.max_memory_reserved(self.device)))
            torch.cuda.reset_peak_memory_stats(self.device)
        self.peak = max(self.peak, peak)
        self.phases[phase] = max(self.phases.get(phase, 0), peak)

    def figures(self) -> dict[str, Any]:
        """Return the figures of the run on this rank so far, by the names of :class:`zeroplan.validate.results.Measurement`."""
        place = self.place
        used, total, source = place.nvml.used(), place.nvml.by_process(), "NVML, by process"
        if total is None and used is not None and place.used_before is not None:
            total, source = used - place.used_before, "NVML, device now less device before"
        return {
            "peak_allocated": self.peak,
            "peak_reserved": self.reserved if self.cuda else None,
            "tensors_counted": self.tensors is not None,
            "phases": dict(self.phases),
            "context": place.context,
            "total": total,
            "total_source": source if total is not None else "",
            "host": max(resident()[1], *self.host_phases.values(), 0),
            "host_before": self.host_before,
            "host_phases": dict(self.host_phases),
            "pinned": page_locked() if self.cuda else 0,
        }
