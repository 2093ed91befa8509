"""An option of a run: one typed row that the command line, the page, the Python API and readers of files all share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from enum import EnumType
from typing import Any, Generic, Protocol, Self, TypeVar, overload

from zeroplan.core.errors import BadInput

T = TypeVar("T")

#: Verbs that search for the best of several runs, verbs that train here, and verbs of data parallelism alone.
SEARCHES, RUNS, DATA_PARALLEL = ("recommend", "scale", "tune"), ("verify", "tune"), ("scale", "tune", "doctor")
#: Groups of the help.
WORK, CLUSTER, MESH, SHARDING, FILES = "Workload", "Cluster", "Parallelism", "Sharding", "Files"
#: No count of an option goes beyond this; it keeps arithmetic and loops sane.
MOST = 1 << 31


class OptionValues(Protocol):
    """Where options are read: an :class:`~zeroplan.run.ask.Ask`."""

    @property
    def values(self) -> Mapping[str, Any]:
        """The options that somebody said, by name."""

    def __getitem__(self, option: Option[T]) -> T:
        """Return an option's value, its default where nobody said one."""

    def source(self, name: str) -> str:
        """Return who said an option; empty where nobody is known."""


class Option(Generic[T]):
    """One option of a run. As an attribute of an :class:`~zeroplan.run.ask.Ask` it is the option's value there.

    Attributes:
        name: what Python, JSON and the page call it.
        kind: the type of its value; ``object`` for one that only readers of files and the planner make.
        default: the value where nobody says one.
        help: one line, the default in brackets at its end; empty for an option without a flag.
        flag: as typer takes it; empty for none.
        panel: the group of the help that it stands in.
        metavar: what the help shows in place of the type.
        complete: the function of ``zeroplan/cli/complete.py`` that completes it in shells.
        read: makes the value of the text after the flag; its second argument is the flag.
        text: the flag's type for typer, where it is not `kind`.
        least: the smallest value of a count; None for any.
        without: verbs that do not take it.
        found: whether a search finds it out itself, so that the command of a search does not repeat it.
        page: whether a question of the page may hold it.
        merges: whether what files say of it is taken as it stands; else its technique decides (``Technique.filled``), or
            ``planner/merge.py``.
        wins: whether the flag stands where files say otherwise: the question may be of another machine, or of a copy of the
            model. Else a contradiction is bad input.
    """

    __slots__ = (
        *("complete", "default", "flag", "found", "help", "kind", "least", "merges", "metavar", "name", "page", "panel"),
        *("read", "text", "wins", "without", "__orig_class__"),
    )

    def __init__(
        self,
        kind: Any,
        default: T,
        help: str = "",
        panel: str | None = None,
        *,
        flag: str | None = None,
        metavar: str | None = None,
        complete: str = "",
        read: Callable[[Any, str], Any] | None = None,
        text: Any = None,
        least: int | None = None,
        without: Sequence[str] = (),
        found: bool = False,
        page: bool = False,
        merges: bool = True,
        wins: bool = False,
    ) -> None:
        self.name = ""
        self.kind, self.default, self.help, self.panel, self.flag = kind, default, help, panel, flag
        self.metavar, self.complete, self.read, self.text = metavar, complete, read, text or kind
        self.least, self.without, self.found, self.page, self.merges, self.wins = least, without, found, page, merges, wins

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        if self.flag is None:
            self.flag = f"--{name.replace('_', '-')}" if self.help else ""

    @overload
    def __get__(self, ask: None, owner: type) -> Self: ...
    @overload
    def __get__(self, ask: OptionValues, owner: type) -> T: ...
    def __get__(self, ask: OptionValues | None, owner: type) -> Self | T:
        if ask is None:
            return self
        value: T = ask.values.get(self.name, self.default)
        return value

    @property
    def where(self) -> str:
        """The flag as messages name it; without one the argument of Python."""
        return (self.flag or (self.help and self.metavar) or self.name).partition("/")[0]

    @property
    def hint(self) -> Any:
        """The type of the value, as an annotation of Python names it."""
        generic = getattr(self, "__orig_class__", None)
        return type(self.default) if generic is None else generic.__args__[0]

    def taken_by(self, verb: str) -> bool:
        """Return whether a verb of the command line has the flag."""
        return bool(self.help) and verb not in self.without

    def checked(self, value: Any) -> Any:
        """Return the value as the option holds it: whole numbers as ``int``, torch's dtypes by name.

        Raises:
            BadInput: a value of another type, or a count that is out of range.
        """
        if self.kind is int:
            value = self._whole(value)
            if self.least is not None and value != self.default and not self.least <= value <= MOST:
                raise BadInput(f"{value} is out of range", where=self.where, remedy="use a whole number above zero")
        elif self.kind is bool and not isinstance(value, bool):
            raise BadInput(f"{value!r:.40} is neither True nor False", where=self.name, remedy="write True or False")
        elif self.kind is str and not isinstance(value, str):
            if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
                return str(value).removeprefix("torch.")
            raise BadInput(f"{value!r:.60} is no name", where=self.name, remedy="write a string")
        return value

    def typed(self, value: Any) -> Any:
        """Return what a reader of files says as the option holds it: a word as the member that it names."""
        return self.kind(value) if isinstance(self.kind, EnumType) and value is not None else value

    def _whole(self, value: Any) -> int:
        try:
            if isinstance(value, bool):
                raise TypeError
            if isinstance(value, float) and value.is_integer() and self.text is str:  # people write 7.5e9
                return int(value)
            return operator.index(value)
        except TypeError:
            raise BadInput(f"{value!r:.40} is no whole number", where=self.name, remedy="write one, such as 2") from None

    def words(self, value: Any) -> list[str]:
        """Return the flag and the value as words of a command."""
        if not self.flag:
            return [str(value)]
        flag = self.where
        if isinstance(value, bool):
            return [flag if value else f"--no-{flag[2:]}"]
        return [flag, ",".join(value) if isinstance(value, tuple) else str(value)]

    def __repr__(self) -> str:
        return f"<Option {self.name}>"
