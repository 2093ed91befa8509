"""Targets as peft finds them: patterns and its defaults, held against peft on a small model."""

from __future__ import annotations

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.models.load import load_model
from zeroplan.models.lora import with_lora
from zeroplan.models.lora_targets import _PEFT_DEFAULTS, PEFT_DEFAULT, named_targets

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
PATTERNS = (
    r".*\.(q|v)_proj",
    r"model\.layers\.[\d]+\.(mlp|self_attn)\.(up|down|gate|q|k|v|o)_proj",
    r".*layers\.(1|11)\..*_proj",
    r"^(?!.*mlp).*_proj$",
    r".*lm_head|.*down_proj",
)


def test_names_stay_and_a_pattern_becomes_names() -> None:
    spec = load_model(dict(CONFIG))
    assert named_targets(spec, ()) == ()
    assert named_targets(spec, ("all-linear",)) == ()  # peft takes that word alone, and no list that holds it
    assert named_targets(spec, ("q_proj", "layers.1.mlp.up_proj")) == ("q_proj", "layers.1.mlp.up_proj")
    assert named_targets(spec, (PATTERNS[0],)) == ("q_proj", "v_proj")
    assert named_targets(spec, (PEFT_DEFAULT,)) == ("q_proj", "v_proj")
    assert len(named_targets(spec, (PATTERNS[2],))) == 2 * 7


@pytest.mark.torch
@pytest.mark.parametrize("pattern", [*PATTERNS, PEFT_DEFAULT])
def test_peft_adapts_the_same_layers(pattern: str) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**CONFIG))
    wanted = None if pattern == PEFT_DEFAULT else pattern
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=wanted), low_cpu_mem_usage=True)
    spec = load_model(dict(CONFIG))
    ours = with_lora(spec, 4, named_targets(spec, (pattern,)))
    theirs = {name.removeprefix("base_model.model.") for name, one in adapted.named_parameters() if one.requires_grad}
    assert {name for name, on in zip(ours.parameters.names, ours.parameters.trainable, strict=True) if on} == theirs


@pytest.mark.torch
def test_the_defaults_are_those_of_peft() -> None:
    constants = pytest.importorskip("peft.utils.constants")
    theirs = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert {kind: tuple(theirs[kind]) for kind in _PEFT_DEFAULTS} == _PEFT_DEFAULTS


@pytest.mark.parametrize(
    "targets",
    [
        (r"(.*)+x",),
        (r"(a+)+$",),
        (r".*.*.*.*.*.*x",),
        (r"(((",),
        (r"nothing\.like\.it.*",),
        (r".*q_proj", "v_proj"),
        ("a" * 400 + "*",),
    ],
)
def test_bad_patterns_are_refused(targets: tuple[str, ...]) -> None:
    spec = load_model(dict(CONFIG))
    with pytest.raises(BadInput):
        named_targets(spec, targets)


def test_an_architecture_without_a_default_is_said() -> None:
    with pytest.raises(BadInput, match="no default targets"):
        named_targets(load_model("WinKawaks/vit-small-patch16-224"), (PEFT_DEFAULT,))
