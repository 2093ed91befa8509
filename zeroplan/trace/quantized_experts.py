"""A mixture's experts as linear layers in 4 bits, one expert after another, as transformers before version 5 runs them.

transformers 5 keeps all experts of a block in two parameters, which bitsandbytes leaves as they are. Before, each expert's
three matrices were layers, which it replaced by its own.

Source: transformers 4.40, ``models/mixtral/modeling_mixtral.py`` (``MixtralSparseMoeBlock``, ``MixtralBlockSparseTop2MLP``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zeroplan.core.quantization import Products
from zeroplan.trace.quantized import Linear4bit, Linear4bitSingle, multiplied


class Experts4bit(nn.Module):
    """Experts with ``gate_up_proj`` (experts, 2 inner, hidden) and ``down_proj`` (experts, hidden, inner) in 4 bits.

    Each gets an even share of the tokens: which ones a router sends decides no size but that.
    """

    compute_dtype = Linear4bit.compute_dtype
    nested = Linear4bit.nested
    from_half = Linear4bit.from_half
    keeps_input = Linear4bit.keeps_input
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    act_fn: Any

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """hidden_states: [tokens, hidden], the others [tokens, k]; returns [tokens, hidden]."""
        out = torch.zeros_like(hidden_states)
        experts, _, inner = self.down_proj.shape
        share = max(1, top_k_index.numel() // experts)
        for expert in range(experts):
            tokens = top_k_index.new_empty(share)
            state = hidden_states[tokens]
            gate_up = self.gate_up_proj[expert]
            passed = self.act_fn(multiplied(self, state, gate_up[:inner])) * multiplied(self, state, gate_up[inner:])
            answer = multiplied(self, passed, self.down_proj[expert])
            answer = answer * top_k_weights.reshape(-1)[tokens, None]
            out.index_add_(0, tokens, answer.to(out.dtype))
        return out


class Experts4bitSingle(Experts4bit):
    """The same with scales that are not quantised in turn."""

    nested = Linear4bitSingle.nested


def quantize_experts(model: Any, products: Products) -> None:
    """Let modules that hold all experts of a block in two parameters run them as layers in 4 bits."""
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if own.keys() == {"gate_up_proj", "down_proj"} and all(weight.dim() == 3 for weight in own.values()):
            module.__class__ = Experts4bit if products is Products.NESTED else Experts4bitSingle
            module.requires_grad_(False)
