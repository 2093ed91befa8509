"""A text-sentiment classifier in plain torch under ZeRO: an encoder of 6 layers, width 256, 8 heads, length 1024, batch 32.

    python examples/sentiment.py --small                                # under a minute on a CPU
    torchrun --nproc-per-node 2 examples/sentiment.py --small --stage 3
    torchrun --nproc-per-node 8 examples/sentiment.py --stage 2         # the full size, on GPUs

The data are generated: reviews of random words among which a few good or bad ones decide the label.
"""

from __future__ import annotations

import argparse

import torch
from planned import plan, print_beside
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import zeroplan_runtime

VOCABULARY, GOOD, BAD, PADDING = 8000, range(10, 30), range(30, 50), 0


class Reviews(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Token sequences of odd lengths, padded, and labels: 1 where good words outnumber bad ones."""

    def __init__(self, count: int, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(0, 2, (count,), generator=generator)
        self.tokens = torch.randint(100, VOCABULARY, (count, length), generator=generator)
        share = torch.rand(count, length, generator=generator)
        words = torch.randint(0, 20, (count, length), generator=generator)
        first = torch.where(self.labels[:, None] == 1, GOOD.start, BAD.start)
        self.tokens = torch.where(share < 0.08, first + words, self.tokens)
        ends = torch.randint(length // 2, length + 1, (count, 1), generator=generator)
        self.tokens[torch.arange(length) >= ends] = PADDING

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens[index], self.labels[index]


class Encoder(nn.Module):
    """Token and position embeddings, pre-norm encoder layers, the mean over the words, a linear layer."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width, padding_idx=PADDING)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens` [batch, length] to logits [batch, 2]."""
        padding = tokens == PADDING
        x = self.words(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        keep = (~padding).unsqueeze(-1).to(x.dtype)
        logits: torch.Tensor = self.classify((self.norm(x) * keep).sum(1) / keep.sum(1))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    parser.add_argument("--small", action="store_true", help="2 layers of width 64, length 64: for a CPU")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()

    width, layers, heads, length, batch = (64, 2, 4, 64, 16) if arguments.small else (256, 6, 8, 1024, 32)
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 2e-3}},
        "zero_optimization": {"stage": arguments.stage},
        **({} if arguments.dtype == "fp32" else {arguments.dtype: {"enabled": True}}),
    }
    model, data = Encoder(width, layers, heads, length), Reviews(64 * batch, length)
    planned = plan(model, config, inputs={"tokens": data.tokens[:batch]})
    engine, _, loader, _ = zeroplan_runtime.initialize(model=model, config=config, training_data=data)
    assert loader is not None
    seen = right = step = 0
    while step < arguments.steps:
        for tokens, labels in loader:
            logits = engine(tokens.to(engine.device)).float()
            loss = functional.cross_entropy(logits, labels.to(engine.device))
            engine.backward(loss)
            engine.step()
            step += 1
            seen, right = seen + len(labels), right + int((logits.argmax(-1).cpu() == labels).sum())
            if step % 20 == 0:
                if engine.global_rank == 0:
                    print(f"step {step:4d}  loss {loss.item():.4f}  accuracy {right / seen:.3f}", flush=True)
                seen = right = 0
            if step == arguments.steps:
                break
    if engine.global_rank == 0:
        print_beside(planned, engine)


if __name__ == "__main__":
    main()
