"""The engines by name. A name stands for a class's dotted path, which is imported when somebody asks for the engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.run.options import DEFAULT_ENGINE as DEFAULT_ENGINE

if TYPE_CHECKING:  # the command line reads the names alone
    from importlib.metadata import EntryPoints

    from zeroplan.engines.base import Engine

#: The entry-point group by which an installed package adds engines: ``name = "package.module:Class"``.
ENTRY_POINTS = "zeroplan.engines"

#: The engine of ``verify``, unless the user names another; other verbs have :data:`~zeroplan.run.options.DEFAULT_ENGINE`.
DEFAULT_VERIFIED = "zeroplan"

_PATHS = {
    "deepspeed": "zeroplan.engines.deepspeed.engine:DeepSpeed",
    "fsdp": "zeroplan.engines.fsdp.engine:Fsdp",
    "fsdp2": "zeroplan.engines.fsdp2.engine:Fsdp2",
    "ddp": "zeroplan.engines.ddp.engine:Ddp",
    "megatron": "zeroplan.engines.megatron.engine:Megatron",
    "zeroplan": "zeroplan.engines.runtime.engine:Runtime",
}


#: The engines that zeroplan brings.
BUILT_IN = tuple(_PATHS)


def register(name: str, path: str) -> None:
    """Add an engine to this process.

    Args:
        name: what users write after ``--engine``: lower case.
        path: ``"module:Class"``; the class derives from :class:`~zeroplan.engines.base.Engine`.

    Raises:
        ValueError: a name that another class has, or a path without a class.
    """
    if _PATHS.get(name, path) != path:
        raise ValueError(f"the engine {name!r} is {_PATHS[name]} already")
    if name != name.strip().lower() or ":" not in path:
        raise ValueError(f"{name!r}: {path!r} is not a lower-case name with 'module:Class'")
    _PATHS[name] = path


def unregister(name: str) -> None:
    """Remove an engine that :func:`register` added."""
    _PATHS.pop(name, None)


def engine_names() -> tuple[str, ...]:
    """Return every engine's name, those of installed packages included."""
    return (*_PATHS, *sorted(_installed().names - _PATHS.keys()))


def engine_path(name: str, *, where: str = "--engine") -> str:
    """Return the dotted path of an engine's class, by which another process finds it.

    Raises:
        BadInput: with the nearest name.
    """
    key = name.strip().lower()
    if key in _PATHS:
        return _PATHS[key]
    for entry in _installed().select(name=key):
        return entry.value
    names = engine_names()
    near = did_you_mean(key, names)
    raise BadInput(f"unknown engine {name[:60]!r}", where=where, remedy=near or f"use one of {', '.join(names)}")


def _installed() -> EntryPoints:
    """Engines of installed packages. Reads every package's metadata, so only an unknown name is worth it."""
    from importlib.metadata import entry_points

    return entry_points(group=ENTRY_POINTS)


def load_engine(path: str) -> Engine:
    """An engine by its class's dotted path, as :func:`engine_path` gives it."""
    module, _, name = path.partition(":")
    engine: Engine = getattr(import_module(module), name)()
    return engine


def find_engine(name: str, *, where: str = "--engine") -> Engine:
    """A new engine of that name. Only its own modules are imported: a plan for one engine never loads the others.

    Raises:
        BadInput: with the nearest name.
    """
    return load_engine(engine_path(name, where=where))
