"""The line of the person's own code that runs now."""

from __future__ import annotations

import sys
import sysconfig
from typing import Any, NamedTuple

_HERE = __file__.rpartition("/")[0].rpartition("/")[0]
_LIBRARIES = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
#: Parts of the paths of torch's own files that stand between a script and an operator.
_WAYS_TO_OPERATORS = ("/torch/_", "/torch/overrides.py", "/torch/utils/_")


class CodeLine(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def is_users(file: str) -> bool:
    """Return whether a file is neither an installed package's, nor Python's, nor ours."""
    return not file.startswith(("<", _HERE, *_LIBRARIES)) and "site-packages" not in file


def user_line() -> CodeLine | None:
    """The innermost line of the person's code; that of the outermost library where none of theirs runs."""
    frame: Any = sys._getframe(1)
    last: CodeLine | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return CodeLine(file, frame.f_lineno)
        if not file.startswith(("<", _HERE)):
            last = CodeLine(file, frame.f_lineno)
        frame = frame.f_back
    return last


def deciding_line() -> CodeLine | None:
    """The innermost line, the person's or a library's, of what reads a value; torch's ways to its operators are passed by."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", _HERE)) and not any(part in file for part in _WAYS_TO_OPERATORS):
            return CodeLine(file, frame.f_lineno)
        frame = frame.f_back
    return None


def trouble_line(error: BaseException) -> CodeLine | None:
    """The innermost line of the person's code in an exception's traceback; the innermost of all where none is theirs."""
    found = last = None
    trace = error.__traceback__
    while trace is not None:
        at = CodeLine(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        if is_users(at.file):
            found = at
        elif not at.file.startswith(("<", _HERE)):
            last = at
        trace = trace.tb_next
    return found or last
