"""Runs the simulated caching allocator: the compiled library where there is one, else its Python twin."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from zeroplan.core.sizes import GIB
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
    """Run one device's allocator over a sequence of events.

    Args:
        code, value: arrays of 64-bit integers ("q") of equal length; see Note [Event columns].
        config: the allocator's settings.
        limit: bytes that the device can give; None for no limit.
        device_memory: bytes of the whole device, of which `config.memory_fraction` may be reserved.
        addresses: the addresses of the first segments, where a recorded history tells them.
        compiled: True for the compiled library, False for Python; None takes the library where there is one.

    Raises:
        BadStream: for events that no program could produce.
        RuntimeError: when `compiled` is True and there is no library.
    """
    most = UNLIMITED if limit is None else limit
    if compiled is None:
        compiled = native.available()
    if compiled:
        return native.run_allocator(code, value, config, most, device_memory, addresses)
    from zeroplan.simulate.allocator.python_twin import PythonAllocator  # not needed where the library is

    return PythonAllocator(config, most, device_memory, addresses).run(code, value)
