"""What a rank is doing, for its watchdog."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from zeroplan_runtime.schedule import Schedule
from zeroplan_runtime.streams import Event


class Activity:
    """Knows whether a rank is inside the engine, where it may wait for other ranks, or runs the user's own code.

    Args:
        schedule: the engine's schedule, which counts the work done and names what is being done.
        device: the rank's device.
        step: gives the number of the step.
    """

    def __init__(self, schedule: Schedule, device: torch.device, step: Callable[[], int]) -> None:
        self._schedule, self._step = schedule, step
        self._inside = False
        self._last_event = Event(device)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A context for the engine's own work; what it leaves on the device counts as the engine's until it is done."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._last_event.record(self._schedule.compute_stream)

    def report(self) -> tuple[int, str, bool]:
        """Progress count, what is being done, and whether this rank may wait for others: in the engine or on the device."""
        outside = "" if self._inside else ", outside the engine since"
        waiting = self._inside or not self._last_event.query()
        return self._schedule.progress_count, f"{self._schedule.where}, step {self._step()}{outside}", waiting
