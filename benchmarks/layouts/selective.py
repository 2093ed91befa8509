"""Steps of FSDP2 on two GPUs without checkpoints, with selective ones and with full ones: eight of Llama 3.1 8B's blocks.

    python -m benchmarks.layouts.selective predict FILE [--gpu H200]
    torchrun --nproc-per-node 2 -m benchmarks.layouts.selective run FILE [--small]

Each writes a line of JSON a kind of checkpoint: seconds of a step in a row, bytes that one GPU allocates and reserves.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.layouts.two_gpus import LARGE, request_of

#: Kinds of checkpoints, as a case of two_gpus.py says them.
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"gradient_checkpointing": True, "checkpoint_policy": "selective"},
    "full": {"gradient_checkpointing": True},
}
_CASE: dict[str, Any] = {"model": LARGE, "micro_batch": 1, "stage": 3, "seq_len": 8192, "from_scratch": True}
_WARM, _TIMED = 3, 8


def predict(file: Path, gpu: str) -> None:
    """Write what is predicted of each kind."""
    from zeroplan.ledger.work import count_tape
    from zeroplan.planner.estimate import estimate_report
    from zeroplan.planner.resolve import resolve
    from zeroplan.planner.tapes import ExpandedTapes
    from zeroplan.search.layout_time import LayoutCost
    from zeroplan.search.machine_rates import machine_rates

    with TemporaryDirectory() as folder, file.open("w") as out:
        for kind, fields in KINDS.items():
            ask = request_of(_CASE | fields, Path(folder)).replace(gpu=gpu)
            resolved, figures = resolve(ask), estimate_report(ask).plans[0].gpu
            case = resolved.cases[0]
            counts = count_tape(ExpandedTapes(resolved.engine).of(case))
            time_ = LayoutCost(case, counts, machine_rates(resolved.cluster, None, []), resolved.engine).time()
            row = {"seconds": time_.total, "allocated": figures.peak_allocated, "reserved": figures.peak_reserved}
            out.write(json.dumps({"case": kind, "gpu": gpu, **row}) + "\n")


def run(file: Path, *, small: bool) -> None:
    """Train on this rank, and write what is measured of each kind."""
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig

    cuda, rank = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    with TemporaryDirectory() as folder:
        config = AutoConfig.from_pretrained(request_of(_CASE, Path(folder)).model)
    if small:
        config.hidden_size, config.intermediate_size, config.head_dim, config.vocab_size = 64, 128, 2, 256
    for kind in KINDS:
        seconds = _steps(config, kind, device, tokens=64 if small else _CASE["seq_len"])
        row = {"case": kind, "seconds": seconds, "torch": torch.__version__}
        if cuda:
            row |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
            row["gpu"] = f"2 × {torch.cuda.get_device_name()}"
        if not rank:
            with file.open("a") as out:
                out.write(json.dumps(row) + "\n")
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    dist.destroy_process_group()


def _steps(config: Any, kind: str, device: Any, *, tokens: int) -> float:
    """Return the seconds of a step, of several in a row."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.utils.checkpoint import create_selective_checkpoint_contexts
    from transformers import LlamaForCausalLM

    from zeroplan.trace.selective import policy

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    if kind != "none":
        selective = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if kind == "selective" else {}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **selective})
    numerics = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.model.layers, model):
        fully_shard(part, mp_policy=numerics)
    model.to_empty(device=device)
    turned = type(model.model.rotary_emb)(config, device=device)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.original_inv_freq = turned.inv_freq
    for one in model.parameters():
        torch.nn.init.normal_(one.detach().to_local(), std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, config.vocab_size, (1, tokens), device=device)
    wait = torch.cuda.synchronize if device.type == "cuda" else gc.collect
    begin = 0.0
    for number in range(_WARM + _TIMED):
        if number == _WARM:
            wait()
            begin = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    wait()
    return (time.perf_counter() - begin) / _TIMED


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("verb", choices=("predict", "run"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--gpu", default="H200", help="for predict")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the program on CPUs")
    asked = parser.parse_args()
    if asked.verb == "predict":
        predict(asked.file, asked.gpu)
    else:
        run(asked.file, small=asked.small)


if __name__ == "__main__":
    main()
