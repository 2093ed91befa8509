"""A rank's process: ``python -m zeroplan.validate.rank.worker FOLDER``, started by torchrun.

Reads ``jobs.json`` in the folder, runs the jobs one after another, and writes ``result-JOB-RANK.json`` for each. For each thing
that it begins it adds a line to ``beat-RANK.jsonl``, by which the launcher sees that it is alive.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.files import write_atomic
from zeroplan.engines.registry import load_engine
from zeroplan.validate.job import VerifyJob, ended_early
from zeroplan.validate.lifeline import end_with_launcher
from zeroplan.validate.run_folder import BEAT, DEVICE, JOBS, MODULE, RESULT

#: The exit code of a rank whose run ended early, whose result says why.
EXIT_EARLY = 70


class Heartbeat:
    """Writes what this rank is doing to a file, which the launcher reads."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / BEAT.format(rank=rank)).open("a", buffering=1)
        self.job = 0

    def say(self, text: str) -> None:
        """Write one line."""
        self._file.write(json.dumps({"job": self.job, "pid": os.getpid(), "doing": text}) + "\n")


def join(job: VerifyJob, device: str, local_rank: int) -> Any:
    """Make the first CUDA call, join the other ranks, and return this rank's :class:`RankDevice`."""
    import torch.distributed as dist

    from zeroplan.validate.rank.probe import RankDevice

    place = RankDevice.of(device, local_rank)
    if not dist.is_initialized():
        longest = timedelta(seconds=job.timeout)
        if device == "cuda":
            bound = place.device if load_engine(job.engine_path).binds_device else None
            dist.init_process_group("nccl", device_id=bound, timeout=longest)
        else:
            dist.init_process_group("gloo", timeout=longest)
    return place


def run_here(job: VerifyJob, place: Any, say: Any) -> dict[str, Any]:
    """Run one job on this rank and return its result, which may be an error."""
    from zeroplan.validate.rank.run import run_job, this_rank

    try:
        return run_job(job, place, say)
    except Exception as error:
        traceback.print_exc()
        return {"rank": this_rank(), **_refused(error)}


def _jobs(folder: Path) -> list[VerifyJob]:
    jobs = [VerifyJob.from_json(values) for values in json.loads((folder / JOBS).read_text())]
    if not (folder / MODULE).exists():
        return jobs
    from zeroplan.validate.live import read_live

    live = read_live(folder)
    return [replace(job, live=live) for job in jobs]


def _refused(error: Exception) -> dict[str, Any]:
    if isinstance(error, BadInput):
        return {"bad_input": {"what": error.what, "where": error.where, "remedy": error.remedy}}
    text = str(error).strip().splitlines() or [""]
    return {"error": f"{type(error).__name__}: {text[0][:300]}"}


def main(folder: Path) -> None:
    """Run the jobs in order, until one fails."""
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    end_with_launcher(folder)
    beat = Heartbeat(folder, rank)
    beat.say("importing torch")
    device = (folder / DEVICE).read_text()
    try:
        jobs = _jobs(folder)
    except Exception as error:  # the user's own script runs here
        write_atomic(folder / RESULT.format(job=0, rank=rank), json.dumps({"rank": rank, **_refused(error)}))
        os._exit(EXIT_EARLY)
    beat.say("joining the other ranks")
    place = join(jobs[0], device, local_rank)
    for index, job in enumerate(jobs):
        beat.job = index
        gc.freeze()  # what is imported stays; else the job's collections go through all of it
        result = run_here(job, place, beat.say)
        write_atomic(folder / RESULT.format(job=index, rank=rank), json.dumps(result))
        beat.say("done")
        if ended_early(result):
            os._exit(EXIT_EARLY)
    sys.stdout.flush()
    os._exit(0)  # engines' tear-down can hang and changes nothing measured


if __name__ == "__main__":
    main(Path(sys.argv[1]))
