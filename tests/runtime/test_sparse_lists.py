"""Lists of blocks: what the kernels are told to compute is attention under the layout's mask, and where they are used."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from zeroplan.core.sparse_attention import SparseAttention
from zeroplan_runtime.techniques import sparse_attention
from zeroplan_runtime.techniques.sparse_attention import SparsityConfig, block_attention
from zeroplan_runtime.techniques.sparse_attention.block_attention import BlockLists, lists_for_kernels
from zeroplan_runtime.techniques.sparse_attention.pieces import Pieces
from zeroplan_runtime.techniques.sparse_attention.section import sparsity_config
from zeroplan_runtime.techniques.sparse_attention.tiles import SparseScores

pytestmark = [pytest.mark.torch]

HEADS, WIDTH, SCALE = 2, 8, 0.3
#: Class, arguments, whether the model is causal, and tokens, of which some fill no block.
CASES: dict[str, tuple[str, dict[str, Any], bool, int]] = {
    "fixed": ("Fixed", {}, False, 250),
    "fixed, wide": ("Fixed", {"num_local_blocks": 8, "num_global_blocks": 2}, False, 256),
    "bigbird": ("BigBird", {"seed": 0}, False, 250),
    "bigbird by head": ("BigBird", {"seed": 0, "different_layout_per_head": True}, False, 256),
    "bigbird causal": ("BigBird", {"seed": 0, "block": 32}, True, 250),
    "bslongformer": ("BSLongformer", {"global_block_indices": [0, 3]}, True, 256),
    "variable": ("Variable", {"seed": 0, "num_random_blocks": 1, "horizontal_global_attention": True}, False, 256),
    "sliding window": ("LocalSlidingWindow", {"block": 64}, True, 250),
}


def config_of(kind: str) -> tuple[SparsityConfig, bool, int]:
    name, arguments, causal, tokens = CASES[kind]
    return getattr(sparse_attention, f"{name}SparsityConfig")(HEADS, **arguments), causal, tokens


def lists_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[BlockLists, torch.Tensor]:
    """The lists in pieces of at most 64 tokens, and whether each score counts."""
    monkeypatch.setattr(block_attention, "LIST_PIECE", 64)
    config, causal, tokens = config_of(kind)
    scores = SparseScores.make(config, tokens, causal=causal)
    lists = BlockLists.of(scores, shares=config.moves_keys)
    assert lists is not None
    return lists, scores.dense_mask()


def spans(pieces: Pieces, head: int, block: int, tokens: int) -> list[tuple[range, torch.Tensor, int]]:
    """A head's pieces: the tokens of its block, the tokens that it meets, and the slot."""
    layout = head if len(pieces.table) > 1 else 0
    found = []
    for number, first, count, slot in pieces.table[layout].tolist():
        if number < 0:
            continue
        each = pieces.entries[layout, first : first + count].long().unsqueeze(1) * block + torch.arange(block)
        met = each.flatten()
        found.append((range(number * block, min((number + 1) * block, tokens)), met[met < tokens], slot))
    return found


def visible(lists: BlockLists, queries: Any, keys: torch.Tensor) -> torch.Tensor:
    at = torch.tensor(list(queries)).unsqueeze(1)
    return at >= keys if lists.causal else torch.ones(len(at), len(keys), dtype=torch.bool)


@pytest.mark.parametrize("kind", CASES)
def test_pieces_put_together_are_attention_under_the_mask(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward as the kernels go, in fp64: partial outputs by their log-sum-exp, and each part's own gradients."""
    lists, mask = lists_of(kind, monkeypatch)
    tokens = lists.tokens
    torch.manual_seed(0)
    query, key, value = (torch.randn(HEADS, tokens, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(3))
    grad = torch.randn(HEADS, tokens, WIDTH, dtype=torch.float64)
    scores = (query @ key.transpose(1, 2) * SCALE).masked_fill(~mask, float("-inf"))
    exact = scores.softmax(-1) @ value
    wanted = torch.autograd.grad(exact, (query, key, value), grad)
    with torch.no_grad():
        for head in range(HEADS):
            q, k, v, g = (each[head] for each in (query, key, value, grad))
            parts = [(list(rows), met) for rows, met, _ in spans(lists.rows, head, lists.block, tokens)]
            if lists.shared is not None:
                parts.append((list(range(tokens)), lists.shared))
            lse, out = torch.full((tokens,), float("-inf"), dtype=torch.float64), torch.zeros_like(q)
            for rows, met in parts:
                one = (q[rows] @ k[met].T * SCALE).masked_fill(~visible(lists, rows, met), float("-inf"))
                new = torch.logaddexp(lse[rows], one.logsumexp(-1))
                part = (one - new.unsqueeze(-1)).exp() @ v[met]
                out[rows] = out[rows] * (lse[rows] - new).exp().nan_to_num(0.0).unsqueeze(-1) + part
                lse[rows] = new
            torch.testing.assert_close(out, exact[head], rtol=1e-9, atol=1e-11)
            delta = (out * g).sum(-1)
            found = [torch.zeros_like(each) for each in (q, k, v)]
            columns = [(met, list(cols)) for cols, met, _ in spans(lists.columns, head, lists.block, tokens)]
            shared = [] if lists.shared is None else [(list(range(tokens)), lists.shared)]
            for side, (rows, cols) in [(0, one) for one in parts] + [(1, two) for two in [*columns, *shared]]:
                one = (q[rows] @ k[cols].T * SCALE).masked_fill(~visible(lists, rows, torch.as_tensor(cols)), float("-inf"))
                weights = (one - lse[rows].unsqueeze(-1)).exp()
                change = weights * (g[rows] @ v[cols].T - delta[rows].unsqueeze(-1)) * SCALE
                if side == 0:
                    found[0][rows] += change @ k[cols]
                else:
                    found[1][cols] += change.T @ q[rows]
                    found[2][cols] += weights.T @ g[rows]
            for mine, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine, theirs[head], rtol=1e-9, atol=1e-10)


def test_blocks_that_meet_many_are_pieces_with_slots_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    lists, _ = lists_of("bigbird", monkeypatch)  # 16 blocks; the first sees all and is seen by all
    for pieces in (lists.rows, lists.columns):
        (table,) = pieces.table.tolist()
        assert max(count for _, _, count, _ in table) == 4  # blocks of 16 in pieces of 64 tokens
        (block, first, slots) = pieces.long[0, 0].tolist()
        assert (block, slots) == (0, 4)
        mine = sorted(slot for number, _, _, slot in table if number == block)
        assert mine == list(range(first, first + slots))
        used = [slot for _, _, _, slot in table if slot >= 0]
        assert sorted(used) == list(range(pieces.slots))
        assert {number for number, _, _, _ in table} == set(range(16))


@pytest.mark.parametrize(
    ("section", "causal", "taken"),
    [
        ({"mode": "bigbird", "num_random_blocks": 1}, False, True),
        ({"mode": "bigbird", "different_layout_per_head": True}, True, True),
        ({"mode": "bslongformer", "block": 64}, False, True),
        ({"mode": "variable", "attention": "unidirectional"}, True, True),
        ({"mode": "local_sliding_window"}, True, True),
        ({"mode": "fixed"}, False, True),
        ({"mode": "fixed"}, True, False),  # half of the global keys' scores are of the future
        ({"mode": "fixed", "horizontal_global_attention": True}, False, False),
        ({"mode": "fixed", "different_layout_per_head": True, "num_different_global_patterns": 2}, False, False),
        ({"mode": "bigbird", "block": 8}, False, False),
        ({"mode": "dense"}, False, False),
    ],
)
def test_the_plan_knows_where_lists_are_taken(
    section: dict[str, Any], causal: bool, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, tokens = SparseAttention(**section), 2048
    monkeypatch.setattr(block_attention, "has_triton", lambda: True)
    config = sparsity_config(known, HEADS)
    scores = SparseScores.make(config, tokens, causal=causal)
    lists = lists_for_kernels(config, scores, torch.device("cpu"), shares_keys=False)
    assert (lists is not None) == taken
    assert known.tables.lists(64, half=True, causal=causal, shares_keys=False) == taken
    if lists is not None:
        assert lists.takes(torch.empty(1, HEADS, 4, 64, dtype=torch.bfloat16))
        assert not lists.takes(torch.empty(1, HEADS, 4, 256, dtype=torch.bfloat16))
        assert lists.takes(torch.empty(1, HEADS, 4, 64)) == (lists.shared is None)
        assert lists.hides(torch.ones(1, tokens, dtype=torch.bool)) == (lists.shared is None)


_INTERPRETED = """
import torch
from tests.runtime.test_sparse_lists import HEADS, SCALE, config_of
from zeroplan_runtime.techniques.sparse_attention import block_attention
from zeroplan_runtime.techniques.sparse_attention.tiles import SparseScores

block_attention.LIST_PIECE = 64
for kind in ("fixed", "bigbird"):
    config, causal, _ = config_of(kind)
    tokens = 120
    scores = SparseScores.make(config, tokens, causal=causal)
    lists = block_attention.BlockLists.of(scores, shares=config.moves_keys)
    torch.manual_seed(0)
    states = [torch.randn(1, tokens, HEADS, 24).transpose(1, 2).requires_grad_() for _ in range(3)]
    grad = torch.randn(1, HEADS, tokens, 24)
    padding = torch.ones(1, tokens, dtype=torch.bool)
    padding[:, 100:] = False
    given = padding if lists.hides(padding) else None
    out = block_attention.block_attention(*states, lists, padding=given, scale=SCALE)
    found = torch.autograd.grad(out, states, grad)
    wide = [each.detach().double().requires_grad_() for each in states]
    mask = scores.dense_mask() if given is None else scores.dense_mask() & padding
    weights = (wide[0] @ wide[1].transpose(2, 3) * SCALE).masked_fill(~mask, float("-inf")).softmax(-1)
    exact = weights @ wide[2]
    wanted = torch.autograd.grad(exact, wide, grad.double())
    for mine, theirs in zip((out, *found), (exact, *wanted), strict=True):
        assert (mine.double() - theirs).norm() < 2e-6 * theirs.norm(), kind
"""


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton, which interprets the kernels, is not installed")
def test_interpreted_kernels_give_outputs_and_gradients() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", _INTERPRETED], check=True, env=environment)
