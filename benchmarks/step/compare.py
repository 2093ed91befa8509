"""Step time and peak memory of the runtime beside FSDP2 on the shape of Llama-3.2-1B, after a check that both are right.

    torchrun --nproc-per-node N -m benchmarks.step.compare --out results.json [--seq 2048] [--micro 1] [--cases z3,f3,…]

A case is one letter for the engine (z: this runtime, f: FSDP2), the stage, and optionally ``r32`` for reduction in fp32 (else
the gradients' bf16). All cases run in this one process, one after another, and start from empty memory; times are medians
over steps between device events on the slowest rank. FSDP2 is set up as ``benchmarks/measure`` does, without autocast.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeroplan_runtime

LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}
ADAMW: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.1}
Step = Callable[[torch.Tensor], torch.Tensor]


def llama(device: torch.device | str, dtype: torch.dtype, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**{**LLAMA_1B, **changes}, use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()


def ours(device: torch.device, stage: int, reduce32: bool, options: dict[str, Any], **changes: Any) -> tuple[Step, Any]:
    config = {
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage},
        "zeroplan": {"audit_steps": 0, **options},
        **({"communication_data_type": "fp32"} if reduce32 else {}),
    }
    engine, *_ = zeroplan_runtime.initialize(model=llama(device, torch.bfloat16, **changes), config=config, device=device)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, engine


def fsdp2(device: torch.device, stage: int, reduce32: bool) -> tuple[Step, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = llama(device, torch.float32)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32 if reduce32 else torch.bfloat16)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=stage == 3)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=stage == 3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, model


def batch(number: int, rank: int, micro: int, seq: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(0, 128256, (micro, seq), generator=generator).to(device)


def correct(device: torch.device, ranks: int, rank: int) -> list[dict[str, Any]]:
    """Losses of a 2-block model over 5 steps at every stage, beside plain torch on this rank's GPU with fp32 masters."""
    small = {
        "num_hidden_layers": 2,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "vocab_size": 128256,
    }
    plain = llama(device, torch.bfloat16, **small)
    masters = [p.detach().float() for p in plain.parameters()]
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)
    expected = []
    for number in range(5):
        sums = [torch.zeros_like(p) for p in plain.parameters()]
        for other in range(ranks):
            tokens = batch(number, other, 2, 256, device)
            loss = plain(input_ids=tokens, labels=tokens).loss
            loss.backward()
            if other == rank:
                expected.append(loss.item())
            for total, p in zip(sums, plain.parameters(), strict=True):
                total += p.grad
                p.grad = None
        for master, total in zip(masters, sums, strict=True):
            master.grad = (total / ranks).float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(plain.parameters(), masters, strict=True):
                p.copy_(master)
    rows = []
    for stage in range(4):
        for reduce32 in (False, True):
            step, engine = ours(device, stage, reduce32, {}, **small)
            losses = [step(batch(n, rank, 2, 256, device)).item() for n in range(5)]
            worst = torch.tensor(max(abs(a - b) for a, b in zip(losses, expected, strict=True)), device=device)
            if ranks > 1:
                dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            rows.append({"check": stage, "reduce32": reduce32, "worst_loss_difference": worst.item(), "losses": losses})
            engine.destroy()
            del step, engine
    return rows


def measure(step: Step, device: torch.device, rank: int, micro: int, seq: int, steps: int) -> dict[str, Any]:
    inputs = [batch(n, rank, micro, seq, device) for n in range(steps)]
    for tokens in inputs[:3]:
        step(tokens)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    begin = time.perf_counter()
    marks[0].record()
    for tokens, mark in zip(inputs, marks[1:], strict=True):
        loss = step(tokens)
        mark.record()
    issued = (time.perf_counter() - begin) / steps
    torch.cuda.synchronize()
    median = torch.tensor(statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)), device=device)
    if dist.is_initialized():
        dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return {
        "step_ms": round(median.item(), 3),
        "host_ms": round(issued * 1e3, 3),
        "tokens_per_s": round(micro * seq * (dist.get_world_size() if dist.is_initialized() else 1) / median.item() * 1e3),
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "loss": loss.item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cases", default="z1,z2,z3,f2,f3,z3r32,f3r32")
    parser.add_argument("--profile", default="", help="a case whose step is profiled into OUT.trace.json")
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        row = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "ranks": ranks, **row}
        rows.append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)
            arguments.out.write_text("".join(json.dumps(r) + "\n" for r in rows))

    for row in correct(device, ranks, rank):
        note(row)
    for case in arguments.cases.split(","):
        gc.collect()
        torch.cuda.empty_cache()
        name, _, plain = case.partition("+")
        engine, stage, reduce32 = name[0], int(name[1]), name.endswith("r32")
        try:
            if engine == "z":
                step, keep = ours(device, stage, reduce32, {"direct_linear": plain != "copy"})
            else:
                step, keep = fsdp2(device, stage, reduce32)
            gc.collect()
            torch.cuda.empty_cache()
            found = measure(step, device, rank, arguments.micro, arguments.seq, arguments.steps)
            if case == arguments.profile and rank == 0:
                profile(step, batch(0, rank, arguments.micro, arguments.seq, device), arguments.out)
            elif case == arguments.profile:
                step(batch(0, rank, arguments.micro, arguments.seq, device))
            owned = {"owned": keep.arena.peak()} if engine == "z" else {}
            note({"case": case, "micro": arguments.micro, "seq": arguments.seq, **owned, **found})
            if engine == "z":
                keep.destroy()
            del step, keep
        except (RuntimeError, ValueError) as fault:
            note({"case": case, "fault": f"{type(fault).__name__}: {fault}"[:300]})
    dist.destroy_process_group()


def profile(step: Step, tokens: torch.Tensor, out: Path) -> None:
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        step(tokens)
        torch.cuda.synchronize()
    for order in ("self_cuda_time_total", "self_cpu_time_total"):
        table = seen.key_averages().table(sort_by=order, row_limit=16, max_name_column_width=48)
        print("\n".join(line[:49] + line[-130:] for line in table.splitlines()), flush=True)
    seen.export_chrome_trace(f"{out}.trace.json")


if __name__ == "__main__":
    main()
