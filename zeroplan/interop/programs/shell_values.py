"""Values of a shell's words: variables, substitutions and arithmetic put in, and tests. What no text tells stays as ``$NAME``.

Source: the Bash Reference Manual, sections 3.4 (parameters), 3.5 (expansions), 6.4 (tests) and 6.5 (arithmetic).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase, translate
from posixpath import basename, dirname, isabs, join, normpath
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.interop.programs.shell_syntax import part_end

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PARAMETER = re.compile(r"(#|!)?([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_CUT = re.compile(r": ?(\d{1,4})(?::(\d{1,4}))?")
_DEFAULT = re.compile(r":?([-=+?])(.*)", re.DOTALL)
_INTEGER = re.compile(r"[+-]?\d{1,15}")
#: Characters of all words with their variables put in.
MOST_TEXT = 256 << 10
_LARGEST = 1 << 60
_STEPS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) is (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    ast.Pow: lambda a, b: a**b if 0 <= b < 64 and abs(a) < 1 << 16 else _LARGEST,
}
_ORDER: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_COMPARED: dict[type[ast.cmpop], str] = {
    ast.Eq: "-eq",
    ast.NotEq: "-ne",
    ast.Lt: "-lt",
    ast.LtE: "-le",
    ast.Gt: "-gt",
    ast.GtE: "-ge",
}


@dataclass(frozen=True, slots=True)
class Unknown:
    """What a script does not tell of a variable: why, in one clause with its line; `empty` where a default counts instead."""

    why: str
    empty: bool = False


Value = str | tuple[str, ...] | Unknown


@dataclass(slots=True)
class ShellState:
    """What a script has set at one point.

    Attributes:
        variables: by name: text, an array's words, or why nothing tells it.
        arguments: of the script or function; None where they are taken to be any.
        script: the script's path, which is ``$0``.
        folder: in which commands run: a path, one from where the script is started, or None where no text tells.
        functions: their bodies by name.
        substitute: what a command prints, None where no text tells; of its text and this state.
        alive: whether the script gets here.
        returned: whether a function ended here, where it does not.
        room: characters that words may still take.
        noted: what it takes for granted, one clause each.
    """

    variables: dict[str, Value]
    arguments: tuple[str, ...] | None
    script: str
    folder: str | None
    functions: dict[str, Any]
    substitute: Callable[[str, ShellState], str | None]
    alive: bool = True
    returned: bool = False
    room: list[int] = field(default_factory=lambda: [MOST_TEXT])
    noted: dict[str, None] = field(default_factory=dict)

    def fork(self) -> ShellState:
        """A copy in which variables change by themselves."""
        return ShellState(
            *(dict(self.variables), self.arguments, self.script, self.folder, dict(self.functions), self.substitute),
            *(self.alive, self.returned, self.room, self.noted),
        )

    def without_arguments(self) -> None:
        """Note that the script is taken to be started without arguments."""
        self.noted["the script is started without arguments"] = None

    # Words

    def words(self, raw: Sequence[str]) -> list[str]:
        """Expand words; unquoted values are split at blanks."""
        return [one for word in raw for one in self.expanded(word)]

    def text(self, raw: str) -> str:
        """Expand one word that is not split, as behind ``=``."""
        return " ".join(self.expanded(raw, split=False))

    def expanded(self, raw: str, *, split: bool = True) -> list[str]:
        """Expand a word to none, one or several."""
        fields, current, at, quoted = [], "", 0, False
        started = False
        while at < len(raw):
            one = raw[at]
            if one == '"' and (quoted or part_end(raw, at) > at + 1):
                quoted, started, at = not quoted, True, at + 1
                continue
            end = (
                part_end(raw, at)
                if not quoted or one in "$`"
                else at + 2
                if one == "\\" and raw[at + 1 :][:1] in '"$`\\'
                else at + 1
            )
            piece = raw[at:end]
            if one == "$" and end == at + 1 and (name := _NAME.match(raw, end)):
                end = name.end()
                piece = raw[at:end]
            at = end
            if one == "\\" and len(piece) == 2:
                current, started = current + piece[1], True
            elif not quoted and len(piece) > 1 and piece.startswith(("'", "$'")):
                current, started = current + piece.removeprefix("$")[1:-1], True
            elif len(piece) > 1 and one in "$`":
                value = self.value(piece)
                parts = [value] if isinstance(value, str) else list(value)
                if not quoted and split and value != piece:  # what nothing tells stays one word
                    parts = " ".join(parts).split()
                self._spend(sum(map(len, parts)))
                if len(parts) > 1:
                    fields += [current + parts[0], *parts[1:-1]]
                    current = parts[-1]
                elif parts:
                    current += parts[0]
                started |= bool(parts) or (quoted and isinstance(value, str))
                if quoted and not parts and raw == f'"{piece}"':
                    return []  # "$@" without arguments
            else:
                current, started = current + piece, True
        self._spend(len(current))
        return [*fields, current] if started or current else fields

    def _spend(self, size: int) -> None:
        self.room[0] -= size
        if self.room[0] < 0:
            raise BadInput("is too long with its variables put in", where=self.script, remedy="give the command alone")

    def value(self, piece: str) -> str | tuple[str, ...]:
        """Return what a substitution stands for; itself where no text tells."""
        if piece.startswith("$((") and piece.endswith("))"):
            number = self.number(piece[3:-2])
            return piece if number is None else str(number)
        if piece.startswith("$["):
            number = self.number(piece[2:-1])
            return piece if number is None else str(number)
        if piece.startswith(("$(", "`")):
            printed = self.substitute(piece[2:-1] if piece[0] == "$" else piece[1:-1], self)
            return piece if printed is None else printed
        inside = piece[2:-1] if piece.startswith("${") else piece[1:]
        found = _PARAMETER.fullmatch(inside)
        return piece if found is None else self._parameter(piece, *found.groups())

    def _parameter(self, piece: str, mark: str | None, name: str, index: str | None, rest: str) -> str | tuple[str, ...]:
        if mark == "!" and self.known(name) is not None:
            mark, name = None, str(self.known(name))
        value = self.known(name)
        default = _DEFAULT.fullmatch(rest)
        if default is not None and isinstance(value, Unknown) and value.empty:
            value = None
        if default is not None and not isinstance(value, Unknown):
            empty = value is None or (rest.startswith(":") and not value)
            if default[1] == "+":
                return "" if empty else self.text(default[2])
            if empty and default[1] in "-=":
                found = self.text(default[2])
                if default[1] == "=":
                    self.variables[name] = found
                return found
            rest = ""
        if value is None or isinstance(value, Unknown):
            return f"${name}" if name.isidentifier() and not mark else piece
        if index is not None or isinstance(value, tuple):
            parts = (value,) if isinstance(value, str) else value
            if mark == "#":
                return str(len(parts)) if index in ("@", "*") else str(len("".join(parts[:1])))
            if index in ("@", "*") or (index is None and name in "@*"):
                cut = _CUT.fullmatch(rest)
                if cut is None:
                    return parts if not rest else piece
                first = int(cut[1]) - (index is None)  # the script's own arguments count from 1, behind its name
                return piece if first < 0 else parts[first:][: int(cut[2]) if cut[2] else None]
            at = self.number(index or "0")
            return piece if at is None or rest else parts[at] if -len(parts) <= at < len(parts) else ""
        if mark == "#":
            return str(len(value))
        changed = _changed(value, self.text(rest) if rest else "") if "$" not in value or not rest else None
        return piece if changed is None else changed

    def known(self, name: str) -> Value | None:
        """Return a variable's value, None where nothing sets it."""
        if name in self.variables:
            return self.variables[name]
        if name == "PWD":
            return self.folder if self.folder is None else self.folder or "."
        if name in ("0", "BASH_SOURCE"):
            return self.script
        if name in ("@", "*", "#") or name.isdigit():
            if self.arguments is None:
                return Unknown("the script's arguments decide it")
            if not self.arguments:
                self.without_arguments()
            if name == "#":
                return str(len(self.arguments))
            if name.isdigit():
                return self.arguments[int(name) - 1] if int(name) <= len(self.arguments) else None
            return self.arguments
        return None

    # Arithmetic and tests

    def number(self, text: str) -> int | None:
        """Return the whole number that an expression gives; None where no text tells."""
        plain = self.text(text)
        plain = re.sub(r"[A-Za-z_]\w*", lambda one: self._numeral(one[0]), plain)
        plain = plain.replace("/", "//").replace("&&", " and ").replace("||", " or ").strip()
        if len(plain) > 200 or not re.fullmatch(r"(?:[\d\s()+*/%<>=!-]|and|or)+", plain):
            return None
        try:
            found = _computed(ast.parse(re.sub(r"\b0+(?=\d)", "", plain), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None
        return found if found is not None and abs(found) < _LARGEST else None

    def _numeral(self, name: str) -> str:
        value = self.known(name)
        return value if isinstance(value, str) and _INTEGER.fullmatch(value.strip()) else f"${name}"

    def test(self, raw: Sequence[str]) -> bool | None:
        """Return what a test finds; None where no text tells."""
        for operator, decides in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
            if operator in raw[1:-1]:
                at = raw.index(operator, 1)
                sides = (self.test(raw[:at]), self.test(raw[at + 1 :]))
                return decides if decides in sides else None if None in sides else not decides
        if raw[:1] == ["!"] or raw[:1] == ("!",):
            inner = self.test(raw[1:])
            return None if inner is None else not inner
        if len(raw) >= 3 and raw[0] == "(" and raw[-1] == ")":
            return self.test(raw[1:-1])
        if len(raw) == 3:
            return self._compare(raw[0], raw[1], raw[2])
        if len(raw) == 2 and raw[0] in ("-z", "-n"):
            empty = self._empty(raw[1])
            return None if empty is None else empty is (raw[0] == "-z")
        if len(raw) == 1:
            empty = self._empty(raw[0])
            return None if empty is None else not empty
        return None

    def _empty(self, raw: str) -> bool | None:
        """Whether a word is empty. A variable that nothing sets is; so are the arguments of a script that is given none."""
        bare = raw.strip('"')
        name = re.fullmatch(r"\$\{?(\w+|[@*])(?::?-)?\}?", bare)
        if name is not None:
            value = self.known(name[1])
            if value is None or (isinstance(value, Unknown) and value.empty):
                return True
            return None if isinstance(value, Unknown) else not "".join(value).strip()
        text = self.text(raw)
        return None if "$" in text else not text

    def _is_assigned(self, raw: str) -> bool:
        """Whether a word is an argument of the script, or a variable that has its value; others the environment may set."""
        name = re.search(r"\w+", raw)
        return name is not None and (name[0].isdigit() or self.known(name[0]) is not None)

    def _compare(self, left: str, operator: str, right: str) -> bool | None:
        if operator in _ORDER:
            numbers = self.number(self.text(left)), self.number(self.text(right))
            return None if numbers[0] is None or numbers[1] is None else _ORDER[operator](numbers[0], numbers[1])
        one, two = self.text(left), self.text(right)
        if operator in ("=", "==", "!=") and self._empty(left) and (not two or self._is_assigned(left)):
            one = ""
        if "$" in one or "$" in two or "`" in one + two:
            return None
        if operator in ("=", "=="):
            return fnmatchcase(one, two) if "'" not in right and '"' not in right else one == two
        if operator == "!=":
            return not fnmatchcase(one, two)
        if operator == "=~":
            return _searches(two, one)
        return {"<": one < two, ">": one > two}.get(operator)


def _searches(pattern: str, text: str) -> bool | None:
    """Whether an expression of plain characters and one class is found; None for another."""
    if not re.fullmatch(r"\^?[\w/:.-]*(?:\[[\w-]+\][+*]?)?\$?", pattern):
        return None
    return re.search(pattern, text) is not None


def _changed(value: str, rest: str) -> str | None:
    """Return a value cut or replaced as ``%``, ``#``, ``/``, ``,,`` and ``:`` do; None where the form is another."""
    if not rest:
        return value
    if rest in (",,", "^^"):
        return value.lower() if rest == ",," else value.upper()
    if rest[0] in "%#":
        longest, pattern = rest[:2] in ("%%", "##"), rest.lstrip("%#")
        cuts = range(len(value) + 1)
        sides = ((value[:at], value[at:]) for at in (cuts if longest is (rest[0] == "%") else reversed(cuts)))
        compiled = re.compile(translate(pattern))
        if len(value) > 1_000:
            return None
        kept, gone = (0, 1) if rest[0] == "%" else (1, 0)
        return next((side[kept] for side in sides if compiled.match(side[gone])), value)
    if rest[0] == "/" and not re.search(r"[*?\[]", rest):
        every, (old, _, new) = rest.startswith("//"), rest.lstrip("/").partition("/")
        return value.replace(old, new, -1 if every else 1) if old else None
    cut = _CUT.fullmatch(rest)
    return None if cut is None else value[int(cut[1]) :][: int(cut[2]) if cut[2] else None]


def _computed(node: ast.expr) -> int | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and (inner := _computed(node.operand)) is not None:
        return -inner if isinstance(node.op, ast.USub) else inner if isinstance(node.op, ast.UAdd) else int(not inner)
    if isinstance(node, ast.BinOp) and type(node.op) in _STEPS:
        left, right = _computed(node.left), _computed(node.right)
        known = left is not None and right is not None and max(abs(left), abs(right)) < _LARGEST
        return _STEPS[type(node.op)](left or 0, right or 0) if known else None
    if isinstance(node, ast.BoolOp):
        values = [_computed(one) for one in node.values]
        every = isinstance(node.op, ast.And)
        return None if None in values else int(all(values) if every else any(values))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
        left, right = _computed(node.left), _computed(node.comparators[0])
        return None if left is None or right is None else int(_ORDER[_COMPARED[type(node.ops[0])]](left, right))
    return None


def appended(before: Value, value: Value) -> Value:
    """Return a value with another behind it, as ``+=`` puts it."""
    if isinstance(before, Unknown) or isinstance(value, Unknown):
        return before if isinstance(before, Unknown) else value
    if isinstance(before, tuple) or isinstance(value, tuple):
        return (*((before,) if isinstance(before, str) else before), *((value,) if isinstance(value, str) else value))
    return before + value


def same(values: list[Value | None], why: Unknown) -> Value:
    """Return the value that several ways end with; unknown, by `why`, where they differ."""
    first = values[0]
    if first is not None and all(one == first for one in values):
        return first
    unknown = next((one for one in values if isinstance(one, Unknown)), None)
    return unknown or why


def printed_by(words: list[str], shell: ShellState) -> str | None:
    """Return what a builtin or a program of paths and numbers prints."""
    first = words[0]
    rest = [word for word in words[1:] if word not in ("--", "-f", "-e", "-m", "-P", "-n")]
    if first == "echo":
        return " ".join(rest)
    if first == "pwd":
        return shell.folder if shell.folder is None else shell.folder or "."
    if first == "expr":
        number = shell.number(" ".join(rest))
        return None if number is None else str(number)
    if first in ("dirname", "basename") and rest:
        found = dirname(rest[0]) or "." if first == "dirname" else basename(rest[0])
        return found.removesuffix(rest[1]) if first == "basename" and len(rest) > 1 else found
    if first in ("realpath", "readlink") and len(rest) == 1:
        return rest[0] if isabs(rest[0]) else None
    return None


def changed_folder(shell: ShellState, words: list[str]) -> str | None:
    """Return the folder to which ``cd`` with these words goes; None where no text tells."""
    target = next((word for word in words if not word.startswith("-")), "$HOME")
    if "$" in target or target.startswith("~"):
        return None
    if isabs(target):
        return normpath(target)
    return None if shell.folder is None else normpath(join(shell.folder, target))
