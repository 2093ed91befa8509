"""Arguments of a script's ``argparse`` parser: their defaults, and what a command line's flags make of them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from zeroplan.interop.programs.script_syntax import UNKNOWN, called

_NUMBERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float}


def _converted(kind: Callable[[str], Any], text: str) -> Any:
    """A default by its argument's type, as the parser converts one that is a text."""
    try:
        return kind(text)
    except ValueError:
        return UNKNOWN


class ParserArguments:
    """A parser's arguments.

    Args:
        of: returns the value of an expression.

    Attributes:
        arguments: values by name.
    """

    def __init__(self, of: Callable[[ast.expr], Any]) -> None:
        self._of = of
        self.arguments: dict[str, Any] = {}
        self._options: dict[str, str] = {}  # its options, and what each fills
        self._switches: set[str] = set()  # by argparse.BooleanOptionalAction
        self._negated: set[str] = set()  # switches that store false
        self._converted: set[str] = set()  # by a function of the script's own

    def read(self, nodes: Iterable[ast.AST]) -> None:
        """Read the arguments that calls of ``add_argument`` and ``set_defaults`` name."""
        for call in nodes:
            if not isinstance(call, ast.Call):
                continue
            if called(call.func) == "add_argument":
                self._argument(call)
            elif called(call.func) == "set_defaults":
                self.arguments |= {one.arg: UNKNOWN for one in call.keywords if one.arg}

    def parsed(self, flags: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
        """The arguments that a command line's flags and short options give, also taken into :attr:`arguments`."""
        given: dict[str, Any] = {}
        for name, value in flags.items():
            near = [name] if name in self._options else [one for one in self._options if one.startswith(name)]
            if name.startswith("no_") and name[3:] in self._switches:
                given[name[3:]] = self.arguments[name[3:]] = False
            elif near:
                dest = self._options[near[0]]
                sure = len({self._options[one] for one in near}) == 1 and dest not in self._converted
                given[dest] = self.arguments[dest] = (
                    (dest not in self._negated if value is True else value) if sure else UNKNOWN
                )
        short = {word[:2] for word in words if word[:1] == "-" and word[1:2].isalpha()}
        for option in short & self._options.keys():
            dest, at = self._options[option], words.index(option) if option in words else -1
            text = words[at + 1] if 0 <= at < len(words) - 1 else ""
            known = text.isdigit() and len(text) < 10 and dest not in self._converted
            given[dest] = self.arguments[dest] = int(text) if known else UNKNOWN
        return given

    def _argument(self, call: ast.Call) -> None:
        words = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        given = {one.arg: one.value for one in call.keywords if one.arg}
        long = next((word for word in words if word.startswith("--")), words[0] if words else "")
        dest = self._of(given["dest"]) if "dest" in given else long.lstrip("-").replace("-", "_")
        if not isinstance(dest, str) or not dest:
            return
        action = given["action"].value if "action" in given and isinstance(given["action"], ast.Constant) else None
        value = self._default(given, action, optional=long.startswith("-"))
        if called(given.get("action")) == "BooleanOptionalAction":
            self._switches.add(dest)
        elif dest in self.arguments or action not in (None, "store", "store_true", "store_false"):
            value = UNKNOWN
        if action == "store_false":
            self._negated.add(dest)
        if "type" in given and called(given["type"]) not in ("int", "float", "str"):
            self._converted.add(dest)
            value = UNKNOWN if isinstance(value, str) else value
        self.arguments[dest] = value
        self._options |= {word if not word.startswith("--") else word[2:].replace("-", "_"): dest for word in words}

    def _default(self, given: dict[str, ast.expr], action: Any, *, optional: bool) -> Any:
        """The value of an argument that the command does not name."""
        if "default" in given:
            value = self._of(given["default"])
            kind = _NUMBERS.get(called(given.get("type")))
            return _converted(kind, value) if isinstance(value, str) and kind is not None else value
        if action in ("store_true", "store_false"):
            return action == "store_false"
        return UNKNOWN if "required" in given or not optional else None
