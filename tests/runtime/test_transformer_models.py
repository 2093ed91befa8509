"""The fused layer in BERT and RoBERTa: what they compute, their own layers again, and training at every stage."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import zeroplan_runtime
from tests.patience import PATIENCE
from tests.runtime.ranks import RankPool
from zeroplan.core.errors import BadInput
from zeroplan_runtime.techniques.transformer import DeepSpeedTransformerLayer, models, use_transformer_layer

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.torch

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 120,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,
    "pad_token_id": 1,
}
ALL_FLAGS = {"normalize_invertible": True, "gelu_checkpoint": True, "attn_dropout_checkpoint": True}


def make(kind: str = "bert", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **changes})
    return transformers.AutoModelForMaskedLM.from_config(config).train()


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 120, (4, 17), generator=generator)
    mask = torch.ones_like(ids)
    mask[2, 11:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.detach() - other.detach()).norm() / other.detach().norm())


def own_names(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
def test_a_model_computes_what_it_computed(kind: str, attention: str) -> None:
    """Loss, gradients and recorded hidden states; and after ``restore`` the model is its own again, to the bit."""
    model = make(kind, attn_implementation=attention)
    fused = copy.deepcopy(model)
    restore = use_transformer_layer(fused, **ALL_FLAGS)
    layers = [each for each in fused.modules() if isinstance(each, DeepSpeedTransformerLayer)]
    assert len(layers) == SMALL["num_hidden_layers"]
    assert all(layer.config.gelu_approximate == "none" and not layer.config.pre_layer_norm for layer in layers)
    expected, found = (one(**batch(), output_hidden_states=True) for one in (model, fused))
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert len(found.hidden_states) == len(expected.hidden_states) == SMALL["num_hidden_layers"] + 1
    seen = batch()["attention_mask"].bool()
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert error(one[seen], other[seen]) < 1e-5
    expected.loss.backward()
    found.loss.backward()
    with torch.no_grad():
        for one in (model, fused):
            for param in one.parameters():
                if param.grad is not None:
                    param -= 0.1 * param.grad
    restore()
    assert not any(isinstance(each, DeepSpeedTransformerLayer) for each in fused.modules())
    after, wanted = own_names(fused), own_names(model)
    assert list(after) == list(wanted)
    for name, value in wanted.items():
        assert torch.allclose(after[name], value, rtol=2e-4, atol=2e-6), name
    assert fused(**batch()).loss.item() == pytest.approx(model(**batch()).loss.item(), rel=1e-4)


def test_what_is_frozen_stays_so() -> None:
    model = make()
    for part in (model.bert.encoder.layer[0], model.bert.encoder.layer[1].attention.self):
        part.requires_grad_(False)
    wanted = {name: param.requires_grad for name, param in model.named_parameters()}
    restore = use_transformer_layer(model)
    first, second, third = model.bert.encoder.layer
    assert not any(param.requires_grad for param in first.parameters())
    assert [name for name, param in second.named_parameters() if not param.requires_grad] == ["attn_qkvw", "attn_qkvb"]
    assert all(param.requires_grad for param in third.parameters())
    restore()
    assert {name: param.requires_grad for name, param in model.named_parameters()} == wanted


def test_gradient_checkpointing_of_transformers_reaches_the_layers() -> None:
    model = make(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.1)
    use_transformer_layer(model)
    results = []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        torch.manual_seed(5)
        calls = []
        hooks = [layer.register_forward_pre_hook(lambda *_, seen=calls: seen.append(1)) for layer in model.bert.encoder.layer]
        model(**batch()).loss.backward()
        for hook in hooks:
            hook.remove()
        results.append((len(calls), [param.grad.clone() for param in model.parameters()]))
    assert results[1][0] == 2 * results[0][0]
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.long
def test_a_fused_model_goes_to_another_process() -> None:
    """Its layers' classes are made when they are asked for, also by a process that has made none."""
    model = make()
    use_transformer_layer(model, gelu_checkpoint=True)
    content = pickle.dumps(model)
    program = "import pickle, sys; m = pickle.load(sys.stdin.buffer); print(m.bert.encoder.layer[0].config.gelu_checkpoint)"
    told = subprocess.run([sys.executable, "-c", program], input=content, capture_output=True, check=True, timeout=PATIENCE)
    assert told.stdout.split() == [b"True"]
    found = pickle.loads(content).eval()
    assert torch.equal(found(**batch()).loss, model.eval()(**batch()).loss)
    with pytest.raises(AttributeError, match="FusedGPT2Block"):
        _ = models.FusedGPT2Block


def test_adapters_that_leave_the_fused_layers_out_are_named(caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft")
    model = make()
    use_transformer_layer(model)
    models.warn_of_adapters(model)
    assert not caplog.records
    models.warn_of_adapters(peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear")))
    assert "the 3 fused layers have none" in caplog.text


def test_what_no_layer_can_take_the_place_of_is_refused() -> None:
    with pytest.raises(BadInput, match="Linear has none of the layers BertLayer, RobertaLayer, XLMRobertaLayer"):
        use_transformer_layer(nn.Linear(2, 2))
    with pytest.raises(BadInput, match="hidden_act 'relu' is not one of gelu, gelu_new, gelu_pytorch_tanh"):
        use_transformer_layer(make(hidden_act="relu"))
    with pytest.raises(BadInput, match="a decoder is not supported"):
        use_transformer_layer(make(is_decoder=True))
    with pytest.raises(BadInput, match="heads: it follows from the model"):
        use_transformer_layer(make(), heads=2)
    model = make()
    model.bert.encoder.layer[1].attention.self.key.weight.requires_grad_(False)
    with pytest.raises(BadInput, match="some of query, key and value are frozen"):
        use_transformer_layer(model)
    adapted = peft.get_peft_model(make(), peft.LoraConfig(r=2, target_modules=["query"]))
    with pytest.raises(BadInput, match=r"'attention.self.query.lora_A.default.weight' would be lost; call it before adapters"):
        use_transformer_layer(adapted)
    model = make()
    with pytest.raises(BadInput, match="'gelu_checkpoints' is no key of it"):
        use_transformer_layer(model, gelu_checkpoints=True)
    assert not any(isinstance(each, DeepSpeedTransformerLayer) for each in model.modules())


def test_it_trains_at_every_stage_as_the_models_own_layers_do(pool: RankPool) -> None:
    """Losses and last weights of two ranks under the engine, with every flag, beside plain layers at stage 0."""
    expected, wanted = pool.run(2, train, 0, False)[0]
    for stage in range(4):
        for losses, weights in pool.run(2, train, stage, True):
            assert losses == pytest.approx(expected, rel=1e-4), stage
            for name, value in wanted.items():
                assert torch.allclose(weights[name], value, rtol=1e-3, atol=1e-4), (stage, name)


def train(group: Any, stage: int, fused: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Three steps of SGD; the weights by the names of transformers' own layers."""
    model = make()
    restore = use_transformer_layer(model, **ALL_FLAGS) if fused else lambda: None
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = zeroplan_runtime.initialize(model=model, config=config, group=group, device="cpu")
    losses = []
    for _ in range(3):
        loss = engine(**batch()).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy(keep_parameters=True)
    restore()
    return losses, own_names(model)
