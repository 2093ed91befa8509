"""The captured process: ``python -m zeroplan.capturing.child JOB.json`` sets all up, runs the script, writes the answer."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from zeroplan.capturing import guards, result
from zeroplan.capturing.machine import Job, PlannedCard, World


def _job(path: str) -> Job:
    held = json.loads(Path(path).read_text(encoding="utf-8"))
    card, world = held.pop("card"), held.pop("world")
    card["capability"] = tuple(card["capability"])
    held["samples"] = None if held.get("samples") is None else tuple(held["samples"])
    held["arguments"], held["launch_words"] = tuple(held["arguments"]), tuple(held["launch_words"])
    return Job(card=PlannedCard(**card), world=World(**world), **held)


def main() -> None:
    """Run the job."""
    job = _job(sys.argv[1])
    os.environ.update(guards.ENVIRONMENT)
    os.environ.update(job.environment)
    temporary = os.path.join(job.folder, "tmp")
    os.makedirs(temporary, exist_ok=True)
    os.environ["TMPDIR"] = temporary
    os.environ["HF_MODULES_CACHE"] = os.path.join(temporary, "modules")  # imports see the disk itself
    if job.launched:
        from zeroplan.capturing.launchers import process_group

        os.environ.update(process_group(job))
    _hide_gpus()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(str(one) for one in range(job.gpus)))
    began = time.monotonic()
    captured = Session(job).run()
    captured.seconds = time.monotonic() - began
    result.write(captured, job.answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries' threads and exit handlers have nothing left to do


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
        from zeroplan.capturing.hooks import data_files
        from zeroplan.capturing.session import install, running
        from zeroplan.capturing.state import Capture

        capture = Capture(self.job)
        install(capture)
        if self.job.launcher == "accelerate":
            self._by_accelerate()
        name = self.job.target
        if not self.job.module:
            sys.path[0] = os.path.dirname(os.path.abspath(name))
        else:
            sys.path[0] = os.getcwd()
        sys.argv = [name, *self.job.arguments]
        data_files.install(capture)
        with running(capture):
            if self.job.module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            elif name.endswith(".ipynb"):
                _run_notebook(name)
            else:
                runpy.run_path(name, run_name="__main__")
        return capture.captured()

    def _by_accelerate(self) -> None:
        from zeroplan.capturing.launchers import by_accelerate, process_group

        found, grouped = by_accelerate(self.job.launch_words)
        os.environ.update(found)
        if grouped:
            os.environ.update(process_group(self.job))


def _run_notebook(path: str) -> None:
    """Run a notebook's cells as one script; lines for a shell or of magic are left out."""
    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {"__name__": "__main__", "__file__": path}
    for number, cell in enumerate(cells, 1):
        if cell.get("cell_type") != "code":
            continue
        lines = "".join(cell["source"]).splitlines()
        text = "\n".join("pass" if line.lstrip()[:1] in ("!", "%") else line for line in lines)
        exec(compile(text, f"{path}[{number}]", "exec"), names)


if __name__ == "__main__":
    main()
