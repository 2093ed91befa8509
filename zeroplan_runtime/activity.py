"""The present activity of a rank, for its watchdog."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from zeroplan_runtime.mesh import MeshRanks
from zeroplan_runtime.schedule import Schedule
from zeroplan_runtime.streams import Event
from zeroplan_runtime.watchdog import RankActivity, Watchdog, watch, weakly


class Activity:
    """Knows whether a rank is inside the engine, where it may wait for other ranks, or runs the user's own code.

    Args:
        schedule: the engine's schedule, which counts the work done and names what is being done.
        device: the rank's device.
        step: gives the number of the step.

    Attributes:
        watchdog: asks for the activity; None where nobody does.
    """

    def __init__(self, schedule: Schedule, device: torch.device, step: Callable[[], int]) -> None:
        self._schedule, self._step = schedule, step
        self._inside = False
        self._pieces = 0
        self._last_event = Event(device)
        self.watchdog: Watchdog | None = None

    def watch(self, ranks: MeshRanks, timeout: float) -> None:
        """Starts a watchdog, where the engine has all ranks; a pipeline's wait for each other outside it, too."""
        if ranks.world.group is None and ranks.pp is None:
            self.watchdog = watch(ranks.world.rank, ranks.world.world_size, weakly(self.report), timeout)
        if self.watchdog is not None:
            ranks.explain_losses(self.watchdog.explain)
            weakref.finalize(self, self.watchdog.stop)

    def end_watch(self, ranks: MeshRanks) -> None:
        """Stops the watchdog."""
        if self.watchdog is not None:
            self.watchdog.stop()
            ranks.explain_losses(None)

    @contextmanager
    def inside(self, doing: str = "") -> Iterator[None]:
        """A context for the engine's own work; what it leaves on the device counts as the engine's until it is done.

        Args:
            doing: what is done, where the schedule does not say it.
        """
        before, self._inside = self._inside, True
        if doing:
            self.begin(doing)
        try:
            yield
        finally:
            self._inside = before
            self._last_event.record(self._schedule.compute_stream)

    @contextmanager
    def alone(self, doing: str) -> Iterator[None]:
        """A context for what this rank may do without the others, and in which it may have to wait for them."""
        where = self._schedule.where
        with self.inside():
            self.piece(doing)
            yield
            self._schedule.where = where

    def begin(self, doing: str) -> None:
        """Counts a part of the work that every rank does."""
        self._schedule.where = doing
        self._schedule.progress_count += 1

    def piece(self, doing: str) -> None:
        """Counts a piece of the present part; ranks may have different numbers of them."""
        self._schedule.where = doing
        self._pieces += 1

    def report(self) -> RankActivity:
        """Returns the present activity of this rank."""
        outside = "" if self._inside else ", outside the engine since"
        waiting = self._inside or not self._last_event.query()
        where = f"{self._schedule.where}, step {self._step()}{outside}"
        return RankActivity(self._schedule.progress_count, self._pieces, where, waiting)
