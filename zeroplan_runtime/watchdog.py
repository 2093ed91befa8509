"""Ends a job whose ranks no longer get on, and says which rank is to blame, instead of standing still.

Every rank's watcher, a thread, writes where its rank is to the store that the ranks met in. When its own rank has waited
for others for the timeout, it reads what they wrote: a rank whose watcher has stopped writing is dead or stopped, one that is
behind is stuck. The message names them and the process ends. A rank that is busy elsewhere (loading data, evaluating) waits
for nobody and is left alone; those that wait for it name it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

#: The exit code of a process that its watcher ends ("temporary failure" in sysexits.h): trying again may help.
EXIT_STALLED = 75


#: How far a rank is, where, and whether it may be waiting for others.
Progress = Callable[[], tuple[int, str, bool]]


class RankLost(RuntimeError):
    """A collective failed because another rank is gone; the message names it."""


class Watchdog:
    """Watches one rank's progress.

    Args:
        store: where the ranks meet; it must not be used by others while they wait, so give a connection of its own.
        progress: gives a count that rises with every piece of work, what is being done, and whether it may be waiting for
            other ranks.
        timeout: seconds of waiting that are too many.
        on_stall: called with the message; by default it is printed to stderr and the process ends at once.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        progress: Progress,
        timeout: float,
        on_stall: Callable[[str], None] | None = None,
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._progress, self._timeout = progress, timeout
        self._on_stall = on_stall or _end
        self._interval = min(2.0, timeout / 8)
        self._beats = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zeroplan-watchdog", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends watching."""
        self._stop.set()

    def _watch(self) -> None:
        last, since = -1, time.monotonic()
        while not self._stop.wait(self._interval):
            count, _, waiting = self._progress()
            if count != last or not waiting:
                last, since = count, time.monotonic()
            overdue = time.monotonic() - since > self._timeout
            try:
                self._beat(count)
                message = self.diagnose(f"has waited {self._timeout:g} s") if overdue else ""
            except (RuntimeError, ValueError):
                message = f"rank {self._rank} has waited {self._timeout:g} s and cannot reach the first rank" if overdue else ""
            if message and not self._stop.is_set():
                self._on_stall(message)
                return

    def _beat(self, count: int) -> None:
        self._beats += 1
        self._store.set(f"zeroplan/{self._rank}", json.dumps([self._beats, count, self._progress()[1]]))

    def _read(self) -> dict[int, tuple[int, int, str]]:
        found = {}
        for rank in range(self._ranks):
            key = f"zeroplan/{rank}"
            if self._store.check([key]):
                beats, count, where = json.loads(self._store.get(key))
                found[rank] = (beats, count, where)
        return found

    def diagnose(self, what: str) -> str:
        """One line that says `what` befell this rank, and which ranks are silent or behind. Takes a few seconds."""
        before = self._read()
        time.sleep(2.5 * self._interval)
        after = self._read()
        count, where, _ = self._progress()
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        silent = [r for r in others if r not in after or (r in before and before[r][0] == after[r][0])]
        behind = [r for r in others if r not in silent and after[r][1] < count]
        faults = [f"rank {r} is dead or stopped (last seen in {after[r][2] if r in after else 'nothing'})" for r in silent]
        faults += [f"rank {r} is behind, in {after[r][2]}" for r in behind]
        return "; ".join([f"rank {self._rank} {what} in {where}", *(faults or ["no other rank is silent or behind"])])


def weakly(progress: Progress) -> Progress:
    """`progress`, a method, without keeping its object alive: the watchdog's thread must not."""
    alive = weakref.WeakMethod(progress)

    def found() -> tuple[int, str, bool]:
        method = alive()
        return method() if method is not None else (0, "an engine that is gone", False)

    return found


def watch(rank: int, ranks: int, progress: Progress, timeout: float) -> Watchdog | None:
    """Starts a watcher on the store of the default process group; None where there is nothing to wait for."""
    if ranks < 2 or not dist.is_initialized() or timeout <= 0:
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        store = store.clone()  # a connection of its own: the main thread may be waiting in the other
    except (RuntimeError, AttributeError, NotImplementedError):
        return None
    store.set_timeout(timedelta(seconds=30))
    made = Watchdog(store, rank, ranks, progress, timeout)
    made.start()
    return made


def _end(message: str) -> None:
    print(f"zeroplan_runtime: {message}", file=sys.stderr, flush=True)
    os._exit(EXIT_STALLED)
