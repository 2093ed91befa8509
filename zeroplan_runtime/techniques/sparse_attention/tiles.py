"""A layout of small blocks as FlexAttention's tiles: which tiles of the scores are computed, and which of their scores count.

FlexAttention's kernels compute tiles of 128 × 128 scores: the kernels that torch picks for Hopper take no smaller ones in the
backward, unless they are tuned at run time. Blocks of 16, 32 or 64 tokens are smaller. So a tile is computed where any of its
blocks exists, and within it each score asks the layout's rules, or looks its block up where it has none.

Note [Order of tokens]
    Fixed's global columns lie one in each window of 64 tokens, so that every tile of 128 keys holds one, and every tile would
    be computed. Attention does not ask for the order of its keys. Keys of blocks that most queries see are therefore moved to
    the front, where they fill whole tiles; so are queries of blocks that see most keys, where Fixed has them. The others keep
    their order behind them. The result is the same to rounding: only the order of a sum differs. With a quarter of all blocks
    global, Fixed's tiles fall from all to a little more than a quarter. Other kinds have their global blocks in few tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from zeroplan.core.sparse_attention import TILE, require_tiles
from zeroplan_runtime.techniques.sparse_attention.rules import LayoutRules, rules_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from zeroplan_runtime.techniques.sparse_attention.sparsity_config import SparsityConfig

#: A block's keys move to the front where more than this share of the queries sees them.
_SEEN_BY_MOST = 0.5

#: Whether a score counts, by sample, head, query and key: each a tensor of an index.
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
#: The token at a place, by head and place.
TokenAt = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TokenOrder:
    """Tokens in another order, whole blocks at a time.

    Attributes:
        tokens: the token at each place, int64 [1 or heads, tokens].
        places: the place of each token, likewise.
    """

    tokens: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of_blocks(cls, blocks: torch.Tensor, block: int, tokens: int) -> TokenOrder:
        """Returns the order of `tokens` tokens by the order of their blocks, int64 [1 or heads, blocks]."""
        each = (blocks.unsqueeze(-1) * block + torch.arange(block)).flatten(1)
        kept = each[each < tokens].view(len(blocks), tokens)
        return cls(kept, kept.argsort(-1))

    def to(self, device: torch.device) -> TokenOrder:
        """Returns the order on a device."""
        return TokenOrder(self.tokens.to(device), self.places.to(device))


@dataclass(frozen=True)
class SparseScores:
    """Which scores of a sequence exist, in the order in which its tokens are attended.

    Attributes:
        table: which blocks exist, bool [1 or heads, blocks, blocks], in that order.
        block: tokens of a block's side.
        tokens: of a sequence.
        causal: no token sees a later one.
        queries, keys: the order of the tokens; None where they stand as they are.
        tile: tokens of a tile's side.
        rules: what says whether a block exists, where it needs no table.
    """

    table: torch.Tensor
    block: int
    tokens: int
    causal: bool
    queries: TokenOrder | None = None
    keys: TokenOrder | None = None
    tile: int = TILE
    rules: LayoutRules | None = None

    @classmethod
    def make(cls, config: SparsityConfig, tokens: int, *, causal: bool, tile: int = TILE) -> SparseScores:
        """Returns the scores of `config` for `tokens` tokens, which need not fill their last block, on the CPU.

        Raises:
            BadInput: when neither of block and tile is a multiple of the other.
        """
        length = -(-tokens // config.block) * config.block
        return cls.of_layouts(config.head_layouts(length), config.block, tokens, causal=causal, tile=tile)

    @classmethod
    def of_layouts(cls, table: torch.Tensor, block: int, tokens: int, *, causal: bool, tile: int = TILE) -> SparseScores:
        """Returns the scores of layouts, bool [1 or heads, blocks, blocks].

        Raises:
            BadInput: when neither of block and tile is a multiple of the other.
        """
        require_tiles(block, tile)
        if block > tile:
            each = block // tile
            blocks = -(-tokens // tile)
            table, block = table.repeat_interleave(each, 1).repeat_interleave(each, 2)[:, :blocks, :blocks], tile
        return cls(table, block, tokens, causal, tile=tile)

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.table.device

    def to(self, device: torch.device) -> SparseScores:
        """Returns the scores with their tables on a device."""
        queries, keys = (order and order.to(device) for order in (self.queries, self.keys))
        rules = self.rules and self.rules.to(device)
        return replace(self, table=self.table.to(device), queries=queries, keys=keys, rules=rules)

    # ---- all scores at once, for devices without the kernels ---------------------------------------------------------
    def dense_mask(self) -> torch.Tensor:
        """Returns whether each score counts: bool [1 or heads, tokens, tokens]."""
        each = self.table.repeat_interleave(self.block, 1).repeat_interleave(self.block, 2)
        each = each[:, : self.tokens, : self.tokens]
        if self.causal:
            queries, keys = self._positions()
            each = each & (queries.unsqueeze(-1) >= keys.unsqueeze(-2))
        return each

    def _positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tokens at the places of queries and of keys, each int64 [1 or heads, tokens]."""
        plain = torch.arange(self.tokens, device=self.device).unsqueeze(0)
        return (
            plain if self.queries is None else self.queries.tokens,
            plain if self.keys is None else self.keys.tokens,
        )

    # ---- tiles ---------------------------------------------------------------------------------------------------------
    @cached_property
    def tiles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tiles that have a score that counts, and those whose scores all count: bool [1 or heads, tiles, tiles]."""
        queries, keys = self._positions()
        allowed = self.table
        whole = self.table
        if self.causal:
            low_q, high_q = self._block_bounds(queries)
            low_k, high_k = self._block_bounds(keys)
            allowed = allowed & (high_q.unsqueeze(-1) >= low_k.unsqueeze(-2))
            whole = whole & (low_q.unsqueeze(-1) >= high_k.unsqueeze(-2))
        some = self._pooled(allowed.float()) > 0
        every = self._pooled((~whole).float(), padding=1.0) == 0  # what lies beyond the sequence does not count
        return some, every

    def _block_bounds(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the first and the last token of each place of a block, int64 [1 or heads, blocks]."""
        blocks = self.table.shape[-1]
        last = positions[:, -1:].expand(-1, blocks * self.block - self.tokens)
        each = torch.cat((positions, last), 1).view(len(positions), blocks, self.block)
        return each.amin(-1), each.amax(-1)

    def _pooled(self, blocks: torch.Tensor, padding: float = 0.0) -> torch.Tensor:
        """Returns the greatest value of each tile's blocks."""
        each = self.tile // self.block
        short = -blocks.shape[-1] % each
        if padding and self.tokens % self.block:  # the last block is not whole, so neither is a tile with it
            blocks[:, -1], blocks[:, :, -1] = padding, padding
        blocks = functional.pad(blocks, (0, short, 0, short), value=padding)
        return functional.max_pool2d(blocks, each)

    def for_kernels(self, *, queries: bool, keys: bool) -> SparseScores:
        """Returns the scores, on the CPU, as kernels take them: with the layout's rules, if it has any, and with tokens in
        another order. See Note [Order of tokens], and Note [Rules] of :mod:`.rules`.

        Args:
            queries: move queries that see most keys to the front; not those of causal attention, where early ones see few.
            keys: move keys that most queries see to the front.
        """
        table, blocks = self.table, self.table.shape[-1]
        moved_q = moved_k = None
        if keys:
            visible = torch.arange(blocks, 0, -1) if self.causal else torch.tensor(blocks)
            seen = table.tril() if self.causal else table
            order = self._front(seen.sum(1) > _SEEN_BY_MOST * visible)
            table = table.gather(2, order.unsqueeze(1).expand_as(table))
            moved_k = TokenOrder.of_blocks(order, self.block, self.tokens)
        if queries and not self.causal:
            order = self._front(self.table.sum(2) > _SEEN_BY_MOST * blocks)
            table = table.gather(1, order.unsqueeze(2).expand_as(table))
            moved_q = TokenOrder.of_blocks(order, self.block, self.tokens)
        return replace(self, table=table, queries=moved_q, keys=moved_k)._with_rules()

    def _with_rules(self) -> SparseScores:
        token_queries, token_keys = (each // self.block for each in self._positions())
        first = slice(None, None, self.block)
        rules = rules_of(self.table, token_queries[:, first], token_keys[:, first], token_queries, token_keys)
        return replace(self, rules=rules)

    @property
    def computed_tiles(self) -> float:
        """Tiles that are computed, of a head on average."""
        some, _ = self.tiles
        return float(some.sum()) / len(some)

    def _front(self, chosen: torch.Tensor) -> torch.Tensor:
        """Returns the order of blocks, int64 [1 or heads, blocks], with the chosen ones first and a partial one last."""
        if self.tokens % self.block:
            chosen = chosen.clone()
            chosen[:, -1] = False
        order = torch.argsort(chosen, dim=-1, descending=True, stable=True)
        return order[:1] if bool((order == order[:1]).all()) else order

    # ---- FlexAttention's form ------------------------------------------------------------------------------------------
    def block_mask(self, padding: torch.Tensor | None = None, also: torch.Tensor | None = None) -> BlockMask:
        """Returns FlexAttention's mask.

        Args:
            padding: which keys of each sample are tokens, bool [samples, tokens], in their own order.
            also: scores that may count, bool [tokens, tokens], in their own order.
        """
        return self._plain_mask if padding is None and also is None else self._mask(padding, also)

    @cached_property
    def _plain_mask(self) -> BlockMask:
        return self._mask(None, None)

    def _mask(self, padding: torch.Tensor | None, also: torch.Tensor | None) -> BlockMask:
        from torch.nn.attention.flex_attention import BlockMask

        some, every = (each.unsqueeze(0) for each in self.tiles)
        if padding is not None:
            kept = padding.unsqueeze(1) if self.keys is None else padding[:, self.keys.tokens]  # [samples, 1 or heads, tokens]
            tiles = functional.pad(kept, (0, -self.tokens % self.tile)).unflatten(-1, (-1, self.tile))
            some = some & tiles.any(-1).unsqueeze(-2)
            every = every & tiles.all(-1).unsqueeze(-2)
        if also is not None:
            every = torch.zeros_like(every)
        partial, full = _ordered(some & ~every), _ordered(every)
        mask: BlockMask = BlockMask.from_kv_blocks(
            *partial,
            *full,
            BLOCK_SIZE=(self.tile, self.tile),
            mask_mod=self._mask_mod(padding, also),
            seq_lengths=(self.tokens, self.tokens),
        )
        return mask

    def token_functions(self) -> tuple[TokenAt, TokenAt]:
        """Returns which token stands at a place of the queries, and of the keys, given the head and the place."""
        return _token_at(self.queries), _token_at(self.keys)

    def _mask_mod(self, padding: torch.Tensor | None, also: torch.Tensor | None) -> MaskMod:
        """Returns what says whether a score counts, for FlexAttention to compile."""
        from torch.nn.attention.flex_attention import and_masks

        table, block, by_head = self.table, self.block, len(self.table) > 1
        shared = table[0]
        query_at, key_at = self.token_functions()

        def looked_up(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return table[h, q // block, k // block] if by_head else shared[q // block, k // block]

        by_rules = self.rules.test() if self.rules is not None else None
        exists: MaskMod = looked_up if by_rules is None else lambda b, h, q, k: by_rules(h, q, k)
        tests = [exists]
        if self.causal:
            tests.append(lambda b, h, q, k: query_at(h, q) >= key_at(h, k))
        if padding is not None:
            tests.append(lambda b, h, q, k: padding[b, key_at(h, k)])
        if also is not None:
            tests.append(lambda b, h, q, k: also[query_at(h, q), key_at(h, k)])
        if len(tests) == 1:
            return exists
        combined: MaskMod = and_masks(*tests)
        return combined


def _ordered(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each row's number of chosen tiles, and its tiles with those first, in int32."""
    indices = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), indices.to(torch.int32)


def _token_at(order: TokenOrder | None) -> TokenAt:
    if order is None:
        return lambda h, place: place
    tokens = order.tokens
    if len(tokens) > 1:
        return lambda h, place: tokens[h, place]
    shared = tokens[0]
    return lambda h, place: shared[place]
