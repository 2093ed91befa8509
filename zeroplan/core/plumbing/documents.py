"""Files as plain objects: JSON, JSON with comments, YAML and TOML, within limits that no hostile file passes.

Whatever a file holds, reading it takes time and memory in proportion to its bytes, which are bounded; see :class:`Limits`.
What comes out is made of dicts with string keys, lists, strings, booleans, None, finite floats and integers of at most
:data:`MOST_BITS` bits.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.files import fault, read_bytes

#: How the fault of a text begins that JSON's syntax does not allow.
NOT_JSON = "is not JSON"
#: Integers beyond this are no sizes; floats end here, too.
MOST_BITS = 1024
#: Characters of a number in YAML: ``1:1:1:…`` in base 60 takes time in the square of its length.
MOST_NUMBER = 64
#: Uses of YAML aliases in one file, and entries of mappings that merge keys (``<<``) make. Hand-written files have a few.
MOST_ALIASES = 64
MOST_MERGED = 10_000
#: The squares of the numbers of dots on the lines of a TOML file, summed up.
MOST_DOTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on the size and depth of a file.

    Attributes:
        size: bytes.
        depth: levels of nesting.
        nodes: values, counted by the brackets, commas and colons of the text for JSON.
    """

    size: int
    depth: int
    nodes: int


#: A configuration that people write by hand.
CONFIG = Limits(size=1 << 20, depth=32, nodes=200_000)
#: The same in YAML and TOML, whose parsers are Python and read a few hundred kilobytes a second.
YAML = Limits(size=256 << 10, depth=32, nodes=20_000)


def read_document(path: str) -> dict[str, Any]:
    """The object that a JSON, YAML or TOML file holds; the name's ending says which, and JSON may have comments.

    Raises:
        BadInput: unreadable, beyond the limits, malformed, or no object.
    """
    ending = path.lower().rpartition(".")[2]
    limits = YAML if ending in ("yaml", "yml", "toml") else CONFIG
    text = text_of(read_bytes(path, limits.size), path)
    parse = {"yaml": parse_yaml, "yml": parse_yaml, "toml": parse_toml}.get(ending, parse_commented_json)
    data = parse(text, path, limits)
    if not isinstance(data, dict):
        raise fault(path, f"holds {kind_of(data)}, not an object", "", "write keys and values")
    return data


def text_of(data: bytes, name: str, *, where: str = "") -> str:
    """Decode UTF-8 text, with or without a byte order mark. Raises BadInput: when it is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise fault(name, f"is not UTF-8 (byte {error.start:,})", where, "save it as UTF-8") from None


def parse_json(text: str, name: str, limits: Limits = CONFIG, *, where: str = "", unique: bool = False) -> Any:
    """The value of a JSON text; `name` and `where` are for messages, `unique` refuses a key that stands twice.

    Raises:
        BadInput: malformed, beyond the limits, or with numbers that JSON does not have.
    """
    try:
        return _strict_json(text, name, limits, where, unique)
    except json.JSONDecodeError as error:
        raise fault(name, f"is not JSON ({_place(error)})", where, "mend the syntax") from None


def parse_commented_json(text: str, name: str, limits: Limits = CONFIG, *, where: str = "") -> Any:
    """Parse JSON with comments and trailing commas, with unique keys; otherwise as :func:`parse_json`."""
    return parse_relaxed_json(text, name, limits, where=where)[0]


def parse_relaxed_json(text: str, name: str, limits: Limits = CONFIG, *, where: str = "") -> tuple[Any, bool]:
    """The value of a JSON text that may have comments and trailing commas, and whether it is strict JSON.

    Raises:
        BadInput: as :func:`parse_json` with `unique`.
    """
    try:
        return _strict_json(text, name, limits, where, True), True
    except json.JSONDecodeError as error:
        first = error
    try:
        return _strict_json(without_comments(text), name, limits, where, True), False
    except json.JSONDecodeError:
        raise fault(name, f"{NOT_JSON} ({_place(first)})", where, "mend the syntax") from None


def _place(error: json.JSONDecodeError) -> str:
    return f"line {error.lineno}, column {error.colno}: {error.msg}"


def _strict_json(text: str, name: str, limits: Limits, where: str, unique: bool) -> Any:
    marks = sum(map(text.count, "[{,:"))
    if marks > limits.nodes and _marks_outside_strings(text) > limits.nodes:
        raise fault(name, f"holds more than {limits.nodes:,} values", where, "this is no configuration")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            twice = next(key for key, count in Counter(key for key, _ in items).items() if count > 1)
            raise fault(name, f"the key {twice[:80]!r} stands twice", where, "keep one")
        return found

    def constant(word: str) -> NoReturn:
        raise fault(name, f"holds {word}, which is not JSON", where, "write a finite number")

    try:
        data = json.loads(text, object_pairs_hook=pairs if unique else None, parse_constant=constant)
    except (json.JSONDecodeError, BadInput):
        raise
    except RecursionError:
        raise fault(name, f"is nested deeper than {limits.depth} levels", where) from None
    except ValueError:  # Python turns no more digits into an integer
        raise fault(name, "is not usable JSON (a number of thousands of digits)", where, "write a smaller one") from None
    require_plain(data, name, limits, where=where)
    return data


_STRING = r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"?'
_STRINGS = re.compile(_STRING, re.DOTALL)
_COMMENTS = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*[^*]*(?:\*(?!/)[^*]*)*(?:\*/)?", re.DOTALL)
_COMMAS = re.compile(rf"{_STRING}|,(?=\s*[}}\]])", re.DOTALL)
_NOT_NEWLINE = re.compile(r"[^\n]")


def _marks_outside_strings(text: str) -> int:
    return sum(map(_STRINGS.sub("", text).count, "[{,:"))


def without_comments(text: str) -> str:
    """Comments (``#``, ``//``, ``/* */``) and trailing commas become spaces, strings stay as they are.

    A string or a comment without an end goes on to the end of its line or of the text, so no character is looked at twice.
    """

    def blank(match: re.Match[str]) -> str:
        token = match[0]
        return token if token[0] == '"' else _NOT_NEWLINE.sub(" ", token)

    def drop(match: re.Match[str]) -> str:
        return match[0] if match[0][0] == '"' else " "

    return _COMMAS.sub(drop, _COMMENTS.sub(blank, text))


def parse_toml(text: str, name: str, limits: Limits = YAML, *, where: str = "") -> Any:
    """Parse a TOML text into an object. Raises BadInput: malformed or beyond the limits."""
    import tomllib

    # tomllib takes time in the square of a dotted key's parts, and each key walks down from its table's header.
    dots = [(line.lstrip().startswith("["), line.count(".")) for line in text.split("\n")]
    if len(dots) > limits.nodes or text.count("=") > limits.nodes:
        raise fault(name, f"holds more than {limits.nodes:,} values", where, "this is no configuration")
    if any(header and count > limits.depth for header, count in dots) or sum(count**2 for _, count in dots) > MOST_DOTS:
        raise fault(name, f"is nested deeper than {limits.depth} levels", where)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise fault(name, f"is not TOML ({error})", where, "mend the syntax") from None
    except (ValueError, RecursionError) as error:
        raise fault(name, f"is not usable TOML ({error})", where) from None
    return plain_copy(data, name, limits, where=where, texts=True)


def parse_yaml(text: str, name: str, limits: Limits = YAML, *, where: str = "") -> Any:
    """Parse a YAML text with PyYAML's safe loader into plain dicts and lists; dates and the like become text.

    Raises:
        BadInput: malformed, beyond the limits, with too many aliases or merge keys, or with a number of too many characters.
    """
    import yaml

    def refuse(what: str, remedy: str = "write the values out") -> NoReturn:
        raise fault(name, what, where, remedy)

    class Loader(yaml.SafeLoader):
        """The safe loader, which counts before anything is built."""

        aliases = depth = nodes = merged = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                self.aliases += 1
                if self.aliases > MOST_ALIASES:
                    refuse(f"uses more than {MOST_ALIASES} aliases")
            self.nodes += 1
            if self.nodes > limits.nodes:
                refuse(f"holds more than {limits.nodes:,} values", "this is no configuration")
            self.depth += 1
            if self.depth > limits.depth:
                refuse(f"is nested deeper than {limits.depth} levels", "no configuration is")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def flatten_mapping(self, node: Any) -> None:
            before = len(node.value)
            super().flatten_mapping(node)
            self.merged += max(0, len(node.value) - before)
            if self.merged > MOST_MERGED:
                refuse(f"merges more than {MOST_MERGED:,} keys")

    def bounded(build: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def number(loader: Any, node: Any) -> Any:
            if len(node.value) > MOST_NUMBER:
                refuse(f"holds a number of more than {MOST_NUMBER} characters", "write it shorter, or in quotes")
            return build(loader, node)

        return number

    Loader.add_constructor("tag:yaml.org,2002:int", bounded(yaml.SafeLoader.construct_yaml_int))
    Loader.add_constructor("tag:yaml.org,2002:float", bounded(yaml.SafeLoader.construct_yaml_float))
    try:
        data = yaml.load(text, Loader)
    except yaml.composer.ComposerError as error:
        if getattr(error, "problem", None) == "but found another document":
            refuse("holds several documents", "give the one that is meant by itself")
        refuse(f"is not YAML ({error.problem})", "mend the syntax")
    except yaml.constructor.ConstructorError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        if "could not determine a constructor for the tag" in str(error.problem):
            tag = str(error.problem).rpartition("tag ")[2].strip("'")[:60]
            refuse(f"is not YAML (line {line}: the tag {tag} is not read)", "write the value out")
        refuse(f"is not YAML (line {line}): {error.problem}", "mend the syntax")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "malformed"
        raise fault(name, f"is not YAML{place}: {problem}", where, "mend the syntax") from None
    except BadInput:
        raise
    except (ValueError, TypeError, RecursionError, OverflowError, AttributeError, LookupError) as error:
        raise fault(name, f"is not usable YAML ({error})", where) from None
    return plain_copy(data, name, limits, where=where, texts=True)


def require_plain(data: Any, name: str, limits: Limits, *, where: str = "") -> None:
    """Refuse what is nested too deeply, and numbers that are not finite or too large; values are those of a JSON parser."""
    level = [data]
    for _ in range(limits.depth + 1):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
            elif isinstance(value, int | float):
                _require_number(value, name, where)
        if not inner:
            return
        level = inner
    raise fault(name, f"is nested deeper than {limits.depth} levels", where)


def _require_number(value: float, name: str, where: str) -> None:
    if isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            raise fault(name, f"holds a whole number of more than {MOST_BITS:,} bits", where, "write a smaller one")
    elif not math.isfinite(value):
        raise fault(name, f"holds {value}, which is not JSON", where, "write a finite number")


def plain_copy(data: Any, name: str, limits: Limits = CONFIG, *, where: str = "", texts: bool = False) -> Any:
    """Return a deep copy in plain dicts and lists with string keys.

    Shared parts (YAML's aliases) are written out, within the limit of values. With `texts`, what JSON does not know (a date)
    becomes text; else it is refused.

    Raises:
        BadInput: beyond the limits, or with what JSON does not have.
    """
    budget = limits.nodes

    def copy(value: Any, depth: int) -> Any:
        nonlocal budget
        budget -= 1
        if budget < 0:
            raise fault(name, f"holds more than {limits.nodes:,} values", where, "write the values out")
        if depth > limits.depth:
            raise fault(name, f"is nested deeper than {limits.depth} levels", where)
        if isinstance(value, Mapping):
            for key in value:
                if not (texts or isinstance(key, str)):
                    raise fault(name, f"the key {str(key)[:80]!r} is not a string", where)
            return {str(key): copy(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple) or (texts and isinstance(value, set)):
            return [copy(item, depth + 1) for item in value]
        if isinstance(value, int | float):
            _require_number(value, name, where)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if not texts:
            raise fault(name, f"holds {kind_of(value)}, which is not JSON", where)
        return str(value)

    return copy(data, 0)


def kind_of(data: Any) -> str:
    """Return the type of a JSON value in words for messages, such as ``a list`` or ``null``."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(data), "null" if data is None else f"a {type(data).__name__}")


def dump_yaml(data: Mapping[str, Any]) -> str:
    """Write nested mappings of scalars as YAML, keys in order."""
    import yaml

    return str(yaml.safe_dump(dict(data), sort_keys=False))
