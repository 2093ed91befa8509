"""Whatever ends the process that launched ranks, none of them goes on, and none of their files stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from zeroplan.validate.lifeline import EXIT_ALONE

_BEGIN = "import pathlib, sys, time; from zeroplan.validate import lifeline; folder = pathlib.Path(sys.argv[1])"
_WAIT = "print(flush=True); time.sleep(600)"
LAUNCHER = f"{_BEGIN}; kept = lifeline.hold(folder); {_WAIT}"
RANK = f"{_BEGIN}; lifeline.end_with_launcher(folder); {_WAIT}"
ASKED = """
import os, signal, sys
from zeroplan.cli.main import _end_in_order
_end_in_order()
try:
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])
finally:
    print("in order")
"""


def begun(code: str, folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_rank_ends_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    launcher = begun(LAUNCHER, folder)
    rank = begun(RANK, folder)
    assert rank.poll() is None
    os.kill(launcher.pid, signal.SIGKILL)
    assert rank.wait(PATIENCE) == EXIT_ALONE
    assert not folder.exists()
    launcher.communicate()
    rank.communicate()


@pytest.mark.parametrize(("name", "ignored", "code"), [("SIGTERM", False, 143), ("SIGHUP", False, 129), ("SIGHUP", True, 0)])
def test_the_command_ends_in_order(name: str, ignored: bool, code: int) -> None:
    """``timeout`` sends SIGTERM, a closed terminal SIGHUP, which ``nohup`` has ignored."""
    words = ["sh", "-c", f"trap '' HUP; exec {sys.executable} -c \"$0\" {name}"] if ignored else [sys.executable, "-c"]
    words += [ASKED] if ignored else [ASKED, name]
    usual = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # also where these tests run under nohup
    ended = subprocess.run(words, capture_output=True, text=True, check=False, preexec_fn=usual)
    assert (ended.returncode, ended.stdout.strip()) == (code, "in order")
