"""One exception class for what a user can mend, with the exit code that the command line returns."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TypeVar

EXIT_OK = 0
EXIT_DOES_NOT_FIT = 1
EXIT_BAD_INPUT = 2
EXIT_OUT_OF_TOLERANCE = 3
_Member = TypeVar("_Member", bound=StrEnum)


class BadInput(ValueError):
    """Input that cannot be used: what is wrong, where, and the remedy, in one line.

    Args:
        what: the fault, such as ``"'12Q' is not a size"``.
        where: the flag, file or key at fault, such as ``"--vram"``.
        remedy: what to write instead.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        text = f"{where}: {what}" if where else what
        if remedy:
            text = f"{text}; {remedy}"
        # Whatever a file held, the message stays one printable line of bounded length.
        if not text.isprintable():
            text = "".join(ch if ch.isprintable() else " " for ch in text)
        super().__init__(text if len(text) <= 600 else text[:597] + "...")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"did you mean 'a' or 'b'?"`` for the names nearest to `word`, or an empty string."""
    lowered = {name.lower(): name for name in known}
    near = [lowered[hit] for hit in difflib.get_close_matches(word.lower()[:200], lowered, n=3, cutoff=0.6)]
    return f"did you mean {' or '.join(repr(name) for name in near)}?" if near else ""


def member_named(
    kind: type[_Member], text: str, *, where: str, fault: str = "unknown value {}", names: Sequence[str] = ()
) -> _Member:
    """Return the member of `kind` that a name stands for, whatever its case.

    Args:
        kind: the enum, whose own other names are understood as well.
        where: the flag, file or key that gave it.
        fault: what to say of an unknown one, with ``{}`` for the name.
        names: those that the remedy lists, where they are others than the members' values.

    Raises:
        BadInput: an unknown name; the remedy has the nearest ones, or all.
    """
    try:
        return kind(text.strip().lower())
    except ValueError:
        names = names or [member.value for member in kind]
        remedy = did_you_mean(text, names) or f"use one of {', '.join(names)}"
        raise BadInput(fault.format(repr(text[:60])), where=where, remedy=remedy) from None
