"""An Ask: a run whose options may be open, and know who said them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Self, TypeVar

from zeroplan.core.errors import did_you_mean
from zeroplan.core.option import MESH, Option
from zeroplan.run.options import (
    ClusterOptions,
    ModelOptions,
    ProgramOptions,
    ShardingOptions,
    WorkloadOptions,
)
from zeroplan.techniques.degrees import MeshOptions
from zeroplan.techniques.table import TABLE

T = TypeVar("T")


class Ask(ModelOptions, WorkloadOptions, ClusterOptions, MeshOptions, ShardingOptions, ProgramOptions):
    """What is asked of a run: the value of each option that somebody said, and who did; immutable.

    ``ask.dtype`` is the option's value, or its default where nobody said one; ``"dtype" in ask`` tells which, and
    ``ask.source("dtype")`` who: ``--dtype``, ``train.yaml: bf16``. None is never said: it leaves an option open.

    Args:
        values: options by name.

    Raises:
        TypeError: an option that does not exist.
    """

    __slots__ = ("_sources", "values")
    #: The value of each option that was said.
    values: Mapping[str, Any]
    _sources: dict[str, str]

    def __init__(self, **values: Any) -> None:
        for name in values:
            if name not in OPTIONS:
                raise TypeError(f"there is no option {name!r}; {did_you_mean(name, OPTIONS)}")
        said = {name: value for name, value in values.items() if value is not None}
        object.__setattr__(self, "values", MappingProxyType(said))
        object.__setattr__(self, "_sources", {})

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"an Ask is immutable: use replace({name}=…)")

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def __getitem__(self, option: Option[T]) -> T:
        """Return the value of an option that a technique's own file declares."""
        return option.__get__(self, Ask)

    def value(self, name: str) -> Any:
        """Return an option's value by its name."""
        return OPTIONS[name].__get__(self, Ask)

    def source(self, name: str) -> str:
        """Return who said an option: a flag, or a file's key; empty where nobody is known."""
        return self._sources.get(name, "")

    def replace(self, **values: Any) -> Self:
        """Return the ask with other values; None leaves an option open."""
        found = type(self)(**{**self.values, **values})
        found._sources.update({name: by for name, by in self._sources.items() if name not in values})
        return found

    def by(self, sources: Mapping[str, str]) -> Self:
        """Return the ask with the names of those who said some of its options."""
        found = type(self)(**self.values)
        found._sources.update({**self._sources, **sources})
        return found

    def checked(self) -> Self:
        """Return the ask with every value of its option's type. Raises BadInput: a value of another type, or out of range."""
        found = {name: OPTIONS[name].checked(value) for name, value in self.values.items()}
        return self.replace(**{name: value for name, value in found.items() if value is not self.values[name]})

    @property
    def chosen(self) -> dict[str, Any]:
        """The options that have another value than their default."""
        return {name: value for name, value in self.values.items() if value != OPTIONS[name].default}

    def words(self, names: Iterable[str]) -> list[str]:
        """Return the words of a command that says those of the named options that have another value than their default."""
        chosen = self.chosen
        return [word for name in names if name in chosen for word in OPTIONS[name].words(chosen[name])]

    def __eq__(self, other: object) -> bool:
        return self.values == other.values if isinstance(other, Ask) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # a ds_config is no more hashable

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (dict(self.values), dict(self._sources))

    def __repr__(self) -> str:
        return f"Ask({', '.join(f'{name}={value!r}' for name, value in self.values.items())})"


def _made(said: dict[str, Any], sources: dict[str, str]) -> Ask:
    return Ask(**said).by(sources)


def _declared(*groups: type) -> dict[str, Option[Any]]:
    return {name: option for group in groups for name, option in vars(group).items() if isinstance(option, Option)}


#: Every option by its name, in the order of the help.
OPTIONS: dict[str, Option[Any]] = {
    **_declared(ModelOptions, WorkloadOptions),
    **{option.name: option for technique in TABLE for option in technique.options},
    **_declared(ClusterOptions, MeshOptions, ShardingOptions, ProgramOptions),
}
#: Options of the degrees of parallelism, and of how stages are made.
MESH_OPTIONS = tuple(name for name, option in OPTIONS.items() if option.panel == MESH)
