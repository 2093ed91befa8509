"""Trains T5 to translate between two made-up languages: the plan first, then the run.

    python examples/translation.py                          # on a GPU the size of t5-small, else a tiny one
    torchrun --nproc-per-node 8 examples/translation.py --stage 3

A sentence of the one language is a row of words. In the other each word has a partner, and the rows are read backwards.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from planned import ds_config, plan, print_beside, train
from torch.utils.data import Dataset

END, FIRST = 1, 2


class Pairs(Dataset[dict[str, torch.Tensor]]):
    """Sentences of `length` words and their translations; the languages share a vocabulary of two halves."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        half = (vocabulary - FIRST) // 2
        words = torch.randint(0, half, (count, length - 1), generator=torch.Generator().manual_seed(0))
        ends = torch.full((count, 1), END)
        self.sources = torch.cat([FIRST + words, ends], dim=1)
        self.targets = torch.cat([FIRST + half + words.flip(1), ends], dim=1)

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.sources[index], "labels": self.targets[index]}


def main() -> None:
    """Plan, train, measure."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", default=not cuda, help="2 + 2 layers of width 64, 32 words: for a CPU")
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()

    from transformers import T5Config, T5ForConditionalGeneration

    tiny: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 34}
    length = 8 if arguments.tiny else 256
    torch.manual_seed(0)
    shape = T5Config(**(tiny if arguments.tiny else {}), use_cache=False, decoder_start_token_id=0)
    config = ds_config(arguments.micro_batch, arguments.stage, 3e-3 if arguments.tiny else 3e-4, "bf16")
    planned = plan(shape.to_dict(), config, seq_len=length, from_scratch=True)
    engine = train(T5ForConditionalGeneration(shape), config, Pairs(4096, length, shape.vocab_size), arguments.steps)
    print_beside(planned, engine)
    engine.destroy()


if __name__ == "__main__":
    main()
