"""Runs one job on this rank and returns its measurement, also when the run ends early."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan.engines.base import Engine
from zeroplan.engines.registry import load_engine
from zeroplan.engines.verification import Trainer, TrainingRun
from zeroplan.trace.run import loss_of
from zeroplan.validate.job import VerifyJob
from zeroplan.validate.rank.models import make_batch, make_model, prepare
from zeroplan.validate.rank.probe import Probe, RankDevice, bytes_written

#: Called with a line of text about what the rank does next.
Say = Callable[[str], None]
_ASKED = re.compile(r"[Tt]ried to allocate ([0-9.]+) ?(B|bytes|KiB|MiB|GiB|TiB)")
_UNITS = {"B": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_VERSIONS = ("torch", "transformers", "deepspeed", "peft")


def run_job(job: VerifyJob, place: RankDevice, say: Say) -> dict[str, Any]:
    """Run a job and return this rank's figures; ``out_of_memory`` or ``bad_input`` is there where the run ended early."""
    engine = load_engine(job.engine_path)
    probe = Probe(place)
    state: dict[str, Any] = {"trained": None}
    begun = time.time()
    result: dict[str, Any] = {"rank": this_rank()}
    try:
        result |= _train(job, engine, place, probe, say, state)
    except BadInput as error:
        result["bad_input"] = {"what": error.what, "where": error.where, "remedy": error.remedy}
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        result["out_of_memory"] = _out_of_memory(error, probe, state["trained"])
    result |= probe.figures()
    trained = state.pop("trained")
    if trained is not None:
        result["rows"] = trained.rows()
        result["owned"] = trained.owned
        result["pinned"] += trained.pinned()
        result["files"] = bytes_written(job.swap_folders, begun)
        trained.close()
    del trained
    gc.collect()
    return result


def _train(job: VerifyJob, engine: Engine, place: RankDevice, probe: Probe, say: Say, state: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    seconds: list[float] = []
    with probe.counting():

        def mark(phase: str, following: str) -> None:
            probe.end(phase, following)
            say(f"{phase} done")

        say("building the model")
        trained = state["trained"] = _trainer(job, engine, place.device, mark)
        batch = make_batch(job, place.device, seed=job.layout.sample_of(this_rank()), casts=engine.casts_modules)
        for index in range(job.steps):
            say(f"step {index + 1} of {job.steps}")
            begin = time.perf_counter()
            loss = trained.step(batch)
            probe.end("step", "forward")
            seconds.append(time.perf_counter() - begin)
        value = None if loss is None else float(loss.detach())
        del loss, batch  # a training loop has dropped them by now, too
        live = probe.allocated()
    return {
        "live_after_step": live,
        "step_seconds": statistics.median(seconds[1:] or seconds),
        "steps": job.steps,
        "loss": value,
        "versions": _versions(),
    }


def _trainer(job: VerifyJob, engine: Engine, device: torch.device, mark: Callable[[str, str], None]) -> Trainer:
    """Build the engine's trainer of the job's model."""
    module, _, name = engine.trainer.partition(":")
    build: Callable[[TrainingRun], Trainer] = getattr(import_module(module), name)
    return build(
        TrainingRun(
            stage=job.stage,
            workload=job.workload,
            ds_config=job.ds_config,
            device=device,
            mark=mark,
            make_model=partial(make_model, job),
            prepare=partial(prepare, job),
            loss_of=loss_of,
            layout=job.layout,
            schedule=job.schedule,
            partition=job.partition,
        )
    )


def this_rank() -> int:
    """Return this process's rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text or "out of memory" in text


def _out_of_memory(error: BaseException, probe: Probe, trained: Trainer | None) -> dict[str, Any]:
    text = str(error)
    found = _ASKED.search(text)
    asked = round(float(found[1]) * _UNITS[found[2]]) if found else None
    plain = re.search(r"tried to allocate (\d+) bytes", text)
    if plain:
        asked = int(plain[1])
    where = trained.where() if trained is not None else ""
    return {
        "phase": probe.phase,
        "buffer": _buffer_of(error, probe.phase) + (f" ({where})" if where else ""),
        "requested": asked,
        "allocated": probe.allocated(),
        "message": text.splitlines()[0][:300] if text else type(error).__name__,
    }


#: The buffer that a phase allocates, for a failing call that names none.
_OF_PHASE = {"load": Buffer.HOST_MODEL, "init": Buffer.INIT_TEMP, "step": Buffer.OPTIM_TEMP}


def _buffer_of(error: BaseException, phase: str) -> str:
    """The buffer that was being allocated: the variable ``buffer`` of the innermost frame that has one, as the Arena's."""
    trace, found = error.__traceback__, None
    while trace is not None:
        named = trace.tb_frame.f_locals.get("buffer")
        found = named if isinstance(named, Buffer) else found
        trace = trace.tb_next
    return str(found or _OF_PHASE.get(phase, Buffer.ACTIVATION))
