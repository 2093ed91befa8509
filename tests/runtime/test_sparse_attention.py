"""Block-sparse attention: the published layouts, the tiles that kernels compute, and attention beside a plain reference."""

from __future__ import annotations

import hashlib
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode

from zeroplan.core.errors import BadInput
from zeroplan_runtime.compiled import uncompiled
from zeroplan_runtime.techniques import sparse_attention
from zeroplan_runtime.techniques.sparse_attention import SparseAttentionUtils, SparseSelfAttention, SparsityConfig, attention
from zeroplan_runtime.techniques.sparse_attention.attention import dense_attention, reorder, tiled_attention
from zeroplan_runtime.techniques.sparse_attention.rules import rules_of
from zeroplan_runtime.techniques.sparse_attention.tiles import SparseScores, TokenOrder

pytestmark = [pytest.mark.torch]

#: Made by DeepSpeed 0.14.0's own classes, with Python's random seeded by `seed`.
PUBLISHED = json.loads((Path(__file__).parents[1] / "fixtures" / "sparse_layouts.json").read_text())


def config_of(kind: str, **arguments: Any) -> SparsityConfig:
    made: SparsityConfig = getattr(sparse_attention, f"{kind}SparsityConfig")(**arguments)
    return made


# ---- layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row['kind']}-{row['seed']}")
def test_the_layout_is_the_published_one(row: dict[str, Any]) -> None:
    random.seed(row["seed"])
    of_python = config_of(row["kind"], **row["arguments"]).make_layout(row["seq_len"])
    seeded = config_of(row["kind"], **row["arguments"], seed=row["seed"]).make_layout(row["seq_len"])
    for layout in (of_python, seeded):
        assert layout.dtype == torch.int64
        assert list(layout.shape) == row["shape"]
        assert int(layout.sum()) == row["blocks"]
        assert hashlib.sha256(layout.to(torch.uint8).numpy().tobytes()).hexdigest() == row["sha256"]


def test_a_fixed_layout_by_hand() -> None:
    """Windows of 2 blocks, the last one of each seen by all; a short last window is represented by its last block."""
    layout = config_of("Fixed", num_heads=1, num_local_blocks=2).make_layout(16 * 5)
    assert layout[0].tolist() == [
        [1, 1, 0, 1, 1],
        [1, 1, 0, 1, 1],
        [0, 1, 1, 1, 1],
        [0, 1, 1, 1, 1],
        [0, 1, 0, 1, 1],
    ]


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("Fixed", {"num_local_blocks": 4, "num_global_blocks": 3}, "num_global_blocks: 3 does not divide"),
        ("Fixed", {"attention": "backwards"}, "'backwards' is no direction"),
        ("Fixed", {"attention": "unidirectional", "horizontal_global_attention": True}, "only bidirectional"),
        ("Fixed", {"num_different_global_patterns": 2}, "need different_layout_per_head"),
        ("Fixed", {"num_different_global_patterns": 5, "different_layout_per_head": True}, "a window has 4"),
        ("Variable", {"global_block_indices": [1], "global_block_end_indices": [1]}, "not behind its start"),
        ("Variable", {"global_block_indices": [1], "global_block_end_indices": [2, 3]}, "2 ends for 1"),
        ("Variable", {"local_window_blocks": []}, "no window"),
        ("BigBird", {"num_random_blocks": 2, "attention": "unidirectional"}, "use 1, or bidirectional"),
        ("BigBird", {"num_random_blocks": 9}, "9 blocks, where a row has 8"),
        ("LocalSlidingWindow", {"num_sliding_window_blocks": 9}, "9 blocks, where a row has 8"),
        ("Dense", {"block": 0}, "block: 0 is no count"),
        ("Dense", {"block": 48}, "128 tokens are no multiple"),
    ],
)
def test_what_makes_no_layout_is_told(kind: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        config_of(kind, num_heads=2, **arguments).make_layout(128)


# ---- tiles -------------------------------------------------------------------------------------------------------------

#: Kinds at 16 to 256 tokens a block, with layouts that heads share and that they do not.
LAYOUTS: dict[str, SparsityConfig] = {
    "fixed": config_of("Fixed", num_heads=2),
    "patterns": config_of(
        "Fixed", num_heads=2, block=32, different_layout_per_head=True, num_different_global_patterns=2, num_local_blocks=4
    ),
    "horizontal": config_of("Fixed", num_heads=2, horizontal_global_attention=True),
    "past": config_of("Fixed", num_heads=2, attention="unidirectional", num_local_blocks=8),
    "bigbird": config_of("BigBird", num_heads=2, block=64, different_layout_per_head=True, seed=3),
    "window": config_of("LocalSlidingWindow", num_heads=2, block=128),
    "wide": config_of("LocalSlidingWindow", num_heads=2, block=256, num_sliding_window_blocks=1),
    "dense": config_of("Dense", num_heads=2),
}
LENGTHS = (512, 584)  # the second fills neither a tile nor, but at 8 tokens, a block


def moved(config: SparsityConfig, tokens: int, *, causal: bool) -> SparseScores:
    """The scores in the order in which a GPU attends them."""
    scores = SparseScores.make(config, tokens, causal=causal)
    return scores.for_kernels(queries=config.moves_queries, keys=config.moves_keys)


def kept_scores(config: SparsityConfig, tokens: int, *, causal: bool) -> torch.Tensor:
    """Whether each score counts, bool [heads, tokens, tokens], token by token: the reference of this file."""
    layout = config.make_layout(-(-tokens // config.block) * config.block)
    block = torch.arange(tokens) // config.block
    kept = layout[:, block[:, None], block[None, :]].bool()
    return kept & torch.ones_like(kept).tril() if causal else kept


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_tiles_and_their_lookup_give_the_layouts_scores(name: str, causal: bool) -> None:
    """What a kernel computes: full tiles whole, of partial ones what the lookup allows, and of others nothing."""
    config = LAYOUTS[name]
    for tokens in LENGTHS:
        expected = kept_scores(config, tokens, causal=causal)
        plain = SparseScores.make(config, tokens, causal=causal)
        assert torch.equal(plain.dense_mask().expand(2, -1, -1), expected)
        for scores in (plain, moved(config, tokens, causal=causal)):
            assert torch.equal(computed(scores, scores.block_mask(), 2), expected), scores.keys
        theirs = create_block_mask(plain.block_mask().mask_mod, 1, len(plain.table), tokens, tokens, device="cpu")
        for field in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(plain.block_mask(), field), getattr(theirs, field)), field


def test_rules_are_of_any_table() -> None:
    """Also of blocks that do not see themselves, which no published layout has."""
    generator = torch.Generator().manual_seed(0)
    told = 0
    for blocks in range(1, 9):
        for _ in range(10):
            table = torch.rand(2, blocks, blocks, generator=generator) < 0.5
            places = torch.arange(blocks).unsqueeze(0)
            for own in (table, table.tril(), table.tril() | torch.eye(blocks, dtype=torch.bool)):
                rules = rules_of(own, places, places, places, places)
                if rules is None:
                    continue
                told += 1
                at = torch.arange(blocks)
                found = [rules.test()(torch.tensor(h), at[:, None], at[None, :]).expand(blocks, blocks) for h in range(2)]
                assert torch.equal(torch.stack(found), own)
    assert told > 100


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("fixed", {"windows", "columns"}),
        ("horizontal", {"windows", "columns", "rows"}),
        ("past", {"windows", "columns", "past"}),
        ("bigbird", {"band", "columns", "rows", "extras"}),
        ("window", {"windows", "extras", "past"}),
        ("dense", {"windows"}),
    ],
)
def test_a_layouts_rules_are_its_patterns(name: str, patterns: set[str]) -> None:
    rules = moved(LAYOUTS[name], 2048, causal=False).rules
    assert rules is not None
    flags = {"band": rules.band >= 0, "extras": rules.extras > 0, "windows": rules.windows, "past": rules.past}
    flags |= {"rows": rules.rows, "columns": rules.columns}
    found = {key for key, on in flags.items() if on}
    assert found == patterns


def test_a_layout_of_many_single_blocks_is_looked_up() -> None:
    table = torch.rand(1, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.5
    scores = SparseScores.of_layouts(table, 16, 256, causal=False).for_kernels(queries=False, keys=False)
    assert scores.rules is None
    assert torch.equal(computed(scores, scores.block_mask(), 1), scores.dense_mask())


def test_padding_leaves_out_keys_and_whole_tiles() -> None:
    config, tokens = LAYOUTS["past"], 584
    padding = torch.ones(2, tokens, dtype=torch.bool)
    padding[0, 300:] = False
    padding[1, :140] = False
    for scores in (SparseScores.make(config, tokens, causal=True), moved(config, tokens, causal=True)):
        mask = scores.block_mask(padding)
        for sample in range(2):
            expected = kept_scores(config, tokens, causal=True) & padding[sample]
            assert torch.equal(computed(scores, mask, 2, sample), expected)
        assert mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum() < 2 * scores.tiles[0].sum()


def computed(scores: SparseScores, mask: Any, heads: int, sample: int = 0) -> torch.Tensor:
    """The scores that count after FlexAttention's tables, in the tokens' own order: bool [heads, tokens, tokens]."""
    tokens, tile = scores.tokens, scores.tile
    h, q, k = torch.meshgrid(torch.arange(heads), torch.arange(tokens), torch.arange(tokens), indexing="ij")
    allowed = mask.mask_mod(torch.tensor(sample), h, q, k)
    tiles = []
    for counts, indices in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):
        row = min(sample, len(counts) - 1)
        present = torch.arange(indices.shape[-1]) < counts[row].unsqueeze(-1)
        tables = torch.zeros(indices[row].shape, dtype=torch.bool).scatter(-1, indices[row].long(), present)
        tiles.append(tables.repeat_interleave(tile, -1).repeat_interleave(tile, -2)[:, :tokens, :tokens])
    found = (tiles[0] & allowed) | tiles[1].expand(heads, -1, -1)
    query_at, key_at = scores.token_functions()
    back = torch.zeros_like(found)
    back[h, query_at(h, q), key_at(h, k)] = found
    return back


def test_another_order_spares_fixed_three_tiles_in_four() -> None:
    """A block in four is global: 8 of 32 columns of tiles at 4,096 tokens, and a window and its neighbour beside them."""
    fixed = config_of("Fixed", num_heads=1)
    assert SparseScores.make(fixed, 4096, causal=False).computed_tiles == 32 * 32
    assert moved(fixed, 4096, causal=False).computed_tiles <= 32 * (8 + 2)
    horizontal = config_of("Fixed", num_heads=1, horizontal_global_attention=True)
    assert moved(horizontal, 4096, causal=False).computed_tiles <= 8 * 32 + 24 * (8 + 3)
    past = config_of("Fixed", num_heads=1, attention="unidirectional")
    assert moved(past, 4096, causal=True).computed_tiles <= (32 * 9) // 2 + 32 * 3
    bigbird = config_of("BigBird", num_heads=1, seed=0)
    assert not bigbird.moves_keys
    assert SparseScores.make(bigbird, 4096, causal=False).computed_tiles <= 32 * (8 + 1 + 3)


def test_a_block_that_tiles_are_not_made_of_is_refused() -> None:
    with pytest.raises(BadInput, match="48 tokens does not divide a tile of 128"):
        SparseScores.make(config_of("Dense", num_heads=1, block=48), 96, causal=False)


# ---- attention ---------------------------------------------------------------------------------------------------------


def states(heads: int = 2, tokens: int = 584, kv_heads: int | None = None, seed: int = 0) -> list[torch.Tensor]:
    """Query, key and value [2, heads, tokens, 8]."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads, kv_heads or heads, kv_heads or heads)
    return [torch.randn(2, each, tokens, 8, generator=generator).requires_grad_() for each in sizes]


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept: torch.Tensor, added: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Attention as the textbook has it; a query without a key gives zeros."""
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5 + added
    exps = torch.where(kept, (scores - scores.amax(-1, keepdim=True)).exp(), 0.0)
    return exps / exps.sum(-1, keepdim=True).clamp_min(1e-30) @ value


@pytest.mark.parametrize("name", ["fixed", "patterns", "horizontal", "past"])
def test_flex_attention_over_tokens_in_another_order_gives_the_same(name: str) -> None:
    config, causal = LAYOUTS[name], name == "past"
    tokens = 1160  # not a whole block
    query, key, value = (each.detach() for each in states(tokens=tokens))
    scores = moved(config, tokens, causal=causal)
    assert scores.keys is not None
    out = tiled_attention(query, key, value, scores, scores.block_mask())
    torch.testing.assert_close(out, plain_attention(query, key, value, kept_scores(config, tokens, causal=causal)))


def test_the_kernels_are_compiled_where_an_engine_runs_compiled_functions_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's first micro batch does; all scores of a long sequence would not fit."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    attention._compiled.cache_clear()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    query, key, value = (each.detach() for each in states(tokens=128))
    scores = SparseScores.make(LAYOUTS["fixed"], 128, causal=True)
    with uncompiled(FlopCounterMode(display=False)):
        out = attention._compiled(False)(query, key, value, block_mask=scores.block_mask())
    attention._compiled.cache_clear()
    assert graphs["unique_graphs"] == before + 1
    torch.testing.assert_close(out, dense_attention(query, key, value, scores.dense_mask()))


def test_reordering_moves_the_gradient_back() -> None:
    for heads in (1, 2):
        tokens = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(head)) for head in range(heads)])
        order = TokenOrder(tokens, tokens.argsort(-1))
        states = torch.randn(2, 2, 6, 3, dtype=torch.float64, requires_grad=True)
        assert torch.equal(reorder(states, order)[:, -1], states[:, -1, tokens[-1]])
        assert torch.autograd.gradcheck(lambda each, order=order: reorder(each, order), (states,))


def test_dense_attention_and_its_gradients_are_the_references() -> None:
    kept = kept_scores(LAYOUTS["bigbird"], 584, causal=False).clone()
    kept[:, 17] = False  # a query that sees no key
    ours, theirs = states(4, kv_heads=2), states(4, kv_heads=2)
    kept = kept.repeat(2, 1, 1)
    out = dense_attention(*ours, kept.unsqueeze(0))
    query, key, value = theirs
    expected = plain_attention(query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), kept)
    assert out[:, :, 17].eq(0).all()
    torch.testing.assert_close(out, expected)
    for each in (out, expected):
        each.square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("padding_mode", ["add", "mul"])
@pytest.mark.parametrize("mask_mode", ["add", "mul"])
def test_the_module_applies_masks_as_the_published_kernels(padding_mode: str, mask_mode: str) -> None:
    """Scores are q·k / √width + rpe + padding + mask, and a `mul` mask leaves out where it is 0."""
    length = 96
    config = config_of("BigBird", num_heads=2, seed=1)
    module = SparseSelfAttention(config, padding_mode, mask_mode, max_seq_length=128)
    query, key, value = states(tokens=length)
    generator = torch.Generator().manual_seed(5)
    rpe = torch.randn(2, 2, length, length, generator=generator)
    padding = (torch.rand(2, length, generator=generator) < 0.8).float()
    mask = (torch.rand(length, length, generator=generator) < 0.8).float()
    out = module(query, key.transpose(2, 3), value, rpe, padding[:, None, None], mask)
    kept = kept_scores(SparsityConfigOf(config, 128), length, causal=False).unsqueeze(0)
    added = rpe
    if padding_mode == "mul":
        kept = kept & (padding[:, None, None] != 0)
    else:
        added = added + padding[:, None, None]
    if mask_mode == "mul":
        kept = kept & (mask != 0)
    else:
        added = added + mask
    torch.testing.assert_close(out, plain_attention(query, key, value, kept, added))
    out.sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in (query, key, value))


class SparsityConfigOf(SparsityConfig):
    """A kind of one's own: the first blocks of another's layout for a longer sequence."""

    def __init__(self, other: SparsityConfig, length: int) -> None:
        super().__init__(other.num_heads, other.block)
        self.other, self.length = other, length

    def make_layout(self, seq_len: int) -> torch.Tensor:
        """The published pattern: fill what setup_layout gives, and let all heads have the first one's."""
        layout = self.setup_layout(seq_len)
        blocks = layout.shape[-1]
        layout[0] = self.other.make_layout(self.length)[0, :blocks, :blocks]
        return self.check_and_propagate_first_head_layout(layout)


def test_the_module_refuses_what_its_layout_has_not() -> None:
    module = SparseSelfAttention(config_of("Fixed", num_heads=2), max_seq_length=128)
    assert "master_layout" in module.state_dict()
    for tokens in (72, 160):
        with pytest.raises(BadInput, match=f"{tokens} tokens are no multiple of the block, 16, up to max_seq_length, 128"):
            module(*states(tokens=tokens))
    with pytest.raises(BadInput, match="3 heads"):
        module(*states(heads=3, tokens=64))
    with pytest.raises(BadInput, match="no gradient"):
        module(*states(tokens=64), rpe=torch.zeros(2, 2, 64, 64, requires_grad=True))
    with pytest.raises(BadInput, match="differ in shape"):
        module(*states(tokens=64, heads=2)[:2], states(tokens=64, heads=1)[2])
    with pytest.raises(BadInput, match="'or' is no mode"):
        SparseSelfAttention(config_of("Fixed", num_heads=2), "or")


# ---- padding -----------------------------------------------------------------------------------------------------------


def test_padding_to_whole_blocks_and_back() -> None:
    ids = torch.arange(10).view(2, 5)
    embeds = torch.nn.Embedding(32, 4)
    padded = SparseAttentionUtils.pad_to_block_size(8, ids, torch.ones(2, 5), None, ids, embeds(ids), 31, embeds)
    assert padded.pad_len == 3
    assert padded.input_ids is not None
    assert padded.input_ids[0].tolist() == [0, 1, 2, 3, 4, 31, 31, 31]
    assert padded.attention_mask is not None
    assert padded.attention_mask[1].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert padded.token_type_ids is None
    assert padded.inputs_embeds is not None
    assert torch.equal(padded.inputs_embeds[1, 6], embeds.weight[31])
    assert torch.equal(SparseAttentionUtils.unpad_sequence_output(3, padded.inputs_embeds), embeds(ids))
    whole = SparseAttentionUtils.pad_to_block_size(5, ids, None, None, None, None, 0)
    assert whole.pad_len == 0
    assert whole.input_ids is ids
    assert SparseAttentionUtils.unpad_sequence_output(0, ids) is ids
    with pytest.raises(BadInput, match="neither"):
        SparseAttentionUtils.pad_to_block_size(8, None, None, None, None, None, 0)
