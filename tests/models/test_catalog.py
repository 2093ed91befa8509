"""The catalog: it holds what it must, its counts are the shapes' and the published ones, and each entry builds as described."""

from __future__ import annotations

import pytest

from tests.models.reference import assert_same_rows, build_on_meta, rows_of_module, rows_of_spec
from zeroplan.models import catalog
from zeroplan.models.load import load_model

ENTRIES = list(catalog.entries())

#: Published counts, from model cards, papers and the hub's safetensors metadata (tied weights counted once).
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "mistralai/Mistral-Large-Instruct-2407": 122_610_069_504,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x22B-v0.1": 140_630_071_296,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-1b-pt": 999_885_952,
    "google/gemma-3-4b-pt": 4_300_079_472,
    "google/gemma-3-27b-pt": 27_432_406_640,
    "microsoft/phi-2": 2_779_683_840,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "microsoft/Phi-3.5-MoE-instruct": 41_873_153_344,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-xl": 1_557_611_200,
    "EleutherAI/gpt-j-6b": 6_050_882_784,
    "EleutherAI/gpt-neox-20b": 20_554_567_680,
    "EleutherAI/pythia-70m": 70_426_624,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "EleutherAI/pythia-12b": 11_846_072_320,
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-350m": 331_196_416,
    "facebook/opt-13b": 12_853_473_280,
    "bigscience/bloom-560m": 559_214_592,
    "bigscience/bloom": 176_247_271_424,
    "tiiuae/falcon-rw-1b": 1_311_625_216,
    "allenai/OLMo-1B-hf": 1_176_764_416,
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
    "allenai/OLMo-2-0325-32B": 32_234_279_936,
    "allenai/OLMoE-1B-7B-0924": 6_919_161_856,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "deepseek-ai/DeepSeek-V2": 235_741_434_880,
    "FacebookAI/roberta-base": 124_697_433,
    "FacebookAI/roberta-large": 355_412_057,
    "answerdotai/ModernBERT-base": 149_655_232,
    "answerdotai/ModernBERT-large": 395_881_664,
    "google-t5/t5-small": 60_506_624,
    "google-t5/t5-11b": 11_307_321_344,
    "google/flan-t5-base": 247_577_856,
    "google/flan-t5-xxl": 11_135_332_352,
    "google/vit-base-patch16-224": 86_567_656,
    "google/vit-large-patch16-224": 304_326_632,
    "openai/whisper-tiny": 37_760_640,
    "openai/whisper-large-v3": 1_543_490_560,
    "openai/whisper-large-v3-turbo": 808_878_080,
}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_stated_count_is_the_shapes(entry: catalog.Entry) -> None:
    assert load_model(entry.id).params == entry.params


@pytest.mark.parametrize("name", PUBLISHED)
def test_stated_count_is_the_published_one(name: str) -> None:
    assert load_model(name).params == PUBLISHED[name]


def _published_families() -> set[str]:
    return {entry.config["model_type"] for entry in ENTRIES}


def test_holds_the_families_that_people_train() -> None:
    assert len(ENTRIES) >= 160
    assert _published_families() >= {
        *(
            "llama",
            "mistral",
            "mixtral",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "gemma",
            "gemma2",
            "gemma3",
            "gemma3_text",
        ),
        *("phi", "phi3", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "olmo", "olmo2", "olmoe", "deepseek_v2", "deepseek_v3"),
        *("bert", "roberta", "deberta", "deberta-v2", "modernbert", "t5", "vit", "whisper"),
    }


@pytest.mark.parametrize(
    ("spelling", "id_"),
    [
        ("META-LLAMA/llama-3.2-1b", "meta-llama/Llama-3.2-1B"),
        ("Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B"),
        ("unsloth/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B"),
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
        ("meta-llama/Llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"),
        ("gpt2-xl", "openai-community/gpt2-xl"),
        ("t5-large", "google-t5/t5-large"),
        ("bert-base-uncased", "google-bert/bert-base-uncased"),
        ("bert-large-cased", "google-bert/bert-large-cased"),
        ("roberta-large", "FacebookAI/roberta-large"),
        ("google/gemma-2-9b-it", "google/gemma-2-9b"),
        ("google/gemma-3-4b-it", "google/gemma-3-4b-pt"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen1.5-7B-Chat", "Qwen/Qwen1.5-7B"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-4B-Instruct-2507"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistralai/Mistral-7B-Instruct-v0.2"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
        ("allenai/OLMo-2-1124-7B-Instruct", "allenai/OLMo-2-1124-7B"),
        ("tiiuae/falcon-7b-instruct", "tiiuae/falcon-7b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-ai/DeepSeek-V2-Lite"),
        ("mingpt-45B", "karpathy/minGPT-45B"),
    ],
)
def test_other_spellings_resolve(spelling: str, id_: str) -> None:
    entry = catalog.find(spelling)
    assert entry is not None
    assert entry.id == id_


@pytest.mark.parametrize(
    "name", ["roberta", "openai/whisper", "google-t5/t5", "meta-llama/Llama-9-1B", "x/Llama-3.2-1B-GPTQ", "", "-"]
)
def test_a_name_that_states_no_known_shape_does_not_resolve(name: str) -> None:
    assert catalog.find(name) is None


def test_near_names() -> None:
    assert "'meta-llama/Llama-3.2-1B'" in catalog.near_names("meta-lama/Llama-3.2-1B")
    assert "'openai-community/gpt2-xl'" in catalog.near_names("someone/gpt2-xxl")
    assert catalog.near_names("qqqqqqqq") == ""


def test_no_alias_hides_another_models_id() -> None:
    known = {entry.id.lower() for entry in ENTRIES}
    aliases = [alias.lower() for entry in ENTRIES for alias in entry.also]
    assert not known.intersection(aliases)
    assert len(set(aliases)) == len(aliases)


def test_table_has_a_row_for_each_model() -> None:
    rows = catalog.catalog_table()
    assert [row["id"] for row in rows] == [entry.id for entry in ENTRIES]
    assert next(row for row in rows if row["id"] == "openai-community/gpt2")["params"] == 124_439_808


#: The first of each kind of model, by type and class; the others of its kind differ in sizes.
FIRST = {(entry.config["model_type"], tuple(entry.config.get("architectures", ()))): entry for entry in reversed(ENTRIES)}


@pytest.mark.torch
@pytest.mark.parametrize(
    "entry",
    [entry if entry in FIRST.values() else pytest.param(entry, marks=pytest.mark.long) for entry in ENTRIES],
    ids=[entry.id for entry in ENTRIES],
)
def test_builds_as_described(entry: catalog.Entry) -> None:
    """Every tensor's name, order, shape, tie and gradient, at full depth."""
    spec = load_model(entry.id)
    built = rows_of_module(build_on_meta(entry.config, spec.auto_class))
    if spec.model_type == "t5" and entry.config.get("tie_word_embeddings") is False:
        # Random weights are tied whatever the config says; test_live.py shows that loaded ones are not.
        assert built[-1][3] == "shared.weight"
        built[-1] = (*built[-1][:3], "lm_head.weight")
    assert_same_rows(rows_of_spec(spec), built)


def test_mingpt_equals_the_paper_sizes() -> None:
    """Twelve widths squared per block: 1.7, 12.8 and 45 billion, as its authors round them."""
    for name, layers, width, billions in (("1.7B", 15, 3072, 1.7), ("12.8B", 16, 8192, 12.8), ("45B", 56, 8192, 45)):
        params = load_model(f"mingpt-{name}").params
        assert params == pytest.approx(12 * layers * width**2, rel=2e-3)
        assert params / 1e9 == pytest.approx(billions, rel=8e-3)


def test_mingpts_twin_has_its_parameters() -> None:
    """minGPT's blocks: two norms, four square matrices and a feed-forward of four widths, each with a bias; an untied head."""
    layers, width, vocabulary, positions = 15, 3072, 65, 128
    block = 2 * 2 * width + 4 * (width**2 + width) + (8 * width**2 + 5 * width)
    assert load_model("mingpt-1.7B").params == layers * block + (2 * vocabulary + positions + 2) * width == 1_700_090_880


def test_depth_costs_nothing() -> None:
    """A block of any count is stored once, so the largest model's spec is no larger than the smallest's."""
    small, large = load_model("meta-llama/Llama-3.2-1B"), load_model("meta-llama/Llama-3.1-405B")
    assert [len(unit.tensors) for unit in large.units] == [len(unit.tensors) for unit in small.units]
    assert [unit.count for unit in large.units] == [1, 126, 1, 1]
