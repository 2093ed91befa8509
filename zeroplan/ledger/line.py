"""A line is one formula for one buffer; a ledger is a tuple of them.

The same function gives the number (:func:`evaluate`), its derivation (:func:`derived`) and its row in the docs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.ledger.derive import Derived, expression

Formula = Callable[[Any], int]


@dataclass(frozen=True, slots=True)
class Line:
    """One formula: `fn(facts) -> bytes` on one rank. Zero bytes mean that the buffer does not exist there.

    `state` marks model states (parameters, gradients, optimizer), as the ZeRO paper counts them.
    """

    name: str
    buffer: Buffer
    place: Place | Callable[[Any], Place]
    phases: tuple[Phase, ...]
    fn: Formula
    state: bool

    @property
    def doc(self) -> str:
        """What the buffer is for: the first line of the formula's docstring."""
        return (self.fn.__doc__ or "").strip().split("\n")[0]

    @property
    def source(self) -> str:
        """Where the fact comes from: what follows ``Source:`` in the docstring, or nothing."""
        for text in (self.fn.__doc__ or "").splitlines():
            if text.strip().startswith("Source:"):
                return text.strip().removeprefix("Source:").strip()
        return ""

    def place_of(self, facts: Any) -> Place:
        """Where the bytes are, given the facts."""
        return self.place if isinstance(self.place, Place) else self.place(facts)


@dataclass(frozen=True, slots=True)
class Item:
    """A line evaluated: bytes on one rank, and how they came about where that was asked for."""

    name: str
    buffer: Buffer
    place: Place
    phases: tuple[Phase, ...]
    bytes: int
    state: bool
    formula: str = ""
    doc: str = ""
    source: str = ""

    @property
    def names(self) -> tuple[str, str]:
        """What users may call it: the buffer and the line."""
        return self.buffer.value, self.name


class Ledger(tuple[Line, ...]):
    """Lines in the order in which they are shown."""

    __slots__ = ()


class LedgerBuilder:
    """Collects a module's lines: ``@lines.add(Buffer.PARAM_FULL, Place.HBM, ALWAYS)`` above each formula."""

    def __init__(self) -> None:
        self._lines: list[Line] = []

    def add(
        self, buffer: Buffer, place: Place | Callable[[Any], Place], phases: tuple[Phase, ...], *, state: bool = False
    ) -> Callable[[Formula], Formula]:
        """Register the decorated formula as a line named after the function."""

        def register(fn: Formula) -> Formula:
            self._lines.append(Line(fn.__name__, buffer, place, phases, fn, state))
            return fn

        return register

    def ledger(self) -> Ledger:
        """The lines registered so far, in that order."""
        return Ledger(self._lines)


class _Symbols:
    """Facts seen through names: every int attribute comes back as a Derived that knows what it is called.

    A property of the facts is itself a small formula, so it is derived through the same names.
    """

    def __init__(self, facts: Any) -> None:
        self._facts = facts

    def __getattr__(self, name: str) -> Any:
        maker = getattr(type(self._facts), name, None)
        if isinstance(maker, property) and maker.fget is not None:
            return maker.fget(self)
        value = getattr(self._facts, name)
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        return Derived(value, name)


def glossary_of(kind: type) -> dict[str, str]:
    """What the names in formulas over objects of a class mean: the first line of each docstring.

    Such a name is a cached property that returns an int. A plain property is itself derived (:func:`symbols`), so no formula
    shows its name.
    """
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        for name, member in vars(owner).items():
            if isinstance(member, cached_property) and member.__doc__ and not name.startswith("_"):
                if member.func.__annotations__.get("return") not in ("int", int):
                    continue
                text = member.__doc__.strip().split("\n")[0].replace("``", "").removesuffix(".")
                found[name] = text[:1].lower() + text[1:]
    return found


def symbols(facts: Any) -> Any:
    """The facts with every integer replaced by one that remembers its name, for formulas to be derived with."""
    return _Symbols(facts)


def evaluate(ledger: Iterable[Line], facts: Any) -> list[Item]:
    """Every line that is not zero, in bytes on one rank, without derivations."""
    items = []
    for line in ledger:
        count = line.fn(facts)
        if count:
            items.append(Item(line.name, line.buffer, line.place_of(facts), line.phases, int(count), line.state))
    return items


def derived(ledger: Iterable[Line], facts: Any) -> Iterator[Item]:
    """Every line that is not zero, in bytes on one rank, with its formula and what it is for."""
    named = symbols(facts)
    for line in ledger:
        count = line.fn(named)
        if count:
            yield Item(
                name=line.name,
                buffer=line.buffer,
                place=line.place_of(facts),
                phases=line.phases,
                bytes=int(count),
                state=line.state,
                formula=expression(count),
                doc=line.doc,
                source=line.source,
            )
