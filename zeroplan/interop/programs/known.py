"""The argument names of each program, from the lists in ``keys/``, which ``tests/corpus/argument_names.py`` makes."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

#: Programs with a list.
LISTED = ("hf-trainer", "trl", "llama-factory", "axolotl", "ms-swift", "open-instruct")


@cache
def names_in(name: str) -> frozenset[str]:
    """Return the names of one list."""
    text = (files("zeroplan.interop.programs") / "keys" / f"{name}.txt").read_text(encoding="utf-8")
    return frozenset(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))


@cache
def arguments_of(*programs: str) -> frozenset[str]:
    """Return every argument of these programs together, with those of older versions."""
    return frozenset().union(*(names_in(name) for name in (*programs, "older")))


@cache
def only_of(program: str) -> frozenset[str]:
    """The arguments that one program has and no other that is listed."""
    return names_in(program).difference(*(names_in(name) for name in LISTED if name != program))
