"""The grammar of a shell script: its text as commands, branches, loops and functions. Words keep their quotes.

Source: POSIX.1-2024, ShellState Command Language, section 2.10; the Bash Reference Manual, sections 3.2 to 3.6.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

#: Stands where a line goes on in the next one, so that lines can still be counted.
_JOINT = "\x1f"
#: Continued lines: a shell's backslash, also at the end of the file, and the caret of Windows.
_CONTINUED = re.compile(r"(?<!\\)\\[ \t]*(?:\r?\n|\Z)|[ \t]\^[ \t]*\r?\n")
_BLANKS = " \t\r" + _JOINT
_BREAKS = _BLANKS + "\n;&|<>()"
_OPERATOR = re.compile(r"&&|\|\||;;&|;;|;&|\|&|[;&|()\n]")
_REDIRECTION = re.compile(r"(?:\d+|&)?(?:<<<|<<-?|<>|>>|>\||[<>]&|[<>](?!\())")
_ARRAY = re.compile(r"\w+\+?=\(")
_FUNCTION = re.compile(r"(?:(?:function[ \t]+)?([\w:.-]+)[ \t]*\([ \t]*\)|function[ \t]+([\w:.-]+))")
#: Lines that one quoted text may span.
_MOST_QUOTED = 100
#: Branches and loops within each other.
_MOST_NESTED = 50
_CLOSING = frozenset(("then", "else", "elif", "fi", "do", "done", "esac", "}"))


class Unreadable(Exception):
    """The text is no shell from this line on."""


@dataclass(frozen=True, slots=True)
class Simple:
    """Words of one command, redirections left out; `line` counts from 1."""

    words: tuple[str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Commands joined by ``&&``, ``||`` or ``|``: the first, and each other with its operator."""

    first: Node
    rest: tuple[tuple[str, Node], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Branches:
    """An ``if``: conditions with their bodies, and the body of ``else``."""

    branches: tuple[tuple[Body, Body], ...]
    otherwise: Body
    line: int


@dataclass(frozen=True, slots=True)
class Cases:
    """A ``case``: its word, and patterns with their bodies."""

    word: str
    cases: tuple[tuple[tuple[str, ...], Body], ...]
    line: int


@dataclass(frozen=True, slots=True)
class LoopCommand:
    """A loop: ``for`` over words (None: the script's arguments; no variable: a counter's), or ``while`` and ``until``."""

    kind: str
    variable: str
    words: tuple[str, ...] | None
    condition: Body
    body: Body
    line: int


@dataclass(frozen=True, slots=True)
class GroupCommand:
    """Commands in braces, or in parentheses, which change no variable outside."""

    body: Body
    subshell: bool
    line: int


@dataclass(frozen=True, slots=True)
class Function:
    """A function by its name."""

    name: str
    body: Body
    line: int


Node = Simple | Chain | Branches | Cases | LoopCommand | GroupCommand | Function
Body = tuple[Node, ...]


def parse(text: str) -> Body:
    """Return the commands of a script. Raises Unreadable: naming the line, where branches or loops do not close."""
    return _Parser(_CONTINUED.sub(_JOINT, text)).script()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0
        self.here: list[tuple[str, bool]] = []  # here-documents that begin behind this line

    def script(self) -> Body:
        body = self.body()
        if self.at < len(self.text):
            raise self.unreadable()
        return body

    @property
    def line(self) -> int:
        return 1 + self.text.count("\n", 0, self.at) + self.text.count(_JOINT, 0, self.at)

    def unreadable(self) -> Unreadable:
        return Unreadable(f"line {self.line}: {self.text[self.at : self.at + 40].split(chr(10))[0].strip()!r}")

    def body(self, *ends: str) -> Body:
        """Commands up to one of the words that end them, which stays."""
        found: list[Node] = []
        while True:
            self.blanks("\n;")
            word = self.peek()
            if self.at >= len(self.text) or self.text[self.at] == ")" or self.text.startswith(";;", self.at) or word in ends:
                return tuple(found)
            if word in _CLOSING and ends:
                raise self.unreadable()
            found.append(self.chain())
            self.blanks()
            if self.text.startswith("&", self.at):
                self.at += 1

    def chain(self) -> Node:
        line, first = self.line, self.command()
        rest: list[tuple[str, Node]] = []
        while True:
            self.blanks()
            operator = _OPERATOR.match(self.text, self.at)
            if operator is None or operator[0] not in ("&&", "||", "|", "|&"):
                return Chain(first, tuple(rest), line) if rest else first
            self.at = operator.end()
            self.blanks("\n")
            rest.append((operator[0][:2] if operator[0] != "|&" else "|", self.command()))

    def command(self) -> Node:
        line, word = self.line, self.peek()
        self.depth += 1
        if self.depth > _MOST_NESTED:
            raise self.unreadable()
        try:
            return self.compound(word, line) or self.simple(line)
        finally:
            self.depth -= 1

    def compound(self, word: str, line: int) -> Node | None:
        if word == "if":
            return self.branches(line)
        if word == "case":
            return self.cases(line)
        if word in ("for", "while", "until", "select"):
            return self.loop(word, line)
        if word == "{" or (self.text.startswith("(", self.at) and not self.text.startswith("((", self.at)):
            self.at += 1
            body = self.body("}") if word == "{" else self.body()
            self.expect("}" if word == "{" else ")")
            return GroupCommand(body, word != "{", line)
        function = _FUNCTION.match(self.text, self.at)
        if function is not None:
            self.at = function.end()
            self.blanks("\n")
            return Function(function[1] or function[2], (self.command(),), line)
        return None

    def branches(self, line: int) -> Node:
        found: list[tuple[Body, Body]] = []
        self.expect("if")
        while True:
            condition = self.body("then")
            self.expect("then")
            found.append((condition, self.body("elif", "else", "fi")))
            if self.peek() != "elif":
                break
            self.expect("elif")
        otherwise: Body = ()
        if self.peek() == "else":
            self.expect("else")
            otherwise = self.body("fi")
        self.expect("fi")
        return Branches(tuple(found), otherwise, line)

    def cases(self, line: int) -> Node:
        self.expect("case")
        self.blanks()
        word = self.word()
        self.blanks("\n")
        self.expect("in")
        found: list[tuple[tuple[str, ...], Body]] = []
        while True:
            self.blanks("\n")
            if self.peek() == "esac":
                self.expect("esac")
                return Cases(word, tuple(found), line)
            patterns: list[str] = []
            while True:
                self.blanks("(")
                patterns.append(self.word())
                self.blanks()
                if not self.text.startswith("|", self.at):
                    break
                self.at += 1
            self.expect(")")
            found.append((tuple(patterns), self.body("esac")))
            operator = _OPERATOR.match(self.text, self.at)
            if operator is not None and operator[0].startswith(";"):
                self.at = operator.end()

    def loop(self, kind: str, line: int) -> Node:
        self.expect(kind)
        variable = ""
        words: tuple[str, ...] | None = None
        condition: Body = ()
        if kind in ("while", "until"):
            condition = self.body("do")
        else:
            self.blanks()
            if self.text.startswith("((", self.at):
                self.at = _closed(self.text, self.at, "(", ")")
                words = ("$((counter))",)
            else:
                variable = self.word()
                self.blanks("\n")
                if self.peek() == "in":
                    self.expect("in")
                    words = self.simple(line).words
        self.blanks("\n;")
        self.expect("do")
        body = self.body("done")
        self.expect("done")
        return LoopCommand(kind, variable, words, condition, body, line)

    def simple(self, line: int) -> Simple:
        """Words up to the end of the command; what stands behind a redirection is none of them."""
        if self.text.startswith("((", self.at):
            start, self.at = self.at, _closed(self.text, self.at, "(", ")")
            return Simple(("((", self.text[start + 2 : self.at - 2]), line)
        words: list[str] = []
        start = self.at
        while True:
            self.blanks()
            redirected = _REDIRECTION.match(self.text, self.at)
            if redirected is not None:
                self.at = redirected.end()
                self.blanks()
                target = self.word()
                if redirected[0].lstrip("0123456789") in ("<<", "<<-"):
                    self.here.append((re.sub(r"['\"\\]", "", target), redirected[0].endswith("-")))
                continue
            if words[:1] == ["[["] and words[-1] != "]]" and self.at < len(self.text) and self.text[self.at] in "()<>&|":
                operator = _OPERATOR.match(self.text, self.at)
                words.append(operator[0] if operator else self.text[self.at])
                self.at += len(words[-1])
                continue
            word = self.word()
            if not word:
                if self.at == start and self.at < len(self.text):
                    if self.text[self.at] in "\n;)":
                        return Simple((), line)
                    raise self.unreadable()
                return Simple(tuple(words), line)
            words.append(word)

    def word(self) -> str:
        start = self.at
        self.at = word_end(self.text, self.at)
        return self.text[start : self.at].replace(_JOINT, "")

    def peek(self) -> str:
        return self.text[self.at : word_end(self.text, self.at)] if self.at < len(self.text) else ""

    def expect(self, word: str) -> None:
        self.blanks("\n;" if word not in (")", "in") else "\n")
        if not self.text.startswith(word, self.at):
            raise self.unreadable()
        self.at += len(word)

    def blanks(self, more: str = "") -> None:
        """Pass blanks, comments, and what `more` names; here-documents end with the line on which they are named."""
        while self.at < len(self.text):
            one = self.text[self.at]
            if one == "#":
                ends = [at for at in (self.text.find("\n", self.at), self.text.find(_JOINT, self.at)) if at >= 0]
                self.at = min(ends, default=len(self.text))
                if self.text.startswith(_JOINT, self.at):  # a comment's backslash joins nothing
                    self.text = f"{self.text[: self.at]}\n{self.text[self.at + 1 :]}"
            elif self.text.startswith(";;", self.at) or one not in _BLANKS + more:
                return
            elif one == "\n" and self.here:
                self.at += 1
                self.pass_documents()
            else:
                self.at += 1

    def pass_documents(self) -> None:
        for ending, indented in self.here:
            blank = r"[ \t]*" if indented else ""
            end = re.compile(rf"^{blank}{re.escape(ending)}[ \t\r]*$", re.MULTILINE).search(self.text, self.at)
            self.at = len(self.text) if end is None else end.end()
        self.here = []


def word_end(text: str, at: int) -> int:
    """Return where the word that begins here ends: at a blank or an operator outside quotes and substitutions."""
    array = _ARRAY.match(text, at)
    if array is not None:
        return _closed(text, array.end() - 1, "(", ")")
    while at < len(text):
        one = text[at]
        if one in "<>" and text.startswith("(", at + 1):
            at = _closed(text, at + 1, "(", ")")
        elif one in _BREAKS:
            return at
        else:
            at = part_end(text, at)
    return at


def part_end(text: str, at: int) -> int:
    """Return the end of a character, a quoted text or a substitution."""
    one, following = text[at], text[at + 1 : at + 2]
    if one == "\\":
        return min(at + 2, len(text))
    if one == "'" or (one == "$" and following == "'"):
        start = at + len(one if one == "'" else "$'")
        end = text.find("'", start)
        inside_a_word = text[at - 1 : at].isalpha() and following.isalpha() and "\n" in text[start:end]
        return at + 1 if end < 0 or text.count("\n", start, end) > _MOST_QUOTED or inside_a_word else end + 1
    if one in '"`':
        end = at + 1
        while end < len(text) and text[end] != one:
            end = end + 2 if text[end] == "\\" else part_end(text, end) if one == '"' and text[end] == "$" else end + 1
        return at + 1 if end >= len(text) or text.count("\n", at, end) > _MOST_QUOTED else end + 1
    if one == "$" and following and following in "({[":
        return _closed(text, at + 1, following, {"(": ")", "{": "}", "[": "]"}[following])
    return at + 1


@lru_cache(maxsize=1 << 14)
def _closed(text: str, at: int, opening: str, closing: str) -> int:
    """Return where a bracket that opens here is closed; the end of its line where it is not.

    Each place is searched once: a bracket that is not closed is searched to the text's end, and so are those behind it, again
    by each that is before them.
    """
    depth, start = 0, at
    while at < len(text):
        one = text[at]
        if one == "#" and opening == "(" and text[at - 1] in " \t\n" + _JOINT:
            at = min(end for end in (text.find("\n", at), text.find(_JOINT, at), len(text)) if end >= 0)
            continue
        depth += (one == opening) - (one == closing)
        if depth == 0:
            return at + 1
        at = part_end(text, at) if one in "\\'\"`" or (one == "$" and opening != "[") else at + 1
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def every(body: Body) -> Iterator[Node]:
    """Yield each command, those within others too."""
    for node in body:
        yield node
        if isinstance(node, Chain):
            yield from every((node.first, *(one for _, one in node.rest)))
        elif isinstance(node, Branches):
            for condition, one in node.branches:
                yield from every((*condition, *one))
            yield from every(node.otherwise)
        elif isinstance(node, Cases):
            for _, one in node.cases:
                yield from every(one)
        elif isinstance(node, LoopCommand):
            yield from every((*node.condition, *node.body))
        elif isinstance(node, GroupCommand | Function):
            yield from every(node.body)


def in_order(body: Body) -> Iterator[Node]:
    """Yield commands that run one after the other, those behind ``&&`` among them; others as they are."""
    for node in body:
        if isinstance(node, Chain) and all(operator == "&&" for operator, _ in node.rest):
            yield from (node.first, *(one for _, one in node.rest))
        else:
            yield node


def is_test(node: Node) -> bool:
    """Whether a command is a test or a comparison."""
    return isinstance(node, Simple) and node.words[:1] in (("[",), ("[[",), ("test",), ("((",))


def exits(node: Node) -> bool:
    """Whether a command only ends the script or tells something."""
    if isinstance(node, GroupCommand):
        return all(exits(one) for one in node.body)
    return isinstance(node, Simple) and node.words[:1] in (("exit",), ("return",), ("true",), (":",), ("echo",))


def leaves(body: Body) -> bool:
    """Whether commands leave a loop, or a round of it."""
    return any(isinstance(node, Simple) and node.words[:1] in (("break",), ("continue",)) for node in every(body))
