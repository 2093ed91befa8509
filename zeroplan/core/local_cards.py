"""The GPUs of this machine by NVML, without torch or a CUDA context: names, memory, what is free, and who holds the rest.

Where MIG divides a card, its slices stand in its place: a process sees no whole card then.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.gpus import DEFAULT_GPU, DRIVER_RESERVE, Gpu, by_drivers_name
from zeroplan.core.sizes import format_bytes

#: The name by which ``--gpu`` means this machine's.
LOCAL = "local"
#: How a slice's name ends: ``MIG 1g.5gb`` is one of the seven parts of the card's multiprocessors.
_SLICE = re.compile(r"MIG (\d)g\.")
_PARTS = 7
#: What others hold is named from here on: less is within what drivers differ.
_NOTABLE = DRIVER_RESERVE // 2
_NAMED = 3


@dataclass(frozen=True, slots=True)
class LocalCard:
    """One GPU, or one MIG slice of it. Bytes; `holders` are processes with what each holds, the largest first."""

    name: str
    memory: int
    free: int
    holders: tuple[tuple[str, int], ...] = ()
    whole: int = 0

    @property
    def slice(self) -> int:
        """The slice's parts of the card's multiprocessors; 0 for a whole card."""
        found = _SLICE.search(self.name)
        return int(found[1]) if found else 0

    @property
    def gpu(self) -> Gpu:
        """The preset that the driver's name means, with this card's memory; the default's rates where none is known. A slice
        has its share of the card's rates (NVIDIA MIG user guide, "Concepts": multiprocessors in seven parts, bandwidth as
        memory).
        """
        preset = by_drivers_name(self.name) or replace(DEFAULT_GPU, name=self.name)
        preset = replace(preset, memory=self.memory)
        if not self.slice:
            return preset
        share, part = self.slice / _PARTS, self.memory / self.whole
        fp8 = None if preset.fp8_tflops is None else preset.fp8_tflops * share
        return replace(
            preset, bf16_tflops=preset.bf16_tflops * share, bandwidth_gbs=preset.bandwidth_gbs * part, fp8_tflops=fp8
        )

    @property
    def held(self) -> str:
        """Who holds what is not free: ``"python3 (process 77) 9.0 GiB"``; empty where that is no more than the driver's own."""
        used = self.memory - self.free
        if used < (0 if self.slice else DRIVER_RESERVE) + _NOTABLE:
            return ""
        if not self.holders:
            return f"processes that are not seen from here {format_bytes(used, digits=1)}"
        named = ", ".join(f"{who} {format_bytes(size, digits=1)}" for who, size in self.holders[:_NAMED])
        return f"{named} and {len(self.holders) - _NAMED} more" if len(self.holders) > _NAMED else named


def local_cards() -> tuple[tuple[LocalCard, ...], str]:
    """Return the GPUs that a process would see here, in the order of CUDA_VISIBLE_DEVICES; and if there are none, why."""
    try:
        import pynvml
    except ImportError:
        return (), "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), str(error)
    try:
        cards = [one for handle in _visible(pynvml) for one in _slices(pynvml, handle) or [_card(pynvml, handle)]]
        return tuple(cards), "" if cards else "CUDA_VISIBLE_DEVICES names no GPU"
    except pynvml.NVMLError as error:
        return (), str(error)
    finally:
        pynvml.nvmlShutdown()


def require_local(count: int) -> tuple[LocalCard, ...]:
    """Return the first `count` of this machine's GPUs.

    Raises:
        BadInput: there are fewer, or they differ, or they are MIG slices, between which NCCL does not work.
    """
    cards, problem = local_cards()
    where = f"--gpu {LOCAL}"
    if not cards:
        raise BadInput(f"no GPU is found here: {problem}", where=where, remedy="name a card: --gpu H100, or --vram 24G")
    if count > len(cards):
        here = "1 GPU is" if len(cards) == 1 else f"{len(cards)} GPUs are"
        raise BadInput(f"{here} here, and {count} are asked for", where=where, remedy="name the card for more: --gpu H100")
    chosen = cards[:count]
    if count > 1 and any(one.slice for one in chosen):
        what = "NCCL works between no MIG slices"
        raise BadInput(what, where=where, remedy="ask for one GPU, or have the administrator switch MIG off")
    if len(names := {one.name for one in chosen}) > 1:
        raise BadInput(f"the GPUs differ: {', '.join(sorted(names))}", where=where, remedy="choose by CUDA_VISIBLE_DEVICES")
    return chosen


def _visible(nvml: Any) -> list[Any]:
    """Return the handles of CUDA_VISIBLE_DEVICES, or of all devices; CUDA stops at the first name that it does not know."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    found = []
    for name in (word.strip() for word in named.split(",")):
        try:
            by_index = name.isdigit()
            found.append(nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else nvml.nvmlDeviceGetHandleByUUID(name))
        except nvml.NVMLError:
            break
    return found


def _slices(nvml: Any, handle: Any) -> list[LocalCard]:
    """Return the MIG slices of a card; none where MIG is off, or the card knows none."""
    found = []
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return []
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                found.append(_card(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index), handle))
            except nvml.NVMLError_NotFound:
                continue
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument, nvml.NVMLError_FunctionNotFound):
        return []
    return found


def _card(nvml: Any, handle: Any, of: Any = None) -> LocalCard:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    whole = memory if of is None else nvml.nvmlDeviceGetMemoryInfo(of)
    return LocalCard(
        _text(nvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.free), _holders(nvml, handle), int(whole.total)
    )


def _holders(nvml: Any, handle: Any) -> tuple[tuple[str, int], ...]:
    """Return the processes on a device that NVML shows, with what each holds."""
    held: dict[int, int] = {}
    for running in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            held |= {one.pid: int(one.usedGpuMemory or 0) for one in running(handle)}
        except nvml.NVMLError:
            continue
    named = [(f"{_process(nvml, pid)} (process {pid})", size) for pid, size in held.items()]
    return tuple(sorted(named, key=lambda one: -one[1]))


def _process(nvml: Any, pid: int) -> str:
    try:
        return os.path.basename(_text(nvml.nvmlSystemGetProcessName(pid)).split("\0")[0].split(" ")[0]) or "a process"
    except nvml.NVMLError:  # of another user, or another container
        return "a process"


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name
