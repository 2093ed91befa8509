"""Where DeepSpeed's offloaded buffers lie on the host, and how large torch makes their blocks."""

from __future__ import annotations

from zeroplan.core.buffers import Place
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.ledger.derive import pow2


def pinned(c: DeepSpeedRank) -> Place:
    """The memory of what the offloaded optimizer exchanges with the GPU (offload_optimizer.pin_memory)."""
    return c.pinned


def params_on_host(c: DeepSpeedRank) -> Place:
    """The memory of parameters that are copied from the host (offload_param.pin_memory)."""
    return Place.PINNED if c.pin_param else Place.DRAM


def host_block(c: DeepSpeedRank, count: int) -> int:
    """Bytes of a block of the offloaded optimizer for `count` bytes: torch rounds pinned blocks to a power of two.

    Source: aten/src/ATen/core/CachingHostAllocator.h
    """
    return pow2(count) if c.pin_optimizer else count
