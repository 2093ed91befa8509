"""Ends a job whose ranks wait for each other too long, and names the rank that is dead or stuck.

Each rank has a watchdog thread that writes the rank's progress to the rendezvous store every few seconds. When its rank has
waited for other ranks longer than the timeout, the thread reads what they wrote: a rank that has stopped writing is dead or
stopped, a rank with less progress is stuck. The message names them and the process ends. A rank that is busy outside the engine
(loading data, evaluating) does not wait, so its own watchdog does nothing; the ranks that wait for it name it.

Two things end a waiting rank sooner: the process of another rank on the same machine is gone without a farewell, and another
rank has found a fault, which it leaves in the store for all.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

#: Seconds after which a store that does not answer is taken for lost.
ANSWERS_IN = 10.0


class RendezvousStore:
    """Values in JSON under keys with a prefix. Every method raises RuntimeError where the store does not answer.

    Args:
        store: a connection that nothing else uses, as one that waits blocks all its users.
        prefix: of all keys.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._turn = threading.Lock()  # the store serves one request at a time
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._overdue: Future[Any] | None = None
        self._thread = threading.Thread(target=self._serve, name="zeroplan-store", daemon=True)

    def set(self, key: str, value: Any) -> None:
        """Sets a value."""
        self._ask(lambda: self._store.set(f"{self._prefix}/{key}", json.dumps(value)))

    def get(self, key: str) -> Any:
        """The value that was set; None if none was."""
        return (self.get_all([key]) or [None])[0]

    def get_all(self, keys: Sequence[str]) -> list[Any]:
        """The values of all keys; empty until each of them is set."""
        full = [f"{self._prefix}/{key}" for key in keys]
        found: list[Any] = self._ask(lambda: self._store.multi_get(full) if self._store.check(full) else [])
        return [json.loads(text) for text in found]

    def close(self) -> None:
        """Ends the thread, after which no request is answered."""
        self._is_closed = True
        self._requests.put(None)

    def _ask(self, act: Callable[[], Any]) -> Any:
        with self._turn:
            if self._is_closed or (self._overdue is not None and not self._overdue.done()):
                raise RuntimeError("the rendezvous store does not answer")
            if not self._thread.is_alive():
                self._thread.start()
            answer: Future[Any] = Future()
            self._requests.put((act, answer))
            try:
                return answer.result(ANSWERS_IN)
            except TimeoutError:
                self._overdue = answer
                raise RuntimeError("the rendezvous store does not answer") from None

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            act, answer = request
            try:
                answer.set_result(act())
            except BaseException as fault:  # the asking thread raises it
                answer.set_exception(fault)
            del request, act, answer


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


#: The exit code of a process that its watchdog ends: EX_TEMPFAIL of sysexits.h, "try again".
EXIT_STALLED = 75
#: Seconds between two looks of a watchdog at most.
LONGEST_INTERVAL = 2.0
#: Seconds without progress after which a rank asks whether the others' processes are still there.
_ASK_AFTER = 8.0
#: Seconds that a rank leaves the others to read what it has found.
_LEAST_TO_READ = 3.0
#: Engines of this process so far. Every rank makes them in the same order, so each has keys of its own in the store.
_numbers = itertools.count()


class RankActivity(NamedTuple):
    """The activity of a rank.

    Attributes:
        parts: rises with every part of the work that all ranks do alike, so that ranks can be compared.
        pieces: rises with what ranks have different numbers of, such as the pieces of a checkpoint.
        where: what is being done.
        waiting: whether the rank may wait for other ranks.
    """

    parts: int
    pieces: int
    where: str
    waiting: bool


Progress = Callable[[], RankActivity]


class RankLost(RuntimeError):
    """A collective failed because another rank is gone; the message names the rank."""


class Watchdog:
    """Watches one rank's progress.

    Args:
        store: a connection to the rendezvous store that nothing else uses, as one that waits blocks all its users.
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
        self._store = RendezvousStore(store, f"zeroplan/{next(_numbers)}")
        self._rank, self._ranks = rank, ranks
        self._progress, self._timeout = progress, timeout
        self._on_stall = on_stall or _end
        self._interval = min(LONGEST_INTERVAL, timeout / 8)
        self._beats = 0
        self._seen: dict[int, str] = {}  # what other ranks were doing when their progress was last read
        self._processes: dict[int, Identity] = {}
        self._explaining = False
        self._fault: BaseException | None = None  # what ended the process
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zeroplan-watchdog", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()
        atexit.register(self._end_with_interpreter)

    def stop(self) -> None:
        """Ends the thread. It tells the other ranks so, which then do not take this one for dead."""
        self._stop.set()
        atexit.unregister(self._end_with_interpreter)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(self._interval)

    def _end_with_interpreter(self) -> None:
        self._fault = getattr(sys, "last_value", None)
        self.stop()

    def _watch(self) -> None:
        mine = identity()
        self._attempt(lambda: self._store.set(f"process/{self._rank}", mine))
        last, since = (-1, -1), time.monotonic()
        while not self._stop.wait(self._interval):
            report = self._progress()
            if (report.parts, report.pieces) != last or not report.waiting:
                last, since = (report.parts, report.pieces), time.monotonic()
            waited = time.monotonic() - since
            try:
                self._beat(report)
                message = self._why_end(waited)
            except (RuntimeError, ValueError):
                overdue = waited > self._timeout
                message = self._without_store(f"has waited {self._timeout:g} s") if overdue else ""
            if message and not self._stop.is_set() and not self._explaining:
                self._attempt(self._let_others_read)
                self._on_stall(message)
                return
        self._attempt(self._take_leave)
        self._store.close()

    def _why_end(self, waited: float) -> str:
        """Returns why this rank, which has made no progress for `waited` seconds, must end; empty if it need not."""
        if waited > self._timeout:
            return self.diagnose(f"has waited {self._timeout:g} s")
        if waited > self._interval:
            told = self._reported()
            if told:
                return f"rank {self._rank} waits in {self._progress().where}; {told}"
        if waited > min(_ASK_AFTER, self._timeout / 2) and self._dead():
            return self.diagnose(f"has waited {waited:.0f} s")
        return ""

    def _beat(self, report: RankActivity) -> None:
        self._beats += 1
        self._store.set(f"beat/{self._rank}", [self._beats, report.parts, report.where])
        if len(self._processes) < self._ranks:
            found = self._store.get_all([f"process/{rank}" for rank in range(self._ranks)])
            self._processes = {rank: tuple(known) for rank, known in enumerate(found) if known is not None}

    def _take_leave(self) -> None:
        """Says that this rank needs no others any more and, where an exception ended the process, which."""
        fault = self._fault
        if fault is not None and not isinstance(fault, RankLost):
            self._tell(f"rank {self._rank} ended by {type(fault).__name__}: {(str(fault).splitlines() or [''])[0][:300]}")
        self._store.set(f"process/{self._rank}", None)

    # ------------------------------------------------------------------ the store

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (RuntimeError, ValueError):  # the store went with the rank that held it
            return

    def _read(self) -> dict[int, tuple[int, int, str]]:
        found = {}
        for rank in range(self._ranks):
            beat = self._store.get(f"beat/{rank}")
            if beat is not None:
                found[rank] = (int(beat[0]), int(beat[1]), str(beat[2]))
                self._seen[rank] = found[rank][2]
        return found

    def _tell(self, message: str) -> None:
        """Leaves the message for the other ranks, unless one was left before."""
        if self._store.get("fault") is None:
            self._store.set("fault", [self._rank, message])

    def _reported(self) -> str:
        """Returns what another rank has found; empty if nothing."""
        found = self._store.get("fault")
        return str(found[1]) if found is not None and found[0] != self._rank else ""

    def _dead(self) -> list[int]:
        """The ranks on this machine whose process is gone without having taken leave."""
        gone = [rank for rank, process in self._processes.items() if rank != self._rank and is_gone(process)]
        return [rank for rank in gone if self._store.get(f"process/{rank}") is not None]

    # ------------------------------------------------------------------ words

    def explain(self, what: str) -> str:
        """:meth:`diagnose` for a collective that failed; the watchdog does not end the process meanwhile."""
        self._explaining = True
        try:
            message = self.diagnose(what)
            self._let_others_read()
            return message
        except (RuntimeError, ValueError):  # the store does not answer
            return self._without_store(what)

    def _without_store(self, what: str) -> str:
        """Returns one line of what is known where the store does not answer."""
        others = [(rank, process) for rank, process in self._processes.items() if rank != self._rank]
        lost = [rank for rank, process in others if is_gone(process) or is_stopped(process)]
        faults = [self._name_dead(rank) for rank in lost] or [
            "the rendezvous store does not answer: rank 0 or its launcher is dead, stopped or out of reach"
        ]
        return "; ".join([f"rank {self._rank} {what} in {self._progress().where}", *faults])

    def diagnose(self, what: str) -> str:
        """Returns one line: `what` happened on this rank, and which ranks are dead, silent or behind. Takes a few seconds.

        The line is left in the store for the other ranks.
        """
        report = self._progress()
        begun = f"rank {self._rank} {what} in {report.where}"
        told = self._reported()
        if told:
            return f"{begun}; {told}"
        before = self._read()
        dead = self._dead()
        if dead:
            faults = [self._name_dead(rank) for rank in dead]
            self._tell("; ".join(faults))
            return "; ".join([begun, *faults])
        self._pause(2.5 * self._interval)
        told = self._reported()
        if told:
            return f"{begun}; {told}"
        after = self._read()
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        silent = [r for r in others if r not in after or (r in before and before[r][0] == after[r][0])]
        behind = [r for r in others if r not in silent and after[r][1] < report.parts]
        faults = [self._name_dead(r) for r in silent]
        faults += [f"rank {r} is behind, in {after[r][2]}" for r in behind]
        if not faults and any(after[r][1] > report.parts for r in others):
            faults = [f"rank {self._rank} is stuck in {report.where}, and the others wait for it"]
        if faults:
            self._tell("; ".join(faults))
        return "; ".join([begun, *(faults or ["no other rank is silent or behind"])])

    def _let_others_read(self) -> None:
        """Waits before this process ends, because the store may go with it."""
        self._pause(max(_LEAST_TO_READ, 2 * self._interval))

    def _pause(self, seconds: float) -> None:
        """Sleeps, and goes on telling the others that this process lives."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, self._interval))
            if threading.current_thread() is self._thread:
                self._beat(self._progress())

    def _name_dead(self, rank: int) -> str:
        seen = f"last seen in {self._seen.get(rank, 'nothing')}"
        process = self._processes.get(rank)
        if process is not None and is_gone(process):
            return f"rank {rank} is dead: its process {process[2]} was killed or crashed ({seen})"
        if process is not None and is_stopped(process):
            return f"rank {rank} is stopped: its process {process[2]} got a signal such as SIGSTOP ({seen})"
        return f"rank {rank} is dead or stopped ({seen})"


def weakly(progress: Progress) -> Progress:
    """Calls the bound method `progress` through a weak reference, so that the watchdog does not keep its object alive."""
    alive = weakref.WeakMethod(progress)

    def found() -> RankActivity:
        method = alive()
        return method() if method is not None else RankActivity(0, 0, "an engine that is gone", waiting=False)

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
    store.set_timeout(timedelta(seconds=ANSWERS_IN))
    made = Watchdog(store, rank, ranks, progress, timeout)
    made.start()
    return made


def _end(message: str) -> None:
    print(f"zeroplan_runtime: {message}", file=sys.stderr, flush=True)
    os._exit(EXIT_STALLED)
