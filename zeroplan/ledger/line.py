"""A line is one formula for one buffer. A ledger is a tuple of lines.

The same function gives the number (:func:`evaluate`), its derivation (:func:`derived`) and its row in the docs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.ledger.derive import Derived, expression

Formula = Callable[[Any], int]


#: Key of a field's metadata.
_MEANING = "meaning"


@dataclass(frozen=True, slots=True)
class Documented:
    """A formula, ``fn(facts) -> int`` on one rank, whose docstring states its purpose and its source."""

    name: str
    fn: Formula

    @property
    def doc(self) -> str:
        """The purpose: the first line of the formula's docstring, up to its source."""
        return (self.fn.__doc__ or "").strip().split("\n")[0].partition(" Source: ")[0]

    @property
    def source(self) -> str:
        """The source: what follows ``Source:`` on its line of the docstring, or nothing."""
        return (self.fn.__doc__ or "").partition("Source:")[2].split("\n")[0].strip()


@dataclass(frozen=True, slots=True)
class Line(Documented):
    """The formula of one buffer, in bytes. Zero bytes mean that the buffer does not exist on that rank.

    `state` marks model states (parameters, gradients, optimizer), as the ZeRO paper counts them.
    """

    buffer: Buffer
    place: Place | Callable[[Any], Place]
    phases: tuple[Phase, ...]
    state: bool

    def place_of(self, facts: Any) -> Place:
        """Return the memory that holds the bytes, given the facts."""
        return self.place if isinstance(self.place, Place) else self.place(facts)


@dataclass(frozen=True, slots=True)
class Item:
    """An evaluated line: bytes on one rank, with the derivation from :func:`derived`."""

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
        """The names by which users may ask for it: the buffer's and the line's."""
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
            self._lines.append(Line(fn.__name__, fn, buffer, place, phases, state))
            return fn

        return register

    def ledger(self) -> Ledger:
        """Return the lines registered so far, in that order."""
        return Ledger(self._lines)


class _Symbols:
    """Facts whose integers remember their names: each one is returned as a :class:`Derived`.

    A property of the facts is a small formula itself, so it is evaluated on these facts, too. Each is looked up once.
    """

    def __init__(self, facts: Any) -> None:
        self._facts = facts

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__[name] = self._value(name)
        return value

    def _value(self, name: str) -> Any:
        maker = getattr(type(self._facts), name, None)
        if isinstance(maker, property) and maker.fget is not None:
            return maker.fget(self)
        value = getattr(self._facts, name)
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        return Derived(value, name)


def means(text: str, *, default: Any = MISSING) -> Any:
    """Declare a dataclass field of facts that a formula shows by its name. `text` says what it means; see
    :func:`glossary_of`.
    """
    return field(default=default, metadata={_MEANING: text})


def fact(text: str, of: Callable[[Any], int]) -> cached_property[int]:
    """Declare a fact that follows from others, once: a cached property in one line. `text` says what it means."""
    of.__annotations__["return"] = int
    found = cached_property(of)
    found.__doc__ = text
    return found


def glossary_of(kind: type) -> dict[str, str]:
    """Return the meaning of each name that formulas over objects of a class show.

    A dataclass field says it by :func:`means`, a cached property that returns an int by the first line of its docstring (one
    of :func:`fact` by its text). A plain property is derived itself (:func:`symbols`), so no formula shows its name.
    """
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        for name, member in vars(owner).items():
            if isinstance(member, cached_property) and member.__doc__ and not name.startswith("_"):
                if member.func.__annotations__.get("return") not in ("int", int):
                    continue
                text = member.__doc__.strip().split("\n")[0].replace("``", "").removesuffix(".")
                found[name] = text[:1].lower() + text[1:]
    told = fields(kind) if is_dataclass(kind) else ()
    return found | {one.name: one.metadata[_MEANING] for one in told if _MEANING in one.metadata}


def symbols(facts: Any) -> Any:
    """Return the facts with every integer replaced by one that remembers its name, to derive formulas with."""
    return _Symbols(facts)


def evaluate(ledger: Iterable[Line], facts: Any) -> list[Item]:
    """Evaluate every line that is not zero, in bytes on one rank, without derivations."""
    items = []
    for line in ledger:
        count = line.fn(facts)
        if count:
            items.append(Item(line.name, line.buffer, line.place_of(facts), line.phases, int(count), line.state))
    return items


def derived(ledger: Iterable[Line], facts: Any) -> Iterator[Item]:
    """Evaluate every line that is not zero, in bytes on one rank, with its formula and its purpose."""
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
