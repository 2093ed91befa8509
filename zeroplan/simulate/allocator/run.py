"""Runs the caching allocator's simulation: compiled where the library is at hand, in Python elsewhere."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from zeroplan.core.units import GIB
from zeroplan.simulate.allocator import native
from zeroplan.simulate.allocator.config import UNLIMITED, AllocatorConfig
from zeroplan.simulate.allocator.events import AllocatorResult


def run_allocator(
    code: array[int],
    value: array[int],
    config: AllocatorConfig,
    *,
    limit: int | None = None,
    device_memory: int = 80 * GIB,
    addresses: Sequence[int] = (),
    compiled: bool | None = None,
) -> AllocatorResult:
    """Simulates one device's allocator over a stream of events.

    Args:
        code, value: arrays of 64-bit integers ("q") of equal length; see Note [Event columns].
        config: the allocator's settings.
        limit: bytes that the device can give; None never runs out.
        device_memory: bytes of the whole device, of which `config.memory_fraction` may be reserved.
        addresses: where the device puts the first segments, if that is known (from a recorded history).
        compiled: True to insist on the compiled library, False on Python; None takes what is there.

    Raises:
        BadStream: for a stream that no program could produce.
        RuntimeError: when `compiled` is True and there is no library.
    """
    most = UNLIMITED if limit is None else limit
    if compiled is None:
        compiled = native.available()
    if compiled:
        return native.run_allocator(code, value, config, most, device_memory, addresses)
    from zeroplan.simulate.allocator.python_twin import PythonAllocator  # not needed where the library is

    return PythonAllocator(config, most, device_memory, addresses).run(code, value)
