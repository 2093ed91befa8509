"""The head and the loss a chunk of tokens at a time: the same loss and gradients, without all logits."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional

import zeroplan_runtime
from tests.runtime.ranks import RankPool
from tests.runtime.test_labelled_tokens import BATCH, LENGTH, VOCAB, batch, make
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput
from zeroplan_runtime.techniques.chunked_cross_entropy import LinearCrossEntropy, attach_chunked_cross_entropy
from zeroplan_runtime.techniques.labelled_tokens import LabelledTokens, attach_labelled_tokens

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch]

KINDS = ["llama", "gpt2", "qwen3_moe"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("labelled_only", [False, True])
def test_loss_and_gradients_are_those_of_all_logits(kind: str, labelled_only: bool) -> None:
    whole, parts = make(kind), make(kind)
    picks: dict[torch.nn.Module, LabelledTokens] = {}
    undo = [attach_labelled_tokens(parts, picks)] if labelled_only else []
    undo.append(attach_chunked_cross_entropy(parts, 5, picks))
    with mock.patch.object(functional, "linear", side_effect=functional.linear) as linear:
        for seed, more in ((0, {}), (1, {"num_items_in_batch": torch.tensor(17)})):
            data = batch(seed)
            one = whole(**data, **more)
            linear.reset_mock()
            two = parts(**data, **more)
            rows = [len(call.args[0]) for call in linear.call_args_list if call.args[1].shape[0] == VOCAB]
            count = int(data["labels"][:, 1:].ne(-100).sum()) if labelled_only else BATCH * LENGTH
            assert rows == [5] * (count // 5) + [count % 5] * (count % 5 > 0)
            torch.testing.assert_close(two.loss, one.loss, rtol=1e-6, atol=1e-6)
            one.loss.backward()
            two.loss.backward()
    for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    with torch.no_grad():
        assert parts(**batch(2)).logits.shape == (BATCH, LENGTH, VOCAB)
    assert parts(input_ids=batch(2)["input_ids"]).logits.shape == (BATCH, LENGTH, VOCAB)
    for one in reversed(undo):
        one()
    after = parts(**batch(3))
    assert after.logits.shape == (BATCH, LENGTH, VOCAB)
    torch.testing.assert_close(after.loss, whole(**batch(3)).loss)


@pytest.mark.parametrize("frozen", [(), ("weight",), ("x",), ("x", "weight")])
def test_the_function_against_torch(frozen: tuple[str, ...]) -> None:
    torch.manual_seed(1)
    labels = torch.randint(0, 11, (7,))
    labels[2] = -100

    def leaves() -> dict[str, torch.Tensor]:
        torch.manual_seed(2)
        made = {"x": torch.randn(7, 4), "weight": torch.randn(11, 4), "bias": torch.randn(11)}
        return {name: one.requires_grad_(name not in frozen) for name, one in made.items()}

    one, two = leaves(), leaves()
    expected = functional.cross_entropy(functional.linear(one["x"], one["weight"], one["bias"]), labels)
    count = labels.ne(-100).sum()
    found: Any = LinearCrossEntropy.apply(two["x"], two["weight"], two["bias"], labels, count, -100, 3, None)
    torch.testing.assert_close(found, expected)
    for _ in range(2):  # nothing saved is overwritten
        (expected * 3).backward(retain_graph=True)
        (found * 3).backward(retain_graph=True)
    for name, leaf in one.items():
        torch.testing.assert_close(two[name].grad, leaf.grad)


def train(group: torch.distributed.ProcessGroup, kind: str, stage: int, dtype: str, options: dict[str, Any]) -> dict[str, Any]:
    rank = torch.distributed.get_rank(group)
    config = ds_config(stage, dtype, zeroplan={"wide_numel": 500, **options}, train_micro_batch_size_per_gpu=BATCH)
    config["gradient_accumulation_steps"] = 2
    engine, *_ = zeroplan_runtime.initialize(model=make(kind), config=config, group=group, device="cpu")
    losses = []
    for step in range(4):
        output = engine(**batch(10 * step + rank))
        losses.append(float(output.loss))
        engine.backward(output.loss)
        engine.step()
    found = {"losses": losses, "params": engine.module_state_dict()}
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("kind", "stage", "dtype"), [("llama", 1, "fp32"), ("gpt2", 2, "fp32"), ("llama", 3, "fp32"), ("gpt2", 3, "fp16")]
)
def test_trains_equally_on_two_ranks(pool: RankPool, kind: str, stage: int, dtype: str) -> None:
    """GPT-2 shares its head with its embedding; fp16 has a loss scale."""
    whole = pool.run(2, train, kind, stage, dtype, {})
    parts = pool.run(2, train, kind, stage, dtype, {"chunked_cross_entropy": 7, "labelled_tokens_only": kind == "llama"})
    rel, absolute = (2e-5, 1e-4) if dtype == "fp32" else (2e-3, 1e-2)
    for one, two in zip(whole, parts, strict=True):
        assert two["losses"] == pytest.approx(one["losses"], rel=rel)
    for name, value in whole[0]["params"].items():
        torch.testing.assert_close(parts[0]["params"][name], value, rtol=absolute, atol=absolute)


def test_there_are_no_logits_to_use() -> None:
    model = make("llama")
    attach_chunked_cross_entropy(model, 8)
    for output in (model(**batch(0)), model(**batch(0), return_dict=False)):
        logits = output[1]
        assert logits.device.type == "cpu"
        assert "AbsentLogits" in repr(logits)
        for use in (torch.exp, torch.argmax, torch.Tensor.tolist, lambda one: one + 1, lambda one: one[0]):
            with pytest.raises(BadInput, match="the output has no logits"):
                use(logits)


def test_what_it_cannot_compute_is_refused() -> None:
    softcapped = make("gemma2")
    attach_chunked_cross_entropy(softcapped, 8)
    with pytest.raises(BadInput, match="Gemma2ForCausalLM changes the logits between its head and its loss"):
        softcapped(**batch(0))
    with pytest.raises(BadInput, match="no module of BertForMaskedLM is a causal language model"):
        attach_chunked_cross_entropy(make("bert"), 8)
    model = make("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(BadInput, match="the head of LlamaForCausalLM is Sequential and no plain linear layer"):
        attach_chunked_cross_entropy(model, 8)
    cut = make("llama")
    attach_chunked_cross_entropy(cut, 8)
    with pytest.raises(BadInput, match="gives its head 2 rows for 24 labels"):
        cut(**batch(0), logits_to_keep=1)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(BadInput, match="the head runs under autocast"):
        cut(**batch(0))
