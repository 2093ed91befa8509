"""A lock by which ranks notice that the process that launched them is gone, however it ended.

The launcher holds it as long as it lives; the kernel releases it then, also after SIGKILL, of which nobody else is told. Each
rank waits for it in a thread of its own. torchrun, in a session of its own so that Ctrl-C reaches the launcher alone, ends with
its ranks.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from pathlib import Path
from typing import BinaryIO

from zeroplan.validate.run_folder import LIFELINE

#: The exit code of ranks that nobody waits for.
EXIT_ALONE = 9


def hold(folder: Path) -> BinaryIO:
    """Take the folder's lock; it is held until the file is closed, or this process ends."""
    file = (folder / LIFELINE).open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def end_with_launcher(folder: Path) -> None:
    """End this process, and remove the folder, once nobody holds the folder's lock."""
    threading.Thread(target=_wait, args=(folder,), daemon=True, name="lifeline").start()


def _wait(folder: Path) -> None:
    with (folder / LIFELINE).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(EXIT_ALONE)
