"""Fine-tunes a causal language model of transformers under ZeRO.

    python examples/causal_lm.py                                      # one process, generated data, under a minute on a CPU
    torchrun --nproc-per-node 2 examples/causal_lm.py --stage 3       # two ranks
    torchrun --nproc-per-node 8 examples/causal_lm.py --stage 3 --model meta-llama/Llama-3.2-1B --seq 2048 --text my.txt

Without --model a small Llama with random weights learns to continue generated sequences: each is an arithmetic progression
modulo the vocabulary, so the loss falls from ln(vocabulary) towards that of the first two tokens, which cannot be known.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from planned import plan, print_beside
from torch.utils.data import Dataset

import zeroplan_runtime


class Progressions(Dataset[dict[str, torch.Tensor]]):
    """Sequences ``start + i · stride (mod vocabulary)``."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        starts = torch.randint(0, vocabulary, (count, 1), generator=generator)
        strides = torch.randint(1, 9, (count, 1), generator=generator)
        self.tokens = (starts + strides * torch.arange(length)) % vocabulary

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class TextFile(Progressions):
    """Consecutive pieces of a text file."""

    def __init__(self, path: Path, length: int, model: str) -> None:
        from transformers import AutoTokenizer

        tokens = AutoTokenizer.from_pretrained(model)(path.read_text(), return_tensors="pt").input_ids[0]
        self.tokens = tokens[: len(tokens) // length * length].view(-1, length)


def build(arguments: argparse.Namespace) -> tuple[Any, Dataset[dict[str, torch.Tensor]]]:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
        return model, TextFile(arguments.text, arguments.seq, arguments.model)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config), Progressions(4096, min(arguments.seq, 32), config.vocab_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--model", help="a hub id or folder; --text goes with it")
    parser.add_argument("--text", type=Path, help="the text file to train on")
    parser.add_argument("--save", type=Path, help="folder for a checkpoint and the exported model")
    arguments = parser.parse_args()
    if arguments.model and not arguments.text:
        parser.error("--model needs --text")

    model, data = build(arguments)
    if arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.micro_batch,
        "gradient_accumulation_steps": arguments.grad_accum,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": arguments.lr, "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": arguments.steps, "warmup_num_steps": 10, "warmup_max_lr": arguments.lr},
        },
        "zero_optimization": {"stage": arguments.stage},
    }
    if arguments.dtype != "fp32":
        config[arguments.dtype] = {"enabled": True}
    planned = plan(
        model.config.to_dict(),
        config,
        seq_len=data[0]["input_ids"].numel(),
        gradient_checkpointing=arguments.gradient_checkpointing,
        from_scratch=not arguments.model,
    )
    engine, _, loader, _ = zeroplan_runtime.initialize(model=model.train(), config=config, training_data=data)
    assert loader is not None

    batches = iter(loader)
    for step in range(1, arguments.steps + 1):
        for _ in range(engine.gradient_accumulation_steps()):
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0 and (step % 25 == 0 or step == 1):
            norm = engine.get_global_grad_norm() or math.nan
            print(f"step {step:4d}  loss {loss.item():.4f}  norm {norm:.3f}  lr {engine.get_lr()[0]:.2e}", flush=True)
    if arguments.save:
        engine.save_checkpoint(arguments.save / "checkpoint")
        engine.save_16bit_model(arguments.save / "model")
    print_beside(planned, engine)


if __name__ == "__main__":
    main()
