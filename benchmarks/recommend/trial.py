"""One candidate on one rank, in a process of its own: what :mod:`benchmarks.recommend.driver` forks.

The model and its engine are built as by ``benchmarks.measure``, so memory rows compare. Warm-up steps leave marks, which wait
for the device; timed steps wait once, at their end.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure.probe import Device, Probe
from benchmarks.measure.spec import Spec
from benchmarks.measure.worker import figures, row_of, versions

WARM_UP, TIMED = 3, 5
#: A step of more seconds than this is timed twice only, and warmed up twice.
SLOW = 2.0
#: The phase that is under way once a mark has been left.
_AFTER = {"": "load", "model": "init", "fwd": "backward", "bwd": "step"}


@dataclass(frozen=True, slots=True)
class Job:
    """A run to make: a spec; or, with `config`, that ds_config file as it is, under DeepSpeed or the included runtime.

    `threads` is what each rank's operations on the host may use.
    """

    spec: Spec
    config: str = ""
    runtime: bool = False
    threads: int = 1

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Job:
        """Read a line of a file of jobs: a spec's fields, and those of this class beside them."""
        own = {key: values[key] for key in ("config", "runtime", "threads") if key in values}
        return cls(Spec.from_dict({key: value for key, value in values.items() if key not in own}), **own)


class QuietProbe(Probe):
    """Follows the phase at every mark; reads memory only while `reads`."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.reads, self.last = True, ""

    def mark(self, name: str) -> None:
        """Record now as `name`, or only that it was passed."""
        self.last = name
        if self.reads:
            super().mark(name)

    @property
    def phase(self) -> str:
        """The phase under way."""
        return _AFTER.get(self.last, "forward")


def trial(job: Job, rank: int, port: int, folder: str) -> None:
    """Run the job on this rank and write ``RANK.json`` to `folder`; everything printed goes to ``RANK.log``.

    Never returns: engines' tear-down can hang and changes nothing measured.
    """
    out = Path(folder)
    log = os.open(out / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.spec.world),
        "LOCAL_WORLD_SIZE": str(job.spec.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **job.spec.env,
    }
    probe: QuietProbe | None = None
    try:
        probe = QuietProbe(Device(rank))
        found = _emitted(job, probe) if job.config else _candidate(job, probe)
        code = 0
    except Exception as error:  # the driver reports whatever it was
        traceback.print_exc()
        found = {"error": _reason(error), "detail": str(error)[:300], "phase": probe.phase if probe else "load"}
        code = 1
    (out / f"{rank}.part").write_text(json.dumps(found))
    os.replace(out / f"{rank}.part", out / f"{rank}.json")
    os._exit(code)


def _reason(error: Exception) -> str:
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return "out of host memory" if "out of memory" in str(error) else "failed"


def _device(job: Job, probe: QuietProbe) -> Any:
    """Return this rank's device, its allocator capped as the spec asks."""
    import torch

    torch.set_num_threads(job.threads)
    if not probe.device.cuda:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if job.spec.cap is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.spec.cap / total), device)
    if job.spec.env.get("PYTORCH_ALLOC_CONF"):
        # Whatever read the environment before the fork, this rank's allocator obeys its own spec.
        torch.cuda.memory._set_allocator_settings(job.spec.env["PYTORCH_ALLOC_CONF"])
    torch.zeros(1, device=device)
    torch.cuda.synchronize()
    return device


def _candidate(job: Job, probe: QuietProbe) -> dict[str, Any]:
    """Run the spec's steps; returns this rank's figures, and on rank 0 the whole row."""
    import torch
    import torch.distributed as dist

    from benchmarks.measure.engines import build

    begin, before = time.monotonic(), probe.device.used()
    device, spec = _device(job, probe), job.spec
    context, mine = probe.device.used() - before, probe.device.used_by_process()
    torch.manual_seed(0)
    trained = build(spec, probe, device)
    tokens = torch.randint(3, 30000, (spec.micro_batch, spec.seq_len), device=device)
    inputs = {"input_ids": tokens, "labels": tokens}
    ready = time.monotonic() - begin

    def timed(index: int) -> float:
        begin = time.perf_counter()
        loss = trained.step(inputs)
        probe.mark(f"step{index}")
        if probe.device.cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        if not index and not bool(torch.isfinite(loss.detach())):
            raise ValueError("the loss is not finite")
        return seconds

    slow = False
    for index in range(WARM_UP):
        if slow:
            break
        slow = _slowest(timed(index), spec.world, device) > SLOW and index > 0
    probe.reads = False
    seconds = [timed(WARM_UP + index) for index in range(2 if slow else TIMED)]
    probe.reads = True
    probe.mark("timed")
    found = figures(probe, probe.device, before, context) | {
        "context_process": mine,
        "step_seconds": statistics.median(seconds),
        "seconds": [round(value, 5) for value in seconds],
    }
    everyone: list[Any] = [None] * spec.world
    dist.all_gather_object(everyone, found)
    if dist.get_rank():
        return found
    return row_of(spec, trained, everyone, probe) | {
        "threads": job.threads,
        "ready_seconds": round(ready, 2),
        "wall_seconds": round(time.monotonic() - begin, 2),
        "timed_without_marks": True,
        "shared_gpu": False,
    }


def _slowest(seconds: float, world: int, device: Any) -> float:
    """Every rank must count the same steps, so they agree on how long one took."""
    import torch
    import torch.distributed as dist

    if world == 1:
        return seconds
    value = torch.tensor(seconds, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def _emitted(job: Job, probe: QuietProbe) -> dict[str, Any]:
    """A written ds_config trains as it is: its path goes to ``initialize``, nothing is changed."""
    import torch

    from benchmarks.measure.models import auto_class, build_config

    device, spec = _device(job, probe), job.spec
    torch.manual_seed(0)
    config = build_config(spec.model, spec.model_overrides)
    with torch.device(device):
        model = auto_class(config.model_type).from_config(config, dtype=torch.bfloat16).train()
    if spec.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    probe.mark("model")
    engine = _initialize(job, model, device)
    probe.mark("init")
    tokens = torch.randint(3, 30000, (spec.micro_batch, spec.seq_len), device=device)
    losses, seconds = [], []
    for index in range(spec.steps):
        begin = time.perf_counter()
        for _ in range(spec.grad_accum):
            loss = engine(input_ids=tokens, labels=tokens).loss
            probe.mark("fwd")
            engine.backward(loss)
            probe.mark("bwd")
            engine.step()
        probe.mark(f"step{index}")
        seconds.append(time.perf_counter() - begin)
        losses.append(round(float(loss.detach()), 4))
    return {
        "id": spec.id,
        "ok": all(math.isfinite(value) for value in losses),
        "loss_fell": losses[-1] < losses[0],
        "engine": "zeroplan" if job.runtime else "deepspeed",
        "model": spec.model,
        "config": json.loads(Path(job.config).read_text()),
        "losses": losses,
        "step_seconds": statistics.median(seconds[1:]),
        "gpu": torch.cuda.get_device_name() if probe.device.cuda else "cpu",
        "cap": spec.cap,
        "peak_allocated": max(mark.get("peak", 0) for mark in probe.marks),
        "peak_reserved": max(mark.get("reserved_peak", 0) for mark in probe.marks),
        "versions": versions(),
    }


def _initialize(job: Job, model: Any, device: Any) -> Any:
    """Build the engine that the file asks for."""
    if job.runtime:
        import zeroplan_runtime

        return zeroplan_runtime.initialize(model=model, config=job.config)[0]
    import deepspeed

    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo")
    return deepspeed.initialize(model=model, config=job.config, model_parameters=list(model.parameters()))[0]
