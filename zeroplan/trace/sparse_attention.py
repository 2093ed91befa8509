"""Block-sparse attention as the included runtime's kernels allocate for it on CUDA (:mod:`zeroplan_runtime.sparse_attention`).

Kernels of lists save query, key, value, output and lse, as dense attention does. Blocks that meet many others have partial
results in fp32: a block for each :data:`~zeroplan.core.sparse_attention.LIST_PIECE` tokens that it meets. Keys that all queries
see are gathered in the forward and in the backward, and torch's dense kernels allocate what they do for them.

FlexAttention, compiled, saves query, key, value, output and lse, the log-sum-exp of the scores in fp32 [B, H, S]; its forward
makes as many greatest scores, which it does not keep, and its backward lse's size once more. KV heads are not repeated. Moved
tokens are copies. Source: torch/_inductor/kernel/flex/flex_attention.py.

Tables of which blocks and tiles exist are made once in a run; here a forward makes them and its backward lets them go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zeroplan.core.sparse_attention import LIST_PIECE, RULE_NUMBERS, TILE, SparseTables
from zeroplan.trace.attention import fused_backward, fused_forward, kernel
from zeroplan.trace.kernels import block


class SparseFlexAttention(torch.autograd.Function):
    """One call of the kernels: query [B, H, S, D], key and value [B, Hkv, S, D], and the tables that it keeps."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        """Allocate what the forward allocates; returns the output, laid out as the query."""
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        greatest = torch.empty_like(lse)
        out = torch.empty_like(query)
        del greatest
        ctx.save_for_backward(query, key, value, out, lse, *tables)
        ctx.tables = len(tables)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Allocate what the backward allocates; returns the gradients of the inputs."""
        query, key, value, _out, lse, *_tables = ctx.saved_tensors
        delta = torch.empty_like(lse)
        grad_q, grad_v, grad_k = (torch.empty_like(each) for each in (query, value, key))
        del delta
        return grad_q, grad_k, grad_v, *(None for _ in range(ctx.tables))


class ListedAttention(torch.autograd.Function):
    """One call of the kernels of lists, and of dense ones for keys that all queries see."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, known: SparseTables, *tables: torch.Tensor
    ) -> torch.Tensor:
        """Allocate what the forward allocates; returns the output."""
        state: list[torch.Tensor | None] = []
        if known.shared is None:
            out = query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)
            lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        else:
            near, far = _gathered(key, known), _gathered(value, known)
            out, lse, *state = fused_forward(query, value)
            del near, far
        parts = [_parts(query, known.long_rows, known), _parts(query, known.long_rows, known, width=1)]
        del parts
        ctx.save_for_backward(query, key, value, out, lse, *state, *tables)
        ctx.known, ctx.tables = known, len(tables)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Allocate what the backward allocates; returns the gradients of the inputs."""
        query, key, value, _out, lse, *_others = ctx.saved_tensors
        known: SparseTables = ctx.known
        near: list[torch.Tensor] = []
        if known.shared is None:
            grad_q = torch.empty_like(query)
        else:
            seen = _gathered(key, known), _gathered(value, known)
            grad_q, *near = fused_backward(query, *seen, masked=False)
            del seen
        grad_k, grad_v = torch.empty_like(key), torch.empty_like(value)
        delta = torch.empty_like(lse)
        part = _parts(query, known.long_rows, known)
        del part
        parts = [_parts(key, known.long_columns, known) for _ in range(2)]
        del parts, delta, near
        return grad_q, grad_k, grad_v, None, *(None for _ in range(ctx.tables))


def _gathered(states: torch.Tensor, known: SparseTables) -> torch.Tensor:
    """The copy of the keys or values that all queries see."""
    assert known.shared is not None
    of, taken = known.shared
    samples, heads, tokens, width = states.shape
    return states.new_empty((samples, tokens * taken // of, heads, width)).transpose(1, 2)


def _parts(states: torch.Tensor, blocks: int, known: SparseTables, *, width: int | None = None) -> torch.Tensor | None:
    """Partial results of `blocks` blocks that meet all others, in fp32; as wide as the states, rounded up to a power of two."""
    if not blocks:
        return None
    samples, heads, tokens, own = states.shape
    wide = width or max(16, 1 << (own - 1).bit_length())
    pieces = blocks * known.block * wide * 4 * samples * heads
    return block(("rows", tokens, LIST_PIECE, pieces // LIST_PIECE)) if pieces % LIST_PIECE == 0 else None


class MovedTokens(torch.autograd.Function):
    """Tokens in another order: a copy in the forward, and one of the gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Allocate the copy [B, H, S, D], whose memory is laid out as [B, S, H, D]."""
        ctx.save_for_backward(tokens, places)
        return states.new_empty(states.transpose(1, 2).shape).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Allocate the gradient's copy."""
        return grads[0].new_empty(grads[0].transpose(1, 2).shape).transpose(1, 2), None, None


@dataclass(frozen=True)
class _Tables:
    """What all layers of a forward share: the block mask's tables, and the orders of queries and of keys."""

    mask: tuple[torch.Tensor, ...]
    queries: tuple[torch.Tensor, torch.Tensor] | None
    keys: tuple[torch.Tensor, torch.Tensor] | None
    listed: bool = False


def register_sparse(tables: SparseTables) -> str:
    """Make block-sparse attention with these tables an attention implementation of transformers; returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function

    def mask(batch_size: int, q_length: int, kv_length: int, mask_function: Any, config: Any, **others: Any) -> _Tables:
        heads = config.num_attention_heads
        shares_keys = getattr(config, "num_key_value_heads", None) not in (None, heads)
        causal = mask_function is causal_mask_function
        width, half = _width_of(config), config.dtype in (torch.float16, torch.bfloat16)
        if tables.lists(width, half=half, causal=causal, shares_keys=shares_keys):
            return _Tables(_lists_of(tables, kv_length, heads), None, None, listed=True)
        return _tables_of(tables, kv_length, heads, causal=mask_function is causal_mask_function, shares_keys=shares_keys)

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: _Tables, **others: Any
    ) -> tuple[torch.Tensor, None]:
        given = attention_mask
        with kernel():
            if given.listed:
                out = ListedAttention.apply(query, key, value, tables, *given.mask)
                return out.transpose(1, 2).contiguous(), None
            if given.queries is not None:
                query = MovedTokens.apply(query, *given.queries)
            if given.keys is not None:
                key, value = (MovedTokens.apply(each, *given.keys) for each in (key, value))
            out = SparseFlexAttention.apply(query, key, value, *given.mask)
            if given.queries is not None:
                out = MovedTokens.apply(out, *reversed(given.queries))
        return out.transpose(1, 2).contiguous(), None

    name = f"zeroplan_{tables.key}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    return name


def _width_of(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _lists_of(tables: SparseTables, tokens: int, heads: int) -> tuple[torch.Tensor, ...]:
    """Allocate the lists of `tokens` tokens, by queries and by keys: four numbers a block, and the blocks that it meets."""
    layouts = heads if tables.by_head else 1
    blocks = -(-tokens // tables.block)
    met = tables.listed + tables.long_columns + tables.long_rows
    made = [torch.empty((layouts, blocks, 4 + met), dtype=torch.int32, device="meta") for _ in range(2)]
    if tables.shared is not None:
        of, taken = tables.shared
        made.append(torch.empty(tokens * taken // of, dtype=torch.int64, device="meta"))
    return tuple(made)


def _tables_of(tables: SparseTables, tokens: int, heads: int, *, causal: bool, shares_keys: bool) -> _Tables:
    """Allocate the tables of `tokens` tokens: which blocks exist, the rules' numbers, the tiles by queries and by keys, partial
    and full, and orders with their inverses.
    """
    layouts = heads if tables.by_head else 1
    blocks, tiles = -(-tokens // tables.block), -(-tokens // TILE)

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    mask = [empty(layouts, blocks, blocks, dtype=torch.bool), empty(layouts, RULE_NUMBERS, tokens, dtype=torch.int32)]
    for _ in range(4):
        mask += [empty(layouts, tiles, dtype=torch.int32), empty(layouts, tiles, tiles, dtype=torch.int32)]

    def order() -> tuple[torch.Tensor, torch.Tensor]:
        orders = heads if tables.orders_by_head else 1
        return empty(orders, tokens, dtype=torch.int64), empty(orders, tokens, dtype=torch.int64)

    moves_keys = tables.moves_keys and not (tables.orders_by_head and shares_keys)
    queries = order() if tables.moves_queries and not causal else None
    return _Tables(tuple(mask), queries, order() if moves_keys else None)
