"""This machine: cores, memory, disk, GPUs and versions, read without torch."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata

from zeroplan.core.gpus import by_drivers_name
from zeroplan.core.local_cards import local_cards
from zeroplan.core.plumbing.host_memory import physical_memory
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
    found, problem = local_cards()
    cards = tuple(Card(one.name, one.memory, preset_of(one.name)) for one in found)
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=sys.version.split()[0],
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=physical_memory(),
        disk_free=shutil.disk_usage(folder).free,
        cards=cards,
        problem=problem,
        packages=packages(),
    )


def preset_of(name: str) -> str:
    """Return the name of the preset that a driver's name means, or nothing."""
    preset = by_drivers_name(name)
    return "" if preset is None else preset.name


def packages() -> dict[str, str]:
    """Return the versions of the installed packages that plans and runs depend on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def compiled_routines() -> str:
    """Return the instruction set that the compiled library uses on this processor; empty without the library."""
    loaded = library()
    if loaded is None:
        return ""
    loaded.zeroplan_instructions.restype = ctypes.c_char_p
    name: bytes = loaded.zeroplan_instructions()
    return name.decode()
