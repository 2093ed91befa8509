"""Measures one configuration on this rank; rank 0 writes the row.

``torchrun --nproc_per_node=N -m benchmarks.measure.worker SPEC_JSON ROW_FILE [HISTORY_FILE]``; the
row is one JSON object with the fields of ``benchmarks/measure/README.md``, and the history is
written when the spec asks for one.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.measure import history
from benchmarks.measure.probe import Device, Probe, host_status
from benchmarks.measure.spec import OPTIONAL, Spec


def main(spec: Spec, row_file: Path, history_file: Path | None) -> None:
    """Run the spec's steps, gather every rank's figures, write rank 0's row and history."""
    os.environ.setdefault("TORCH_SYMBOLIZE_MODE", "dladdr")  # addr2line takes minutes
    import torch
    import torch.distributed as dist

    started = time.monotonic()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    gpu = Device(local_rank)
    nvml_before = gpu.used()
    device = torch.device("cuda", local_rank) if gpu.cuda else torch.device("cpu")
    if gpu.cuda:
        torch.cuda.set_device(device)
        if spec.cap is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(spec.cap / total, device)
        if spec.history:
            history.start(spec.cpp_stacks, spec.free_stacks)
    torch.zeros(1, device=device)
    if gpu.cuda:
        torch.cuda.synchronize()
    context = gpu.used() - nvml_before
    context_process = gpu.used_by_process()

    import transformers

    from benchmarks.measure import classes
    from benchmarks.measure.engines import DTYPES, build
    from benchmarks.measure.models import CLASS, batch, media_batch, other_batch

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    probe = Probe(gpu)
    trained = build(spec, probe, device)
    half = spec.engine == "deepspeed" or spec.precision == "pure"
    dtype = DTYPES[spec.dtype] if half else torch.float32
    given = spec.images or spec.audio_seconds
    inputs: Any = media_batch(spec, dtype, device) if given else other_batch(spec, dtype, device)
    if spec.model.startswith(CLASS):
        inputs = classes.batch(spec, dtype, device)
    if inputs is None:
        inputs = batch(spec.task, spec.micro_batch, spec.seq_len, device, spec.target_len)
    seconds: list[float] = []
    for index in range(spec.steps):
        begin = time.perf_counter()
        loss = trained.step(inputs)
        probe.mark(f"step{index}")
        seconds.append(time.perf_counter() - begin)

    if spec.save is not None:
        trained.save()
        probe.mark("save")
        for index in range(spec.steps, spec.steps + 2):
            loss = trained.step(inputs)
            probe.mark(f"step{index}")

    mine = figures(probe, gpu, nvml_before, context) | {
        "context_process": context_process,
        "step_seconds": statistics.median(seconds[1:]),
    }
    everyone: list[Any] = [None] * spec.world
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        row = row_of(spec, trained, everyone, probe) | {
            "loss": float(loss.detach()),
            "skipped_steps": trained.skipped(),
            "wall_seconds": round(time.monotonic() - started, 1),
        }
        if spec.history and history_file is not None and gpu.cuda:
            meta = {"spec": spec.to_dict(), "rank": rank, "gpu": row["gpu"]}
            meta |= {"versions": row["versions"], "alloc_conf": _alloc_conf()}
            meta["total_memory"] = torch.cuda.get_device_properties(device).total_memory
            events = history.collect(probe.marks, meta)
            row["history_problems"] = history.check(events)
            row["history_events"] = len(events["columns"]["op"])
            history.write(events, history_file)
        with row_file.open("a") as out:
            out.write(json.dumps(row) + "\n")
    dist.barrier()
    os._exit(0)  # engines' tear-down can hang and changes nothing measured


def figures(probe: Probe, gpu: Device, nvml_before: int, context: int) -> dict[str, Any]:
    """Return this rank's peaks over all marks, device memory since `nvml_before`, and peak host memory."""
    marks = probe.marks
    training = [m for m in marks if m["at"] not in ("model", "init")]
    return {
        "peak_allocated": max((m.get("peak", 0) for m in marks), default=0),
        "peak_allocated_training": max((m.get("peak", 0) for m in training), default=0),
        "peak_reserved": max((m.get("reserved_peak", 0) for m in marks), default=0),
        "nvml_used": gpu.used() - nvml_before,
        "nvml_process": gpu.used_by_process(),
        "cuda_context": context,
        "host_rss_peak": host_status()["VmHWM"],
    }


def row_of(spec: Spec, trained: Any, everyone: list[dict[str, Any]], probe: Probe) -> dict[str, Any]:
    """Return the row of a run, from every rank's figures and rank 0's marks."""
    import torch

    def most(key: str) -> int:
        return max(int(r[key]) for r in everyone)

    step_seconds = max(r["step_seconds"] for r in everyone)
    tokens = spec.world * spec.micro_batch * spec.seq_len * spec.grad_accum
    row: dict[str, Any] = {
        "id": spec.id,
        "engine": spec.engine,
        "model": spec.model,
        "world": spec.world,
        "dtype": spec.dtype,
        "stage": spec.stage,
        "micro_batch": spec.micro_batch,
        "seq_len": spec.seq_len,
        "gradient_accumulation_steps": spec.grad_accum,
        "gradient_checkpointing": spec.checkpointing,
        "attn": spec.attn,
        "lora_rank": spec.lora_rank,
        "zero_overrides": spec.zero,
        "ok": True,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "n_params": trained.n_params,
        "trainable": trained.trainable,
        "optimizer": trained.optimizer,
        "step_seconds": step_seconds,
        "tokens_per_s": tokens / step_seconds,
        "host_rss_peak_all_ranks": sum(r["host_rss_peak"] for r in everyone),
    }
    for key in ("peak_allocated", "peak_allocated_training", "peak_reserved", "nvml_used"):
        row[key] = most(key)
    row["cuda_context"] = most("cuda_context")
    defaults = Spec(id=spec.id, model=spec.model)
    for key in ("cap", "env", *OPTIONAL):
        if getattr(spec, key) != getattr(defaults, key):
            row[key] = getattr(spec, key)
    if spec.quantize is not None and spec.quantize != "int8":
        row["adapter_dtype"] = spec.dtype  # peft makes adapters in the dtype of a 4-bit layer's products
    if spec.ds:
        row["ds_overrides"] = spec.ds
    if spec.optimizer:
        row["opt_params"] = spec.optimizer
    row["alloc_conf"] = _alloc_conf()
    row["per_rank"] = everyone
    row["marks"] = [{k: v for k, v in m.items() if k != "time_us"} for m in probe.marks]
    row["versions"] = versions()
    return row


def versions() -> dict[str, str]:
    """Return installed versions of what the figures depend on."""
    found = {}
    for name in ("torch", "transformers", "deepspeed", "peft", "nvidia-nccl-cu13"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _alloc_conf() -> str:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return ",".join(os.environ[n] for n in names if os.environ.get(n))


if __name__ == "__main__":
    main(
        Spec.from_dict(json.loads(sys.argv[1])),
        Path(sys.argv[2]),
        Path(sys.argv[3]) if len(sys.argv) > 3 else None,
    )
