"""Changes of single values in the texts of JSON, YAML, shell and Python files; all else stays to the character."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"


class UneditableError(Exception):
    """The text says a value in a way that is not changed here."""


@dataclass(frozen=True, slots=True)
class Removed:
    """In place of a value: the key goes."""


REMOVED = Removed()


# --- JSON -------------------------------------------------------------------------------------------------------------------


class _Member(NamedTuple):
    """A key and its value in an object, by places in the text."""

    key: str
    start: int
    value: int
    end: int


def edit_json(text: str, path: Sequence[str], value: Any) -> str:
    """Return a JSON text with another value at a path of keys; missing keys are added behind the others of their object.

    Raises:
        UneditableError: comments and other liberties, or a path through what is no object.
    """
    try:
        return _json(text, _skip(text, 0), tuple(path), value)
    except (ValueError, IndexError) as error:
        raise UneditableError("it is not strict JSON") from error


def _json(text: str, at: int, path: tuple[str, ...], value: Any) -> str:
    if text[at] != "{":
        raise UneditableError(f"what holds {path[0]} is no object")
    members, closing = _members(text, at)
    place = next((i for i, one in enumerate(members) if one.key == path[0]), None)
    if place is not None and len(path) > 1:
        return _json(text, members[place].value, path[1:], value)
    if place is None:
        if value is REMOVED:
            return text
        for key in reversed(path[1:]):
            value = {key: value}
        return _with_member(text, at, members, closing, path[0], value)
    one = members[place]
    if value is not REMOVED:
        return text[: one.value] + _dumped(value, _indent(text, one.start), _unit(text)) + text[one.end :]
    if place + 1 < len(members):
        return text[: one.start] + text[members[place + 1].start :]
    if place:
        return text[: members[place - 1].end] + text[one.end :]
    return text[: at + 1] + text[closing:]


def _members(text: str, at: int) -> tuple[list[_Member], int]:
    """The members of the object that opens at a place, and where it closes."""
    found: list[_Member] = []
    at = _skip(text, at + 1)
    while text[at] != "}":
        if text[at] != '"':
            raise ValueError("no key")
        key, end = _DECODER.raw_decode(text, at)
        value = _skip(text, end)
        if text[value] != ":":
            raise ValueError("no colon")
        value = _skip(text, value + 1)
        end = _DECODER.raw_decode(text, value)[1]
        found.append(_Member(key, at, value, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
        elif text[at] != "}":
            raise ValueError("no comma")
    return found, at


def _skip(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


def _indent(text: str, at: int) -> str | None:
    """The white space before a place on its line; None where something else stands there."""
    before = text[text.rfind("\n", 0, at) + 1 : at]
    return before if not before.strip() and "\n" in text[:at] else None


def _unit(text: str) -> str:
    """The indentation of a file's first key."""
    found = re.search(r"\n([ \t]+)\S", text)
    return found[1] if found else "  "


def _dumped(value: Any, indent: str | None, unit: str) -> str:
    if indent is None:
        return json.dumps(value)
    return json.dumps(value, indent=unit).replace("\n", "\n" + indent)


def _with_member(text: str, at: int, members: list[_Member], closing: int, key: str, value: Any) -> str:
    unit = _unit(text)
    if not members:
        outer = _indent(text, at) or (re.match(r"[ \t]*", text[text.rfind("\n", 0, at) + 1 :]) or [""])[0]
        inner = outer + unit
        return f"{text[: at + 1]}\n{inner}{json.dumps(key)}: {_dumped(value, inner, unit)}\n{outer}{text[closing:]}"
    last = members[-1]
    indent = _indent(text, last.start)
    between = ", " if indent is None else f",\n{indent}"
    return f"{text[: last.end]}{between}{json.dumps(key)}: {_dumped(value, indent, unit)}{text[last.end :]}"


# --- YAML -------------------------------------------------------------------------------------------------------------------

_WORDS = ("yes", "no", "on", "off", "true", "false", "null", "y", "n")
_LINE = re.compile(r"^(?P<indent>[ ]*)(?P<key>[\w.\-]+|\"[^\"]+\"|'[^']+')[ ]*:(?P<rest>(?:[ \t].*)?)$")
#: A plain or quoted scalar, and the comment behind it.
_SCALAR = re.compile(r"""^(?P<space>[ \t]*)(?P<value>"[^"]*"|'[^']*'|[^#\s](?:(?!\s\#).)*?)?(?P<comment>\s*(?:\s\#.*)?)$""")


def edit_yaml(text: str, path: Sequence[str], value: Any) -> str:
    """Return a YAML text with another scalar at a path of keys of block mappings; a missing last key is added to its mapping.

    Raises:
        UneditableError: values over several lines, flow mappings, or keys that stand twice.
    """
    lines = text.splitlines()
    first, end, indent = 0, len(lines), 0
    for key in path[:-1]:
        at = _yaml_line(lines, first, end, indent, key)
        if at is None:
            raise UneditableError(f"it has no {key}")
        if (found := _LINE.match(lines[at])) is None or found["rest"].split("#")[0].strip():
            raise UneditableError(f"{key} is no block of lines")
        first, end, indent = _yaml_block(lines, at, indent)
    at = _yaml_line(lines, first, end, indent, path[-1])
    said = "" if value is REMOVED else _scalar(value)
    if at is None:
        if value is REMOVED:
            return text
        while end > first and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
            end -= 1
        lines.insert(end, f"{' ' * indent}{path[-1]}: {said}")
    else:
        _, behind, _ = _yaml_block(lines, at, indent)
        if any(line.strip() and not line.lstrip().startswith("#") for line in lines[at + 1 : behind]):
            raise UneditableError(f"{path[-1]} takes several lines")
        found = _LINE.match(lines[at])
        scalar = _SCALAR.match(found["rest"]) if found else None
        if found is None or scalar is None or (scalar["value"] or "").startswith(("|", ">", "&", "*", "[", "{", "!")):
            raise UneditableError(f"{path[-1]} is no plain value")
        head = lines[at][: found.end("key")]
        lines[at : at + 1] = [] if value is REMOVED else [f"{head}: {said}{scalar['comment']}"]
    return "\n".join(lines) + ("\n" if text.endswith("\n") or at is None else "")


def _yaml_line(lines: list[str], first: int, end: int, indent: int, key: str) -> int | None:
    places = [
        i
        for i in range(first, end)
        if (found := _LINE.match(lines[i])) and len(found["indent"]) == indent and found["key"].strip("\"'") == key
    ]
    if len(places) > 1:
        raise UneditableError(f"{key} stands twice")
    return places[0] if places else None


def _yaml_block(lines: list[str], at: int, indent: int) -> tuple[int, int, int]:
    """The first line and the end of the lines below a key, and their indentation."""
    end, inner = at + 1, 0
    while end < len(lines):
        line = lines[end]
        if line.strip() and not line.lstrip().startswith("#"):
            depth = len(line) - len(line.lstrip(" "))
            if depth < indent or (depth == indent and not line.lstrip().startswith("- ")):
                break
            inner = inner or depth
        end += 1
    return at + 1, end, inner or indent + 2


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    plain = re.fullmatch(r"[A-Za-z_][\w./\-]*", str(value)) and str(value).lower() not in _WORDS
    return str(value) if not isinstance(value, str) or plain else json.dumps(value)


# --- shell ------------------------------------------------------------------------------------------------------------------

_WORD = r"""(?:"[^"\n]*"|'[^'\n]*'|\\.|[^\s"'\\;|&<>])+"""


def _flag(name: str) -> re.Pattern[str]:
    """A flag with its value, by any of its spellings, outside comments."""
    spelt = re.escape(name).replace("_", "[-_]")
    value = rf"(?:=(?P<bound>{_WORD})|[ \t]+(?!-)(?P<apart>{_WORD}))?"
    return re.compile(rf"(?<![\w-])--{spelt}(?![\w.-]){value}")


def _commented(text: str, at: int) -> bool:
    before = text[text.rfind("\n", 0, at) + 1 : at]
    return bool(re.search(r"(?:^|\s)#", before))


def edit_shell(text: str, name: str, value: Any, among: Sequence[str] = ()) -> str:
    """Return a shell script with another value of a flag; a flag that is missing is put before the first of others.

    Args:
        text: the script.
        name: the flag, without dashes.
        value: of the flag.
        among: flags of the command that takes it.

    Raises:
        UneditableError: a flag that stands twice, or none beside which it could stand.
    """
    word = shlex.quote(str(value))
    found = [one for one in _flag(name).finditer(text) if not _commented(text, one.start())]
    if len(found) > 1:
        raise UneditableError(f"--{name} stands {len(found)} times")
    if found:
        one = found[0]
        group = "bound" if one["bound"] is not None else "apart" if one["apart"] is not None else ""
        if not group:
            return f"{text[: one.end()]} {word}{text[one.end() :]}"
        return text[: one.start(group)] + word + text[one.end(group) :]
    places = [one.start() for flag in among for one in _flag(flag).finditer(text) if not _commented(text, one.start())]
    if not places:
        raise UneditableError("no flag of its command stands in the text")
    at = min(places)
    indent = _indent(text, at)
    between = " " if indent is None else f" \\\n{indent}"
    return f"{text[:at]}--{name} {word}{between}{text[at:]}"


def edit_environment(text: str, names: Sequence[str], value: str) -> str:
    """Return a shell script with variables of one value: where one is set it changes, else all are exported at its head."""
    said = re.compile(rf"(?<![\w$])(?:{'|'.join(names)})=(?P<value>{_WORD})")
    found = [one for one in said.finditer(text) if not _commented(text, one.start())]
    if found:
        for one in reversed(found):
            text = text[: one.start("value")] + shlex.quote(value) + text[one.end("value") :]
        return text
    lines = text.splitlines(keepends=True)
    at = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    lines.insert(at, "export " + " ".join(f"{name}={shlex.quote(value)}" for name in names) + "\n")
    return "".join(lines)


# --- Python -----------------------------------------------------------------------------------------------------------------


def edit_python(text: str, name: str, value: Any, among: Sequence[str] = ()) -> str:
    """Return a Python script with another value of a call's keyword argument; one that is missing is added to the call that
    has one of others.

    Raises:
        UneditableError: an argument that stands twice or is no literal, or no call that takes it.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UneditableError("it is not read as Python") from error
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [one for call in calls for one in call.keywords if one.arg == name]
    if len(named) > 1:
        raise UneditableError(f"{name} stands {len(named)} times")
    lines, said = text.splitlines(keepends=True), json.dumps(value) if isinstance(value, str) else repr(value)
    if named:
        node = named[0].value
        if not isinstance(node, ast.Constant):
            raise UneditableError(f"{name} is no plain value")
        start, end = (
            _offset(lines, node.lineno, node.col_offset),
            _offset(lines, node.end_lineno or 0, node.end_col_offset or 0),
        )
        return text[:start] + said + text[end:]
    others = [one for call in calls for one in call.keywords if one.arg in among]
    if not others:
        raise UneditableError("no call takes it")
    first = min(others, key=lambda one: (one.lineno, one.col_offset))
    at = _offset(lines, first.lineno, first.col_offset)
    indent = _indent(text, at)
    return f"{text[:at]}{name}={said},{' ' if indent is None else chr(10) + indent}{text[at:]}"


def _offset(lines: list[str], line: int, column: int) -> int:
    """The place in the text of a line, counted from 1, and a column in bytes of UTF-8."""
    within = lines[line - 1].encode()[:column].decode()
    return sum(map(len, lines[: line - 1])) + len(within)
