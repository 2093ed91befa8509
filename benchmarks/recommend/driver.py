"""Runs many candidates on one group of GPUs, a fresh process for each rank of each, without paying for imports again.

``python -m benchmarks.recommend.driver JOBS.jsonl… --out ROWS.jsonl [--seconds N] [--port P] [--threads T]``: one process
imports torch, transformers and DeepSpeed and loads DeepSpeed's ops, touches no GPU, and forks the ranks of one job after the
other. Rows are appended to ROWS.jsonl; a job that failed gives ``{"id", "ok": false, "error", "phase", "spec"}``. As soon as
one rank fails the others are killed. Where something has initialised CUDA before the fork, ranks are spawned instead.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.recommend.trial import Job, trial

#: The modules whose import each rank would otherwise pay for. Zero.Init replaces torch.tensor, whose signature dynamo checks
#: when first imported.
_HEAVY = (
    "torch",
    "torch._dynamo",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "deepspeed",
    "deepspeed.ops.adam",
    "zeroplan_runtime",
)
_OPS = ("fused_adam", "cpu_adam")
_POLL_SECONDS = 0.02


def prepare() -> None:
    """Import what every rank needs, without initialising CUDA: a fork could then not use it."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available() asks NVML, not the runtime
    for name in _HEAVY:
        import_module(name)
    import torch

    if torch.cuda.is_available():
        _load_ops()
    gc.collect()
    gc.freeze()


def _load_ops() -> None:
    """Load the ops that ``benchmarks.measure.build_ops`` compiled: DeepSpeed's own loader asks the GPU and ninja anew."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    cpp_extension: Any = import_module("torch.utils.cpp_extension")
    for name in _OPS:
        folder = cpp_extension._get_build_directory(name, False)
        if (Path(folder) / f"{name}.so").exists():
            OpBuilder._loaded_ops[name] = cpp_extension._import_module_from_library(name, folder, True)
        else:
            print(f"{name}: not compiled beforehand, each rank will load it itself", flush=True)


def _try_cuda() -> None:
    import torch

    torch.zeros(1, device="cuda")
    os._exit(0)


def start_method() -> str:
    """``fork`` where a forked process can use the GPU, else ``spawn``."""
    import torch

    if not torch.cuda.is_available():
        return "fork"
    process = multiprocessing.get_context("fork").Process(target=_try_cuda)
    process.start()
    process.join(60)
    if process.exitcode == 0:
        return "fork"
    process.kill()
    print("a forked process cannot use the GPU: every rank is spawned and imports for itself", flush=True)
    return "spawn"


class Driver:
    """Runs jobs one after the other. `port` is the first of those that their rendezvous use."""

    def __init__(self, out: Path, *, method: str, port: int) -> None:
        self.out, self._port = out, port
        self._context: Any = multiprocessing.get_context(method)
        self._scratch = Path(tempfile.mkdtemp(prefix="trial-"))

    def run(self, job: Job, limit: float) -> dict[str, Any]:
        """Run one job and return its row, also appended to the file; `limit` in seconds."""
        begin = time.monotonic()
        self._port += 1
        folder = self._scratch / job.spec.id
        folder.mkdir(parents=True, exist_ok=True)
        ranks = [self._context.Process(target=trial, args=(job, r, self._port, str(folder))) for r in range(job.spec.world)]
        for rank in ranks:
            rank.start()
        try:
            self._wait(ranks, folder, begin + limit)
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.join()
        row = _row(job, folder)
        row["whole_seconds"] = round(time.monotonic() - begin, 2)
        with self.out.open("a") as rows:
            rows.write(json.dumps(row) + "\n")
        if not row["ok"] and row["error"] != "out of memory":
            self._keep_log(job, folder)
        shutil.rmtree(folder, ignore_errors=True)
        return row

    @staticmethod
    def _wait(ranks: list[Any], folder: Path, end: float) -> None:
        """Until every rank has ended, or one without success, or time is up."""
        while time.monotonic() < end:
            codes = [rank.exitcode for rank in ranks]
            if all(code is not None for code in codes):
                return
            if any(code for code in codes):
                time.sleep(0.5)  # the other ranks may be about to fail by themselves and say why
                return
            time.sleep(_POLL_SECONDS)
        (folder / "late").touch()

    def _keep_log(self, job: Job, folder: Path) -> None:
        for log in sorted(folder.glob("*.log"))[:2]:
            text = log.read_text(errors="replace")[-3000:]
            with self.out.with_suffix(".failures.txt").open("a") as failures:
                failures.write(f"==== {job.spec.id} {log.name}\n{text}\n")


def _row(job: Job, folder: Path) -> dict[str, Any]:
    """Rank 0's row where every rank came through, else the failure: out of memory before all else, which the others follow."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    failures = [one for one in found if "error" in one]
    if len(found) == job.spec.world and not failures:
        return dict(next(one for one in found if "ok" in one))
    failures.sort(key=lambda one: one["error"] != "out of memory")
    if failures:
        reason = failures[0]
    else:
        reason = {"error": "too slow" if (folder / "late").exists() else "failed", "detail": "", "phase": ""}
    return {"id": job.spec.id, "ok": False, **reason, "gpu": _gpu_name(), "spec": job.spec.to_dict()}


def _gpu_name() -> str:
    """The first visible GPU, by NVML: this process must not touch CUDA."""
    try:
        import pynvml

        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(int(visible or 0))))
    except Exception:
        return "unknown"


def _line(row: dict[str, Any]) -> str:
    if not row["ok"]:
        return f"{row['error'].upper()} {row.get('phase', '')} {row.get('detail', '')[:120]}"
    text = f"{row['step_seconds']:.4f} s a step, reserved {row['peak_reserved'] / (1 << 30):.2f} GiB"
    return text + (f", {row['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in row else f", losses {row['losses']}")


def read_jobs(paths: list[Path], threads: int) -> list[Job]:
    """Read the jobs of these files, in order; a job that names no threads gets its share of `threads`."""
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.strip()]
    return [Job.from_dict({"threads": max(1, threads // line.get("world", 1)), **line}) for line in lines]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--limit", type=float, default=90, help="seconds until one job is given up")
    parser.add_argument("--port", type=int, default=29700, help="another for a driver beside this")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="the host's cores, shared by the ranks")
    arguments = parser.parse_args()
    begin = time.monotonic()
    end = begin + arguments.seconds
    jobs = read_jobs(arguments.jobs, arguments.threads)
    prepare()
    driver = Driver(arguments.out, method=start_method(), port=arguments.port)
    print(f"{len(jobs)} jobs, ready after {time.monotonic() - begin:.1f}s", flush=True)
    for place, job in enumerate(jobs):
        left = end - time.monotonic()
        if left < 10:
            print("not started:", " ".join(one.spec.id for one in jobs[place:]), flush=True)
            break
        row = driver.run(job, min(arguments.limit, left))
        print(f"{job.spec.id} ({row['whole_seconds']:.1f}s): {_line(row)}", flush=True)


if __name__ == "__main__":
    main()
