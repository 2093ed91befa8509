"""Keys of a run that a plan's figures leave out, and whether each takes more memory or less."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

#: The key of a plan of which nothing was measured, and that ``verify`` cannot measure.
UNMEASURED = "unmeasured"
#: The key of a model whose layers lie over all visible GPUs, which says nothing where there is one.
OVER_GPUS = "device_map over GPUs"


class Effect(StrEnum):
    """Effect of an unmodelled key on the memory of the run, compared with the plan."""

    MORE = "more"
    LESS = "less"
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Unmodelled:
    """One key that the figures leave out.

    Attributes:
        key: as its file or command line writes it, with dots between levels.
        effect: on the memory of the run, compared with the plan.
        says: what it does that the figures leave out, in one clause; behind ``"; give "`` the flag that puts it into them.
    """

    key: str
    effect: Effect
    says: str

    @property
    def flag(self) -> str:
        """The flag that puts it into the figures, as ``"--seq-len"``; empty where none does."""
        return self.says.partition("; give ")[2]


def may_add(left_out: Iterable[Unmodelled]) -> bool:
    """Return whether the run may need more memory than the figures say."""
    return any(one.effect in (Effect.MORE, Effect.UNKNOWN) for one in left_out)


def may_save(left_out: Iterable[Unmodelled]) -> bool:
    """Return whether the run may need less memory than the figures say."""
    return any(one.effect in (Effect.LESS, Effect.UNKNOWN) for one in left_out)
