"""Attention over a layout's blocks by lists, and over keys that all queries see by torch's dense kernels.

Note [Parts]
    Fixed lets a quarter of all keys be seen by every query. These are gathered, and torch's dense attention computes them: no
    other kernel is as fast. What is left is local, and kernels of lists go on from the output and the log-sum-exp that the
    dense part left. A backward of either part that is given the output and the log-sum-exp of both gives the part's exact
    gradients, as weights are exp(score - lse) and a score's gradient is weight · (∂weight - Σ output · ∂output).
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import torch

from zeroplan.core.sparse_attention import LIST_BLOCKS, LIST_PIECE, MOST_WIDTH
from zeroplan_runtime.techniques.sparse_attention.pieces import Pieces
from zeroplan_runtime.techniques.sparse_attention.sparsity_config import SparsityConfig
from zeroplan_runtime.techniques.sparse_attention.tiles import SparseScores

#: Where queries meet more keys than these by lists, and more than this share of all, FlexAttention's larger tiles are as fast.
_MOST_MET, _MOST_SHARE = 512, 0.1

#: Elements of a sample: the kernels count them in 32 bits.
_MOST_ELEMENTS = 2**31
#: Compute capabilities where torch prefers cuDNN's attention.
_CUDNN = ((9, 0), (10, 0), (10, 3))

_aten = torch.ops.aten


@dataclass(frozen=True)
class BlockLists:
    """A layout for the kernels of lists.

    Attributes:
        rows: blocks of keys that each block of queries meets.
        columns: blocks of queries that each block of keys meets.
        shared: tokens of keys that all queries see and that are in neither, int64; None where there are few.
        block: tokens of a block's side.
        tokens: of a sequence.
        causal: no token sees a later one.
    """

    rows: Pieces
    columns: Pieces
    shared: torch.Tensor | None
    block: int
    tokens: int
    causal: bool

    @classmethod
    def of(cls, scores: SparseScores, *, shares: bool) -> BlockLists | None:
        """Returns the lists of scores; None where the kernels do not take them.

        Args:
            scores: with tokens in their own order.
            shares: keys that all queries see are many, and computed densely.
        """
        table, block = scores.table, scores.block
        if block not in LIST_BLOCKS or scores.queries is not None or scores.keys is not None:
            return None
        shared = None
        if scores.causal:
            table = table.tril()
        elif shares:
            common = table.all(1).all(0)
            if scores.tokens % block:
                common[-1] = False
            table = table & ~common
            if not (bool(common.any()) and bool(table.any())):
                return None
            shared = (common.nonzero() * block + torch.arange(block)).flatten()
        most = max(LIST_PIECE // block, 1)
        rows, columns = Pieces.of(table, most), Pieces.of(table.transpose(1, 2), most)
        return cls(rows, columns, shared, block, scores.tokens, scores.causal)

    @property
    def met(self) -> float:
        """Keys that a query meets on average, but for those of `shared`."""
        return float(self.rows.table[..., 2].sum()) * self.block * self.block / (len(self.rows.table) * self.tokens)

    @property
    def by_head(self) -> bool:
        """Whether heads have lists of their own."""
        return len(self.rows.table) > 1

    def hides(self, padding: torch.Tensor | None) -> bool:
        """Whether the kernels hide that padding, bool [samples, tokens]; the dense ones hide none."""
        return self.shared is None or padding is None

    def takes(self, query: torch.Tensor) -> bool:
        """Whether the kernels take queries of that size and dtype."""
        width = query.shape[-1]
        half = query.dtype in (torch.float16, torch.bfloat16)
        if query[0].numel() >= _MOST_ELEMENTS:
            return False
        return width <= MOST_WIDTH and (self.shared is None or (half and width % 8 == 0))

    def to(self, device: torch.device) -> BlockLists:
        """Returns the lists on a device."""
        shared = None if self.shared is None else self.shared.to(device)
        return replace(self, rows=self.rows.to(device), columns=self.columns.to(device), shared=shared)


def lists_for_kernels(
    config: SparsityConfig, scores: SparseScores, device: torch.device, *, shares_keys: bool
) -> BlockLists | None:
    """Returns the lists of scores for kernels on `device`; None where FlexAttention is to compute the scores.

    Args:
        config: whose scores they are.
        scores: with tokens in their own order.
        device: a CUDA device.
        shares_keys: groups of heads have keys in common.
    """
    if not has_triton() or (shares_keys and (config.moves_keys or len(scores.table) > 1)):
        return None
    if config.moves_keys and (scores.causal or config.moves_queries or len(scores.table) > 1):
        return None
    lists = BlockLists.of(scores, shares=config.moves_keys)
    if lists is None or lists.met > max(_MOST_MET, _MOST_SHARE * scores.tokens):
        return None
    return lists.to(device)


@functools.cache
def has_triton() -> bool:
    """Returns whether Triton is installed, as it is with torch's wheels for CUDA."""
    return importlib.util.find_spec("triton") is not None


def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lists: BlockLists,
    *,
    padding: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Returns the attention's output [samples, heads, tokens, width].

    Args:
        query: [samples, heads, tokens, width].
        key: [samples, heads or a divisor of them, tokens, width].
        value: shaped as the key.
        lists: which blocks exist.
        padding: which keys of each sample are tokens, bool [samples, tokens].
        scale: of the scores; by default one over the root of the width.
    """
    out: torch.Tensor = _BlockAttention.apply(query, key, value, lists, padding, scale or query.shape[-1] ** -0.5)
    return out


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lists: BlockLists,
        padding: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        query, key, value = (_rows(each) for each in (query, key, value))
        samples, heads, tokens, _ = query.shape
        random: list[torch.Tensor] = []
        if lists.shared is None:
            out = _like(query)
            lse = query.new_empty((samples, heads, tokens), dtype=torch.float32)
        else:
            near, far = _shared(key, lists.shared), _shared(value, lists.shared)
            out, lse, *random = dense_forward(query, near, far, scale)
        padding = None if padding is None else padding.contiguous()
        with torch.cuda.device_of(query):
            run_forward(query, key, value, out, lse, lists, padding, scale, started=lists.shared is not None)
        ctx.save_for_backward(query, key, value, out, lse, padding, *random)
        ctx.lists, ctx.scale = lists, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, out, lse, padding, *random = ctx.saved_tensors
        lists: BlockLists = ctx.lists
        grad = _rows(grad)
        shared = lists.shared
        near: list[torch.Tensor] = []
        if shared is None:
            grad_q = _like(query)
        else:
            seen = _shared(key, shared), _shared(value, shared)
            grad_q, *near = dense_backward(grad, query, *seen, out, lse, random, ctx.scale)
            del seen
        grad_k, grad_v = _like(key), _like(value)
        grads = grad_q, grad_k, grad_v
        with torch.cuda.device_of(query):
            run_backward(query, key, value, out, grad, lse, grads, lists, padding, ctx.scale, started=shared is not None)
        if shared is not None:
            for target, part in zip((grad_k, grad_v), near, strict=True):
                target.index_copy_(2, shared, part)
        return grad_q, grad_k, grad_v, None, None, None


def _rows(states: torch.Tensor) -> torch.Tensor:
    """Returns states whose rows are contiguous."""
    return states if states.stride(-1) == 1 else states.contiguous()


def _like(states: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor of that shape, laid out as [samples, tokens, heads, width], as projections are."""
    return states.new_empty(states.transpose(1, 2).shape).transpose(1, 2)


def _shared(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return states.transpose(1, 2).index_select(1, tokens).transpose(1, 2)


# ---- the dense part --------------------------------------------------------------------------------------------------


def dense_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
    """Returns output, log-sum-exp [samples, heads, tokens], and what the backward wants beside them."""
    if not query.is_cuda:  # for tests
        scores = query.float() @ _grouped(key, query).float().transpose(2, 3) * scale
        lse = scores.logsumexp(-1)
        out = (scores - lse.unsqueeze(-1)).exp() @ _grouped(value, query).float()
        return out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse
    if not _by_cudnn(query):
        out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, False, False, scale=scale
        )
        return out, lse, seed, offset
    out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, False, False, scale=scale
    )
    return out, lse.squeeze(-1), seed, offset


def dense_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    random: list[torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value, given the output and the log-sum-exp of all parts."""
    if not query.is_cuda:
        group = query.shape[1] // key.shape[1]
        wide_k, wide_v = _grouped(key, query).float(), _grouped(value, query).float()
        weights = (query.float() @ wide_k.transpose(2, 3) * scale - lse.unsqueeze(-1)).exp()
        delta = (out.float() * grad.float()).sum(-1, keepdim=True)
        grad_scores = weights * (grad.float() @ wide_v.transpose(2, 3) - delta) * scale
        grads = (grad_scores @ wide_k, grad_scores.transpose(2, 3) @ query.float(), weights.transpose(2, 3) @ grad.float())
        grad_q, grad_k, grad_v = (each.to(query.dtype) for each in grads)
        return grad_q, *(each.unflatten(1, (-1, group)).sum(2) for each in (grad_k, grad_v))
    given, lengths = (grad, query, key, value, out), (None, None, query.shape[2], key.shape[2])
    if _by_cudnn(query):
        backward = _aten._scaled_dot_product_cudnn_attention_backward
        grad_q, grad_k, grad_v = backward(*given, lse.unsqueeze(-1), *random, None, *lengths, 0.0, False, scale=scale)
    else:
        backward = _aten._scaled_dot_product_flash_attention_backward
        grad_q, grad_k, grad_v = backward(*given, lse, *lengths, 0.0, False, *random, scale=scale)
    return grad_q, grad_k, grad_v


def _by_cudnn(query: torch.Tensor) -> bool:
    """Whether torch prefers cuDNN's attention to FlashAttention 2: on Hopper and later (``sdp_utils.cpp``)."""
    return torch.cuda.get_device_capability(query.device) in _CUDNN and torch.backends.cuda.cudnn_sdp_enabled()


def _grouped(states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return states.repeat_interleave(query.shape[1] // states.shape[1], 1)


# ---- the kernels -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """How a kernel runs: tokens a step, warps, and steps in flight."""

    step: int
    warps: int
    stages: int


#: By the block's side; those of 16 and 64 are the fastest of nine on an H200 (benchmarks/kernels/sparse_parts.py).
SHAPES: dict[str, dict[int, Shape]] = {
    "forward": {16: Shape(32, 1, 2), 32: Shape(64, 2, 2), 64: Shape(64, 4, 1), 128: Shape(128, 8, 2)},
    "queries": {16: Shape(32, 1, 2), 32: Shape(64, 4, 2), 64: Shape(64, 4, 1), 128: Shape(128, 8, 2)},
    "keys": {16: Shape(32, 1, 2), 32: Shape(64, 4, 2), 64: Shape(64, 4, 2), 128: Shape(128, 8, 2)},
}


def _common(query: torch.Tensor, lists: BlockLists, padding: torch.Tensor | None) -> dict[str, Any]:
    return {
        "BLOCK": lists.block,
        "WIDTH": max(16, 1 << (query.shape[-1] - 1).bit_length()),
        "CAUSAL": lists.causal,
        "PADDED": padding is not None,
        "BY_HEAD": lists.by_head,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }


def _launch(kind: str, lists: BlockLists) -> dict[str, Any]:
    shape = SHAPES[kind][lists.block]
    return {"STEP": max(shape.step, lists.block), "num_warps": shape.warps, "num_stages": shape.stages}


def _strides(*tensors: torch.Tensor) -> list[int]:
    return [number for each in tensors for number in each.stride()[:3]]


def run_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    lists: BlockLists,
    padding: torch.Tensor | None,
    scale: float,
    *,
    started: bool,
) -> None:
    """Writes output and log-sum-exp; `started`: they hold those of other keys, and go on from there."""
    from zeroplan_runtime.techniques.sparse_attention import block_kernels

    samples, heads, tokens, width = query.shape
    pieces, common = lists.rows, _common(query, lists, padding)
    part, part_lse = out, lse
    if pieces.slots:
        slots = samples * heads * pieces.slots * lists.block
        part = out.new_empty((slots, common["WIDTH"]), dtype=torch.float32)
        part_lse = out.new_empty(slots, dtype=torch.float32)
    marks = padding if padding is not None else lists.rows.table
    block_kernels.forward[(pieces.table.shape[1], samples * heads)](
        query, key, value, out, lse, part, part_lse, marks, pieces.table, pieces.entries,
        *_strides(query, key, value, out),
        scale, heads, heads // key.shape[1], tokens, width, pieces.entries.shape[1], pieces.slots,
        STARTED=started, **common, **_launch("forward", lists),
    )  # fmt: skip
    if pieces.slots:
        block_kernels.merge_outputs[(pieces.long.shape[1], samples * heads)](
            part, part_lse, out, lse, pieces.long, *_strides(out), heads, tokens, width, pieces.slots,
            STARTED=started, **{name: common[name] for name in ("BLOCK", "WIDTH", "BY_HEAD")},
        )  # fmt: skip


def run_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    grad: torch.Tensor,
    lse: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lists: BlockLists,
    padding: torch.Tensor | None,
    scale: float,
    *,
    started: bool,
) -> None:
    """Writes the gradients of query, key and value; `started`: the query's holds that of other keys, and goes on from there."""
    from zeroplan_runtime.techniques.sparse_attention import block_kernels

    samples, heads, tokens, width = query.shape
    key_heads = key.shape[1]
    grad_q, grad_k, grad_v = grads
    common = _common(query, lists, padding)
    plain = {name: common[name] for name in ("BLOCK", "WIDTH", "BY_HEAD")}
    rows, columns = lists.rows, lists.columns
    marks = padding if padding is not None else rows.table
    delta = torch.empty_like(lse)

    def parts(slots: int, count: int) -> torch.Tensor:
        return query.new_empty((count * slots * lists.block, common["WIDTH"]), dtype=torch.float32) if slots else delta

    part = parts(rows.slots, samples * heads)
    block_kernels.backward_queries[(rows.table.shape[1], samples * heads)](
        query, key, value, out, grad, lse, delta, grad_q, part, marks, rows.table, rows.entries,
        *_strides(query, key, value, out, grad, grad_q),
        scale, heads, heads // key_heads, tokens, width, rows.entries.shape[1], rows.slots,
        STARTED=started, **common, **_launch("queries", lists),
    )  # fmt: skip
    if rows.slots:
        block_kernels.sum_parts[(rows.long.shape[1], samples * heads)](
            part, grad_q, rows.long, *_strides(grad_q), heads, tokens, width, rows.slots, STARTED=started, **plain
        )
    del part
    part_k, part_v = parts(columns.slots, samples * key_heads), parts(columns.slots, samples * key_heads)
    block_kernels.backward_keys[(columns.table.shape[1], samples * key_heads)](
        query, key, value, grad, lse, delta, grad_k, grad_v, part_k, part_v, marks, columns.table, columns.entries,
        *_strides(query, key, value, grad, grad_k, grad_v),
        scale, key_heads, tokens, width, columns.entries.shape[1], columns.slots,
        GROUP=heads // key_heads, **common, **_launch("keys", lists),
    )  # fmt: skip
    if columns.slots:
        for one, target in ((part_k, grad_k), (part_v, grad_v)):
            block_kernels.sum_parts[(columns.long.shape[1], samples * key_heads)](
                one, target, columns.long, *_strides(target), key_heads, tokens, width, columns.slots, STARTED=False, **plain
            )
