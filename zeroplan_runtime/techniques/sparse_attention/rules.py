"""A layout told by rules instead of a table, so that a kernel decides on a score from one number or two of its row and column.

Note [Rules]
    Looking each score's block up in a table loads once for each score of a tile, which takes a kernel longer than to compute
    the score. The published layouts are unions of few patterns: a band about the diagonal, windows, keys that all queries see,
    queries that see all keys, and a few single blocks in a row (BigBird's random ones). What a pattern needs is a number for
    each query and one for each key, which a kernel loads once for a row or column of a tile. The patterns are read off the
    table, whatever kind of layout it is, and each takes only what the table has; where a row has more blocks left than
    :data:`RULE_EXTRAS`, the layout has no rules and scores are looked up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from zeroplan.core.sparse_attention import RULE_EXTRAS, RULE_NUMBERS

#: Numbers for a token in :attr:`LayoutRules.numbers`: of a query first, then of a key.
_PLACE_Q, _WINDOW_Q, _SEES_ALL, _EXTRA, _PLACE_K, _WINDOW_K, _SEEN_BY_ALL = (
    0,
    1,
    2,
    3,
    3 + RULE_EXTRAS,
    4 + RULE_EXTRAS,
    5 + RULE_EXTRAS,
)

#: Operations of a score for rows, columns, windows and the band, of which single blocks take one each.
_COSTS = (1, 1, 1, 2)

_Test = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LayoutRules:
    """Which blocks exist, by numbers of queries and keys.

    Attributes:
        numbers: int32 [1 or heads, :data:`RULE_NUMBERS`, tokens].
        band: blocks to either side of the diagonal that exist; -1 for none.
        windows: whether there are windows.
        rows, columns: whether there are queries that see all keys, and keys that all queries see.
        extras: single blocks of a row.
        past: no block sees a later one.
    """

    numbers: torch.Tensor
    band: int
    windows: bool
    rows: bool
    columns: bool
    extras: int
    past: bool

    def to(self, device: torch.device) -> LayoutRules:
        """Returns the rules with their numbers on a device."""
        return replace(self, numbers=self.numbers.to(device))

    def test(self) -> _Test:
        """Returns what says whether a score's block exists, by its head and the places of its query and key."""
        numbers, by_head = self.numbers, len(self.numbers) > 1
        rows = [numbers[0, i] for i in range(RULE_NUMBERS)]

        def number(h: torch.Tensor, which: int, at: torch.Tensor) -> torch.Tensor:
            return numbers[h, which, at] if by_head else rows[which][at]

        def exists(h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            found = None
            if self.band >= 0:
                found = (number(h, _PLACE_Q, q) - number(h, _PLACE_K, k)).abs() <= self.band
            if self.windows:
                found = _either(found, number(h, _WINDOW_Q, q) == number(h, _WINDOW_K, k))
            for i in range(self.extras):
                found = _either(found, number(h, _EXTRA + i, q) == number(h, _PLACE_K, k))
            if self.columns:
                found = _either(found, number(h, _SEEN_BY_ALL, k) != 0)
            if self.rows:
                found = _either(found, number(h, _SEES_ALL, q) != 0)
            if found is None:  # no block exists
                found = number(h, _PLACE_Q, q) < 0
            return found & (number(h, _PLACE_K, k) <= number(h, _PLACE_Q, q)) if self.past else found

        return exists


def _either(one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if one is None else one | other


def rules_of(
    table: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, token_queries: torch.Tensor, token_keys: torch.Tensor
) -> LayoutRules | None:
    """Returns the rules of a layout, or None where it has none.

    Args:
        table: which blocks exist, bool [1 or heads, blocks, blocks], in the order in which they are attended.
        queries: the block at each place of a block of queries, int64 [1 or heads, blocks].
        keys: the same for keys.
        token_queries: the block that each place of a query belongs to, likewise [1 or heads, tokens].
        token_keys: the same for keys.
    """
    heads, blocks = len(table), table.shape[-1]
    own = torch.empty_like(table)
    rows, columns = (queries.expand(heads, -1), keys.expand(heads, -1))
    at = torch.arange(heads)[:, None, None]
    own[at, rows.unsqueeze(2), columns.unsqueeze(1)] = table
    own, head_of = torch.unique(own, dim=0, return_inverse=True)  # patterns repeat over the heads
    past = not bool(own.triu(1).any())
    visible = torch.ones(blocks, blocks, dtype=torch.bool)
    visible = visible.tril() if past else visible
    lacks = ~own & visible
    sees_all, seen_by_all = ~lacks.any(2), ~lacks.any(1)
    apart = (torch.arange(blocks)[:, None] - torch.arange(blocks)).abs()
    nearest = apart.expand_as(lacks)[lacks].min() if bool(lacks.any()) else torch.tensor(blocks)
    band, window = int(nearest) - 1, _windows(lacks)
    window_q = window.masked_fill(lacks.diagonal(dim1=1, dim2=2), -1)  # a block that does not see itself is in no window
    patterns = [
        sees_all.unsqueeze(2),
        seen_by_all.unsqueeze(1),
        window_q.unsqueeze(2) == window.unsqueeze(1),
        (apart <= band).unsqueeze(0),
    ]
    chosen, left = _cheapest(own, patterns)
    by_rows, by_columns, windows, by_band = chosen
    extras = int(left.sum(2).max())
    if extras > RULE_EXTRAS:
        return None
    layouts = len(own)
    single = torch.full((layouts, blocks, RULE_EXTRAS), -1)
    if extras:
        order = torch.argsort(left.int(), dim=-1, descending=True, stable=True)[..., :RULE_EXTRAS]
        single[..., : order.shape[-1]] = torch.where(left.gather(2, order), order, -1)
    of_queries = torch.stack([torch.arange(blocks).expand(layouts, -1), window_q, sees_all.long(), *single.unbind(-1)], 1)
    of_keys = torch.stack([torch.arange(blocks).expand(layouts, -1), window, seen_by_all.long()], 1)
    whole = [
        numbers.expand(count, -1, -1).gather(2, tokens.expand(count, -1).unsqueeze(1).expand(-1, numbers.shape[1], -1))
        for numbers, tokens in ((of_queries[head_of], token_queries), (of_keys[head_of], token_keys))
        for count in [max(heads, len(token_queries), len(token_keys))]
    ]
    numbers = torch.cat(whole, 1).to(torch.int32)
    return LayoutRules(numbers, band if by_band else -1, windows, by_rows, by_columns, extras, past)


def _cheapest(own: torch.Tensor, patterns: list[torch.Tensor]) -> tuple[tuple[bool, ...], torch.Tensor]:
    """Returns which patterns tell the layout in the fewest operations a score, and the single blocks that they leave."""
    found: tuple[tuple[int, int], tuple[bool, ...], torch.Tensor] | None = None
    for chosen in sorted(itertools.product((False, True), repeat=len(patterns)), key=_cost):
        if found is not None and _cost(chosen) >= found[0][0]:
            break
        left = own
        for pattern in itertools.compress(patterns, chosen):
            left = left & ~pattern
        extras = int(left.sum(2).max())
        if found is None or (_cost(chosen) + extras, extras) < found[0]:
            found = (_cost(chosen) + extras, extras), chosen, left
    assert found is not None
    return found[1:]


def _cost(chosen: tuple[bool, ...]) -> int:
    return sum(itertools.compress(_COSTS, chosen))


def _windows(lacks: torch.Tensor) -> torch.Tensor:
    """Returns the window of each block, int64 [heads, blocks]: from the first block on, the longest runs in which all exist."""
    heads, blocks = lacks.shape[0], lacks.shape[-1]
    # Blocks lacking in a square from s to e, by sums over corners.
    sums = torch.nn.functional.pad(lacks.long().cumsum(1).cumsum(2), (1, 0, 1, 0))
    found = torch.empty(heads, blocks, dtype=torch.int64)
    for head in range(heads):
        total = sums[head].tolist()
        begin = 0
        for end in range(1, blocks + 1):
            if total[end][end] - total[begin][end] - total[end][begin] + total[begin][begin]:
                begin = end - 1
            found[head, end - 1] = begin
    return found
