"""Block-sparse attention in models of transformers: their own eager attention under the layout's mask gives the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroplan_runtime
from tests.runtime.ranks import RankPool
from zeroplan.core.errors import BadInput
from zeroplan.core.sparse_attention import SparseAttention
from zeroplan_runtime.sparse_attention import (
    BigBirdSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    SparseAttentionUtils,
    SparsityConfig,
    use_sparse_attention,
)
from zeroplan_runtime.techniques.sparse_attention.section import sparsity_config

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch]

BATCH, LENGTH, HEADS = 2, 70, 2
SMALL = {
    "vocab_size": 67,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
    "max_position_embeddings": 96,
    "pad_token_id": 1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"type_vocab_size": 1},
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "llama": {"num_key_value_heads": 1},
}


def make(kind: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **MODELS[kind], **more})
    made: nn.Module = transformers.AutoModel.from_config(config, attn_implementation="eager")
    return made.train()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their mask [2, 70]; the second sample ends after 41."""
    ids = torch.randint(4, 67, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 41:] = 0
    return ids, mask


def run(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The hidden states of tokens, and the gradients of all parameters."""
    position_ids = None
    if model.config.model_type == "roberta":  # which else finds padding by its token
        position_ids = torch.arange(2, LENGTH + 2).expand(BATCH, -1)
    for param in model.parameters():
        param.grad = None
    out = model(input_ids=ids, attention_mask=mask, position_ids=position_ids).last_hidden_state
    out = out * seen.unsqueeze(-1)  # what stands at padding differs: transformers lets it see something
    # Behind a layer norm the sum of squares is constant, and its gradients are rounding alone: weigh each value by itself.
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    (out * weights).sum().backward()
    return out.detach(), [param.grad for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("make_config", [FixedSparsityConfig, BigBirdSparsityConfig, DenseSparsityConfig])
def test_a_model_computes_what_eager_attention_does_under_the_layouts_mask(
    kind: str, make_config: type[SparsityConfig]
) -> None:
    config = make_config(HEADS)
    model = make(kind)
    ids, mask = inputs()
    layout = make_config(HEADS, seed=0).make_layout(80)  # whole blocks of 16
    kept = layout.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, :LENGTH, :LENGTH].bool()
    kept = kept & mask[:, None, None].bool()
    if kind in ("gpt2", "llama"):
        kept = kept & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    added = torch.zeros(kept.shape).masked_fill(~kept, torch.finfo(torch.float32).min)
    expected = run(model, ids, added, mask)
    restore = use_sparse_attention(model, config)
    found = run(model, ids, mask, mask)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-4)
    assert config.seed is None  # the caller's own stays as it was
    restore()
    assert model.config._attn_implementation == "eager"
    again = run(model, ids, added, mask)
    assert torch.equal(again[0], expected[0])


def test_dense_blocks_are_attention_as_it_is() -> None:
    model = make("llama")
    ids, _ = inputs()
    whole = torch.ones_like(ids)
    expected = run(model, ids, whole, whole)
    use_sparse_attention(model, DenseSparsityConfig(HEADS))
    found = run(model, ids, whole, whole)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-4)


def test_random_blocks_are_the_same_wherever_they_are_drawn() -> None:
    ids, mask = inputs()
    outs = []
    for _ in range(2):
        model = make("bert")
        use_sparse_attention(model, BigBirdSparsityConfig(HEADS, num_random_blocks=2))
        outs.append(run(model, ids, mask, mask)[0])
        torch.manual_seed(99)
    assert torch.equal(*outs)


def test_a_saved_model_keeps_nothing_of_it(tmp_path: Any) -> None:
    model = make("llama")
    use_sparse_attention(model, FixedSparsityConfig(HEADS))
    model.save_pretrained(tmp_path)
    assert "sparse" not in (tmp_path / "config.json").read_text()


def test_what_it_cannot_do_is_told(caplog: pytest.LogCaptureFixture) -> None:
    fixed = FixedSparsityConfig(HEADS)
    with pytest.raises(BadInput, match="Linear holds no model of transformers"):
        use_sparse_attention(nn.Linear(2, 2), fixed)
    with pytest.raises(BadInput, match="t5 is not supported"):
        use_sparse_attention(transformers.T5Model(transformers.T5Config(d_model=8, num_layers=1, num_heads=1, d_ff=8)), fixed)
    with pytest.raises(BadInput, match="the model has 2 heads, the sparsity_config 4"):
        use_sparse_attention(make("bert"), FixedSparsityConfig(4))
    with pytest.raises(BadInput, match="cross-attention"):
        use_sparse_attention(make("bert", is_decoder=True, add_cross_attention=True), fixed)
    with pytest.raises(BadInput, match="48 tokens does not divide"):
        use_sparse_attention(make("bert"), FixedSparsityConfig(HEADS, block=48))
    assert "is not applied" not in caplog.text
    use_sparse_attention(make("bert", attention_probs_dropout_prob=0.1), fixed)
    assert "attention_probs_dropout_prob 0.1 is not applied" in caplog.text

    model = make("llama")
    use_sparse_attention(model, fixed)
    ids, _ = inputs()
    with pytest.raises(BadInput, match="packed sequences"):
        model(input_ids=ids, position_ids=torch.arange(35).repeat(2).expand(BATCH, -1), use_cache=False)
    with pytest.raises(BadInput, match="a mask of scores is not supported"):
        model(input_ids=ids, attention_mask=torch.zeros(BATCH, 1, LENGTH, LENGTH))
    cache = model(input_ids=ids[:, :20], use_cache=True).past_key_values
    with pytest.raises(BadInput, match="generate without a cache"):
        model(input_ids=ids[:, 20:21], past_key_values=cache)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_longer_positions_repeat_the_old_ones(kind: str) -> None:
    model = make(kind)
    kept = 2 if kind == "roberta" else 0
    old = model.embeddings.position_embeddings.weight.detach().clone()
    SparseAttentionUtils.extend_position_embedding(model, 200)
    table = model.embeddings.position_embeddings.weight
    assert table.shape[0] == 200 + kept == model.config.max_position_embeddings
    assert torch.equal(table[: len(old)], old)
    assert torch.equal(table[len(old)], old[kept])
    assert model(input_ids=torch.full((1, 190), 5)).last_hidden_state.shape[1] == 190
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(model, 200, FixedSparsityConfig(HEADS))
    assert model.config._attn_implementation.startswith("zeroplan_sparse")
    assert model.config.max_position_embeddings == 200 + kept
    assert model(input_ids=torch.full((1, 190), 5)).last_hidden_state.shape[1] == 190
    with pytest.raises(BadInput, match="100 positions, where the model has 200"):
        SparseAttentionUtils.extend_position_embedding(model, 100)
    with pytest.raises(BadInput, match="gpt2 is not supported"):
        SparseAttentionUtils.extend_position_embedding(make("gpt2"), 200)


# ---- in the engine -----------------------------------------------------------------------------------------------------

SECTION = {"mode": "bigbird", "block": 16, "num_random_blocks": 1, "num_local_blocks": 4}  # a key of another mode stays unread


def test_the_section_of_a_ds_config_is_applied_at_every_stage(pool: RankPool) -> None:
    """Losses of each stage on two ranks, with checkpointing, equal those of a model that was given the attention by hand."""
    expected, whole = pool.run(2, sparse_losses, None)[0], pool.run(2, sparse_losses, 0, True)[0]
    assert expected[0] != pytest.approx(whole[0], rel=1e-4)  # it does change what is computed
    for stage in range(4):
        for losses in pool.run(2, sparse_losses, stage):
            assert losses == pytest.approx(expected, rel=1e-5), stage


def sparse_losses(group: Any, stage: int | None, dense: bool = False) -> list[float]:
    """Three steps' losses of a GPT-2 under the engine; with stage None by hand, and `dense` without the section."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("gpt2", **{**SMALL, **MODELS["gpt2"], "initializer_range": 0.3})
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage or 0},
    }
    if stage is None:
        use_sparse_attention(model, BigBirdSparsityConfig(HEADS, seed=0))
    elif not dense:
        config["sparse_attention"] = SECTION
    ids, mask = inputs()
    engine, *_ = zeroplan_runtime.initialize(model=model, config=config, group=group, device="cpu")
    losses = []
    for _ in range(3):
        loss = engine(input_ids=ids, attention_mask=mask, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    assert engine.module.config._attn_implementation != "eager" or stage is None
    return losses


def test_a_section_that_cannot_be_is_refused() -> None:
    def start(model: nn.Module, **section: Any) -> None:
        config = {"train_micro_batch_size_per_gpu": 1, "sparse_attention": section}
        zeroplan_runtime.initialize(model=model, config=config, device="cpu")

    with pytest.raises(BadInput, match=r"sparse_attention.mode: 'big_bird' is no mode; did you mean 'bigbird'"):
        start(make("bert"), mode="big_bird")
    with pytest.raises(BadInput, match="num_different_global_patterns: 4 patterns need different_layout_per_head"):
        start(make("bert"), num_different_global_patterns=4)
    with pytest.raises(BadInput, match="'blok' is not supported; did you mean 'block'"):
        start(make("bert"), blok=16)
    with pytest.raises(BadInput, match="Linear holds no model of transformers"):
        start(nn.Linear(2, 2), mode="fixed")
    start(nn.Linear(2, 2), enabled=False)


def test_each_mode_of_the_section_makes_its_class() -> None:
    for mode, arguments in {
        "dense": {},
        "fixed": {"num_local_blocks": 2},
        "variable": {"num_random_blocks": 1, "local_window_blocks": (2, 1), "global_block_indices": (1,)},
        "bigbird": {"num_random_blocks": 1, "num_sliding_window_blocks": 1},
        "bslongformer": {"global_block_indices": (0,), "global_block_end_indices": (2,)},
        "local_sliding_window": {"num_sliding_window_blocks": 5, "attention": "bidirectional"},
    }.items():
        made = sparsity_config(SparseAttention(mode=mode, **arguments), HEADS)
        name = {"bslongformer": "BSLongformer", "bigbird": "BigBird"}.get(mode, mode.title().replace("_", ""))
        kind = getattr(zeroplan_runtime.sparse_attention, f"{name}SparsityConfig")
        assert type(made) is kind
        assert torch.equal(made.make_layout(128), kind(HEADS, **arguments, seed=0).make_layout(128))
