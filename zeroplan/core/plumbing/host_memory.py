"""The host memory of this machine."""

from __future__ import annotations

import os


def physical_memory() -> int:
    """Return the bytes of physical memory, or a container's limit if that is less; 0 where the system does not tell."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
