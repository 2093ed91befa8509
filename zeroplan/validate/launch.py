"""Starts ranks by torchrun, watches them, and collects their results. A rank that dies or hangs is reported as a line of text.

Note [Watching]
    Each rank writes a line to a file of its own whenever it begins something. The first rank's lines are shown as progress.
    When no rank has written for the timeout and a little more, the ranks furthest behind are named and the job is ended. The
    runtime's watchdog, or a collective's time limit, has usually reported more by then.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from zeroplan.validate.job import VerifyJob, ended_early
from zeroplan.validate.lifeline import hold
from zeroplan.validate.run_folder import BEAT, DEVICE, JOBS, RESULT

#: Called with a job's index and a line of text about what its first rank begins.
Progress = Callable[[int, str], None]
_POLL_SECONDS = 0.05
_WATCHDOG = "zeroplan_runtime: "
#: The launcher waits so much longer than the ranks themselves.
_PATIENCE_SECONDS = 20.0
#: The time that torchrun gets to end by itself.
_GRACE_SECONDS = 5.0

Results = dict[int, list[dict[str, Any]]]


class TorchrunLaunch:
    """One torchrun of `ranks` processes that run `jobs` in turn."""

    def __init__(self, jobs: Sequence[VerifyJob], ranks: int, device: str, progress: Progress, *, timeout: float) -> None:
        self.jobs, self.ranks, self.device = jobs, ranks, device
        self.progress, self.timeout = progress, timeout
        self._folder = tempfile.TemporaryDirectory(prefix="zeroplan-verify-")
        self.folder = Path(self._folder.name)
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: BinaryIO | None = None
        self._read = 0
        self.failure = ""

    def start(self) -> None:
        """Start the ranks, and return at once."""
        (self.folder / JOBS).write_text(json.dumps([job.to_json() for job in self.jobs]))
        (self.folder / DEVICE).write_text(self.device)
        self._lifeline = hold(self.folder)
        if self.jobs[0].live is not None:
            from zeroplan.validate.live import write_live

            write_live(self.folder, self.jobs[0].live)
        home = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH", "")])])
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // self.ranks))
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={self.ranks}"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost", "--max-restarts=0"]
        command += [f"--log-dir={self.folder / 'logs'}", "--redirects=3"]
        command += ["-m", "zeroplan.validate.rank.worker", str(self.folder)]
        with (self.folder / "torchrun.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads, "TORCHELASTIC_ERROR_FILE": ""},
                start_new_session=True,
            )

    def finish(self) -> Results:
        """Wait for the end, and return each job's results, of the ranks that have one. :attr:`failure` says what failed."""
        assert self._process is not None
        try:
            self._follow(self._process)
        finally:
            self._end(self._process)
        return self._results()

    def close(self) -> None:
        """End the ranks if they still run, and remove their files."""
        if self._process is not None:
            self._end(self._process)
        if self._lifeline is not None:
            self._lifeline.close()
        self._folder.cleanup()

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        size, since, early = -1, time.monotonic(), 0.0
        while process.poll() is None:
            time.sleep(_POLL_SECONDS)
            self._show_progress()
            if not early and any(ended_early(result) for results in self._results().values() for result in results):
                early = time.monotonic()
            if early and time.monotonic() - early > _GRACE_SECONDS:
                return  # that rank's result says why; torchrun would wait longer for the others
            written = sum(file.stat().st_size for file in self.folder.glob(BEAT.format(rank="*")))
            if written != size:
                size, since = written, time.monotonic()
            elif time.monotonic() - since > self.timeout + _PATIENCE_SECONDS:
                self.failure = self._who_hangs()
                return
        self._show_progress()
        if process.returncode:
            self.failure = self._why_ended()

    def _show_progress(self) -> None:
        beats = self._beats(0)
        for beat in beats[self._read :]:
            self.progress(beat["job"], beat["doing"])
        self._read = len(beats)

    def _beats(self, rank: int) -> list[dict[str, Any]]:
        file = self.folder / BEAT.format(rank=rank)
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def _who_hangs(self) -> str:
        """A line that names the ranks that are furthest behind, and what they were doing."""
        counts = {rank: len(self._beats(rank)) for rank in range(self.ranks)}
        stopped = [rank for rank, pid in self.pids().items() if _is_stopped(pid)]
        behind = stopped or [rank for rank, count in counts.items() if count == min(counts.values())]
        named = ", ".join(f"rank {rank}" for rank in behind)
        return f"{named} did not move for {self.timeout:g} s (last: {self._last(behind[0])})"

    def _last(self, rank: int) -> str:
        beats = self._beats(rank)
        return str(beats[-1]["doing"]) if beats else "starting"

    def _why_ended(self) -> str:
        """Describe the first failure in a line, from the runtime's watchdog or torchrun's log."""
        message = self._watchdog_message()
        if message:
            return message
        log = (self.folder / "torchrun.log").read_text(errors="replace")
        root = log[log.rfind("Root Cause") :] if "Root Cause" in log else log
        found = re.search(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", root, re.DOTALL)
        if found is None:
            lines = [line for line in log.splitlines() if line.strip()]
            return f"torchrun ended before the ranks did: {lines[-1][:200] if lines else 'it said nothing'}"
        rank, code = int(found[1]), int(found[2])
        return f"rank {rank} ended with {_exit(code)} (last: {self._last(rank)})"

    def _watchdog_message(self) -> str:
        """The message of the runtime's watchdog on any rank, which names the rank that hangs; empty if there is none."""
        for file in sorted(self.folder.glob("logs/**/stderr.log")):
            for line in file.read_text(errors="replace").splitlines():
                if line.startswith(_WATCHDOG):
                    return line.removeprefix(_WATCHDOG)
        return ""

    def _results(self) -> Results:
        found: Results = {}
        for index in range(len(self.jobs)):
            files = sorted(self.folder.glob(RESULT.format(job=index, rank="*")))
            found[index] = [json.loads(file.read_text()) for file in files]
        return found

    def pids(self) -> dict[int, int]:
        """The process ids of the ranks that have begun."""
        firsts = {rank: self._beats(rank)[:1] for rank in range(self.ranks)}
        return {rank: int(beats[0]["pid"]) for rank, beats in firsts.items() if beats}

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the ranks, since a stopped one would not end, then end torchrun."""
        if process.poll() is not None:
            return
        for pid in self.pids().values():
            if self._is_ours(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
        process.terminate()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _is_ours(self, pid: int) -> bool:
        """Return whether the process with that id is a rank of this launch."""
        try:
            return str(self.folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    except OSError:
        return False


def _exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"signal {name}" + (", as when the host's memory runs out" if name == "SIGKILL" else "")
