"""Whose reading of a ds_config is asked for, and what a reader does with a key."""

from __future__ import annotations

from enum import StrEnum


class Dialect(StrEnum):
    """The two programs that read a ds_config."""

    DEEPSPEED = "DeepSpeed"
    RUNTIME = "zeroplan's runtime"


class Support(StrEnum):
    """Ways in which a program treats a key of a ds_config."""

    HONOURED = "honours it"
    IGNORED = "ignores it"
    REFUSED = "refuses it"
