"""Trains a model whose states are at least four times the GPU memory that it is allowed: the plan first, then the run.

    python examples/larger_than_gpu.py                      # on a GPU 18.4 GiB of states in 4.5 GiB, else a small Llama
    python examples/larger_than_gpu.py --nvme /mnt/disk     # masters and optimizer states in files
    python examples/larger_than_gpu.py --nvme /mnt/disk --nvme-params   # parameters, too

States are a 16-bit parameter and gradient, an fp32 master and two moments: 16 bytes a parameter. On a GPU the allowance is
torch's to enforce, on a CPU what the runtime keeps in place of a GPU is held against it.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from planned import print_beside

import zeroplan
import zeroplan_runtime
from zeroplan.core.buffers import Place
from zeroplan.core.sizes import format_bytes, parse_size

STATE_BYTES = 16
SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
    },
    "llama-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}


def ds_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything away from the GPU, to the host or to files."""
    host = {"device": "cpu"}
    files = {"device": "nvme", "nvme_path": str(arguments.nvme)} if arguments.nvme else host
    params = {**files, "max_in_cpu": 0} if arguments.nvme_params else host
    return {
        "train_micro_batch_size_per_gpu": arguments.micro,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": 3, "offload_optimizer": files, "offload_param": params},
        "activation_checkpointing": {"cpu_checkpointing": arguments.checkpointing},
    }


def plan(config: dict[str, Any], model: Any, arguments: argparse.Namespace) -> Any:
    """What the run will take, before anything is allocated."""
    (found,) = zeroplan.estimate(
        {**model.config.to_dict(), "model_type": "llama"},
        engine="zeroplan",
        ds_config=config,
        seq_len=arguments.seq,
        gradient_checkpointing=arguments.checkpointing,
        nvme="1P" if arguments.nvme else None,
    )
    print(
        f"plan: {format_bytes(found.gpu.peak_reserved)} on the GPU ({format_bytes(found.gpu.total)} with what is not torch's),"
    )
    print(f"      {format_bytes(found.cpu.per_node)} of host memory ({format_bytes(found.cpu.pinned)} pinned),", end=" ")
    print(f"{format_bytes(found.nvme.per_node)} in files")
    return found


def main() -> None:
    """Plan, train, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b" if cuda else "small")
    parser.add_argument("--gpu-memory", default="4.5G" if cuda else "64M", help="what the model is allowed")
    parser.add_argument("--nvme", type=Path, help="a folder on a disk for masters and states")
    parser.add_argument("--nvme-params", action="store_true", help="parameters there, too")
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--seq", type=int, default=512 if cuda else 64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpointing", action="store_true", help="checkpoint the blocks, their inputs on the host")
    arguments = parser.parse_args()
    if arguments.nvme_params and not arguments.nvme:
        parser.error("--nvme-params needs --nvme FOLDER")

    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPES[arguments.shape], use_cache=False)).to(torch.bfloat16).train()
    if arguments.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    allowed, states = parse_size(arguments.gpu_memory), STATE_BYTES * sum(p.numel() for p in model.parameters())
    print(f"states: {format_bytes(states)}, {states / allowed:.1f} times the {format_bytes(allowed)} that are allowed")
    if states < 4 * allowed:
        raise SystemExit("the states are less than four times the allowance: give less memory or a larger shape")
    config = ds_config(arguments)
    planned = plan(config, model, arguments)

    if cuda:
        torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    engine, *_ = zeroplan_runtime.initialize(model=model, config=config)
    tokens = torch.arange(arguments.micro * arguments.seq, device=engine.device).view(arguments.micro, -1)
    begins = []
    for step in range(arguments.steps):
        begins.append(time.perf_counter())
        batch = (tokens * 3 + step) % SHAPES[arguments.shape]["vocab_size"]
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        if step % 5 == 0 or step + 1 == arguments.steps:
            print(f"step {step}: loss {loss.item():.3f}")
    engine.drain()
    took = median(b - a for a, b in pairwise([*begins[len(begins) // 2 :], time.perf_counter()]))
    print(f"{took:.2f} s a step, {arguments.micro * arguments.seq / took:,.0f} tokens a second")
    taken = torch.cuda.max_memory_reserved() if cuda else engine.arena.peak(Place.HBM)
    if taken > allowed:
        raise SystemExit(f"{format_bytes(taken)} were taken")
    print_beside(planned, engine)
    engine.destroy()


if __name__ == "__main__":
    main()
