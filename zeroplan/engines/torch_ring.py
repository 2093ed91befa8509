"""Ring attention on a CPU, for which torch's ``context_parallel`` has no rule: torch's own steps over the CPU's kernels.

Imports torch: only trainers import this module, and only a rank's process imports those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist

from zeroplan.trace.context_parallel import RingAttention

_aten = torch.ops.aten


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Any, ...]:
    found: tuple[Any, ...] = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
    return found


def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[Any, ...]:
    found: tuple[Any, ...] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=scale
    )
    return found


@contextlib.contextmanager
def ring_on_cpu(group: dist.ProcessGroup) -> Iterator[None]:
    """Run attention as a ring over the group, within torch's ``context_parallel``."""

    def ring(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        assert attn_mask is None  # the plan refuses what a ring has not
        assert is_causal
        assert not dropout_p
        kernels = partial(_forward, scale=scale), partial(_backward, scale=scale)
        found: torch.Tensor = RingAttention.apply(group, *kernels, query, key, value)
        return found

    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", ring):
        yield
