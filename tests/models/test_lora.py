"""LoRA against peft: the same names, order, shapes and gradients on small models of every kind of layer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.reference import Row, assert_same_rows, build_on_meta, rows_of_module, rows_of_spec
from zeroplan.core.errors import BadInput
from zeroplan.models.load import bare_params, load_model
from zeroplan.models.lora import unmatched_targets, with_lora

_PREFIX = "base_model.model."

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "qwen2": {"num_hidden_layers": 2},
    "qwen3": {"num_hidden_layers": 2},
    "gemma2": {"num_hidden_layers": 2},
    "phi": {"num_hidden_layers": 2},
    "phi3": {"num_hidden_layers": 2},
    "gpt2": {"n_layer": 2},
    "gpt_neox": {"num_hidden_layers": 2},
    "opt": {"num_hidden_layers": 2, "word_embed_proj_dim": 512},
    "bloom": {"n_layer": 2},
    "falcon": {"num_hidden_layers": 2},
    "bert": {"num_hidden_layers": 2},
    "roberta": {"num_hidden_layers": 2},
    "modernbert": {"num_hidden_layers": 2},
    "deberta-v2": {"num_hidden_layers": 2, "relative_attention": True, "pos_att_type": "p2c|c2p"},
    "t5": {"num_layers": 2},
    "vit": {"num_hidden_layers": 2},
    "whisper": {},
    "mixtral": {"num_hidden_layers": 2, "num_local_experts": 2},
    "qwen2_moe": {"num_hidden_layers": 2},
    "qwen3_moe": {"num_hidden_layers": 2},
    "olmoe": {"num_hidden_layers": 2},
    "phimoe": {"num_hidden_layers": 2},
    "deepseek_v2": {"num_hidden_layers": 2, "first_k_dense_replace": 1},
    "deepseek_v3": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4, "num_experts": 4},
    "glm4_moe": {"num_hidden_layers": 2, "n_routed_experts": 4, "hidden_size": 256},
    "minimax": {"num_hidden_layers": 2, "num_local_experts": 2, "hidden_size": 256},
    "hunyuan_v1_moe": {"num_hidden_layers": 2, "num_experts": 2, "hidden_size": 256, "head_dim": 64},
}


def _peft_rows(config: dict[str, Any], auto_class: str, rank: int, targets: Any) -> list[Row]:
    from peft import LoraConfig, get_peft_model

    module = build_on_meta(config, auto_class)
    lora = get_peft_model(
        module, LoraConfig(r=rank, target_modules=targets, init_lora_weights=False), autocast_adapter_dtype=False
    )
    return [
        (name.removeprefix(_PREFIX), shape, trainable, owner.removeprefix(_PREFIX))
        for name, shape, trainable, owner in rows_of_module(lora)
    ]


def _untied(rows: list[Row]) -> list[tuple[str, tuple[int, ...], bool]]:
    """The rows without their owners, whose names ours give as they were before the adapters."""
    return [row[:3] for row in rows]


@pytest.mark.torch
@pytest.mark.parametrize("model_type", MODELS)
def test_all_linear_layers_equal_peft(model_type: str) -> None:
    config = {"model_type": model_type, **MODELS[model_type]}
    spec = load_model(config)
    theirs = _peft_rows(config, spec.auto_class, 8, "all-linear")
    assert_same_rows(_untied(rows_of_spec(with_lora(spec, 8))), _untied(theirs))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("model_type", "targets"),
    [
        ("llama", ["q_proj", "v_proj"]),
        ("llama", ["self_attn.o_proj"]),
        ("llama", ["model.layers.1.self_attn.q_proj", "layers.0.mlp.up_proj"]),
        ("qwen2", ["q_proj", "lm_head"]),
        ("gpt2", ["c_attn"]),
        ("gpt2", ["c_proj", "c_fc"]),
        ("t5", ["q", "v", "wo"]),
        ("bert", ["query", "value"]),
        ("opt", ["q_proj", "v_proj", "project_in"]),
        ("mixtral", ["q_proj", "w2"]),
        ("mixtral", ["w1", "w3", "gate"]),
        ("qwen3_moe", ["q_proj", "gate_proj", "up_proj", "down_proj"]),
        ("deepseek_v2", ["kv_b_proj", "down_proj"]),
        ("qwen2_moe", ["gate_proj", "shared_expert_gate"]),
        ("mixtral", ["q_proj", "gate_proj", "up_proj"]),  # of another architecture: passed over
    ],
)
def test_named_targets_equal_peft(model_type: str, targets: list[str]) -> None:
    config = {"model_type": model_type, **MODELS[model_type]}
    spec = load_model(config)
    theirs = _peft_rows(config, spec.auto_class, 3, targets)
    assert_same_rows(_untied(rows_of_spec(with_lora(spec, 3, targets))), _untied(theirs))


def test_llama_1b_by_hand() -> None:
    """Rank 16 on a block's seven layers: 16 (in + out) each."""
    base = load_model("meta-llama/Llama-3.2-1B")
    spec = with_lora(base, 16)
    widths = [(2048, 2048), (2048, 512), (2048, 512), (2048, 2048), (2048, 8192), (2048, 8192), (8192, 2048)]
    adapters = 16 * 16 * sum(inputs + outputs for inputs, outputs in widths)
    assert spec.trainable == adapters == 11_272_192
    assert spec.frozen == base.params
    assert with_lora(base, 16, ("all-linear",)) == spec


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, 10**12])
def test_a_rank_must_be_a_count(rank: Any) -> None:
    with pytest.raises(BadInput, match="LoRA rank"):
        with_lora(load_model("gpt2"), rank)


def test_an_unknown_target_names_its_neighbours() -> None:
    with pytest.raises(BadInput, match="did you mean 'q_proj'"):
        with_lora(load_model("meta-llama/Llama-3.2-1B"), 8, ["q_prj"])
    with pytest.raises(BadInput, match="c_attn, c_proj, c_fc"):
        with_lora(load_model("gpt2"), 8, ["xyzzy"])


def test_targets_of_no_layer_are_named_beside_others() -> None:
    spec = with_lora(load_model("mistralai/Mixtral-8x7B-v0.1"), 8, ["q_proj", "gate_proj", "w2"])
    assert unmatched_targets(spec, ["q_proj", "gate_proj", "w2"]) == ("gate_proj",)


def test_halves_of_a_fused_parameter_go_together() -> None:
    with pytest.raises(BadInput, match="give up_proj too"):
        with_lora(load_model("Qwen/Qwen3-30B-A3B"), 8, ["gate_proj"])


def test_a_bare_count_has_no_layers() -> None:
    with pytest.raises(BadInput, match="no layers to adapt"):
        with_lora(bare_params(7 * 10**9), 8)
