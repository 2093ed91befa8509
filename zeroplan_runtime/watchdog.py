"""Ends a job whose ranks wait for each other too long, and names the rank that is dead or stuck.

Each rank has a watchdog thread that writes the rank's progress to the rendezvous store every few seconds. When its rank has
waited for other ranks longer than the timeout, the thread reads what they wrote: a rank that has stopped writing is dead or
stopped, a rank with less progress is stuck. The message names them and the process ends. A rank that is busy outside the engine
(loading data, evaluating) does not wait, so its own watchdog does nothing; the ranks that wait for it name it.
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

#: The exit code of a process that its watchdog ends: EX_TEMPFAIL of sysexits.h, "try again".
EXIT_STALLED = 75

#: Gives a count that rises with every piece of work, what is being done, and whether the rank may wait for other ranks.
Progress = Callable[[], tuple[int, str, bool]]


class RankLost(RuntimeError):
    """A collective failed because another rank is gone; the message names the rank."""


class Watchdog:
    """Watches one rank's progress.

    Args:
        store: a connection to the rendezvous store that no other thread uses, as one that waits blocks all its users.
        rank: this rank.
        ranks: the number of ranks.
        progress: gives this rank's progress.
        timeout: the longest wait for other ranks, in seconds.
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
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
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
        """One line that says `what` happened on this rank and which ranks are silent or behind. Takes a few seconds."""
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
    """Calls the bound method `progress` through a weak reference, so that the watchdog does not keep its object alive."""
    alive = weakref.WeakMethod(progress)

    def found() -> tuple[int, str, bool]:
        method = alive()
        return method() if method is not None else (0, "an engine that is gone", False)

    return found


def watch(rank: int, ranks: int, progress: Progress, timeout: float) -> Watchdog | None:
    """Starts a watchdog on the default process group's store; None for one rank, no timeout, or a store without clones."""
    if ranks < 2 or not dist.is_initialized() or timeout <= 0:
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        store = store.clone()  # the main thread may block in the other connection
    except (RuntimeError, AttributeError, NotImplementedError):
        return None
    store.set_timeout(timedelta(seconds=30))
    made = Watchdog(store, rank, ranks, progress, timeout)
    made.start()
    return made


def _end(message: str) -> None:
    print(f"zeroplan_runtime: {message}", file=sys.stderr, flush=True)
    os._exit(EXIT_STALLED)
