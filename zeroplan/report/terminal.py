"""The abilities of a terminal: how long its lines are, and whether it shows colours."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from zeroplan.report.wrap import wrap

#: Lines are no longer than this, however wide the terminal: longer ones are hard to read.
MOST_COLUMNS = 120
_FEWEST_COLUMNS = 40


@dataclass(frozen=True, slots=True)
class Terminal:
    """The place that text goes to.

    Attributes:
        width: the most characters of a line; None for lines of any length.
        colour: whether it shows colours.
        full: whether an answer shows all that it has, and not its first screen alone.
    """

    width: int | None = 80
    colour: bool = False
    full: bool = True

    @classmethod
    def here(cls, *, wide: bool = False, why: bool = True) -> Terminal:
        """The terminal that standard output goes to: its width (80 if it is none), in colour unless ``NO_COLOR`` is set."""
        import os
        import shutil
        import sys

        shows = sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        columns = shutil.get_terminal_size((80, 24)).columns
        width = None if wide else min(max(columns, _FEWEST_COLUMNS), MOST_COLUMNS)
        return cls(width, shows and not os.environ.get("NO_COLOR"), wide or why)

    def wrap(self, text: str, *, indent: str = "", hang: str = "  ") -> list[str]:
        """Return the text in lines: the first begins with `indent`, the others with `hang`."""
        if self.width is None:
            return [indent + text]
        return wrap(text, self.width, indent=indent, hang=hang)

    def command(self, before: str, words: Sequence[str]) -> list[str]:
        """Return a shell command in lines that a shell reads as one: all but the last end with a backslash."""
        return self._continued(before, [shlex.quote(word) for word in words])

    def shell(self, before: str, command: str) -> list[str]:
        """Return a command that is quoted already, as :meth:`command` does."""
        words: list[str] = []
        for word in shlex.split(command, posix=False):
            if words and words[-1].count("(") > words[-1].count(")"):  # what the shell computes stays in one piece
                words[-1] += f" {word}"
            else:
                words.append(word)
        return self._continued(before, words)

    def _continued(self, before: str, quoted: Sequence[str]) -> list[str]:
        lines, line = [], before + quoted[0]
        for part in _with_values(quoted):
            if self.width is not None and len(line) + len(part) + 3 > self.width:
                lines.append(line + " \\")
                line = "   "
            line += f" {part}"
        return [*lines, line]

    def items(self, texts: Sequence[str], mark: str = "- ") -> list[str]:
        """Return one item for each text, in lines."""
        return [line for text in texts for line in self.wrap(text, indent=mark, hang=" " * len(mark))]

    def verdict(self, text: str, good: bool | None) -> list[str]:
        """Return an answer's first sentence in lines, its words up to the colon in bold: green, red or, for None, neither."""
        first, *others = self.wrap(text)
        head, colon, rest = first.partition(":")
        paint = self.bold if good is None else self.good if good else self.bad
        return [f"{paint(head + colon)}{rest}", *others]

    def judged(self, table: str, cells: Sequence[tuple[str, bool | None]]) -> str:
        """Return a table with its headers in bold, and in colour the last cell of each row: its text, and whether that is good.

        A row that goes on below stays as it is.
        """
        lines = table.splitlines()
        if not self.colour:
            return table
        for at, (cell, good) in enumerate(cells, len(lines) - len(cells)):
            if good is not None and lines[at].endswith(cell):
                lines[at] = lines[at].removesuffix(cell) + (self.good(cell) if good else self.bad(cell))
        return "\n".join([self.bold(lines[0]), *lines[1:]])

    def good(self, text: str) -> str:
        """Return the text in bold green."""
        return self._styled(text, fg="green", bold=True)

    def bad(self, text: str) -> str:
        """Return the text in bold red."""
        return self._styled(text, fg="red", bold=True)

    def bold(self, text: str) -> str:
        """Return the text in bold."""
        return self._styled(text, bold=True)

    def dim(self, text: str) -> str:
        """Return the text in a colour that steps back."""
        return self._styled(text, dim=True)

    def _styled(self, text: str, **style: object) -> str:
        if not self.colour or not text:
            return text
        from typer import style as styled

        return str(styled(text, **style))  # type: ignore[arg-type]


def _with_values(words: Sequence[str]) -> list[str]:
    """Return the words after the first, each option together with its value."""
    parts: list[str] = []
    for word in words[1:]:
        if parts and parts[-1].startswith("-") and " " not in parts[-1] and not word.startswith("-"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    return parts


#: Text that goes to no terminal in particular.
PLAIN = Terminal()
