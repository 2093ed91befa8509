"""One line on standard error that renews itself while a verb works, where that is a terminal."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from zeroplan.core.plumbing.progress import watch

if TYPE_CHECKING:
    from threading import Timer

#: Seconds of work before the line appears.
PATIENCE = 1.0


class ProgressLine:
    """Draws what :func:`zeroplan.core.plumbing.progress.working` says, from `patience` seconds on, until it is closed."""

    def __init__(self, patience: float = PATIENCE, console: Any = None) -> None:
        self._patience, self._console = patience, console
        from threading import Lock  # here, since a start without a terminal needs none

        self._lock = Lock()
        self._timer: Timer | None = None
        self._said: tuple[str, int, int] = ("", 0, 0)
        self._drawn: Any = None  # rich's Progress, imported when the line appears
        self._task: Any = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Take the latest word."""
        with self._lock:
            self._said = (what, done, total)
            if self._timer is None:
                from threading import Timer

                self._timer = Timer(self._patience, self._appear)
                self._timer.daemon = True
                self._timer.start()
            if self._drawn is not None:
                self._draw()

    def close(self) -> None:
        """Take the line away; a word after that brings it back."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._drawn is not None:
                self._drawn.stop()
                self._drawn = None

    def _appear(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        with self._lock:
            if self._timer is None:  # closed in the meantime
                return
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(20), TimeElapsedColumn())
            console = self._console or Console(stderr=True)
            self._drawn = Progress(
                *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False, refresh_per_second=8
            )
            self._task = self._drawn.add_task("", total=None)
            self._draw()
            self._drawn.start()

    def _draw(self) -> None:
        what, done, total = self._said
        self._drawn.update(self._task, description=what[:48], completed=done, total=total or None)


_line: ProgressLine | None = None


def begin() -> None:
    """Show progress from now on, if standard error is a terminal that can renew a line."""
    global _line
    if sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        _line = ProgressLine()
        watch(_line)


def pause() -> None:
    """Take the line away, for something else to be printed."""
    if _line is not None:
        _line.close()


def end() -> None:
    """Show no more progress."""
    pause()
    watch(None)
