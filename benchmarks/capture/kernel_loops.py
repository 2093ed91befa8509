"""A training loop around one kernel, whose rule under capture no GPU had measured: ``python kernel_loops.py NAME``.

Names: flex (compiled FlexAttention), grouped (torch's grouped products), moe (transformers' experts), adam8bit, adam4bit and
adamfp8 (torchao's optimizers), flash, efficient, cudnn and math (torch's attention), liger (Liger's Llama).
"""

import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCH, LENGTH, WIDTH, HEADS, EXPERTS = 4, 1024, 1024, 16, 8


class Attention(nn.Module):
    """Attention by one kernel."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.mask = kind, None
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        if kind == "flex":
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            def causal(_b: Any, _h: Any, q: Any, k: Any) -> Any:
                return q >= k

            self.mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cuda")
            self.flex = torch.compile(flex_attention)

    def forward(self, x: torch.Tensor) -> Any:
        """x: [B, S, D]."""
        q, k, v = (one.view(*one.shape[:2], HEADS, -1).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        if self.kind == "flex":
            found = self.flex(q, k, v, block_mask=self.mask)
        elif self.kind in ("flash", "efficient", "cudnn", "math"):
            from torch.nn.attention import SDPBackend, sdpa_kernel

            names = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH"}
            with sdpa_kernel(getattr(SDPBackend, names[self.kind])):
                found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Experts whose rows are sorted by their expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.02)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, S, D]."""
        rows = x.flatten(0, 1)
        each = rows.shape[0] // EXPERTS
        ends = torch.arange(each, rows.shape[0] + 1, each, device=x.device, dtype=torch.int32)
        inner = F.silu(torch._grouped_mm(rows, self.up.to(rows.dtype), offs=ends))
        found: torch.Tensor = torch._grouped_mm(inner, self.down.to(rows.dtype), offs=ends)
        return found.view_as(x)


class Block(nn.Module):
    """One layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(kind)
        plain = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.mlp = Experts() if kind == "grouped" else plain

    def forward(self, x: torch.Tensor) -> Any:
        """x: [B, S, D]."""
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


def plain_loop(kind: str) -> None:
    """A stack of blocks, and three steps."""
    model = nn.Sequential(nn.Embedding(8192, WIDTH), *(Block(kind) for _ in range(6)), nn.Linear(WIDTH, 8192))
    model.to("cuda", torch.float32 if kind == "efficient" else torch.bfloat16)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if kind.startswith("adam"):
        sys.path.append(os.environ.get("TORCHAO", ""))  # a folder with it, which no other program may find
        import torchao.optim

        made = {"adam8bit": "AdamW8bit", "adam4bit": "AdamW4bit", "adamfp8": "AdamWFp8"}[kind]
        optimizer = getattr(torchao.optim, made)(model.parameters(), lr=1e-3)
    for _ in range(3):
        tokens = torch.randint(0, 8192, (BATCH, LENGTH), device="cuda")
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def model_loop(kind: str) -> None:
    """A model of transformers, and three steps."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 6, "num_attention_heads": HEADS, "num_key_value_heads": 4}
    config: Any = LlamaConfig(vocab_size=32000, intermediate_size=2816, **sizes)
    if kind == "moe":
        config = Qwen3MoeConfig(
            vocab_size=32000, moe_intermediate_size=512, num_experts=EXPERTS, num_experts_per_tok=2, head_dim=64, **sizes
        )
    if kind == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        tokens = torch.randint(0, 32000, (BATCH, LENGTH), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    (model_loop if sys.argv[1] in ("moe", "liger") else plain_loop)(sys.argv[1])
