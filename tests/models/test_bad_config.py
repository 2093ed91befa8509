"""Configs that cannot be used, by table and by fuzz: one clear line each, in bounded time and memory."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zeroplan.core.errors import BadInput
from zeroplan.core.sizes import LARGEST
from zeroplan.models import catalog
from zeroplan.models.families import FAMILIES
from zeroplan.models.families.config import DEEPEST, Config
from zeroplan.models.load import bare_params, load_model
from zeroplan.models.spec import ModelSpec


def _config(model_type: str, **values: Any) -> dict[str, Any]:
    return {"model_type": model_type, **values}


def _llama(**values: Any) -> dict[str, Any]:
    return _config("llama", **values)


_CYCLE: dict[str, Any] = {"model_type": "gemma3"}
_CYCLE["text_config"] = _CYCLE

CASES: dict[str, tuple[Any, str]] = {
    "no model_type": ({"hidden_size": 8}, "has no model_type; give the config.json that transformers writes"),
    "empty": ({}, "has no model_type"),
    "model_type of a number": ({"model_type": 3}, "'model_type' must be a text, not 3"),
    "model_type of a list": ({"model_type": ["llama"]}, "'model_type' must be a text, not a list"),
    "model_type of many letters": ({"model_type": "x" * 100_000}, "'model_type' must be a text"),
    "text for a number": (_llama(hidden_size="4096"), "'hidden_size' must be a whole number, not '4096'"),
    "truth for a number": (_llama(hidden_size=True), "'hidden_size' must be a whole number, not True"),
    "a list for a number": (
        _llama(hidden_size=[1] * 10**6),
        "'hidden_size' must be a whole number, not a list",
    ),
    "an object for a number": (_llama(hidden_size={}), "must be a whole number, not an object"),
    "half a layer": (_llama(num_hidden_layers=1.5), "'num_hidden_layers' must be a whole number, not 1.5"),
    "1e30 layers": (
        _llama(num_hidden_layers=1e30),
        "'num_hidden_layers' must be between 1 and 10,000, not 1e+30",
    ),
    "10^5000 layers": (_llama(num_hidden_layers=10**5000), "not a number of more than 38 digits"),
    "negative layers": (_llama(num_hidden_layers=-1), "must be between 1 and 10,000, not -1"),
    "no layers": (_llama(num_hidden_layers=0), "must be between 1 and 10,000, not 0"),
    "NaN": (_llama(hidden_size=math.nan), "'hidden_size' must be a whole number, not nan"),
    "infinity": (_llama(hidden_size=math.inf), "must be a whole number, not inf"),
    "a null vocabulary": (_llama(vocab_size=None), "'vocab_size' must be a whole number, not null"),
    "heads beside the width": (_llama(hidden_size=100, num_attention_heads=3), "100 is not a multiple of 3"),
    "a wide vocabulary": (_llama(vocab_size=10**12), "'vocab_size' must be between 1 and 268,435,456"),
    "no heads": (_llama(num_attention_heads=0), "'num_attention_heads' must be between 1 and"),
    "more heads than width": (
        _llama(hidden_size=8, num_attention_heads=16),
        "the width and 'num_attention_heads': 8 is not a multiple of 16",
    ),
    "an answer for a flag": (
        _llama(tie_word_embeddings="yes"),
        "'tie_word_embeddings' must be true or false, not 'yes'",
    ),
    "two for a flag": (_llama(attention_bias=2), "'attention_bias' must be true or false, not 2"),
    "NaN for a flag": (_llama(attention_bias=math.nan), "'attention_bias' must be true or false, not nan"),
    "a number for a list": (
        {"model_type": "qwen3_moe", "mlp_only_layers": 5},
        "'mlp_only_layers' must be a list of block indices, not 5",
    ),
    "words in a list": (_config("qwen3_moe", mlp_only_layers=["a"]), "must be a list of block indices, not a list"),
    "a list for a section": ({"model_type": "gemma3", "text_config": []}, "'text_config' must be an object, not a list"),
    "a fault inside a section": (
        {"model_type": "gemma3", "text_config": {"hidden_size": -1}},
        "text_config: 'hidden_size' must be between",
    ),
    "a number for words": (
        {"model_type": "deberta-v2", "relative_attention": True, "pos_att_type": 3},
        "'pos_att_type' must be a list of words",
    ),
    "more experts a token than there are": (
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 99},
        "'num_experts_per_tok' 99 is more than 'num_local_experts' 8",
    ),
    "falcon's heads": ({"model_type": "falcon", "hidden_size": 100, "num_attention_heads": 71}, "100 is not a multiple of 71"),
    "an image of text": ({"model_type": "vit", "image_size": "big"}, "'image_size' must be a whole number, not 'big'"),
    "an oblong image": ({"model_type": "vit", "image_size": [224, 448]}, "'image_size' must be a whole number, not a list"),
    "more than any machine": (
        _llama(hidden_size=1 << 28, intermediate_size=1 << 28, num_hidden_layers=DEEPEST),
        "more parameters than any machine could hold",
    ),
    "a number for a section": (
        {"model_type": "gemma3", "text_config": None, "vision_config": 1},
        "'vision_config' must be an object",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_config(case: str) -> None:
    config, message = CASES[case]
    with pytest.raises(BadInput) as caught:
        load_model(config)
    text = str(caught.value)
    assert message in text
    assert "\n" not in text
    assert len(text) <= 600
    assert caught.value.exit_code == 2


def test_a_size_without_a_default_must_be_there() -> None:
    with pytest.raises(BadInput, match="key 'n_embd' is missing; did you mean 'n_emb'\\?"):
        Config({"n_emb": 8}).size("n_embd")


def test_a_cycle_ends() -> None:
    """A config that holds itself is read as its keys are: never deeper than the description asks."""
    assert load_model(_CYCLE).params > 0


@pytest.mark.parametrize("source", [None, 3, 2.5, b"\xff", object(), [LARGEST], ("a",), True])
def test_things_that_are_no_model(source: Any) -> None:
    with pytest.raises(BadInput):
        load_model(source, offline=True)


@pytest.mark.parametrize("text", ["", "   ", "a\0b", "x" * 10_000, "/", "//", "a/b/c/d", "~nobody/x", "\n", "é" * 300])
def test_texts_that_are_no_model(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_model(text, offline=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("count", "largest"), [(0, None), (-5, None), (1.5, None), (True, None), (10, 0), (10, 11), (10, "3")])
def test_bare_counts_must_be_counts(count: Any, largest: Any) -> None:
    with pytest.raises(BadInput):
        bare_params(count, largest_layer=largest)


def test_a_bare_count() -> None:
    spec = bare_params(7_500_000_000, largest_layer=50_000_000, name="7.5B")
    assert (spec.params, spec.trainable, spec.frozen, spec.has_shapes, spec.source) == (
        7_500_000_000,
        7_500_000_000,
        0,
        False,
        "params",
    )
    assert spec.largest_module == 50_000_000


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
_ANYTHING = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=12
)
_KEYS = sorted({key for entry in catalog.entries() for key in entry.config} | {"n_embd", "hidden_size", "head_dim"})
_NEAR = st.integers(-3, 70_000) | st.sampled_from([0, 1, -1, 2**31, 2**63, 10**30, 1e30, 0.5]) | _ANYTHING


def _load(config: Any) -> ModelSpec | None:
    try:
        spec = load_model(config)
    except BadInput as error:
        assert "\n" not in str(error)
        assert len(str(error)) <= 600
        spec = None
    return spec


@settings(max_examples=300)
@given(st.dictionaries(st.text(max_size=12), _ANYTHING, max_size=6))
def test_any_json_object_is_a_model_or_bad_input(config: dict[str, Any]) -> None:
    _load(config)


@settings(max_examples=600)
@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(_KEYS), _NEAR, max_size=8))
def test_any_values_in_a_known_family_give_a_sane_model_or_bad_input(model_type: str, values: dict[str, Any]) -> None:
    spec = _load({**values, "model_type": model_type})
    if spec is not None:
        assert 0 < spec.params <= LARGEST
        assert all(side >= 0 for unit in spec.units for tensor in unit.tensors for side in tensor.shape)
        assert spec.trainable + spec.frozen == spec.params


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.builds(lambda value: json.dumps(value).encode(), _ANYTHING))
def test_any_bytes_on_disk_are_a_model_or_bad_input(tmp_path: Any, data: bytes) -> None:
    for name in ("config.json", "model.safetensors"):
        path = tmp_path / name
        path.write_bytes(data)
        _load(path)
        path.write_bytes(len(data).to_bytes(8, "little") + data)
        _load(path)


@settings(max_examples=200)
@given(st.text(max_size=60))
def test_any_text_is_a_model_or_bad_input(text: str) -> None:
    try:
        load_model(text, offline=True)
    except BadInput as error:
        assert "\n" not in str(error)
