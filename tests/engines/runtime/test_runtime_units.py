"""Units found in a spec equal those that the runtime finds in transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.reference import build_on_meta
from zeroplan.core.arena.layout import UnitShape
from zeroplan.engines.runtime.units import PEFT_PREFIX, unit_shapes
from zeroplan.models.load import load_model
from zeroplan.models.lora import with_lora

pytestmark = pytest.mark.torch

CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama", "num_hidden_layers": 3},
    {"model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": True},
    {"model_type": "llama", "num_hidden_layers": 1},
    {"model_type": "qwen2_moe", "num_hidden_layers": 3, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    {"model_type": "deepseek_v3", "num_hidden_layers": 3, "first_k_dense_replace": 1},
    {"model_type": "gemma", "num_hidden_layers": 2, "tie_word_embeddings": False},
    {"model_type": "gpt2", "n_layer": 2},
    {"model_type": "opt", "num_hidden_layers": 2},
    {"model_type": "roberta", "num_hidden_layers": 2},
    {"model_type": "deberta-v2", "num_hidden_layers": 2, "relative_attention": True, "conv_kernel_size": 3},
    {"model_type": "t5", "num_layers": 3, "num_decoder_layers": 2},
    {"model_type": "vit", "num_hidden_layers": 2},
    {"model_type": "whisper"},
]


def names(units: list[UnitShape]) -> list[tuple[str, str, tuple[tuple[str, int, bool], ...]]]:
    """Units as plain values, without peft's prefix."""
    return [
        (
            unit.name.removeprefix(PEFT_PREFIX),
            unit.kind.value,
            tuple((p.name.removeprefix(PEFT_PREFIX), p.numel, p.trainable) for p in unit.params),
        )
        for unit in units
    ]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_units_are_those_of_the_live_module(config: dict[str, Any]) -> None:
    from zeroplan_runtime.units import find_units

    spec = load_model(config)
    live = [unit.shape for unit in find_units(build_on_meta(config, spec.auto_class))]
    assert names(unit_shapes(spec)) == names(live)


@pytest.mark.parametrize("rank", [1, 8])
def test_units_with_adapters(rank: int) -> None:
    peft = pytest.importorskip("peft")
    from zeroplan_runtime.units import find_units

    spec = load_model({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 160})
    model = build_on_meta(dict(spec.config), spec.auto_class)
    lora = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    live = [unit.shape for unit in find_units(adapted)]
    assert names(unit_shapes(with_lora(spec, rank))) == names(live)
