"""Follows a shell script to the commands that it starts, without running anything.

Branches that a test decides from the text alone are followed; of others both are, and what they set differently is unknown,
with the line that decides. So are variables that are read, or printed by programs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from posixpath import basename, join
from types import MappingProxyType

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.documents import CONFIG, text_of
from zeroplan.core.plumbing.files import read_bytes
from zeroplan.interop.programs.shell_syntax import (
    Body,
    Branches,
    Cases,
    Chain,
    Function,
    LoopCommand,
    Node,
    Simple,
    Unreadable,
    every,
    exits,
    in_order,
    is_test,
    leaves,
    parse,
)
from zeroplan.interop.programs.shell_values import ShellState, Unknown, Value, appended, changed_folder, printed_by, same

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=(.*)", re.DOTALL)
_DECLARES = ("export", "local", "readonly", "declare", "typeset")
#: Files whose variables are the machine's.
_ENVIRONMENTS = re.compile(
    r"(^|/)(activate(\.\w+)?|\.?bashrc|\.?bash_profile|\.?profile|conda\.sh|setvars\.sh|.*env.*/bin/.*)$"
)
_READS = ("read", "mapfile", "readarray", "getopts")
_STEP = re.compile(r"\s*(\w+)\s*(\+\+|--|[-+*/%]?=)(?!=)\s*(.*)", re.DOTALL)
#: Behind these words, files are arguments.
_STARTS = re.compile(r"(.*/)?(python[\d.]*|torchrun|deepspeed|accelerate|--)$")
_SHELLS = ("bash", "sh", "zsh")
#: Commands that start the one behind them.
WRAPPERS = frozenset(("nohup", "srun", "time", "exec", "env", "sudo", "uv", "run", "poetry", "sbatch"))
_MOST_STEPS, _MOST_ROUNDS, _MOST_DEPTH = 20_000, 64, 12


@dataclass(frozen=True, slots=True)
class Started:
    """One command as the script starts it.

    Attributes:
        words: expanded; ``$NAME`` where no text tells.
        variables: of its environment, those that text tells.
        why: of the others, what decides each.
        folder: in which it runs; None where no text tells, empty for where the script is started.
        line: of the script.
    """

    words: tuple[str, ...]
    variables: dict[str, str]
    why: dict[str, str]
    folder: str | None
    line: int


@dataclass(frozen=True, slots=True)
class Followed:
    """What a script starts, in order, and what its text leaves open.

    Attributes:
        commands: those that it may start.
        noted: what is taken for granted.
        unread: files that it sources and that are not there.
    """

    commands: tuple[Started, ...]
    noted: tuple[str, ...]
    unread: tuple[str, ...]


def follow(
    text: str,
    name: str,
    find: Callable[[str], Path | None],
    *,
    arguments: tuple[str, ...] | None = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Followed:
    """Follow a script.

    Args:
        name: its path.
        find: where a file is that the script sources or starts; None where it is not there.
        arguments: with which it is started; None where they may be any.
        environment: variables that are set where it starts; ``PWD`` is the folder, without it paths stay relative.

    Raises:
        BadInput: it is no shell, or too long once its variables are put in.
    """
    run = _Run(name, find)
    variables: dict[str, Value] = {key: value for key, value in environment.items() if key != "PWD"}
    shell = ShellState(variables, arguments, str(Path(name).absolute()), environment.get("PWD", ""), {}, run.printed)
    try:
        run.body(parse(text), shell)
    except (Unreadable, RecursionError) as error:
        where = f"{name}: {error}" if isinstance(error, Unreadable) else name
        raise BadInput("is no shell that can be read", where=where, remedy="give the command alone") from None
    return Followed(tuple(run.commands), tuple(shell.noted), tuple(run.unread))


class _Run:
    def __init__(self, name: str, find: Callable[[str], Path | None]) -> None:
        self.name, self.find = name, find
        self.commands: list[Started] = []
        self.unread: dict[str, None] = {}
        self.steps = self.depth = 0

    def body(self, body: Body, shell: ShellState) -> None:
        for node in body:
            if shell.alive:
                self.node(node, shell)

    def node(self, node: Node, shell: ShellState) -> bool | None:
        """Follow one command; returns its success, None where no text tells."""
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise BadInput("takes too many steps to be followed", where=self.name, remedy="give the command alone")
        if isinstance(node, Simple):
            return self.simple(node, shell)
        if isinstance(node, Chain):
            return self.chain(node, shell)
        if isinstance(node, Branches):
            self.branches(node, shell)
        elif isinstance(node, Cases):
            self.cases(node, shell)
        elif isinstance(node, LoopCommand):
            self.loop(node, shell)
        elif isinstance(node, Function):
            shell.functions[node.name] = node.body
        else:
            self.body(node.body, shell.fork() if node.subshell else shell)
        return None

    # Decisions

    def chain(self, node: Chain, shell: ShellState) -> bool | None:
        """Follow ``a && b || c``. Programs succeed; what a test decides that no text tells may run or not."""
        done = self.node(node.first, shell)
        certain = is_test(node.first)
        for operator, one in node.rest:
            if operator == "|":
                self.node(one, shell.fork() if _starts_program(one) else shell)
                done, certain = None, False
                continue
            decided = done if certain else True if done is None else done
            if decided is None:
                self.either(shell, [partial(self.node, one), _nothing], node.line, "a test")
            elif decided is (operator == "&&"):
                done, certain = self.node(one, shell), is_test(one)
            elif not certain and exits(one) is False:
                self.either(shell, [_nothing, partial(self.node, one)], node.line, "a command's success")
        return done

    def branches(self, node: Branches, shell: ShellState) -> None:
        open_: list[Body] = []
        for condition, body in node.branches:
            found = self.condition(condition, shell)
            if found:
                open_.append(body)
                break
            if found is None:
                open_.append(body)
        else:
            open_.append(node.otherwise)
        self.either(shell, [partial(self.body, one) for one in open_], node.line, "an if")

    def condition(self, condition: Body, shell: ShellState) -> bool | None:
        found: bool | None = None
        for node in condition:
            found = self.node(node, shell)
        return found

    def cases(self, node: Cases, shell: ShellState) -> None:
        word = shell.text(node.word)
        open_: list[Body] = []
        empty = "$" in word and shell.test(("-z", node.word)) is True
        sure = "$" not in word or empty
        for patterns, body in node.cases:
            texts = [shell.text(one) for one in patterns]
            if not sure:
                open_.append(body)
            elif any(fnmatchcase("" if empty else word, one) for one in texts):
                open_ = [body]
                break
        else:
            if not sure and not any("*" in patterns for patterns, _ in node.cases):
                open_.append(())
        if open_:
            self.either(shell, [partial(self.body, one) for one in open_], node.line, "a case")

    def loop(self, node: LoopCommand, shell: ShellState) -> None:
        if node.kind in ("while", "until"):
            for _ in range(_MOST_ROUNDS):
                found = self.condition(node.condition, shell)
                if found is (node.kind == "until"):
                    return
                if found is None or leaves(node.body):
                    break
                self.body(node.body, shell)
                if not shell.alive:
                    return
            self.open_loop(node, shell, may_skip=True)
            return
        words = shell.words(('"$@"',) if node.words is None else node.words)
        told = not any("$" in one or "`" in one for one in words) and node.variable and len(words) <= _MOST_ROUNDS
        if not told or node.kind == "select" or (len(words) > 1 and leaves(node.body)):
            self.open_loop(node, shell, may_skip=False)
            return
        for word in words:
            shell.variables[node.variable] = word
            self.body(node.body, shell)

    def open_loop(self, node: LoopCommand, shell: ShellState, *, may_skip: bool) -> None:
        """Follow a body once, with all that it sets unknown."""
        why = Unknown(f"line {node.line}: a {node.kind} sets it")

        def once(side: ShellState) -> None:
            for name in {node.variable, *_assigned(node.body)} - {""}:
                side.variables[name] = why
            self.body(node.body, side)
            for name in _assigned(node.body):
                side.variables[name] = why

        self.either(shell, [once, _nothing] if may_skip else [once], node.line, f"a {node.kind}")

    def either(self, shell: ShellState, ways: Sequence[Callable[[ShellState], object]], line: int, what: str) -> None:
        """Follow each way from here; variables that come out differently are unknown."""
        if len(ways) == 1:
            ways[0](shell)
            return
        sides = [shell.fork() for _ in ways]
        for side, way in zip(sides, ways, strict=True):
            way(side)
        living = [side for side in sides if side.alive]
        if not living:
            shell.alive, shell.returned = False, any(side.returned for side in sides)
            return
        why = Unknown(f"line {line}: {what} decides it")
        names = dict.fromkeys(name for side in living for name in side.variables)
        shell.variables = {name: same([side.variables.get(name) for side in living], why) for name in names}
        shell.folder = living[0].folder if len({side.folder for side in living}) == 1 else None
        shell.arguments = living[0].arguments if len({side.arguments for side in living}) == 1 else None
        for side in living:
            shell.functions |= side.functions

    # Commands

    def simple(self, node: Simple, shell: ShellState) -> bool | None:
        raw = node.words
        if raw[:1] == ("((",):
            return self.arithmetic(raw[1], shell, node.line)
        if raw[:1] in (("[",), ("[[",)) or raw[:1] == ("test",):
            return shell.test(raw[1:-1] if raw[0] != "test" else raw[1:])
        while raw and ASSIGNMENT.fullmatch(raw[0]):
            raw = raw[1:]
        if not raw:
            for word in node.words:
                self.assign(word, shell, node.line)
            return True
        if raw[0] in _DECLARES:
            for word in raw[1:]:
                self.assign(word, shell, node.line)
            return True
        before = shell.fork() if len(raw) < len(node.words) else shell
        for word in node.words[: len(node.words) - len(raw)]:
            self.assign(word, before, node.line)
        words = before.words(raw)
        if not words:
            return True
        return self.command(words, node.line, shell, before)

    def command(self, words: list[str], line: int, shell: ShellState, own: ShellState) -> bool | None:
        """Follow a builtin or function, or note what is started."""
        first, rest = words[0], words[1:]
        if first == "!":
            inner = self.command(rest, line, shell, own) if rest else None
            return None if inner is None else not inner
        if first in shell.functions:
            self.call(shell.functions[first], tuple(rest), shell)
        elif first in (":", "true", "false"):
            return first != "false"
        elif first in ("exit", "return"):
            shell.alive, shell.returned = False, first == "return"
        elif first in ("cd", "pushd", "popd"):
            shell.folder = changed_folder(shell, rest) if first != "popd" else None
        elif first in ("source", "."):
            self.source(rest, shell, line)
        elif first == "eval":
            self.text(" ".join(rest), shell)
        elif first in _READS:
            for name in rest:
                if name.isidentifier():
                    shell.variables[name] = Unknown(f"line {line}: {first} sets it")
        elif first == "unset":
            for name in rest:
                shell.variables.pop(name, None)
        elif first == "set" and "--" in rest:
            shell.arguments = tuple(rest[rest.index("--") + 1 :])
        elif first == "shift":
            count = int(rest[0]) if rest and rest[0].isdigit() else 1
            shell.arguments = shell.arguments[count:] if shell.arguments is not None else None
        elif first == "let":
            for one in rest:
                self.arithmetic(one, shell, line)
        elif first == "printf" and rest[:1] == ["-v"] and len(rest) > 1:
            shell.variables[rest[1]] = Unknown(f"line {line}: printf sets it")
        else:
            self.start(words, line, own)
        return None

    def start(self, words: list[str], line: int, shell: ShellState) -> None:
        """Note a command, or follow the shell script that it starts."""
        wrapped = words[0] in WRAPPERS
        named = range(next((at for at, word in enumerate(words) if _STARTS.match(word)), len(words)) if wrapped else 1)
        at = next((at for at in named if basename(words[at]) in _SHELLS or words[at].endswith(".sh")), None)
        if at is not None:
            shell_named = not words[at].endswith(".sh")
            rest = [word for word in words[at + shell_named :] if not re.fullmatch(r"-[exuil]+", word)]
            if rest[:1] in (["-c"], ["-lc"]):
                self.text(rest[1] if len(rest) > 1 else "", shell.fork())
                return
            if rest and (found := self.find(join(shell.folder or "", rest[0]))) is not None:
                child = shell.fork()
                child.arguments, child.functions, child.script = tuple(rest[1:]), {}, str(found)
                self.file(found, child)
                return
        known = {name: value for name, value in shell.variables.items() if isinstance(value, str)}
        why = {name: value.why for name, value in shell.variables.items() if isinstance(value, Unknown)}
        self.commands.append(Started(tuple(words), known, why, shell.folder, line))

    def call(self, body: Body, arguments: tuple[str, ...], shell: ShellState) -> None:
        """Follow a function; a ``return`` ends it alone."""
        self.depth += 1
        if self.depth < _MOST_DEPTH:
            own, shell.arguments = shell.arguments, arguments
            self.body(body, shell)
            shell.arguments, shell.alive, shell.returned = own, shell.alive or shell.returned, False
        self.depth -= 1

    def source(self, words: list[str], shell: ShellState, line: int) -> None:
        if not words or _ENVIRONMENTS.search(words[0]):
            return
        found = None if "$" in words[0] else self.find(join(shell.folder or "", words[0]))
        if found is None:
            self.unread[f"line {line}: {words[0][:60]}"] = None
            return
        own = shell.arguments
        shell.arguments = tuple(words[1:]) or own
        self.file(found, shell)
        shell.arguments = own

    def file(self, path: Path, shell: ShellState) -> None:
        if path.suffix not in ("", ".sh", ".bash", ".env"):
            return
        self.text(text_of(read_bytes(str(path), CONFIG.size), str(path)), shell)

    def text(self, text: str, shell: ShellState) -> None:
        self.depth += 1
        if self.depth < _MOST_DEPTH:
            self.body(parse(text), shell)
        self.depth -= 1

    def assign(self, word: str, shell: ShellState, line: int) -> None:
        said = ASSIGNMENT.fullmatch(word)
        if said is None:
            return
        name, index, more, raw = said.groups()
        before = shell.variables.get(name)
        value: Value
        if index is not None:
            value = Unknown(f"line {line}: one word of an array")
        elif raw.startswith("(") and raw.endswith(")"):
            value = tuple(shell.words(_array_words(raw[1:-1])))
        else:
            argument = re.fullmatch(r'"?\$\{?(\d+)\}?"?', raw)
            if argument is not None and shell.known(argument[1]) is None and argument[1] != "0":
                value = Unknown(f"line {line}: the script's argument ${argument[1]}", empty=True)
            else:
                value = shell.text(raw)
                bare = re.fullmatch(r'"?\$\{?(\w+)\}?"?', raw)
                if bare is not None and isinstance(origin := shell.known(bare[1]), Unknown):
                    value = origin
                elif "$((" in value or "$[" in value:
                    value = Unknown(f"line {line}: its arithmetic has a part that no text tells")
                elif "$(" in value or "`" in value:
                    value = Unknown(f"line {line}: a command prints it")
        if more and before is not None and not isinstance(value, Unknown):
            value = appended(before, value)
        shell.variables[name] = value

    def arithmetic(self, text: str, shell: ShellState, line: int) -> bool | None:
        """Follow ``x += 1`` and the like; of another expression, return whether it is not zero."""
        step = _STEP.fullmatch(text)
        if step is None:
            number = shell.number(text)
            return None if number is None else number != 0
        name, operator, rest = step.groups()
        expression = rest if operator == "=" else f"{name} {operator[0]} ({rest or 1})"
        number = shell.number(expression)
        shell.variables[name] = Unknown(f"line {line}: arithmetic sets it") if number is None else str(number)
        return None

    def printed(self, text: str, shell: ShellState) -> str | None:
        """Return what the commands of a substitution print; None where no text tells."""
        side, out = shell.fork(), []
        try:
            body = parse(text)
        except Unreadable:
            return None
        for node in in_order(body):
            words = side.words(node.words) if isinstance(node, Simple) else []
            if any("$" in word for word in words) or not words:
                return None
            if words[0] == "cd":
                side.folder = changed_folder(side, words[1:])
                continue
            found = printed_by(words, side)
            if found is None:
                return None
            out.append(found)
        return " ".join(out)


def _array_words(text: str) -> tuple[str, ...]:
    """Split an array's text, which may have comments and lines, into raw words."""
    nodes = parse(re.sub(r"\s*\n\s*", "\n", text.replace("\x1f", "\n")))
    return tuple(word for node in nodes if isinstance(node, Simple) for word in node.words)


def _nothing(_shell: ShellState) -> None:
    """Leave all as it is."""


def _starts_program(node: Node) -> bool:
    return isinstance(node, Simple) and bool(node.words) and node.words[0] not in _READS


def _assigned(body: Body) -> set[str]:
    """The variables that commands set, those of functions left out."""
    names: set[str] = set()
    for node in every(body):
        if isinstance(node, LoopCommand):
            names.add(node.variable)
        if not isinstance(node, Simple):
            continue
        declares = node.words[:1] and node.words[0] in (*_DECLARES, *_READS)
        for at, word in enumerate(node.words):
            said = ASSIGNMENT.fullmatch(word)
            if said is not None:
                names.add(said[1])
            elif declares and at and word.isidentifier():
                names.add(word)
            elif at == 0 and not declares:
                break
        if node.words[:1] in (("((",), ("let",)) and (step := _STEP.fullmatch(node.words[1])):
            names.add(step[1])
    return names - {""}
