"""Every family's description against transformers' own classes: names, order, shapes, ties, gradients and defaults."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.reference import assert_same_rows, build_on_meta, rows_of_module, rows_of_spec
from zeroplan.core.errors import BadInput
from zeroplan.core.tasks import parse_task
from zeroplan.models.families import FAMILIES, units_of
from zeroplan.models.families.config import NULLABLE, Config
from zeroplan.models.families.heads import GENERIC
from zeroplan.models.load import load_model
from zeroplan.models.megatron import MODEL_TYPE

pytestmark = pytest.mark.torch

#: Families that transformers has no class of.
OTHERS = {MODEL_TYPE}
CLASSES = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
#: Small configs that take every branch of a description.
VARIANTS: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    {"model_type": "llama", "head_dim": 96},
    {"model_type": "mistral"},
    {"model_type": "mistral", "head_dim": 160, "tie_word_embeddings": True},
    {"model_type": "qwen2"},
    {"model_type": "qwen2", "num_key_value_heads": 4, "tie_word_embeddings": True},
    {"model_type": "qwen2", "num_key_value_heads": None},
    {"model_type": "qwen3", "num_key_value_heads": 4},
    {"model_type": "qwen3", "attention_bias": True, "head_dim": 64, "tie_word_embeddings": True},
    {"model_type": "mixtral"},
    {"model_type": "mixtral", "num_local_experts": 3, "tie_word_embeddings": True},
    {"model_type": "qwen2_moe"},
    {"model_type": "qwen2_moe", "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [1], "qkv_bias": False},
    {"model_type": "qwen3_moe"},
    {"model_type": "qwen3_moe", "num_hidden_layers": 4, "mlp_only_layers": [0, 2], "head_dim": 128, "attention_bias": True},
    {"model_type": "olmoe"},
    {"model_type": "olmoe", "num_key_value_heads": 4, "attention_bias": True},
    {"model_type": "phimoe"},
    {"model_type": "phimoe", "attention_bias": True, "lm_head_bias": True},
    {"model_type": "deepseek_v2"},
    {"model_type": "deepseek_v2", "q_lora_rank": None, "first_k_dense_replace": 1, "attention_bias": True, "mlp_bias": True},
    {"model_type": "deepseek_v3", "num_hidden_layers": 5},
    {"model_type": "deepseek_v3", "q_lora_rank": None, "first_k_dense_replace": 0, "attention_bias": True},
    {"model_type": "gemma"},
    {"model_type": "gemma", "num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False},
    {"model_type": "gemma2"},
    {"model_type": "gemma2", "attention_bias": True},
    {"model_type": "gemma3_text"},
    {"model_type": "gemma3_text", "attention_bias": True},
    {"model_type": "gemma3", "text_config": {"num_hidden_layers": 2}, "vision_config": {"num_hidden_layers": 2}},
    {
        "model_type": "gemma3",
        "text_config": {"num_hidden_layers": 2, "hidden_size": 1024},
        "vision_config": {"num_hidden_layers": 1, "vision_use_head": False, "image_size": 64, "patch_size": 8},
    },
    {"model_type": "phi"},
    {"model_type": "phi", "qk_layernorm": True, "num_key_value_heads": 4, "tie_word_embeddings": True},
    {"model_type": "phi3"},
    {"model_type": "phi3", "num_key_value_heads": 8, "tie_word_embeddings": True},
    {"model_type": "olmo"},
    {"model_type": "olmo", "num_key_value_heads": 8, "attention_bias": True, "tie_word_embeddings": True},
    {"model_type": "olmo2"},
    {"model_type": "olmo2", "num_key_value_heads": 8, "attention_bias": True},
    {"model_type": "olmo3"},
    {"model_type": "gpt2"},
    {"model_type": "gpt2", "n_inner": 512, "tie_word_embeddings": False},
    {"model_type": "gptj"},
    {"model_type": "gptj", "n_inner": 512, "tie_word_embeddings": True},
    {"model_type": "gpt_neox"},
    {"model_type": "gpt_neox", "attention_bias": False, "tie_word_embeddings": True},
    {"model_type": "opt"},
    {"model_type": "opt", "word_embed_proj_dim": 512, "do_layer_norm_before": False},
    {"model_type": "opt", "enable_bias": False, "layer_norm_elementwise_affine": False, "tie_word_embeddings": False},
    {"model_type": "bloom"},
    {"model_type": "bloom", "n_embed": 128, "tie_word_embeddings": False},
    {"model_type": "falcon"},
    {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 1, "ffn_hidden_size": 512},
    {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1},
    {"model_type": "falcon", "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
    {"model_type": "bert"},
    {"model_type": "bert", "tie_word_embeddings": False},
    {"model_type": "roberta"},
    {"model_type": "roberta", "tie_word_embeddings": False},
    {"model_type": "modernbert"},
    {"model_type": "modernbert", "norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True},
    {"model_type": "modernbert", "decoder_bias": False, "tie_word_embeddings": False},
    {"model_type": "deberta"},
    {"model_type": "deberta", "relative_attention": True, "pos_att_type": "c2p|p2c", "position_biased_input": False},
    {
        "model_type": "deberta",
        "relative_attention": True,
        "pos_att_type": ["c2p"],
        "type_vocab_size": 2,
        "max_relative_positions": 9,
    },
    {"model_type": "deberta-v2"},
    {
        "model_type": "deberta-v2",
        "relative_attention": True,
        "position_buckets": 32,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "conv_kernel_size": 3,
        "position_biased_input": False,
    },
    {"model_type": "deberta-v2", "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "tie_word_embeddings": False},
    {"model_type": "t5"},
    {"model_type": "t5", "feed_forward_proj": "gated-gelu", "num_layers": 3, "num_decoder_layers": 2},
    {"model_type": "vit"},
    {"model_type": "vit", "num_labels": 7, "qkv_bias": False, "image_size": 32, "patch_size": 8, "num_channels": 1},
    {"model_type": "whisper"},
    {"model_type": "whisper", "encoder_layers": 3, "decoder_layers": 2, "num_mel_bins": 128, "decoder_ffn_dim": 512},
]

_DEPTH = {
    "gpt2": {"n_layer": 2},
    "gptj": {"n_layer": 2},
    "bloom": {"n_layer": 2},
    "gemma3": {},
    "whisper": {},
    "t5": {},
}


def _with_depth(config: dict[str, Any]) -> dict[str, Any]:
    return {**_DEPTH.get(config["model_type"], {"num_hidden_layers": 2}), **config}


@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: " ".join(f"{k}={v}" for k, v in c.items())[:80])
def test_description_equals_transformers(config: dict[str, Any]) -> None:
    config = _with_depth(config)
    spec = load_model(config)
    module = build_on_meta(config, spec.auto_class)
    assert_same_rows(rows_of_spec(spec), rows_of_module(module))
    assert spec.params == sum(p.numel() for p in module.parameters())


#: Architectures whose head is no language model's, with the labels that the config names.
HEADS = [
    *(
        {"model_type": m, "architectures": [f"Any{end}"]}
        for m in ("bert", "roberta", "deberta", "deberta-v2")
        for end in CLASSES
    ),
    *({"model_type": m, "architectures": [f"Any{end}"], "num_labels": 7} for m in sorted(GENERIC) for end in CLASSES[:2]),
]


@pytest.mark.parametrize("config", HEADS, ids=lambda c: " ".join((c["model_type"], *c["architectures"])))
def test_architectures_decide_the_head(config: dict[str, Any]) -> None:
    config = _with_depth({**config, "id2label": {str(i): str(i) for i in range(config.get("num_labels", 3))}})
    spec = load_model(config)
    assert spec.auto_class.endswith(config["architectures"][0].removeprefix("Any"))
    assert_same_rows(rows_of_spec(spec), rows_of_module(build_on_meta(config, spec.auto_class)))


@pytest.mark.parametrize(
    ("model_type", "name", "auto_class"),
    [
        ("bert", "BertLMHeadModel", "AutoModelForCausalLM"),
        ("bert", "BertForPreTraining", "AutoModelForPreTraining"),
        ("llama", "LlamaModel", "AutoModel"),
        ("roberta", "RobertaForCausalLM", "AutoModelForCausalLM"),
    ],
)
def test_heads_beside_the_familys_own_are_those_of_transformers(model_type: str, name: str, auto_class: str) -> None:
    config = _with_depth({"model_type": model_type, "architectures": [name]})
    spec = load_model(config)
    assert spec.auto_class == auto_class
    assert_same_rows(rows_of_spec(spec), rows_of_module(build_on_meta(config, auto_class)))


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "Eagle3LlamaForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "draft_vocab_size"),
        ({"architectures": ["LlamaForRewardModel"]}, "LlamaForRewardModel"),
    ],
)
def test_heads_that_no_config_describes_are_refused_by_name(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=named):
        load_model(_with_depth({"model_type": "llama", **extra}))


def test_a_task_takes_the_place_of_the_configs_head() -> None:
    config = _with_depth({"model_type": "bert", "architectures": ["BertForMaskedLM"]})
    spec = load_model(config, task=parse_task("sequence_classification"))
    assert [unit.name for unit in spec.units][-2:] == ["bert.pooler", "classifier"]
    assert load_model(config).units[-1].name == "cls.predictions"
    with pytest.raises(BadInput, match=r"unknown task 'sequence-clasification'.*sequence-classification"):
        parse_task("sequence-clasification")


def test_every_family_is_tested() -> None:
    assert {config["model_type"] for config in VARIANTS} == set(FAMILIES) - OTHERS


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - OTHERS - {"gemma3"}))
def test_defaults_are_transformers_own(model_type: str) -> None:
    """A published config leaves out what equals the class's default, so ours must be the same."""
    from transformers import AutoConfig

    reader = Config({"model_type": model_type}, model_type)
    units_of(reader, model_type)
    theirs = AutoConfig.for_model(model_type)
    for name, default in reader.defaults.items():
        actual = getattr(theirs, name, None)
        assert actual == default or actual is None, f"{name}: ours {default!r}, transformers {actual!r}"


def _smallest(model_type: str) -> dict[str, Any]:
    one = {"num_hidden_layers": 1}
    return {"model_type": model_type, **({"text_config": one, "vision_config": one} if model_type == "gemma3" else one)}


def _builds(config: dict[str, Any], auto_class: str) -> bool:
    try:
        build_on_meta(config, auto_class)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - OTHERS - {"gemma3"}))
def test_nulls_and_heads_that_transformers_refuses(model_type: str) -> None:
    """Null sizes, and heads that do not divide the width, wherever transformers builds no model of them."""
    base, auto_class = _smallest(model_type), FAMILIES[model_type][1]
    reader = Config(base, model_type)
    units_of(reader, model_type)
    sizes = {name: value for name, value in reader.defaults.items() if isinstance(value, int) and not isinstance(value, bool)}
    heads = [name for name in sizes if name.endswith(("attention_heads", "n_head")) and name != "num_key_value_heads"]
    shared = {"num_key_value_heads": 7} if "num_key_value_heads" in sizes else {}
    cases = [{name: None} for name in sizes.keys() - NULLABLE] + [{name: 7} | shared for name in heads]
    for case in cases:
        config = {**base, **case}
        try:
            load_model(config)
        except BadInput as fault:
            assert any(name in str(fault) for name in case)
            assert not _builds(config, auto_class), f"{case}: refused, and transformers builds it"
        else:
            assert _builds(config, auto_class), f"{case}: described, and transformers refuses it"


def test_heads_that_are_built_and_cannot_be_run_are_refused() -> None:
    """Queries share keys and values in equal groups; transformers builds other counts, and its forward ends in an error."""
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 3}
    with pytest.raises(BadInput, match="'num_attention_heads' over 'num_key_value_heads': 8 is not a multiple of 3"):
        load_model(config)
    import torch

    module = build_on_meta(config, FAMILIES["llama"][1])
    with pytest.raises(RuntimeError):
        module(input_ids=torch.ones(1, 8, dtype=torch.long, device="meta"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"num_hidden_layers": None, "n_layers": 16},
            "has 'n_layers' and no 'num_hidden_layers', for which transformers takes 32",
        ),
        ({"hidden_size": None, "dim": 64}, "has 'dim' and no 'hidden_size', for which transformers takes 4096"),
        ({"vocab_size": 1e5}, "'vocab_size' must be a whole number, and 100000.0 is none to transformers; write 100000"),
    ],
)
def test_sizes_that_transformers_would_not_read_are_refused(change: dict[str, Any], says: str) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 64} | change
    with pytest.raises(BadInput) as found:
        load_model({name: value for name, value in config.items() if value is not None})
    assert says in str(found.value)
