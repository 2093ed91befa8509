"""One training whose ranks may hold so many bytes: ``torchrun capped.py SETTINGS.json``. See :mod:`benchmarks.doctor.advised`.

The limit is the system's own on private memory (``RLIMIT_DATA``), counted from what a rank holds before it builds the model. It
is set once the engine has started, since a GPU does not hold what the host builds the model from.
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_MALLOC = {"M_TRIM_THRESHOLD": -1, "M_MMAP_THRESHOLD": -3, "M_ARENA_MAX": -8}


def main() -> None:
    """Train some steps under the limit."""
    _return_freed_memory()
    settings: dict[str, Any] = json.loads(Path(sys.argv[-1]).read_text())
    dist.init_process_group("gloo")
    _steps({**settings, "model": {**settings["model"], "num_hidden_layers": 1}, "micro_batch": 1, "steps": 1}, None)
    _steps(settings, _held() + settings["allowed"])
    if dist.get_rank() == 0:
        print("Training completed", flush=True)
    dist.destroy_process_group()


def _steps(settings: dict[str, Any], limit: int | None) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = dict(settings["model"])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape))
    if settings["checkpointing"]:
        model.gradient_checkpointing_enable()
    engine = _engine(settings, model)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        if dist.get_rank() == 0:
            print(f"  Instantaneous batch size per device = {settings['micro_batch']}", flush=True)
    tokens = torch.randint(0, settings["model"]["vocab_size"], (settings["micro_batch"], settings["seq_len"]))
    for step in range(settings["steps"]):
        for _ in range(settings["grad_accum"]):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        if limit is not None and dist.get_rank() == 0:
            print(f"step {step}: loss: {loss.item():.4f}", flush=True)


def _engine(settings: dict[str, Any], model: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": settings["micro_batch"],
        "gradient_accumulation_steps": settings["grad_accum"],
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": settings["stage"]},
    }
    if settings["engine"] == "zeroplan":
        import zeroplan_runtime

        engine, *_ = zeroplan_runtime.initialize(model=model, config=config)
    else:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo's own collectives, and none to compile
        config["optimizer"]["params"]["torch_adam"] = True
        engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def _return_freed_memory() -> None:
    """Let malloc map each tensor by itself, so that a freed one goes back to the system (mallopt's constants, malloc.h)."""
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in (("M_MMAP_THRESHOLD", 1 << 16), ("M_TRIM_THRESHOLD", 1 << 16), ("M_ARENA_MAX", 1)):
        mallopt(_MALLOC[option], value)


def _held() -> int:
    """Return the bytes of private memory that this process has, as the limit counts them."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmData:")[2].split()[0]) << 10


if __name__ == "__main__":
    main()
