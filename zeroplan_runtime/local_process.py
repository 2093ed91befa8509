"""Whether another process of this machine is still there."""

from __future__ import annotations

import os
from pathlib import Path

#: What tells one process from all others: the machine's boot, the namespace of process numbers, the number, when it began.
Identity = tuple[str, str, int, str]


def identity() -> Identity | None:
    """This process's; None where the system has no ``/proc``."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.readlink("/proc/self/ns/pid"), os.getpid(), _state(os.getpid())[1]
    except (OSError, ValueError):
        return None


def is_gone(other: Identity) -> bool:
    """Returns whether that process has ended. False for one of another machine or container, of which nothing is known."""
    own = identity()
    if own is None or own[:2] != tuple(other[:2]):
        return False
    try:
        state, began = _state(other[2])
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return state in "ZX" or began != other[3]  # ended and not yet waited for, or its number was given to another


def is_stopped(other: Identity) -> bool:
    """Returns whether that process is stopped by a signal or a debugger. False where nothing is known of it."""
    own = identity()
    if own is None or own[:2] != tuple(other[:2]):
        return False
    try:
        state, began = _state(other[2])
    except (OSError, ValueError):
        return False
    return state in "Tt" and began == other[3]


def _state(pid: int) -> tuple[str, str]:
    """Returns the state (a letter) and the start time of a process: fields 3 and 22 of proc_pid_stat(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if len(fields) < 20:
        raise ValueError("not what proc_pid_stat(5) describes")
    return fields[0], fields[19]
