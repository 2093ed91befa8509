"""Context parallelism as torch builds it: ring attention on one of a group of fake ranks.

Note [Ring attention]
    Each rank has a part of every sample's tokens: one piece of its first half and one of its second, so that causal attention
    gives all ranks the same work. Attention runs once for the keys and values of each rank; they are gathered at once (torch's
    default rotation), and results are merged in fp32. Gradients of keys and values travel around the ring.

    The steps are torch's own (``_templated_ring_attention`` and its backward), over our allocations of the kernel. The last
    rank of the group needs the most: it merges whole results, where the first merges halves.
    Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

from zeroplan.core.errors import BadInput
from zeroplan.trace import attention

#: A kernel of attention, as torch's ring calls it.
Kernel = Callable[..., tuple[Any, ...]]
_SEQUENCE = 2  # the dimension of the tokens in [B, H, S, D]


class RingAttention(torch.autograd.Function):
    """``scaled_dot_product_attention`` within ``context_parallel``; query [B, H, S / cp, D], key and value with Hkv heads."""

    @staticmethod
    def forward(
        ctx: Any, group: Any, forward: Kernel, backward: Kernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Run the ring over the kernel `forward`, as later over `backward`; returns the merged output."""
        found = torch_ring._templated_ring_attention(group, _SEQUENCE, forward, query, key, value, is_causal=True)
        out, lse, *state = found
        ctx.group, ctx.kernel = group, backward
        ctx.save_for_backward(query, key, value, out, lse, *state)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run the ring's backward; returns the gradients of the inputs."""
        query, key, value, out, lse, *state = ctx.saved_tensors
        made = torch_ring._templated_ring_attention_backward(
            ctx.group, _SEQUENCE, ctx.kernel, grads[0], "grad_out", query, key, value, out, lse, is_causal=True
        )
        del state
        return None, None, None, *made


def _forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: object) -> tuple[Any, ...]:
    with attention.kernel():
        return attention.fused_forward(query, value)


def _backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
    with attention.kernel():
        return attention.fused_backward(query, key, value, masked=False)


@contextlib.contextmanager
def ring_attention(group: dist.ProcessGroup) -> Iterator[None]:
    """Run attention as a ring over the group. Raises BadInput: where the model asks for attention that no ring has."""

    def ring(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, masked: bool) -> torch.Tensor:
        dim = query.shape[-1]
        half = query.dtype in (torch.float16, torch.bfloat16)
        if masked or not half or dim != value.shape[-1] or dim % 8 or dim > 256:
            raise BadInput(
                "ring attention is modelled for causal attention in 16 bits, with heads of 8 to 256 channels",
                where="--cp",
                remedy="use --cp 1",
            )
        found: torch.Tensor = RingAttention.apply(group, _forward, _backward, query, key, value)
        return found

    balanced = torch_ring._cp_options.enable_load_balance
    attention.ring, torch_ring._cp_options.enable_load_balance = ring, True
    try:
        yield
    finally:
        attention.ring, torch_ring._cp_options.enable_load_balance = None, balanced
