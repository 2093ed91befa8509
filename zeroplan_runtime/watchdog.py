"""Ends a job whose ranks no longer get on, and says which rank is to blame, instead of standing still.

Every rank's watcher, a thread, writes where its rank is to the store that the ranks met in, several times within the
timeout. When its own rank has made no progress for the timeout, it reads the others': a rank whose watcher has stopped
writing is dead or stopped, one that is behind the others is stuck. The message names them and the process ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

#: The exit code of a process that its watcher ends ("temporary failure" in sysexits.h): trying again may help.
EXIT_STALLED = 75


class Watchdog:
    """Watches one rank's progress.

    Args:
        store: where the ranks meet; it must not be used by others while they wait, so give a connection of its own.
        progress: gives (a count that rises with every piece of work, what is being done).
        timeout: seconds without progress that are too many.
        on_stall: called with the message; by default it is printed to stderr and the process ends at once.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        progress: Callable[[], tuple[int, str]],
        timeout: float,
        on_stall: Callable[[str], None] | None = None,
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._progress, self._timeout = progress, timeout
        self._on_stall = on_stall or _end
        self._interval = min(5.0, timeout / 8)
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
        last, since = self._progress()[0], time.monotonic()
        while not self._stop.wait(self._interval):
            count, _ = self._progress()
            if count != last:
                last, since = count, time.monotonic()
            try:
                self._beat(count)
                if count and time.monotonic() - since > self._timeout:
                    self._on_stall(self._diagnose())
                    return
            except (RuntimeError, ValueError):
                if not self._stop.is_set() and count and time.monotonic() - since > self._timeout:
                    self._on_stall(f"rank {self._rank} has stood still for {self._timeout:g} s and cannot reach the first rank")
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

    def _diagnose(self) -> str:
        before = self._read()
        time.sleep(3 * self._interval)
        after = self._read()
        mine = self._progress()
        silent = [
            r for r in range(self._ranks) if r != self._rank and (r not in after or before.get(r, ())[:1] == after[r][:1])
        ]
        behind = [r for r in after if r not in silent and r != self._rank and after[r][1] < mine[0]]
        text = f"rank {self._rank} has stood still in {mine[1]} for {self._timeout:g} s"
        if silent:
            text += "; " + ", ".join(
                f"rank {r} is dead or stopped (last {after[r][2] if r in after else 'never seen'})" for r in silent
            )
        if behind:
            text += "; " + ", ".join(f"rank {r} is behind, in {after[r][2]}" for r in behind)
        if not silent and not behind:
            text += "; no other rank is behind it: this rank itself is stuck, or the network between them"
        return text


def watch(rank: int, ranks: int, progress: Callable[[], tuple[int, str]], timeout: float) -> Watchdog | None:
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
