"""Tensor parallelism: the plans are transformers', and impossible degrees are refused in one line that names the divisor."""

from __future__ import annotations

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.core.tensor_parallel import PLANS, local_parameters
from zeroplan.models.load import load_model
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}


@pytest.mark.parametrize("model_type", PLANS)
def test_the_plans_are_those_of_transformers(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    plan, named = PLANS[model_type], transformers.AutoConfig.for_model(model_type).base_model_tp_plan
    styles = {name.removeprefix("layers.*."): style for name, style in named.items() if name.startswith("layers.")}
    assert {name for name, style in styles.items() if style == "colwise"} == set(plan.columns)
    assert {name for name, style in styles.items() if style == "rowwise"} == set(plan.rows)
    assert {name for name, style in styles.items() if style not in ("colwise", "rowwise")} == set(plan.head_norms)


def test_a_rank_holds_its_part_of_each_matrix_and_whole_norms() -> None:
    parameters = load_model(CONFIG).parameters
    local = dict(zip(parameters.names, local_parameters(parameters, "llama", 4).shapes, strict=True))
    assert local["model.embed_tokens.weight"] == (64, 64)
    assert local["lm_head.weight"] == (64, 64)
    assert local["model.norm.weight"] == (64,)
    block = {name.removeprefix("model.layers.1."): shape for name, shape in local.items() if ".layers.1." in name}
    assert block["self_attn.q_proj.weight"] == (16, 64)
    assert block["self_attn.k_proj.weight"] == (8, 64)
    assert block["self_attn.o_proj.weight"] == (64, 16)
    assert block["mlp.up_proj.weight"] == (24, 64)
    assert block["mlp.down_proj.weight"] == (64, 24)
    assert block["input_layernorm.weight"] == (64,)


@pytest.mark.parametrize(
    ("changed", "asked", "said"),
    [
        ({}, {"tp": 3}, "tp 3 does not divide 1 × 8 = 8 ranks"),
        ({"num_attention_heads": 4}, {"tp": 8}, "tp 8 does not divide the 4 attention heads"),
        ({}, {"tp": 8}, "tp 8 does not divide the 4 KV heads"),
        ({"intermediate_size": 98}, {"tp": 4}, "tp 4 does not divide the 98 channels of the MLP"),
        ({"vocab_size": 258}, {"tp": 4}, "tp 4 does not divide the 258 words of the vocabulary"),
        ({}, {"tp": 4, "sp": True, "seq_len": 30}, "tp 4 does not divide the 30 tokens of a sample"),
        ({}, {"tp": 2, "lora_rank": 4}, "tensor parallelism with LoRA is not modelled"),
        ({}, {"sp": True}, "sp needs tensor parallelism"),
        ({}, {"tp": 2, "optimizer": "muon"}, "muon steps whole matrices, and is not modelled on their parts"),
        ({}, {"tp": 2, "optimizer": "adafactor"}, "adafactor steps whole matrices, and is not modelled on their parts"),
        ({"architectures": ["LlamaForSequenceClassification"]}, {"tp": 2}, "is modelled for causal language models alone"),
        ({}, {"tp": 0}, "tp 0 is below 1"),
        ({"model_type": "gpt2", "n_head": 8}, {"tp": 2}, "tensor parallelism of gpt2 is not modelled"),
        ({}, {"cp": 3}, "cp 3 does not divide 1 × 8 = 8 ranks"),
        ({}, {"cp": 4, "seq_len": 1028}, "cp 4 divides each half of a sample, and 1,028 tokens are no multiple of 8"),
        ({}, {"cp": 2, "tp": 4, "sp": True, "seq_len": 24}, "and sp its parts, and 24 tokens are no multiple of 16"),
        ({}, {"cp": 2, "attn": "flash"}, "torch has ring attention for sdpa alone"),
        ({}, {"cp": 2, "dtype": "fp32"}, "ring attention is modelled for 16 bits"),
        ({}, {"cp": 2, "lora_rank": 4}, "context parallelism with LoRA is not modelled"),
        (
            {},
            {"cp": 2, "gradient_checkpointing": True, "checkpoint_policy": "selective"},
            "selective checkpointing of ring attention",
        ),
        ({"model_type": "gpt2", "n_head": 8}, {"cp": 2}, "context parallelism of gpt2 is not modelled"),
        ({}, {"tp": 2, "engine": "zeroplan", "optimizer": "lamb"}, "lamb steps by the norms of whole tensors"),
        ({}, {"tp": 2, "engine": "ddp"}, "ddp has data parallelism only, and no tp"),
    ],
)
def test_what_cannot_be_is_one_line(changed: dict[str, object], asked: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        estimate_report(Ask(**{"model": CONFIG | changed, "gpus": 8, "engine": "fsdp2", "depth": "formula"} | asked))  # type: ignore[arg-type]
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("degrees", [{"cp": 2}, {"pp": 2, "vpp": 2, "grad_accum": 2}, {"tp": 2}])
def test_layouts_that_were_measured_carry_no_warning(degrees: dict[str, int]) -> None:
    config = CONFIG | {"num_hidden_layers": 8}
    asked = Ask(**{"model": config, "gpus": 8, "engine": "fsdp2", "stage": 2, "depth": "formula", "seq_len": 64} | degrees)  # type: ignore[arg-type]
    assert [text for text in estimate_report(asked).warnings if "measured" in text] == []


def test_formulas_tell_the_states_of_a_rank_and_no_fit() -> None:
    """Masters, gradients and two moments in fp32 are 16 bytes a parameter of the rank's part, over two data-parallel ranks."""
    asked = Ask(model=CONFIG, gpus=8, tp=4, engine="fsdp2", stage=3, depth="formula", vram="80G")
    report = estimate_report(asked)
    plan = report.plans[0]
    parameters = load_model(CONFIG).parameters
    rows = (shape[0] * (1 if len(shape) == 1 else shape[1]) for shape in local_parameters(parameters, "llama", 4).shapes)
    assert plan.gpu.model_states == 16 * sum(rows) // 2
    assert plan.fits is None
    assert plan.gpu.bound is None
    assert report.cluster["layout"] == {"dp": 2, "tp": 4, "sp": False, "cp": 1, "pp": 1, "vpp": 1, "shard_group": 2}
