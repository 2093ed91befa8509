"""Other programs' files as plain objects: JSON, or YAML by PyYAML's safe loader within limits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.ds_config.source import MAX_BYTES, MAX_DEPTH, load_source

#: Uses of YAML aliases in one file. Hand-written ones have a few; a bomb needs many.
MAX_ALIASES = 64
#: Nodes of one YAML file, aliases expanded.
MAX_NODES = 100_000


def load_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object that a JSON or YAML file holds, with string keys.

    Raises:
        BadInput: unreadable, too large, not JSON or YAML, no object, too deep, too many aliases, or PyYAML missing.
    """
    name = os.fspath(path)
    if not name.lower().endswith((".yaml", ".yml")):
        return load_source(name)[0]
    try:
        with open(name, "rb") as file:
            blob = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"cannot be read ({reason})", where=name, remedy="give a file of YAML or JSON") from None
    if len(blob) > MAX_BYTES:
        raise BadInput(f"is larger than {MAX_BYTES >> 20} MiB", where=name, remedy="this is no training configuration")
    try:
        text = blob.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"is not UTF-8 (byte {error.start})", where=name, remedy="save it as UTF-8") from None
    return _plain_object(_parse_yaml(text, name), name)


def _parse_yaml(text: str, name: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise BadInput("is YAML, which needs PyYAML", where=name, remedy="pip install pyyaml, or give JSON") from None

    class Loader(yaml.SafeLoader):
        """The safe loader, which counts aliases and depth before anything is built."""

        aliases = 0
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                self.aliases += 1
                if self.aliases > MAX_ALIASES:
                    raise BadInput(f"uses more than {MAX_ALIASES} aliases", where=name, remedy="write the values out")
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise BadInput(f"is nested deeper than {MAX_DEPTH} levels", where=name, remedy="no configuration is")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        problem = getattr(error, "problem", None) or "malformed"
        raise BadInput(f"is not YAML{place}: {problem}", where=name, remedy="mend the syntax") from None
    except BadInput:
        raise
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise BadInput(f"is not usable YAML ({error})", where=name) from None


def _plain_object(data: Any, name: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise BadInput("holds no mapping of keys to values", where=name, remedy="write lines of KEY: VALUE")
    budget = [MAX_NODES]
    copied = _copy(data, name, 0, budget)
    assert isinstance(copied, dict)
    return copied


def _copy(data: Any, name: str, depth: int, budget: list[int]) -> Any:
    """Plain dicts and lists of plain scalars; dates and the like become text. Stops expanded aliases at a budget."""
    budget[0] -= 1
    if budget[0] < 0 or depth > MAX_DEPTH:
        raise BadInput("is too large once its aliases are expanded", where=name, remedy="write the values out")
    if isinstance(data, Mapping):
        return {str(key): _copy(value, name, depth + 1, budget) for key, value in data.items()}
    if isinstance(data, list | tuple | set):
        return [_copy(value, name, depth + 1, budget) for value in data]
    return data if data is None or isinstance(data, bool | int | float | str) else str(data)


def dump_yaml(data: Mapping[str, Any], indent: int = 0) -> str:
    """YAML of nested mappings of scalars, keys in order; strings that YAML would read as something else are quoted."""
    lines = []
    for key, value in data.items():
        pad = " " * indent
        if isinstance(value, Mapping):
            lines.append(f"{pad}{key}:\n{dump_yaml(value, indent + 2)}".rstrip("\n"))
        else:
            lines.append(f"{pad}{key}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


_SPECIAL = frozenset({"", "yes", "no", "true", "false", "on", "off", "null", "~", "y", "n"})


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = str(value)
    plain = text.lower() not in _SPECIAL and all(ch.isalnum() or ch in "_-./" for ch in text) and not text[0].isdigit()
    return text if plain and not text.startswith("-") else "'" + text.replace("'", "''") + "'"
