"""This machine: cores, memory, disk, GPUs and versions, read without torch."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata

from zeroplan.core.errors import BadInput
from zeroplan.core.gpus import find_gpu
from zeroplan.core.plumbing.native import library

_PACKAGES = ("zeroplan", "torch", "transformers", "deepspeed", "accelerate", "peft", "lightning", "cuda-core", "pyyaml")


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU as its driver reports it; `preset` is its name among the presets, empty where there is none. Bytes."""

    name: str
    memory: int
    preset: str


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine. Bytes; `cards` is empty without GPUs, `problem` then says why."""

    system: str
    python: str
    cores: int
    memory: int
    disk_free: int
    cards: tuple[Card, ...]
    problem: str
    packages: dict[str, str]


def look(folder: str = ".") -> Machine:
    """Look at the machine that this runs on; `folder` says which disk."""
    cards, problem = _cards()
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=sys.version.split()[0],
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=_memory(),
        disk_free=shutil.disk_usage(folder).free,
        cards=cards,
        problem=problem,
        packages=packages(),
    )


def _memory() -> int:
    """Physical memory, or a container's limit if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def packages() -> dict[str, str]:
    """Return the versions of the installed packages that plans and runs depend on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cards() -> tuple[tuple[Card, ...], str]:
    try:
        import pynvml
    except ImportError:
        return (), "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), str(error)
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetName(handle)
            name = name.decode() if isinstance(name, bytes) else name
            found.append(Card(name, int(pynvml.nvmlDeviceGetMemoryInfo(handle).total), preset_of(name)))
        return tuple(found), ""
    except pynvml.NVMLError as error:
        return (), str(error)
    finally:
        pynvml.nvmlShutdown()


def preset_of(name: str) -> str:
    """Return the preset that a driver's name such as ``NVIDIA H100 80GB HBM3`` means, or nothing."""
    words = (
        name.replace("NVIDIA", "")
        .replace("GeForce", "")
        .replace("Tesla", "")
        .replace("-SXM4", " ")
        .replace("-PCIE", " ")
        .split()
    )
    for count in range(len(words), 0, -1):
        for joint in ("-", ""):
            try:
                return find_gpu(joint.join(words[:count])).name
            except BadInput:
                continue
    return ""


def compiled_routines() -> str:
    """Return the instruction set that the compiled library uses on this processor; empty without the library."""
    loaded = library()
    if loaded is None:
        return ""
    loaded.zeroplan_instructions.restype = ctypes.c_char_p
    name: bytes = loaded.zeroplan_instructions()
    return name.decode()
