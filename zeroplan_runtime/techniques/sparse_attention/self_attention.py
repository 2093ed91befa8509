"""``SparseSelfAttention``: block-sparse attention as a module, by DeepSpeed's name and arguments."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan_runtime.techniques.sparse_attention.attention import ScoreMod, dense_attention, tiled_attention
from zeroplan_runtime.techniques.sparse_attention.block_attention import BlockLists, block_attention, lists_for_kernels
from zeroplan_runtime.techniques.sparse_attention.sparsity_config import SparsityConfig
from zeroplan_runtime.techniques.sparse_attention.tiles import SparseScores

_MODES = ("add", "mul")


class SparseSelfAttention(nn.Module):
    """Attention over the blocks of a layout (``deepspeed/ops/sparse_attention/sparse_self_attention.py``).

    The layout is made once, for the longest sequence; shorter ones use its first blocks. It is a buffer, so checkpoints hold
    it, and the first forward takes rank 0's, as random blocks may differ.

    Args:
        sparsity_config: the kind of sparsity.
        key_padding_mask_mode: ``add`` adds the mask to the scores; ``mul`` leaves out the keys at which it is 0.
        attn_mask_mode: the same for the mask of scores.
        max_seq_length: the longest sequence, in tokens.

    Raises:
        BadInput: for a mode that does not exist, and what the layout refuses.
    """

    master_layout: torch.Tensor

    def __init__(
        self,
        sparsity_config: SparsityConfig,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in _MODES:
                raise BadInput(f"{mode!r} is no mode", where=name, remedy=f"use {' or '.join(_MODES)}")
        self.sparsity_config = sparsity_config
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self.register_buffer("master_layout", sparsity_config.make_layout(max_seq_length))
        self._synchronized = False
        self._scores: dict[tuple[int, torch.device], SparseScores] = {}
        self._lists: dict[tuple[int, torch.device], BlockLists | None] = {}

    def get_layout(self, length: int) -> torch.Tensor:
        """Returns the layout for `length` tokens, int64 [heads, blocks, blocks].

        Raises:
            BadInput: for a length that is no multiple of the block, or is longer than the longest.
        """
        if not self._synchronized and dist.is_initialized():
            # NCCL sends what lies on a GPU alone.
            shared = self.master_layout.to("cuda" if dist.get_backend() == "nccl" else self.master_layout.device)
            dist.broadcast(shared, src=0)
            self.master_layout.copy_(shared)
            self._scores.clear()
            self._lists.clear()
        self._synchronized = True
        block = self.sparsity_config.block
        most = self.master_layout.shape[-1] * block
        if length % block or length > most:
            raise BadInput(
                f"{length} tokens are no multiple of the block, {block}, up to max_seq_length, {most}",
                where="SparseSelfAttention",
                remedy="pad the sequence",
            )
        return self.master_layout[:, : length // block, : length // block]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the output [samples, heads, tokens, width].

        Scores are q·k / √width + rpe + key padding + mask, as the published kernels add them up.

        Args:
            query: [samples, heads, tokens, width].
            key: likewise, or with its last two dimensions swapped.
            value: shaped as the query.
            rpe: relative positions, added to the scores: broadcast to [samples, heads, tokens, tokens]. It gets no gradient.
            key_padding_mask: [samples, tokens], further dimensions of size 1 aside.
            attn_mask: [tokens, tokens], dimensions of size 1 aside.

        Raises:
            BadInput: for shapes that differ, a length that the layout does not have, and an `rpe` that wants a gradient.
        """
        samples, heads, length, _ = query.shape
        if key.shape[2] != length:
            key = key.transpose(2, 3)
        if not query.shape == key.shape == value.shape:
            raise BadInput(
                f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} differ in shape",
                where="SparseSelfAttention",
                remedy="only self-attention is supported",
            )
        if heads != self.sparsity_config.num_heads:
            raise BadInput(f"{heads} heads, where the sparsity_config has {self.sparsity_config.num_heads}", where="query")
        if rpe is not None and rpe.requires_grad:
            raise BadInput("gets no gradient, as in DeepSpeed", where="rpe", remedy="detach it")
        layouts = self.get_layout(length)[: self.sparsity_config.num_layout_heads].bool()
        padding = None if key_padding_mask is None else key_padding_mask.reshape(samples, length)
        mask = None if attn_mask is None else attn_mask.reshape(length, length)
        kept = added_k = also = added = None
        if padding is not None:
            kept, added_k = (padding != 0, None) if self.key_padding_mask_mode == "mul" else (None, padding)
        if mask is not None:
            also, added = (mask != 0, None) if self.attn_mask_mode == "mul" else (None, mask)
        plain = all(part is None for part in (rpe, also, added_k, added)) and not torch.compiler.is_compiling()
        if query.is_cuda and plain:
            lists = self._lists_at(length, layouts)
            if lists is not None and lists.hides(kept) and lists.takes(query):
                return block_attention(query, key, value, lists, padding=kept)
        if query.is_cuda:
            scores = self._scores_at(length, layouts)
            score_mod = _score_mod(scores, None if rpe is None else rpe.expand(samples, heads, length, length), added_k, added)
            return tiled_attention(query, key, value, scores, scores.block_mask(kept, also), score_mod=score_mod)
        allowed = SparseScores.of_layouts(layouts, self.sparsity_config.block, length, causal=False).dense_mask().unsqueeze(0)
        allowed = allowed if kept is None else allowed & kept[:, None, None]
        allowed = allowed if also is None else allowed & also
        keys = None if added_k is None else added_k[:, None, None]
        return dense_attention(query, key, value, allowed, added=_summed(rpe, keys, added))

    def _lists_at(self, length: int, layouts: torch.Tensor) -> BlockLists | None:
        key = (length, layouts.device)
        if key not in self._lists:
            found = SparseScores.of_layouts(layouts.cpu(), self.sparsity_config.block, length, causal=False)
            self._lists[key] = lists_for_kernels(self.sparsity_config, found, layouts.device, shares_keys=False)
        return self._lists[key]

    def _scores_at(self, length: int, layouts: torch.Tensor) -> SparseScores:
        key = (length, layouts.device)
        if key not in self._scores:
            config = self.sparsity_config
            found = SparseScores.of_layouts(layouts.cpu(), config.block, length, causal=False)
            moved = found.for_kernels(queries=config.moves_queries, keys=config.moves_keys)
            self._scores[key] = moved.to(layouts.device)
        return self._scores[key]


def _score_mod(
    scores: SparseScores, rpe: torch.Tensor | None, padding: torch.Tensor | None, mask: torch.Tensor | None
) -> ScoreMod | None:
    """Returns what adds these to a score: [samples, heads, tokens, tokens], [samples, tokens] and [tokens, tokens]."""
    if rpe is None and padding is None and mask is None:
        return None
    query_at, key_at = scores.token_functions()

    def add(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        q, k = query_at(h, q), key_at(h, k)
        if rpe is not None:
            score = score + rpe[b, h, q, k]
        if padding is not None:
            score = score + padding[b, k]
        if mask is not None:
            score = score + mask[q, k]
        return score

    return add


def _summed(*parts: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the sum of what is added to the scores; None where nothing is."""
    found = [part for part in parts if part is not None]
    return sum(found[1:], found[0]) if found else None
