"""Runs many specs within a time bound, several at once, a spec as soon as it fits.

``python -m benchmarks.measure.grid SPECS.jsonl --out DIR --seconds N [--jobs 4] [--gib 72] [--port P]``: rows go to
``DIR/rows.jsonl`` (a failed run gives ``{"id", "ok": false, "error", "spec"}``), histories, bundled
in tar files of at most 15 MiB, to ``DIR/SPECS-K.tar``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure.spec import Spec

_ROOT = Path(__file__).resolve().parents[2]
_BUNDLE_BYTES = 15 << 20


@dataclass
class Job:
    """A run under way."""

    spec: Spec
    process: subprocess.Popen[bytes]
    log: Path
    started: float
    shared: bool

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Grid:
    """Starts specs in order as room appears and collects what they write."""

    def __init__(self, specs: list[Spec], out: Path, *, jobs: int, gib: float, port: int) -> None:
        self.waiting, self.out, self.jobs, self.gib, self._port = list(specs), out, jobs, gib, port
        self.running: list[Job] = []
        self.scratch = Path(tempfile.mkdtemp(prefix="measure-"))
        out.mkdir(parents=True, exist_ok=True)

    def run(self, seconds: float) -> None:
        """Until all are done or ``seconds`` have passed."""
        end = time.monotonic() + seconds
        while (self.waiting or self.running) and time.monotonic() < end:
            self._start_some()
            time.sleep(0.2)
            self._collect()
        for job in self.running:
            job.kill()
            self._fail(job, "out of time")
        print("not started:", " ".join(s.id for s in self.waiting) or "none", flush=True)

    def _start_some(self) -> None:
        for spec in list(self.waiting):
            used = sum(job.spec.gib for job in self.running)
            if len(self.running) >= self.jobs or (self.running and used + spec.gib > self.gib):
                continue
            self.waiting.remove(spec)
            self._start(spec)

    def _start(self, spec: Spec) -> None:
        self._port += 1
        log = self.scratch / f"{spec.id}.log"
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += [f"--nproc_per_node={spec.world}", f"--master_port={self._port}"]
        command += ["-m", "benchmarks.measure.worker", json.dumps(spec.to_dict())]
        command += [str(self.scratch / f"{spec.id}.row"), str(self.scratch / f"{spec.id}.json.gz")]
        threads = max(1, (os.cpu_count() or 1) // (self.jobs * spec.world))
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"} | spec.env
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        for other in self.running:
            other.shared = True
        self.running.append(Job(spec, process, log, time.monotonic(), bool(self.running)))

    def _collect(self) -> None:
        for job in list(self.running):
            late = time.monotonic() - job.started > job.spec.limit
            if job.process.poll() is None and not late:
                continue
            job.kill()
            self.running.remove(job)
            row_file = self.scratch / f"{job.spec.id}.row"
            if not row_file.exists():
                self._fail(job, "too slow" if late else "failed")
                continue
            row = json.loads(row_file.read_text())
            row["shared_gpu"] = job.shared
            if job.shared:
                _attribute_nvml(row)
            self._write(row)
            print(_summary(row), f"{time.monotonic() - job.started:.0f}s", flush=True)

    def _fail(self, job: Job, reason: str) -> None:
        text = job.log.read_text(errors="replace")
        if "out of memory" in text:
            reason = "out of memory"
        self._write({"id": job.spec.id, "ok": False, "error": reason, "spec": job.spec.to_dict()})
        lines = [line for line in text.splitlines() if "Error" in line or "error:" in line]
        print(job.spec.id, reason.upper(), *lines[-4:], sep=" | ", flush=True)
        (self.out / "failures.txt").open("a").write(f"==== {job.spec.id}\n{text[-4000:]}\n")

    def _write(self, row: dict[str, Any]) -> None:
        with (self.out / "rows.jsonl").open("a") as rows:
            rows.write(json.dumps(row) + "\n")

    def bundle(self, stem: str) -> None:
        """Tar the histories, the files already compressed, in pieces that stay small."""
        piece, room = -1, 0
        for path in sorted(self.scratch.glob("*.json.gz"), key=lambda p: p.stat().st_mtime):
            size = path.stat().st_size + 2048
            if size > room:
                piece, room = piece + 1, _BUNDLE_BYTES
            room -= size
            with tarfile.open(self.out / f"{stem}-{piece}.tar", "a") as tar:
                tar.add(path, path.name)


def _attribute_nvml(row: dict[str, Any]) -> None:
    """Take what NVML attributes to each rank's process, and nothing where it cannot tell: on a shared GPU a difference of the
    device's figures means nothing.
    """
    for key, source in (("nvml_used", "nvml_process"), ("cuda_context", "context_process")):
        values = [rank[source] for rank in row["per_rank"]]
        row[key] = None if None in values else max(values)


def _summary(row: dict[str, Any]) -> str:
    gib = 1 << 30
    text = f"{row['id']} alloc {row['peak_allocated'] / gib:.3f}"
    text += f" res {row['peak_reserved'] / gib:.3f} nvml {(row['nvml_used'] or 0) / gib:.2f}"
    if "history_events" in row:
        text += f" events {row['history_events']} problems {row['history_problems'][:2]}"
    return text + f" {row['optimizer']}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--gib", type=float, default=72)
    parser.add_argument("--port", type=int, default=29600, help="another for a grid beside this")
    args = parser.parse_args()
    lines = args.specs.read_text().splitlines()
    specs = [Spec.from_dict(json.loads(line)) for line in lines if line.strip()]
    grid = Grid(specs, args.out, jobs=args.jobs, gib=args.gib, port=args.port)
    grid.run(args.seconds)
    grid.bundle(args.specs.stem)


if __name__ == "__main__":
    main()
