"""Attention over the scores that a layout has.

On CUDA FlexAttention computes the tiles of :mod:`.tiles`, forward and backward, compiled once for a shape. FlexAttention has
no backward on a CPU, so there all scores are computed and those of missing blocks left out: exact, and as slow and as large as
dense attention. A query that sees no key gives zeros, and its gradients are zeros; DeepSpeed's kernels gave NaN for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from zeroplan_runtime.techniques.sparse_attention.tiles import SparseScores, TokenOrder

#: Shapes that the kernels may be compiled for in one process; torch's own limit is 8.
_MOST_SHAPES = 64

#: Queries of fewer than 128 tokens would get a kernel for decoding.
_KERNEL_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}

#: Changes a score, given its sample, head, query and key.
ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def tiled_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: SparseScores,
    block_mask: Any,
    *,
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
    autotune: bool = False,
) -> torch.Tensor:
    """Returns the attention's output [samples, heads, tokens, width], by FlexAttention.

    Args:
        query: [samples, heads, tokens, width].
        key: [samples, heads or a divisor of them, tokens, width].
        value: shaped as the key.
        scores: which scores exist.
        block_mask: its mask, of :meth:`.tiles.SparseScores.block_mask`.
        scale: of the scores; by default one over the root of the width.
        score_mod: what else changes a score; it sees the order of `scores`.
        autotune: try several kernels at the first call and keep the fastest.
    """
    if scores.queries is not None:
        query = reorder(query, scores.queries)
    if scores.keys is not None:
        key, value = reorder(key, scores.keys), reorder(value, scores.keys)
    attend = _compiled(autotune) if query.is_cuda else _uncompiled()
    grouped = key.shape[1] != query.shape[1]
    out: torch.Tensor = attend(
        query,
        key,
        value,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=grouped,
        kernel_options=_KERNEL_OPTIONS,
    )
    if scores.queries is not None:
        out = reorder(out, TokenOrder(scores.queries.places, scores.queries.tokens))
    return out


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float | None = None,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns what :func:`tiled_attention` returns, with all scores computed.

    Args:
        query: [samples, heads, tokens, width].
        key: [samples, heads or a divisor of them, tokens, width].
        value: shaped as the key.
        mask: whether each score counts, bool, broadcast to [samples, heads, tokens, tokens].
        scale: of the scores; by default one over the root of the width.
        added: to the scores, broadcast likewise.
    """
    allowed = mask if added is None else torch.where(mask, added.to(query.dtype), float("-inf"))
    grouped = key.shape[1] != query.shape[1]
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scale, enable_gqa=grouped)


@functools.cache
def _compiled(autotune: bool) -> Callable[..., Any]:
    """FlexAttention compiled, shape by shape.

    As a whole graph, so that what cannot be compiled raises, where torch would otherwise compute all scores without a word.
    That holds in an engine's first micro batch, too, which runs compiled functions as written and under a dispatch mode that
    looks at parameters (:func:`zeroplan_runtime.compiled.uncompiled`): here are none, and all scores may not fit.
    """
    from torch.nn.attention.flex_attention import flex_attention

    mode = "max-autotune-no-cudagraphs" if autotune else None
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False, mode=mode)

    def attend(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # within a compiled model it is part of its graph
            return flex_attention(*args, **kwargs)
        limit = torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES)
        with _disable_current_modes(), torch.compiler.set_stance("default"), limit:
            return compiled(*args, **kwargs)

    return attend


def _uncompiled() -> Callable[..., Any]:
    """FlexAttention as written, which computes all scores: for tests on a CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


def reorder(states: torch.Tensor, order: TokenOrder) -> torch.Tensor:
    """Returns [samples, heads, tokens, width] with the tokens in that order."""
    moved: torch.Tensor = _Reorder.apply(states, order.tokens, order.places)
    return moved


class _Reorder(torch.autograd.Function):
    """Moves tokens; the gradient moves them back, where an index's own backward would add one by one."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, places)
        return _moved(states, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _, places = ctx.saved_tensors
        return _moved(grads[0], places), None, None


def _moved(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Laid out as [samples, tokens, heads, width], as projections are: a token's heads move as one piece."""
    rows = states.transpose(1, 2)
    if len(tokens) == 1:
        return rows.index_select(1, tokens[0]).transpose(1, 2)
    return rows.gather(1, tokens.t().unsqueeze(-1).unsqueeze(0).expand_as(rows)).transpose(1, 2)
