"""CUDA streams and events that also work on a CPU, where they do nothing.

Note [Streams]
    The runtime issues work on three streams: the stream that the model computes on, one for all-gathers and one for gradient
    reductions. A stream waits for another by an event; the host never waits. On a CPU everything runs in program order.
    The buffers that streams hand to each other belong to the Arena and are never freed while in use, so ``record_stream``
    is not needed. At the end :func:`wait_when_dropped` sees to it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch


class Event:
    """A ``torch.cuda.Event`` with torch's method names; on a CPU every event has completed."""

    __slots__ = ("_event",)

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self, stream: Stream) -> None:
        """Captures all work that `stream` has been given so far."""
        if self._event is not None:
            self._event.record(stream.cuda_stream())

    def query(self) -> bool:
        """Returns whether the captured work is done; true for an event that was never recorded."""
        return self._event is None or bool(self._event.query())

    def wait(self, stream: Stream) -> None:
        """Makes `stream` wait for the captured work; does nothing for an event that was never recorded."""
        if self._event is not None:
            stream.cuda_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """Blocks the calling thread until the captured work is done."""
        if self._event is not None:
            self._event.synchronize()


class Stream:
    """A new high-priority CUDA stream; see :meth:`current` for the stream that the model computes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @classmethod
    def current(cls, device: torch.device) -> Stream:
        """Whichever stream is current at the time of each use."""
        made = cls.__new__(cls)
        made._device, made._stream = device, None
        return made

    def cuda_stream(self) -> torch.cuda.Stream:
        """Returns the CUDA stream. Call it for CUDA devices only."""
        return self._stream if self._stream is not None else torch.cuda.current_stream(self._device)

    def key(self) -> int:
        """An id that tells one stream from another."""
        return 0 if self._device.type != "cuda" else self.cuda_stream().cuda_stream

    def as_current(self) -> AbstractContextManager[object]:
        """A context in which work is issued on this stream."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def wait_when_dropped(owner: object, device: torch.device, streams: tuple[Stream, ...]) -> Callable[[], object]:
    """Makes the stream that is current once `owner` is garbage wait for all work of `streams`, before memory that `owner`
    alone refers to is freed: what is allocated there next is used on that stream.

    Returns:
        A function that makes it wait now, and not again.
    """
    end = weakref.finalize(owner, _wait, Event(device), Stream.current(device), streams)
    end.atexit = False  # the device is given back then
    return end


def _wait(event: Event, waits: Stream, streams: tuple[Stream, ...]) -> None:
    with contextlib.suppress(RuntimeError):  # a device that has failed runs nothing any more
        for stream in streams:
            event.record(stream)
            event.wait(waits)
