"""Which modules become units, and models of several architectures at stage 3 beside plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.arena.layout import UnitKind
from zeroplan_runtime.units import find_blocks, find_units

STEPS = 4


def kinds(model: nn.Module, **options: Any) -> dict[str, str]:
    return {unit.shape.name: str(unit.shape.kind) for unit in find_units(model, **options)}


def test_blocks_wide_and_root() -> None:
    blocks = {f"blocks.{i}": "block" for i in range(5)}
    assert kinds(models.make(), wide_numel=500) == {"root": "root", "embed": "wide", **blocks, "head": "wide"}
    assert kinds(models.make(tied=True), wide_numel=500) == {"root": "root", **blocks}  # a tied table belongs to the root
    assert kinds(models.make()) == {"root": "root", **blocks}


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"unused": True}])
def test_every_parameter_is_in_one_unit(options: dict[str, Any]) -> None:
    model = models.make(**options)
    found = [id(p) for unit in find_units(model, wide_numel=500) for p in unit.params]
    assert sorted(found) == sorted(id(p) for p in model.parameters())
    names = [p.name for unit in find_units(model, wide_numel=500) for p in unit.shape.params]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_containers() -> None:
    def pair() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))

    assert list(find_blocks(nn.Sequential(pair(), nn.ReLU(), pair()))) == ["0", "2"]  # the outer ones, not their parts
    stages = nn.ModuleList(nn.ModuleList([pair(), pair()]) for _ in range(2))
    assert list(find_blocks(nn.ModuleDict({"s": stages}))) == ["s.0.0", "s.0.1", "s.1.0", "s.1.1"]  # a list has no forward
    assert find_blocks(nn.Linear(2, 2)) == {}
    assert list(find_blocks(models.make(), lambda name, _: name.endswith(".up"))) == [f"blocks.{i}.up" for i in range(5)]


def test_order_is_that_of_the_forward_as_far_as_it_is_written() -> None:
    units = find_units(models.make(), wide_numel=500)
    assert units[0].shape.kind is UnitKind.ROOT
    assert [u.shape.name for u in units[1:]] == ["embed", *(f"blocks.{i}" for i in range(5)), "head"]


def small(kind: str) -> nn.Module:
    import transformers as t

    torch.manual_seed(0)
    if kind == "gpt2":
        return t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=53, n_embd=24, n_layer=3, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
            )
        )
    if kind == "t5":
        config = t.T5Config(
            vocab_size=53,
            d_model=24,
            d_kv=6,
            d_ff=40,
            num_layers=3,
            num_decoder_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
        return t.T5ForConditionalGeneration(config)
    if kind == "mixtral":
        config = t.MixtralConfig(
            vocab_size=53,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=1,
        )
        return t.MixtralForCausalLM(config)
    config = t.BertConfig(
        vocab_size=53,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=40,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return t.BertForMaskedLM(config)


def train_small(group: dist.ProcessGroup, kind: str, stage: int, checkpointing: bool) -> tuple[list[float], Any]:
    model = small(kind).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine, *_ = zeroplan_runtime.initialize(model=model, config=ds_config(stage), group=group, device="cpu")
    losses = []
    for number in range(STEPS):
        tokens = models.batch(number, 0, dist.get_rank(group))
        losses.append(engine.backward(engine(input_ids=tokens, labels=tokens).loss).item())
        engine.step()
    return losses, engine.module_state_dict()


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["gpt2", "t5", "mixtral", pytest.param("bert", marks=pytest.mark.long)])
def test_architectures(pool: RankPool, kind: str) -> None:
    plain = small(kind).train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    expected = []
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            tokens = models.batch(number, 0, rank)
            loss = plain(input_ids=tokens, labels=tokens).loss
            (loss / 2).backward()
            if rank == 0:
                expected.append(loss.item())
        optimizer.step()
    for stage, checkpointing in ((1, False), (3, True)):
        losses, _ = pool.run(2, train_small, kind, stage, checkpointing)[0]
        assert losses == pytest.approx(expected, abs=2e-4), (stage, checkpointing)
