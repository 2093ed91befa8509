"""A checkpoint that says how its weights are quantised."""

from __future__ import annotations

from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.core.quantization import PackedWeights, parse_quantization
from zeroplan.core.unmodelled import Effect
from zeroplan.core.workload import Precision
from zeroplan.planner.estimate import estimate_runs
from zeroplan.planner.quantized_checkpoint import METHODS, read_checkpoint
from zeroplan.planner.resolve import Resolved, resolve
from zeroplan.run.ask import Ask

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000}  # fmt: skip
NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}


def resolved(said: Any, **changes: Any) -> Resolved:
    request: dict[str, Any] = {"model": {**LLAMA, "quantization_config": said}, "engine": "ddp", "lora_rank": 8}
    return resolve(Ask(**{**request, **changes}))


@pytest.mark.torch
def test_every_method_of_transformers_is_known() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as known

    assert {"bitsandbytes" if name.startswith("bitsandbytes_") else name for name in known} == METHODS


@pytest.mark.parametrize(
    ("changes", "base"),
    [
        ({}, "nf4"),
        ({"bnb_4bit_use_double_quant": False}, "nf4-single"),
        ({"bnb_4bit_quant_type": "fp4"}, "fp4"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "int8"),
        ({"llm_int8_skip_modules": ["lm_head"]}, "nf4"),
    ],
)
def test_a_base_of_bitsandbytes_is_planned_as_it_is_kept(changes: dict[str, Any], base: str) -> None:
    found = resolved({**NF4, **changes})
    assert found.workload.quantize == base
    assert found.unmodelled == ()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bnb_4bit_compute_dtype": "float32"}, "32-bit copies"),
        ({"llm_int8_skip_modules": ["lm_head", "model.layers.0"]}, "llm_int8_skip_modules"),
        ({"load_in_4bit": False}, "neither load_in_4bit nor load_in_8bit"),
        ({"bnb_4bit_quant_type": "nf5"}, "no such levels"),
    ],
)
def test_a_base_that_is_not_modelled_is_named(changes: dict[str, Any], says: str) -> None:
    found = resolved({**NF4, **changes})
    assert found.workload.quantize is None
    (left_out,) = found.unmodelled
    assert left_out.effect is Effect.UNKNOWN
    assert says in left_out.says


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"lora_rank": None}, "--lora-rank is not given"), ({"engine": "zeroplan"}, "this engine models no such base")],
)
def test_a_base_without_adapters_or_engine_is_named(changes: dict[str, Any], says: str) -> None:
    found = resolved(NF4, **changes)
    assert found.workload.quantize is None
    assert says in found.unmodelled[0].says


@pytest.mark.parametrize("method", sorted(METHODS - {"bitsandbytes", "gptq", "awq"}))
def test_other_methods_are_named(method: str) -> None:
    (left_out,) = resolved({"quant_method": method}).unmodelled
    assert method in left_out.says
    assert left_out.effect in (Effect.UNKNOWN, Effect.LESS)


def test_where_the_config_says_it() -> None:
    """In the config of the text model too, and under an older name."""
    said = {"quant_method": "gptq", "bits": 4}
    for config in ({"text_config": {"quantization_config": said}}, {"compression_config": said}):
        found = read_checkpoint(config)
        assert found is not None
        assert found.method == "gptq"
    assert read_checkpoint({"quantization_config": {}}) is None
    assert read_checkpoint({"quantization_config": {"quant_method": "mxfp4", "dequantize": True}}) is None


def test_another_format_than_the_checkpoint_is_refused() -> None:
    assert resolved(NF4, quantize="nf4").workload.quantize == "nf4"
    for said in (NF4, {"quant_method": "gptq"}):
        with pytest.raises(BadInput, match="quantised already"):
            resolved(said, quantize="int8")


def test_a_base_in_bytes_is_whole_under_fsdp2() -> None:
    assert resolved(NF4, engine="fsdp2").workload.whole_base
    assert not resolved(NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, engine="fsdp2").workload.whole_base


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}


def test_blocks_of_packed_weights() -> None:
    """A weight of 512 × 256 by hand: eight values in an integer, along inputs with GPTQ and along outputs with AWQ."""
    gptq = PackedWeights("gptq", 4, 128)
    assert gptq.blocks_of_weight((512, 256)) == (4 * 32 * 512, 4 * 2 * 64, 2 * 2 * 512, 4 * 256)
    awq = PackedWeights("awq", 4, 64)
    assert awq.blocks_of_weight((512, 256)) == (4 * 256 * 64, 4 * 4 * 64, 2 * 4 * 512)
    rows = PackedWeights("gptq", 3, -1)
    assert rows.blocks_of_weight((512, 256)) == (4 * 24 * 512, 4 * 48, 2 * 512, 4 * 256)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("said", "name"), [(GPTQ, "gptq-4-128"), (AWQ, "awq-4-64"), (GPTQ | {"group_size": -1}, "gptq-4-row")])
def test_packed_checkpoints_are_planned_as_they_are_kept(said: dict[str, Any], name: str, engine: str) -> None:
    """Buffers are whole on every rank; no plan over them is said to fit."""
    found = resolved(said, engine=engine, gpus=2)
    assert found.unmodelled == ()
    base = found.workload.quantize
    assert isinstance(base, PackedWeights)
    assert str(base) == name == str(parse_quantization(name))
    rank = found.engine.rank(found.cases[-1], found.cases[-1].parameters)  # type: ignore[attr-defined]
    matrices = 2 * [(256, 256), (128, 256), (128, 256), (256, 256), (512, 256), (512, 256), (256, 512)]
    kept = sum(sum(base.blocks_of_weight(shape)) for shape in matrices)
    packed = rank.parameters.packed
    if engine == "fsdp2":
        assert kept == rank.quant_states_bytes + 2 * sum(rank.chunks[p] for p in packed)
    else:
        assert kept == rank.quantized_bytes
    assert [one.effect for one in found.engine.unmodelled(found.cases[-1])] == [Effect.UNKNOWN]


@pytest.mark.torch
def test_the_kernel_for_training_keeps_whole_weights() -> None:
    """autograd keeps each product's 16-bit weight: integers of the checkpoint come on top, and checkpointing frees it."""
    asked: dict[str, Any] = {"engine": "ddp", "lora_rank": 8, "gpu": "H200", "seq_len": 64, "depth": "simulated"}
    model = {**LLAMA, "quantization_config": GPTQ}
    (whole,) = estimate_runs(Ask(model=model, **asked)).runs
    assert whole is not None
    linear = 2 * 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)
    assert whole.plan.gpu.activations is not None
    assert whole.plan.gpu.activations > linear
    (again,) = estimate_runs(Ask(model=model, **asked, gradient_checkpointing=True)).runs
    assert again is not None
    assert again.plan.gpu.activations is not None
    assert again.plan.gpu.activations < whole.plan.gpu.activations


@pytest.mark.parametrize(
    ("said", "changes", "says"),
    [
        (GPTQ | {"dynamic": {"-:.*k_proj.*": {}}}, {}, "dynamic makes rules for single layers"),
        (AWQ | {"modules_to_not_convert": ["model.layers.0"]}, {}, "modules_to_not_convert makes rules"),
        (GPTQ | {"checkpoint_format": "marlin"}, {}, "packing are not modelled"),
        (GPTQ | {"bits": 5}, {}, "bits, groups or packing"),
        (GPTQ, {"engine": "deepspeed"}, "this engine models no such base"),
    ],
)
def test_packed_checkpoints_that_are_not_planned_are_named(said: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    found = resolved(said, **changes)
    assert found.workload.quantize is None
    assert says in found.unmodelled[0].says


@pytest.mark.parametrize("said", [[4, 128], "gptq", 4, True])
def test_what_is_no_object_is_refused(said: Any) -> None:
    with pytest.raises(BadInput, match=r"quantization_config: .* is not an object"):
        resolved(said)


@pytest.mark.parametrize("name", ["gptq", "gptq-5-128", "gptq-4-0", "awq"])
def test_what_is_no_packed_format_hears_how_one_is_written(name: str) -> None:
    with pytest.raises(BadInput, match=f"'{name}' is no packed format; use gptq-4-128"):
        parse_quantization(name)


def test_awq_has_four_bits() -> None:
    with pytest.raises(BadInput, match="AWQ keeps 4 bits"):
        parse_quantization("awq-8-128")


def torchao(kind: str, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": fields}}}


ROWS = {"granularity": {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}}
GROUPS = {"granularity": {"_type": "PerGroup", "_version": 1, "_data": {"group_size": 32}}}


@pytest.mark.parametrize(
    "said", [torchao("Int8WeightOnlyConfig", **ROWS), {"quant_method": "torchao", "quant_type": "int8_weight_only"}]
)
def test_torchaos_int8_weights_are_planned_as_they_are_kept(said: dict[str, Any]) -> None:
    found = resolved(said)
    assert str(found.workload.quantize) == "torchao-8-row"
    assert found.workload.numerics.precision is Precision.HALF_AUTOCAST
    assert PackedWeights("torchao", 8, -1).blocks_of_weight((96, 64)) == (96 * 64, 4 * 96, 96)
    assert "this engine models no such base" in resolved(said, engine="fsdp2").unmodelled[0].says


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (torchao("Int4WeightOnlyConfig", group_size=32), "trains over torchao's 8 bits alone"),
        (torchao("Int8WeightOnlyConfig", **GROUPS), "is not modelled"),
        (torchao("Int8DynamicActivationInt8WeightConfig", **ROWS), "is not modelled"),
        (torchao("Int8WeightOnlyConfig", **ROWS) | {"include_input_output_embeddings": True}, "is not modelled"),
        (torchao("Int8WeightOnlyConfig", **ROWS) | {"modules_to_not_convert": ["model.layers.0"]}, "is not modelled"),
    ],
)
def test_other_types_of_torchao_are_named(said: dict[str, Any], says: str) -> None:
    found = resolved(said)
    assert found.workload.quantize is None
    assert says in found.unmodelled[0].says


@pytest.mark.parametrize("name", ["torchao-4-32", "torchao-8-128"])
def test_torchaos_other_formats_are_refused(name: str) -> None:
    with pytest.raises(BadInput, match="use torchao-8-row"):
        parse_quantization(name)


def test_what_is_unknown_of_a_checkpoints_base_is_called_by_its_own_key() -> None:
    said = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    for engine in ("ddp", "fsdp2"):
        found = resolved(said, engine=engine)
        assert {one.key for one in found.engine.unmodelled(found.cases[0])} == {"quantization_config"}
    assert resolved(NF4, quantize="nf4").workload.quantized_by == "--quantize"
