"""The head and the loss over labelled tokens alone: the same loss and gradients as over all tokens, from fewer logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroplan_runtime
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput
from zeroplan_runtime.techniques.labelled_tokens import attach_labelled_tokens

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch]

VOCAB, BATCH, LENGTH = 67, 2, 12
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
}
#: Model type and ending of the class's name, with what its config needs beside SMALL.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("ForCausalLM", {}),
    "gpt2": ("LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    "gemma2": ("ForCausalLM", {"head_dim": 8, "num_key_value_heads": 2}),  # bounds its logits
    "qwen3_moe": (
        "ForCausalLM",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "head_dim": 8,
            "num_key_value_heads": 2,
            "output_router_logits": True,
        },
    ),
    "bert": ("ForMaskedLM", {}),
    "roberta": ("ForMaskedLM", {"type_vocab_size": 1}),
    "distilbert": ("ForMaskedLM", {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}),
    "modernbert": ("ForMaskedLM", {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}),
    "deberta-v2": ("ForMaskedLM", {}),
    "big_bird": ("ForMaskedLM", {"attention_type": "original_full"}),
}


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    ending, more = MODELS[kind]
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **more})
    for name in ("dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout_prob"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    for name in ("attention_probs_dropout_prob", "embedding_dropout", "mlp_dropout", "seq_classif_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    auto = transformers.AutoModelForMaskedLM if ending == "ForMaskedLM" else transformers.AutoModelForCausalLM
    model: nn.Module = auto.from_config(config, attn_implementation="eager")
    assert type(model).__name__.endswith(ending)
    return model.train()


def batch(seed: int, share: float = 0.3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB, (BATCH, LENGTH), generator=generator)
    labelled = torch.rand(BATCH, LENGTH, generator=generator) < share
    labelled[0, 3] = True
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.where(labelled, ids, -100)}


def labels_that_count(kind: str, labels: torch.Tensor) -> int:
    return int((labels if MODELS[kind][0] == "ForMaskedLM" else labels[:, 1:]).ne(-100).sum())


@pytest.mark.parametrize("kind", list(MODELS))
def test_loss_and_gradients_are_those_of_all_tokens(kind: str) -> None:
    whole, picked = make(kind), make(kind)
    detach = attach_labelled_tokens(picked)
    for seed, more in ((0, {}), (1, {"num_items_in_batch": torch.tensor(17)} if MODELS[kind][0] != "ForMaskedLM" else {})):
        data = batch(seed)
        one, two = whole(**data, **more), picked(**data, **more)
        torch.testing.assert_close(two.loss, one.loss, rtol=1e-6, atol=1e-6)
        assert two.logits.shape == (1, labels_that_count(kind, data["labels"]), VOCAB)
        one.loss.backward()
        two.loss.backward()
    for (name, a), b in zip(whole.named_parameters(), picked.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    with torch.no_grad():
        assert picked(**batch(2)).logits.shape == (BATCH, LENGTH, VOCAB)
    assert picked.eval()(**batch(2)).logits.shape == (BATCH, LENGTH, VOCAB)
    picked.train()
    assert picked(input_ids=batch(2)["input_ids"]).logits.shape == (BATCH, LENGTH, VOCAB)
    detach()
    after = picked(**batch(3))
    assert after.logits.shape == (BATCH, LENGTH, VOCAB)
    torch.testing.assert_close(after.loss, whole(**batch(3)).loss)


def train(group: torch.distributed.ProcessGroup, kind: str, stage: int, options: dict[str, Any]) -> dict[str, Any]:
    rank = torch.distributed.get_rank(group)
    config = ds_config(stage, zeroplan={"wide_numel": 500, **options}, train_micro_batch_size_per_gpu=BATCH)
    engine, *_ = zeroplan_runtime.initialize(model=make(kind), config=config, group=group, device="cpu")
    losses, tokens = [], []
    for step in range(3):
        data = batch(10 * step + rank, share=0.2 + 0.3 * rank)
        output = engine(**data)
        losses.append(float(output.loss))
        tokens.append(output.logits.shape[:-1].numel() == labels_that_count(kind, data["labels"]))
        engine.backward(output.loss)
        engine.step()
    found = {"losses": losses, "params": engine.module_state_dict(), "picked": tokens}
    engine.destroy()
    return found


@pytest.mark.parametrize(("kind", "stage"), [("llama", 1), ("bert", 2), ("llama", 3), ("bert", 3)])
def test_trains_equally_on_two_ranks(pool: RankPool, kind: str, stage: int) -> None:
    """Each rank has another number of labelled tokens."""
    whole = pool.run(2, train, kind, stage, {})
    picked = pool.run(2, train, kind, stage, {"labelled_tokens_only": True})
    for one, two in zip(whole, picked, strict=True):
        assert not any(one["picked"])
        assert all(two["picked"])
        assert two["losses"] == pytest.approx(one["losses"], rel=2e-5)
    for name, value in whole[0]["params"].items():
        torch.testing.assert_close(picked[0]["params"][name], value, rtol=1e-4, atol=1e-4)


def test_models_without_such_a_loss_are_refused() -> None:
    with pytest.raises(BadInput, match="no module of Linear is a causal or masked language model"):
        attach_labelled_tokens(nn.Linear(2, 2))
    model: Any = make("llama")
    model.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(BadInput, match=r"LlamaForCausalLM\.loss_function is not transformers' own"):
        attach_labelled_tokens(model)
