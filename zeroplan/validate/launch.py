"""Starts ranks by torchrun, follows them, and collects what they measured. A rank that dies or hangs becomes a line of text.

Note [Following]
    Each rank writes a line to a file of its own whenever it begins something. The first rank's lines are the progress shown.
    When no rank has written for the timeout, those furthest behind are named and the job is ended.
"""

from __future__ import annotations

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
from typing import Any

from zeroplan.validate.job import Job

#: Called with a job's index and what its first rank is doing.
Progress = Callable[[int, str], None]
_POLL_SECONDS = 0.05
#: After the first rank has ended early, the others get so long to write what they have.
_GRACE_SECONDS = 10.0

Results = dict[int, list[dict[str, Any]]]


class Launch:
    """One torchrun of `ranks` processes that run `jobs` in turn."""

    def __init__(self, jobs: Sequence[Job], ranks: int, device: str, progress: Progress, *, timeout: float) -> None:
        self.jobs, self.ranks, self.device = jobs, ranks, device
        self.progress, self.timeout = progress, timeout
        self._folder = tempfile.TemporaryDirectory(prefix="zeroplan-verify-")
        self.folder = Path(self._folder.name)
        self._process: subprocess.Popen[bytes] | None = None
        self._read = 0
        self.failure = ""

    def start(self) -> None:
        """Start the ranks; returns at once."""
        (self.folder / "jobs.json").write_text(json.dumps([job.to_json() for job in self.jobs]))
        (self.folder / "device").write_text(self.device)
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
        """Wait for the end; results by job, each with as many ranks as had one. :attr:`failure` says what went wrong."""
        assert self._process is not None
        try:
            self._follow(self._process)
        finally:
            self._end(self._process)
        return self._results()

    def close(self) -> None:
        """End the ranks if they run, and remove their files."""
        if self._process is not None:
            self._end(self._process)
        self._folder.cleanup()

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        size, since = -1, time.monotonic()
        while process.poll() is None:
            time.sleep(_POLL_SECONDS)
            self._show_progress()
            written = sum(file.stat().st_size for file in self.folder.glob("beat-*.jsonl"))
            if written != size:
                size, since = written, time.monotonic()
            elif time.monotonic() - since > self.timeout:
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
        file = self.folder / f"beat-{rank}.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def _who_hangs(self) -> str:
        """The ranks that did the least, with what they were doing."""
        counts = {rank: len(self._beats(rank)) for rank in range(self.ranks)}
        behind = [rank for rank, count in counts.items() if count == min(counts.values())]
        named = ", ".join(f"rank {rank}" for rank in behind)
        return f"{named} did not move for {self.timeout:g} s (last: {self._last(behind[0])})"

    def _last(self, rank: int) -> str:
        beats = self._beats(rank)
        return str(beats[-1]["doing"]) if beats else "starting"

    def _why_ended(self) -> str:
        """What torchrun, or a rank's own result, says of the first failure."""
        log = (self.folder / "torchrun.log").read_text(errors="replace")
        root = log[log.rfind("Root Cause") :] if "Root Cause" in log else log
        found = re.search(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", root, re.DOTALL)
        if found is None:
            lines = [line for line in log.splitlines() if line.strip()]
            return f"torchrun ended before the ranks did: {lines[-1][:200] if lines else 'it said nothing'}"
        rank, code = int(found[1]), int(found[2])
        return f"rank {rank} ended with {_exit(code)} (last: {self._last(rank)})"

    def _results(self) -> Results:
        found: Results = {}
        for index in range(len(self.jobs)):
            files = sorted(self.folder.glob(f"result-{index}-*.json"))
            found[index] = [json.loads(file.read_text()) for file in files]
        return found

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End torchrun and, should they outlive it, the ranks, which are in sessions of their own."""
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"signal {name}" + (", as when the host's memory runs out" if name == "SIGKILL" else "")
