"""The line of the person's own code that runs now."""

from __future__ import annotations

import sys
import sysconfig
from typing import Any, NamedTuple

_HERE = __file__.rpartition("/")[0].rpartition("/")[0]
_LIBRARIES = tuple(sorted({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, key=len, reverse=True))
_PYTHON = sysconfig.get_path("stdlib")
#: Parts of the paths of torch's own files that stand between a script and an operator.
_WAYS_TO_OPERATORS = ("/torch/_", "/torch/overrides.py", "/torch/utils/_")


class CodeLine(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    @property
    def short(self) -> str:
        """Return it without the folder of installed packages."""
        return f"{next((self.file[len(one) + 1 :] for one in _LIBRARIES if self.file.startswith(one)), self.file)}:{self.line}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def is_users(file: str) -> bool:
    """Return whether a file is neither an installed package's, nor Python's, nor ours."""
    return not file.startswith(("<", _HERE, *_LIBRARIES)) and "site-packages" not in file


def callers_file() -> str:
    """The file of the innermost code, the person's or an installed package's: of an ``import`` or an ``open``, its caller."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file: str = frame.f_code.co_filename
        if not file.startswith(("<", _HERE)) and ("site-packages" in file or not file.startswith(_PYTHON)):
            return file
        frame = frame.f_back
    return ""


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


_is_torchs: dict[Any, bool] = {}


def asking_line() -> CodeLine | None:
    """The innermost line, of the person's or a library's, that asks torch for something: none of torch's own files."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        torchs = _is_torchs.get(code)
        if torchs is None:
            file = code.co_filename
            torchs = _is_torchs[code] = file.startswith(("<", _HERE)) or "/torch/" in file
        if not torchs:
            return CodeLine(code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def trouble_line(error: BaseException) -> CodeLine | None:
    """The innermost line of the person's code in an exception's traceback; the innermost of all where none is theirs."""
    if isinstance(error, SyntaxError) and error.filename and is_users(error.filename):
        return CodeLine(error.filename, error.lineno or 0)
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
