"""The captured process: ``python -m zeroplan.capturing.child JOB.json`` sets all up, runs the script, writes the answer."""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from zeroplan.capturing import guards, landlock, result
from zeroplan.capturing.machine import Job, PlannedCard, World

#: Seconds beyond its time after which a script is stopped wherever it is.
_LATE = 5.0


def _job(path: str) -> Job:
    held = json.loads(Path(path).read_text(encoding="utf-8"))
    card, world = held.pop("card"), held.pop("world")
    card["capability"] = tuple(card["capability"])
    held["samples"] = None if held.get("samples") is None else tuple(held["samples"])
    held["arguments"], held["launch_words"] = tuple(held["arguments"]), tuple(held["launch_words"])
    return Job(card=PlannedCard(**card), world=World(**world), **held)


def main() -> None:
    """Run the job."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the script runs: Ctrl-C reaches the command as well, which ends by it
    job = _job(sys.argv[1])
    landlock.forbid_writes(os.path.realpath(job.folder))
    os.environ.update(guards.ENVIRONMENT)
    os.environ.update(job.environment)
    temporary = os.path.join(job.folder, "tmp")
    os.makedirs(temporary, exist_ok=True)
    os.environ["TMPDIR"] = temporary
    os.environ["HF_MODULES_CACHE"] = os.path.join(temporary, "modules")  # imports see the disk itself
    if job.launched:
        from zeroplan.capturing.launchers import process_group

        os.environ.update(process_group(job))
    if job.launcher == "srun":
        from zeroplan.capturing.launchers import slurm

        os.environ.update(slurm(job))
    _hide_gpus()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(str(one) for one in range(job.gpus)))
    leave = os._exit
    died = open(job.fault, "w", encoding="utf-8")  # noqa: SIM115 (Python writes to it as it dies)
    faulthandler.enable(died)
    began = time.monotonic()
    captured = Session(job).run()
    captured.seconds = time.monotonic() - began
    try:
        result.write(captured, job.answer)
    except OSError as error:
        leave(error.errno or 1)
    sys.stdout.flush()
    sys.stderr.flush()
    leave(0)  # libraries' threads and exit handlers have nothing left to do


def _ends_after(seconds: float) -> None:
    """Stop the script after that long where it does not come back to torch; what was learnt until then stays."""
    late = getattr(signal, "SIGRTMAX", signal.SIGVTALRM)  # macOS has no signals of one's own

    def stop(*_: Any) -> None:
        from zeroplan.capturing.recorder import StoppedError
        from zeroplan.capturing.source import user_line

        raise StoppedError(f"the script took longer than {seconds:.0f} s (--seconds)", user_line())

    signal.signal(late, stop)
    main = threading.get_ident()
    timer = threading.Timer(seconds + _LATE, lambda: signal.pthread_kill(main, late))
    timer.daemon = True
    timer.start()


def _hide_gpus() -> None:
    """Let torch count no GPU of this machine's, whatever the script is then shown: it counts once, and keeps the number."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    count: Any = getattr(torch._C, "_cuda_getDeviceCount", None)
    if count is not None:
        count()
    del os.environ["CUDA_VISIBLE_DEVICES"]
    if shown is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = shown


class Session:
    """One captured run."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def run(self) -> result.Captured:
        """Set up, run the script, and return what was captured."""
        from zeroplan.capturing import loops, notebooks
        from zeroplan.capturing.hooks import data_files
        from zeroplan.capturing.session import install, running
        from zeroplan.capturing.state import Capture

        capture = Capture(self.job)
        install(capture)
        if self.job.launcher == "accelerate":
            self._by_accelerate()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        name = self.job.target
        sys.path.insert(0, os.getcwd() if self.job.module else os.path.dirname(os.path.abspath(name)))
        sys.argv = [name, *self.job.arguments]
        data_files.install(capture)
        loops.install()
        _ends_after(self.job.seconds)
        with running(capture):
            if self.job.module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            elif name.endswith(".ipynb"):
                notebooks.run(name)
            else:
                runpy.run_path(name, run_name="__main__")
        try:
            return capture.captured()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            why = f"what was recorded cannot be planned ({type(error).__name__}: {' '.join(str(error).split())[:160]})"
            return result.Captured(stopped=result.Stop(self.job.target, 0, why))

    def _by_accelerate(self) -> None:
        from zeroplan.capturing.launchers import by_accelerate, process_group

        found, grouped = by_accelerate(self.job.launch_words)
        os.environ.update(found)
        if grouped:
            os.environ.update(process_group(self.job))


if __name__ == "__main__":
    main()
