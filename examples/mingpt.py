"""minGPT of 1.7, 12.8 and 45 billion parameters on eight A100s of 40 GB: planned, and trained at a size that is here.

    python examples/mingpt.py                               # the plans, then a tiny one on a CPU
    torchrun --nproc-per-node 8 examples/mingpt.py --size 1.7B --stage 2

minGPT is planned and trained as GPT-2 of the same shapes, which has the same parameters: 1,700,090,880 of the smallest. What a
post reported of such runs stands beside the plans; docs/reported.md says what of it can be.
"""

from __future__ import annotations

import argparse

import torch
from planned import Text, ds_config, plan, print_beside, train

import zeroplan
from zeroplan.core.sizes import MIB
from zeroplan.models import catalog

SIZES = ("1.7B", "12.8B", "45B")
#: Runs of the post (fp16, batch 1): size, engine, stage, optimizer and parameters on, checkpointing, MiB that it reports.
REPORTED = (
    ("1.7B", "ddp", 0, "none", "none", False, 36_148.55),
    ("12.8B", "deepspeed", 3, "none", "none", False, 7_796.98),
    ("45B", "deepspeed", 3, "cpu", "cpu", False, 4_976.98),
    ("45B", "deepspeed", 3, "cpu", "cpu", True, 2_192.98),
)


def print_reported() -> None:
    """Print plan beside report: states, allocated and reserved of one GPU, and the host."""
    print("MiB a GPU; host: GiB")
    print(f"{'':34}{'states':>9}{'allocated':>11}{'reserved':>10}{'reported':>10}{'host':>7}")
    for size, engine, stage, optimizer, param, checkpointing, reported in REPORTED:
        (found,) = zeroplan.estimate(
            f"minGPT-{size}",
            engine=engine,
            stage=stage if engine == "deepspeed" else None,
            offload_optimizer=optimizer if engine == "deepspeed" else None,
            offload_param=param if engine == "deepspeed" else None,
            gradient_checkpointing=checkpointing,
            dtype="fp16",
            gpu="A100-40G",
            gpus=8,
            cpu_ram="1T",
        )
        gpu = found.gpu
        where = "DDP" if engine == "ddp" else f"stage {stage}" + (", all on cpu" if param == "cpu" else "")
        name = f"{size} {where}" + (", checkpointing" if checkpointing else "")
        sizes = [gpu.model_states / MIB, (gpu.peak_allocated or 0) / MIB, (gpu.peak_reserved or 0) / MIB, reported]
        figures = "".join(f"{value:>{width},.0f}" for value, width in zip(sizes, (9, 11, 10, 10), strict=True))
        print(f"{name[:34]:34}{figures}{found.cpu.per_node / 2**30:>7,.0f}")


def main() -> None:
    """Print the plans of the three, then train one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", *SIZES), default="tiny")
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()

    from transformers import GPT2Config, GPT2LMHeadModel

    print_reported()
    entry = catalog.find(f"minGPT-{SIZES[0] if arguments.size == 'tiny' else arguments.size}")
    assert entry is not None  # the catalog has all three
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4} if arguments.size == "tiny" else {}
    torch.manual_seed(0)
    shape = GPT2Config(
        **{**entry.config, **sizes, "vocab_size": Text.VOCABULARY}, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    config = ds_config(arguments.micro_batch, arguments.stage, 3e-3 if sizes else 1e-4, "bf16")
    planned = plan(shape.to_dict(), config, seq_len=shape.n_positions, from_scratch=True)
    engine = train(GPT2LMHeadModel(shape), config, Text(shape.n_positions), arguments.steps)
    print_beside(planned, engine)
    engine.destroy()


if __name__ == "__main__":
    main()
