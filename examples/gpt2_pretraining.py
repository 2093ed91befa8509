"""Pre-trains GPT-2 from random weights on bytes of text: the plan first, then the run.

    python examples/gpt2_pretraining.py                     # on a GPU the 124 M model at length 1024, else a tiny one
    torchrun --nproc-per-node 8 examples/gpt2_pretraining.py --stage 1 --steps 2000

The text is that of Python's own library. The loss falls from ln 256 = 5.5.
"""

from __future__ import annotations

import argparse

import torch
from planned import Text, ds_config, plan, print_beside, train


def main() -> None:
    """Plan, train, measure."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", default=not cuda, help="4 layers of width 64, length 64: for a CPU")
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()

    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 64} if arguments.tiny else {}
    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=Text.VOCABULARY, use_cache=False, bos_token_id=0, eos_token_id=0, **sizes)
    config = ds_config(arguments.micro_batch, arguments.stage, 3e-3 if arguments.tiny else 6e-4, "bf16")
    planned = plan(shape.to_dict(), config, seq_len=shape.n_positions, from_scratch=True)
    engine = train(GPT2LMHeadModel(shape), config, Text(shape.n_positions), arguments.steps)
    print_beside(planned, engine)
    engine.destroy()


if __name__ == "__main__":
    main()
