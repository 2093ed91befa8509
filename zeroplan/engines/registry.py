"""The engines by name."""

from __future__ import annotations

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.engines.base import Engine

ENGINE_NAMES = ("deepspeed", "fsdp2", "ddp", "zeroplan")


def find_engine(name: str, *, where: str = "--engine") -> Engine:
    """The engine of that name.

    Raises:
        BadInput: with the nearest name.
    """
    key = name.strip().lower()
    # Each import waits for its engine: a plan for one never loads the others.
    if key == "deepspeed":
        from zeroplan.engines.deepspeed.engine import DeepSpeed

        return DeepSpeed()
    if key == "fsdp2":
        from zeroplan.engines.fsdp2.engine import Fsdp2

        return Fsdp2()
    if key == "ddp":
        from zeroplan.engines.ddp.engine import Ddp

        return Ddp()
    if key == "zeroplan":
        from zeroplan.engines.runtime.engine import Runtime

        return Runtime()
    near = did_you_mean(key, ENGINE_NAMES)
    raise BadInput(f"unknown engine {name[:60]!r}", where=where, remedy=near or f"use one of {', '.join(ENGINE_NAMES)}")
