"""Reads memory at named moments: the caching allocators, NVML and the kernel's view of the host.

Without CUDA every device figure is 0, so that the worker can be tried on a CPU.
"""

from __future__ import annotations

import os
import time
from typing import Any

_STATUS_KEYS = ("VmRSS", "VmHWM", "RssAnon", "RssShmem", "VmLck", "VmPin")
# Events within this many seconds of a mark belong before it: the device is idle at a mark, and
# the pause keeps the allocator's clock and the host's apart by more than their drift.
_PAUSE_SECONDS = 0.002


def host_status() -> dict[str, int]:
    """Return the memory of the calling process from ``/proc/self/status``, in bytes."""
    with open("/proc/self/status") as lines:
        pairs = (line.split(":", 1) for line in lines)
        return {k: int(v.split()[0]) * 1024 for k, v in pairs if k in _STATUS_KEYS}


class Device:
    """One GPU as NVML sees it, and this process on it."""

    def __init__(self, local_rank: int) -> None:
        import torch

        self.cuda = torch.cuda.is_available()
        self._handle: Any = None
        if self.cuda:
            import pynvml

            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            index = int(visible.split(",")[local_rank]) if visible else local_rank
            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)

    def used(self) -> int:
        """Return the bytes in use on the device, by whomever."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used) if self._handle else 0

    def used_by_process(self) -> int | None:
        """Bytes that NVML attributes to this process; None where it cannot tell."""
        if not self._handle:
            return None
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return None
        mine = [p.usedGpuMemory for p in running if p.pid == os.getpid()]
        return int(mine[0]) if mine and mine[0] is not None else None


class Probe:
    """Collects marks: the allocator's state at a named moment and its peaks since the last one."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.marks: list[dict[str, Any]] = []

    def mark(self, name: str) -> None:
        """Record now as ``name`` and start new peaks. Waits for the device."""
        row: dict[str, Any] = {"at": name}
        if self.device.cuda:
            row |= self._cuda_state()
        status = host_status()
        row["host_VmRSS"], row["host_VmHWM"] = status["VmRSS"], status["VmHWM"]
        row["nvml"] = self.device.used()
        self.marks.append(row)

    def _cuda_state(self) -> dict[str, Any]:
        import torch

        torch.cuda.synchronize()
        time.sleep(_PAUSE_SECONDS)
        now = time.time_ns() // 1000
        time.sleep(_PAUSE_SECONDS)
        stats = torch.cuda.memory_stats()
        pool = torch.cuda.host_memory_stats()
        row = {
            "alloc": stats["allocated_bytes.all.current"],
            "peak": stats["allocated_bytes.all.peak"],
            "reserved": stats["reserved_bytes.all.current"],
            "reserved_peak": stats["reserved_bytes.all.peak"],
            "requested": stats["requested_bytes.all.current"],
            "requested_peak": stats["requested_bytes.all.peak"],
            "active": stats["active_bytes.all.current"],
            "inactive_split": stats["inactive_split_bytes.all.current"],
            "segments": stats["segment.all.current"],
            "retries": stats["num_alloc_retries"],
            "nvml_process": self.device.used_by_process(),
            "time_us": now,
            "pinned": {k: n for k, n in pool.items() if n and "time" not in k},
        }
        torch.cuda.reset_peak_memory_stats()
        return row
