"""The ``sparse_attention`` section of a ds_config: which kind of block-sparse attention, and what its arguments may be.

Keys and defaults are those of DeepSpeed up to 0.19.6 (``runtime/config.py`` and ``runtime/constants.py``), which handed the
section to the user's model. Here the included runtime applies it. Layouts are made in
:mod:`zeroplan_runtime.techniques.sparse_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from zeroplan.core.errors import BadInput, did_you_mean

DIRECTIONS = ("bidirectional", "unidirectional")

#: transformers' ``model_type`` of the models that the runtime gives block-sparse attention.
MODEL_TYPES = ("bert", "roberta", "gpt2", "llama")

#: Tokens of a side of the tiles that FlexAttention's kernels compute.
TILE = 128

#: Sides of blocks that the kernels of lists take, as matrix units have at least 16 rows, and the widest head.
LIST_BLOCKS, MOST_WIDTH = (16, 32, 64, 128), 128

#: Tokens that a piece meets at most: a global row or column of more is several pieces (``block_kernels.py``).
LIST_PIECE = 512

#: Single blocks of a row that a layout's rules can name, and numbers (int32) of a token that rules keep (``rules.py``).
RULE_EXTRAS = 4
RULE_NUMBERS = 6 + RULE_EXTRAS


class SparsityMode(StrEnum):
    """Kinds of block-sparse attention by their names in a ds_config; the last is not one of DeepSpeed's."""

    DENSE = "dense"
    FIXED = "fixed"
    VARIABLE = "variable"
    BIGBIRD = "bigbird"
    BSLONGFORMER = "bslongformer"
    LOCAL_SLIDING_WINDOW = "local_sliding_window"


@dataclass(frozen=True, slots=True)
class SparseTables:
    """What decides the memory of block-sparse attention beside a model's shapes.

    Attributes:
        block: tokens of a block's side, a tile's at most.
        by_head: each head has a layout of its own.
        moves_keys: keys are attended in another order, as copies.
        moves_queries: queries are, too, where the model is not causal.
        orders_by_head: the order is each head's own; heads that share keys then leave these as they are.
        listed: blocks of keys that a block of queries meets by lists, those aside that all queries see or that see all; 0
            where tiles are computed in any case.
        long_rows, long_columns: blocks that see all, and that all see.
        shared: of so many blocks of keys, so many are seen by all and computed densely, in a model that is not causal.
    """

    block: int
    by_head: bool
    moves_keys: bool
    moves_queries: bool
    orders_by_head: bool
    listed: int = 0
    long_rows: int = 0
    long_columns: int = 0
    shared: tuple[int, int] | None = None

    @property
    def key(self) -> str:
        """A short name, unique for the tables."""
        flags = {"h": self.by_head, "k": self.moves_keys, "q": self.moves_queries, "o": self.orders_by_head}
        name = f"sparse{self.block}" + "".join(letter for letter, on in flags.items() if on)
        lists = (self.listed, self.long_rows, self.long_columns, *(self.shared or ()))
        return f"{name}_{'_'.join(map(str, lists))}" if self.listed else name

    def lists(self, width: int, *, half: bool, causal: bool, shares_keys: bool) -> bool:
        """Whether kernels of lists compute it (``block_attention.py``): heads of `width` elements, in 16 bits if `half`."""
        if not self.listed or width > MOST_WIDTH or (self.by_head and shares_keys):
            return False
        return self.shared is None or (half and width % 8 == 0 and not causal and not shares_keys)


@dataclass(frozen=True, slots=True)
class SparseAttention:
    """The section's keys; see the classes of :mod:`zeroplan_runtime.techniques.sparse_attention.sparsity_config` for each.

    A mode reads the keys that it has, and leaves out the others, as DeepSpeed does. BigBird's default of `num_random_blocks` is
    0 here and 1 in its class, as it is in DeepSpeed.

    Raises:
        BadInput: for a mode that does not exist, and for what the mode refuses.
    """

    mode: str = SparsityMode.FIXED.value
    block: int = 16
    different_layout_per_head: bool = False
    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1
    num_random_blocks: int = 0
    local_window_blocks: tuple[int, ...] = (4,)
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None
    num_sliding_window_blocks: int = 3

    def __post_init__(self) -> None:
        known = [mode.value for mode in SparsityMode]
        if self.mode not in known:
            raise BadInput(
                f"{self.mode!r} is no mode",
                where="mode",
                remedy=did_you_mean(str(self.mode), known) or f"use {', '.join(known)}",
            )
        require_counts(block=self.block)
        require_tiles(self.block)
        if self.mode == SparsityMode.FIXED:
            require_fixed(
                self.num_local_blocks,
                self.num_global_blocks,
                self.attention,
                horizontal=self.horizontal_global_attention,
                by_head=self.different_layout_per_head,
                patterns=self.num_different_global_patterns,
            )
        elif self.mode == SparsityMode.VARIABLE:
            require_counts(least=0, num_random_blocks=self.num_random_blocks)
            require_windows(self.local_window_blocks)
            require_global(self.global_block_indices, self.global_block_end_indices)
            require_direction(self.attention, self.horizontal_global_attention)
        elif self.mode != SparsityMode.DENSE:
            require_counts(num_sliding_window_blocks=self.num_sliding_window_blocks)
            require_direction(self.attention)
        if self.mode == SparsityMode.BIGBIRD:
            require_counts(least=0, num_random_blocks=self.num_random_blocks, num_global_blocks=self.num_global_blocks)
        elif self.mode == SparsityMode.BSLONGFORMER:
            require_global(self.global_block_indices, self.global_block_end_indices)

    def as_section(self) -> dict[str, Any]:
        """Return the keys that differ from their defaults, and the mode."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}
        return {"mode": str(self.mode), **plain}

    @property
    def tables(self) -> SparseTables:
        """The sizes of what the kernels read beside the states."""
        by_head = self.different_layout_per_head and self.mode != SparsityMode.LOCAL_SLIDING_WINDOW
        return SparseTables(
            block=min(self.block, TILE),
            by_head=by_head,
            moves_keys=self.moves_keys,
            moves_queries=self.moves_queries,
            orders_by_head=self.num_different_global_patterns > 1 and self.mode == SparsityMode.FIXED,
            **self._lists(by_head),
        )

    def _lists(self, by_head: bool) -> dict[str, Any]:
        """The fields of the tables that are of lists."""
        both = self.attention == "bidirectional"
        count = self._global_blocks
        if self.block not in LIST_BLOCKS or self.mode == SparsityMode.DENSE:
            return {}
        if self.mode == SparsityMode.FIXED:
            if by_head or self.horizontal_global_attention or not both:
                return {}
            return {
                "listed": self.num_local_blocks - self.num_global_blocks,
                "shared": (self.num_local_blocks, self.num_global_blocks),
            }
        if self.mode == SparsityMode.VARIABLE:
            rows = count if self.horizontal_global_attention else 0
            listed = self.num_random_blocks + max(self.local_window_blocks)
            return {"listed": listed, "long_rows": rows, "long_columns": count}
        if self.mode == SparsityMode.LOCAL_SLIDING_WINDOW:
            return {"listed": self.num_sliding_window_blocks}
        random = self.num_random_blocks if self.mode == SparsityMode.BIGBIRD else 0
        return {
            "listed": self.num_sliding_window_blocks + random,
            "long_rows": count if both else 0,
            "long_columns": count,
        }

    @property
    def _global_blocks(self) -> int:
        if self.mode == SparsityMode.BIGBIRD:
            return self.num_global_blocks
        if self.global_block_end_indices is None:
            return len(self.global_block_indices)
        pairs = zip(self.global_block_indices, self.global_block_end_indices, strict=True)
        return sum(end - start for start, end in pairs)

    @property
    def moves_keys(self) -> bool:
        """Whether keys are attended in another order: Note [Order of tokens] of the runtime's sparse_attention/tiles.py."""
        return self.mode == SparsityMode.FIXED

    @property
    def moves_queries(self) -> bool:
        """Whether queries are, too, where the model is not causal."""
        return self.moves_keys and self.horizontal_global_attention


def require_model_type(model_type: str) -> None:
    """Refuse models whose attention is not known to take it."""
    if model_type not in MODEL_TYPES:
        raise BadInput(
            f"{model_type or 'this model'} is not supported",
            where="sparse_attention",
            remedy=f"it knows {', '.join(MODEL_TYPES)}",
        )


def require_tiles(block: int, tile: int = TILE) -> None:
    """Refuse blocks that tiles are not made of."""
    if tile % block and block % tile:
        what = f"a block of {block} tokens does not divide a tile of {tile}"
        raise BadInput(what, where="block", remedy="use 16, 32, 64 or 128")


def require_counts(*, least: int = 1, **counts: int) -> None:
    """Refuse what is no whole number of `least` or more."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise BadInput(f"{count!r} is no count of {least} or more", where=name)


def require_direction(attention: str, horizontal: bool = False) -> None:
    """Refuse a direction that does not exist, and global rows where the future is hidden."""
    if attention not in DIRECTIONS:
        raise BadInput(f"{attention!r} is no direction", where="attention", remedy=f"use {' or '.join(DIRECTIONS)}")
    if horizontal and attention != "bidirectional":
        raise BadInput("only bidirectional attention has it", where="horizontal_global_attention", remedy="set it to false")


def require_fixed(local: int, wide: int, attention: str, *, horizontal: bool, by_head: bool, patterns: int) -> None:
    """Refuse what the fixed kind cannot be.

    Args:
        local: blocks of a window.
        wide: global blocks of a window.
        attention: the direction.
        horizontal: global blocks see all.
        by_head: heads have layouts of their own.
        patterns: of global blocks.
    """
    require_counts(num_local_blocks=local, num_global_blocks=wide, num_different_global_patterns=patterns)
    require_direction(attention, horizontal)
    if local % wide:
        raise BadInput(f"{wide} does not divide num_local_blocks, {local}", where="num_global_blocks")
    where = "num_different_global_patterns"
    if patterns > 1 and not by_head:
        raise BadInput(f"{patterns} patterns need different_layout_per_head", where=where, remedy="set it to true")
    if patterns > local // wide:
        raise BadInput(f"{patterns} patterns, where a window has {local // wide}", where=where)


def require_windows(sizes: Sequence[int]) -> None:
    """Refuse windows that have no size."""
    if not sizes:
        raise BadInput("no window", where="local_window_blocks", remedy="give the blocks of one window or more")
    for size in sizes:
        require_counts(local_window_blocks=size)


def require_global(starts: Sequence[int], ends: Sequence[int] | None) -> None:
    """Refuse global blocks whose ends are not behind their starts."""
    for start in starts:
        require_counts(least=0, global_block_indices=start)
    if ends is None:
        return
    if len(starts) != len(ends):
        raise BadInput(f"{len(ends)} ends for {len(starts)} global_block_indices", where="global_block_end_indices")
    for start, end in zip(starts, ends, strict=True):
        require_counts(global_block_end_indices=end)
        if start >= end:
            raise BadInput(f"{end} is not behind its start, {start}", where="global_block_end_indices")
