"""Progress of a long piece of work, and the hook of whoever watches it.

Low layers call :func:`working`; nothing happens unless the command line, or a program of the user's, watches.
"""

from __future__ import annotations

from collections.abc import Callable

#: Called with what is being done, how much of it is done, and of how much (0: unknown).
Watcher = Callable[[str, int, int], None]

_watcher: Watcher | None = None


def watch(watcher: Watcher | None) -> None:
    """Let `watcher` be told of all work of this process from now on; None ends that."""
    global _watcher
    _watcher = watcher


def watched() -> bool:
    """Return whether anybody is told."""
    return _watcher is not None


def working(what: str, done: int = 0, total: int = 0) -> None:
    """Say what begins: ``working("simulating ZeRO-2", 3, 10)``."""
    if _watcher is not None:
        _watcher(what, done, total)
