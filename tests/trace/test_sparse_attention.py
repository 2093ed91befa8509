"""Block-sparse attention in a plan: what the kernels keep and copy, the tables of the runtime to the byte, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zeroplan
from zeroplan.core.errors import BadInput
from zeroplan.core.sparse_attention import SparseAttention, SparsityMode
from zeroplan.tape.expanded import ExpandedTape, Kind, Op
from zeroplan.tape.options import TraceOptions

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch]

LAYERS, HEADS, WIDTH = 4, 4, 16
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HEADS * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 500,
    "max_position_embeddings": 4096,
}
FILE = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {}},
    "zero_optimization": {"stage": 2},
}


def tape(section: SparseAttention | None, batch: int, tokens: int) -> ExpandedTape:
    from zeroplan.trace.api import trace_at
    from zeroplan.trace.fit import TracePoint

    options = TraceOptions(sparse=None if section is None else section.tables)
    return trace_at(LLAMA, "AutoModelForCausalLM", options, TracePoint(batch, tokens)).expand(batch, tokens, None)


def sizes(found: ExpandedTape, kind: Kind | None = None) -> list[int]:
    """Bytes of what the attention allocates, in the forward and in the backward."""
    inside = {i for i, module in enumerate(found.modules) if module.type == "LlamaAttention"}
    made = [event for event in found.events() if event[0] == Op.ALLOC and event[4] in inside]
    return [size for _, _, size, one, _ in made if kind is None or one == kind]


@pytest.mark.parametrize(("mode", "made"), [("fixed", 3), ("bigbird", 2)])  # tiles keep the greatest scores for a while
def test_the_kernels_keep_one_number_a_query_and_no_scores(mode: str, made: int) -> None:
    batch, tokens = 2, 1024
    found = tape(SparseAttention(mode=mode), batch, tokens)
    lse = 4 * batch * HEADS * tokens
    assert sizes(found).count(lse) == made * LAYERS  # the last are the backward's sums
    assert sizes(found, Kind.SAVED).count(lse) == LAYERS
    assert max(sizes(found)) < 2 * batch * HEADS * tokens * tokens


def test_fixed_copies_keys_and_values_into_another_order() -> None:
    """The moved copies of two KV heads take the places of what they were copied from; their gradients are moved back."""
    batch, tokens = 2, 1024
    plain, moved = (sizes(tape(SparseAttention(mode=mode), batch, tokens)) for mode in ("bigbird", "fixed"))
    states = 2 * batch * 2 * tokens * WIDTH
    assert moved.count(states) - plain.count(states) == 4 * LAYERS
    by_head = {"different_layout_per_head": True, "num_different_global_patterns": 4}
    shared = sizes(tape(SparseAttention(mode="fixed", **by_head), batch, tokens))  # KV heads of a group cannot move apart
    assert shared.count(states) == plain.count(states)


@pytest.mark.parametrize(
    ("section", "causal"),
    [
        ({"mode": "fixed"}, True),
        ({"mode": "fixed", "horizontal_global_attention": True}, False),
        ({"mode": "fixed", "different_layout_per_head": True, "num_different_global_patterns": 2}, False),
        ({"mode": "bigbird", "block": 64, "different_layout_per_head": True}, False),
        ({"mode": "dense", "block": 256}, True),
        ({"mode": "local_sliding_window", "different_layout_per_head": True}, True),
    ],
)
def test_tables_are_the_runtimes_to_the_byte(section: dict[str, Any], causal: bool) -> None:
    from zeroplan.trace.sparse_attention import _tables_of
    from zeroplan_runtime.techniques.sparse_attention.section import sparsity_config
    from zeroplan_runtime.techniques.sparse_attention.tiles import SparseScores

    known = SparseAttention(**section)
    config = sparsity_config(known, HEADS)
    for tokens in (512, 1000):
        planned = _tables_of(known.tables, tokens, HEADS, causal=causal, shares_keys=False)
        scores = SparseScores.make(config, tokens, causal=causal)
        scores = scores.for_kernels(queries=config.moves_queries, keys=config.moves_keys)
        mask = scores.block_mask()
        assert scores.rules is not None
        made = [scores.table, scores.rules.numbers]
        for side in ("kv", "full_kv", "q", "full_q"):
            made += [getattr(mask, f"{side}_num_blocks"), getattr(mask, f"{side}_indices")]
        assert [each.nbytes for each in planned.mask] == [each.nbytes for each in made]
        for ours, theirs in ((planned.queries, scores.queries), (planned.keys, scores.keys)):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert [each.nbytes for each in ours] == [theirs.tokens.nbytes, theirs.places.nbytes]


def test_every_mode_is_planned() -> None:
    for mode in (SparsityMode.FIXED, SparsityMode.BIGBIRD):
        plans = zeroplan.estimate(
            LLAMA, ds_config={**FILE, "sparse_attention": {"mode": mode.value}}, engine="zeroplan", vram="80G"
        )
        assert plans[0].gpu.peak_allocated is not None
        assert plans[0].fits is True


def test_what_is_not_supported_is_told() -> None:
    def plan(model: Any = LLAMA, *, engine: str = "zeroplan", section: Any = None, **more: Any) -> None:
        zeroplan.estimate(model, ds_config={**FILE, "sparse_attention": section or {}}, engine=engine, **more)

    with pytest.raises(BadInput, match="qwen2 is not supported; it knows bert, roberta, gpt2, llama"):
        plan("Qwen/Qwen2.5-0.5B")
    with pytest.raises(BadInput, match="ranks share the model or its tokens"):
        plan(gpus=2, tp=2)
    with pytest.raises(BadInput, match="DeepSpeed, which refuses the key; remove it: zeroplan's runtime has it"):
        plan(engine="deepspeed")
    with pytest.raises(BadInput, match="num_global_blocks: 3 does not divide"):
        plan(section={"mode": "fixed", "num_global_blocks": 3})


def test_a_search_does_not_leave_it_out(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({**FILE, "sparse_attention": {}}))
    with pytest.raises(BadInput, match="the time that block-sparse attention takes is in no figure"):
        zeroplan.recommend(LLAMA, source=str(file), engine="zeroplan", vram="80G")


@pytest.mark.parametrize("section", [{"mode": "bigbird", "num_random_blocks": 1}, {"mode": "fixed"}, {"mode": "bslongformer"}])
def test_lists_take_what_is_planned(section: dict[str, Any]) -> None:
    from zeroplan.trace.sparse_attention import _lists_of
    from zeroplan_runtime.techniques.sparse_attention.block_attention import BlockLists
    from zeroplan_runtime.techniques.sparse_attention.section import sparsity_config
    from zeroplan_runtime.techniques.sparse_attention.tiles import SparseScores

    known, tokens = SparseAttention(**section), 4096
    config = sparsity_config(known, HEADS)
    lists = BlockLists.of(SparseScores.make(config, tokens, causal=False), shares=config.moves_keys)
    assert lists is not None
    made = [side.table.nbytes + side.entries.nbytes for side in (lists.rows, lists.columns)]
    rows, columns, *shared = (each.nbytes for each in _lists_of(known.tables, tokens, HEADS))
    assert [rows, columns] == pytest.approx(made, rel=0.1)  # random blocks may fall on others
    assert shared == ([] if lists.shared is None else [lists.shared.nbytes])


def test_fixed_leaves_the_keys_where_they_are_in_a_model_that_is_not_causal() -> None:
    """The gathered quarter lives within the forward, and within the backward; nothing of it is kept."""
    from zeroplan.trace.api import trace_at
    from zeroplan.trace.fit import TracePoint

    bert = {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        **{name: value for name, value in LLAMA.items() if name not in ("model_type", "architectures", "num_key_value_heads")},
        "attention_probs_dropout_prob": 0.0,
    }
    tokens = 1024
    found = trace_at(bert, "AutoModelForMaskedLM", TraceOptions(sparse=SparseAttention().tables), TracePoint(1, tokens)).expand(
        1, tokens, None
    )
    inside = {i for i, module in enumerate(found.modules) if module.type == "BertSelfAttention"}
    made = [(size, kind) for op, _, size, kind, module in found.events() if op == Op.ALLOC and module in inside]
    gathered = 2 * HEADS * WIDTH * tokens // 4
    assert sum(size == gathered for size, _ in made) == LAYERS * (2 + 4)  # and the gradients of them
    assert all(kind != Kind.SAVED for size, kind in made if size == gathered)
