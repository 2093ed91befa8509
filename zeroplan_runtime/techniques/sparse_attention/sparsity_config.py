"""Kinds of block-sparse attention, and the blocks of the scores that each computes.

The scores of S queries with S keys are cut into blocks of `block` × `block`, and a layout says which of them exist. Classes,
arguments and layouts are those that DeepSpeed published (``deepspeed/ops/sparse_attention/sparsity_config.py``, up to 0.19.6).

Note [Random blocks]
    BigBird and Variable draw their random blocks by ``random.sample``, a row at a time and head after head, so that the same
    seed of Python's ``random`` gives the published layout. Without a `seed` they draw from Python's own generator, as DeepSpeed
    does; with one from ``random.Random(seed)``, which gives what ``random.seed(seed)`` gives, wherever it is called.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from zeroplan.core.errors import BadInput
from zeroplan.core.sparse_attention import (
    require_counts,
    require_direction,
    require_fixed,
    require_global,
    require_windows,
)

#: Draws so many columns of a range, as ``random.sample`` does.
Sample = Callable[[range, int], list[int]]


@dataclass(eq=False)
class SparsityConfig:
    """What all kinds share. A kind of your own overrides :meth:`make_layout`.

    Attributes:
        num_heads: attention heads of a layer.
        block: tokens of a block's side.
        different_layout_per_head: each head has a layout of its own; otherwise all have the first one's.
        seed: of the random blocks; see Note [Random blocks]. None draws from Python's own generator.
    """

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False
    seed: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        require_counts(num_heads=self.num_heads, block=self.block)
        self.num_layout_heads = self.num_heads if self.different_layout_per_head else 1
        #: Whether keys and queries are attended in another order: Note [Order of tokens] in :mod:`.tiles`.
        self.moves_keys = self.moves_queries = False

    def setup_layout(self, seq_len: int) -> torch.Tensor:
        """Returns a layout without a block: zeros [heads, blocks, blocks] of int64.

        Raises:
            BadInput: when `seq_len` is no multiple of the block.
        """
        blocks = self._num_blocks(seq_len)
        return torch.zeros((self.num_heads, blocks, blocks), dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: torch.Tensor) -> torch.Tensor:
        """Gives all heads the first one's layout, in place, unless each has its own; returns it."""
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout

    def make_layout(self, seq_len: int) -> torch.Tensor:
        """Returns which blocks exist: int64 [heads, blocks of queries, blocks of keys] of 0 and 1.

        Args:
            seq_len: tokens, a multiple of the block.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no layout")

    def head_layouts(self, seq_len: int) -> torch.Tensor:
        """Returns the layouts that differ: bool [1 or heads, blocks, blocks]."""
        return self.make_layout(seq_len)[: self.num_layout_heads].bool()

    def _num_blocks(self, seq_len: int) -> int:
        if seq_len <= 0 or seq_len % self.block:
            raise BadInput(
                f"{seq_len} tokens are no multiple of the block, {self.block}", where="seq_len", remedy="pad the sequence"
            )
        return seq_len // self.block


class _Pattern(SparsityConfig):
    """A kind that marks the blocks of one head at a time."""

    def make_layout(self, seq_len: int) -> torch.Tensor:
        """See :meth:`SparsityConfig.make_layout`."""
        own = self.head_layouts(seq_len).long()
        return own.expand(self.num_heads, -1, -1).clone()

    def head_layouts(self, seq_len: int) -> torch.Tensor:
        """See :meth:`SparsityConfig.head_layouts`."""
        blocks = self._num_blocks(seq_len)
        sample: Sample = random.sample if self.seed is None else random.Random(self.seed).sample
        layouts = torch.zeros((self.num_layout_heads, blocks, blocks), dtype=torch.bool)
        for head, layout in enumerate(layouts):
            self._mark(layout, head, sample)
        return layouts

    def _mark(self, layout: torch.Tensor, head: int, sample: Sample) -> None:
        """Marks one head's blocks in `layout`, bool [blocks, blocks]."""
        raise NotImplementedError


class DenseSparsityConfig(_Pattern):
    """Every block: attention as it is, for comparison."""

    def _mark(self, layout: torch.Tensor, head: int, sample: Sample) -> None:
        layout.fill_(True)


@dataclass(eq=False)
class FixedSparsityConfig(_Pattern):
    """Local windows side by side, and the last blocks of each window seen by all (Child et al. 2019, arXiv 1904.10509).

    Attributes:
        num_local_blocks: blocks of a window.
        num_global_blocks: blocks of a window that represent it to all others.
        attention: ``unidirectional`` leaves out blocks of the future; within a block tokens still see the future.
        horizontal_global_attention: global blocks see all others, too; bidirectional only.
        num_different_global_patterns: heads take turns in which blocks of the window are global, counted from its end.

    Raises:
        BadInput: for counts that do not divide, and for options that exclude each other.
    """

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fixed(
            self.num_local_blocks,
            self.num_global_blocks,
            self.attention,
            horizontal=self.horizontal_global_attention,
            by_head=self.different_layout_per_head,
            patterns=self.num_different_global_patterns,
        )
        self.moves_keys, self.moves_queries = True, self.horizontal_global_attention

    def _mark(self, layout: torch.Tensor, head: int, sample: Sample) -> None:
        blocks, window, wide = len(layout), self.num_local_blocks, self.num_global_blocks
        _mark_windows(layout, [window], self.attention)
        first = window - (1 + head % self.num_different_global_patterns) * wide
        whole = blocks - blocks % window
        starts = list(range(first, whole, window))
        if whole < blocks:  # a short last window is represented by its last blocks at the latest
            starts.append(min(whole + first, blocks - wide))
        for start in starts:
            _mark_global(layout, start, start + wide, self.attention, rows=self.horizontal_global_attention)


@dataclass(eq=False)
class VariableSparsityConfig(_Pattern):
    """Fixed with windows of several sizes, chosen global blocks, and random ones.

    Attributes:
        num_random_blocks: random blocks of each row; also of the future, whatever `attention` says.
        local_window_blocks: blocks of the first windows; the last number holds for all further ones.
        global_block_indices: global blocks; those beyond the sequence are left out.
        global_block_end_indices: where given, global are the blocks from each index to its end, excluded.
        attention: ``unidirectional`` leaves out blocks of the future in windows and global columns.
        horizontal_global_attention: global blocks see all others, too; bidirectional only.

    Raises:
        BadInput: for options that exclude each other.
    """

    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = (4,)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(least=0, num_random_blocks=self.num_random_blocks)
        require_windows(self.local_window_blocks)
        require_global(self.global_block_indices, self.global_block_end_indices)
        require_direction(self.attention, self.horizontal_global_attention)

    def _mark(self, layout: torch.Tensor, head: int, sample: Sample) -> None:
        _mark_random(layout, self.num_random_blocks, sample, past_only=False)
        _mark_windows(layout, self.local_window_blocks, self.attention)
        for start, end in _global_ranges(self.global_block_indices, self.global_block_end_indices, len(layout)):
            _mark_global(layout, start, end, self.attention, rows=self.horizontal_global_attention)


@dataclass(eq=False)
class BigBirdSparsityConfig(_Pattern):
    """A sliding window, random blocks, and the first blocks global (Zaheer et al. 2020, arXiv 2007.14062).

    Attributes:
        num_random_blocks: random blocks of each row.
        num_sliding_window_blocks: blocks of the window around each block.
        num_global_blocks: of the first blocks, which see all and are seen by all.
        attention: ``unidirectional`` leaves out blocks of the future.

    Raises:
        BadInput: for a direction that does not exist.
    """

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: str = "bidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(least=0, num_random_blocks=self.num_random_blocks, num_global_blocks=self.num_global_blocks)
        require_counts(num_sliding_window_blocks=self.num_sliding_window_blocks)
        require_direction(self.attention)

    def _mark(self, layout: torch.Tensor, head: int, sample: Sample) -> None:
        past_only = self.attention == "unidirectional"
        _mark_random(layout, self.num_random_blocks, sample, past_only=past_only)
        _mark_sliding_window(layout, self.num_sliding_window_blocks)
        _require_room(layout, num_global_blocks=self.num_global_blocks)
        layout[: self.num_global_blocks] = True
        layout[:, : self.num_global_blocks] = True
        if past_only:
            layout.tril_()


@dataclass(eq=False)
class BSLongformerSparsityConfig(_Pattern):
    """Longformer by blocks: a sliding window and chosen global blocks (Beltagy et al. 2020, arXiv 2004.05150).

    No head differs from another, whatever `different_layout_per_head` says.

    Attributes:
        num_sliding_window_blocks: blocks of the window around each block.
        global_block_indices: blocks that see all and are seen by all; those beyond the sequence are left out.
        global_block_end_indices: where given, global are the blocks from each index to its end, excluded.
        attention: ``unidirectional`` leaves out blocks of the future.

    Raises:
        BadInput: for a direction that does not exist, or ends that are not behind their starts.
    """

    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(num_sliding_window_blocks=self.num_sliding_window_blocks)
        require_global(self.global_block_indices, self.global_block_end_indices)
        require_direction(self.attention)

    def _mark(self, layout: torch.Tensor, head: int, sample: Sample) -> None:
        _mark_sliding_window(layout, self.num_sliding_window_blocks)
        for start, end in _global_ranges(self.global_block_indices, self.global_block_end_indices, len(layout)):
            _mark_global(layout, start, end, "bidirectional", rows=True)
        if self.attention == "unidirectional":
            layout.tril_()


@dataclass(eq=False)
class LocalSlidingWindowSparsityConfig(_Pattern):
    """A sliding window alone.

    Attributes:
        num_sliding_window_blocks: blocks of the window around each block.
        attention: ``unidirectional``, the default here, leaves out blocks of the future.

    Raises:
        BadInput: for a direction that does not exist.
    """

    different_layout_per_head: bool = field(default=False, init=False)
    num_sliding_window_blocks: int = 3
    attention: str = "unidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(num_sliding_window_blocks=self.num_sliding_window_blocks)
        require_direction(self.attention)

    def _mark(self, layout: torch.Tensor, head: int, sample: Sample) -> None:
        _mark_sliding_window(layout, self.num_sliding_window_blocks)
        if self.attention == "unidirectional":
            layout.tril_()


# Parts of layouts: `layout` is one head's, bool [blocks, blocks]


def _mark_windows(layout: torch.Tensor, sizes: Sequence[int], attention: str) -> None:
    """Marks windows along the diagonal, of these sizes and then of the last one."""
    start, window = 0, 0
    while start < len(layout):
        size = sizes[min(window, len(sizes) - 1)]
        local = layout[start : start + size, start : start + size]
        local |= torch.ones_like(local).tril_() if attention == "unidirectional" else True
        start, window = start + size, window + 1


def _mark_global(layout: torch.Tensor, start: int, end: int, attention: str, *, rows: bool) -> None:
    """Marks the columns from `start` to `end`, from row `start` on where the future is hidden, and such rows if asked for."""
    layout[0 if attention == "bidirectional" else start :, start:end] = True
    if rows:
        layout[start:end] = True


def _mark_random(layout: torch.Tensor, count: int, sample: Sample, *, past_only: bool) -> None:
    _require_room(layout, num_random_blocks=count)
    if past_only and count > 1:
        raise BadInput(
            f"the first block has 1 block to draw {count} from", where="num_random_blocks", remedy="use 1, or bidirectional"
        )
    for row in range(len(layout)):
        layout[row, sample(range(row + 1 if past_only else len(layout)), count)] = True


def _mark_sliding_window(layout: torch.Tensor, count: int) -> None:
    _require_room(layout, num_sliding_window_blocks=count)
    half, ones = count // 2, torch.ones_like(layout)
    layout |= ones.tril(half) & ones.triu(-half)


def _global_ranges(starts: Sequence[int], ends: Sequence[int] | None, blocks: int) -> list[tuple[int, int]]:
    """Returns the ranges of global blocks that begin within the sequence."""
    pairs = zip(starts, [start + 1 for start in starts] if ends is None else ends, strict=True)
    return [(start, min(end, blocks)) for start, end in pairs if start < blocks]


def _require_room(layout: torch.Tensor, **counts: int) -> None:
    for name, count in counts.items():
        if count > len(layout):
            raise BadInput(
                f"{count} blocks, where a row has {len(layout)}", where=name, remedy="use fewer, or a longer sequence"
            )
