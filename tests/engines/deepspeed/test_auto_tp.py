"""DeepSpeed's AutoTP: our rank against DeepSpeed's own layers, event by event, and the plans of its stages."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engines.deepspeed.beside_deepspeed import assert_same_events
from tests.engines.test_contract import ledger_and_schedule_differ
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.tensor_parallel import auto_tp_rejects, local_parameters
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.models.families import FAMILIES
from zeroplan.models.load import load_model
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask
from zeroplan.tape.options import options_for
from zeroplan.tapes import can_trace

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
QWEN2 = CONFIG | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}  # has biases
QWEN3 = CONFIG | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}  # has norms of heads
QWEN2_MOE = CONFIG | {
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 192,
}
CASES = [
    {"id": "llama", "config": CONFIG, "checkpointing": "none"},
    {"id": "qwen2, recomputed", "config": QWEN2, "checkpointing": "ckpt"},
    {"id": "qwen3", "config": QWEN3, "checkpointing": "none"},
    {"id": "qwen2_moe", "config": QWEN2_MOE, "checkpointing": "none"},
    {"id": "qwen2_moe, a dense block", "config": QWEN2_MOE | {"mlp_only_layers": [1, 3]}, "checkpointing": "ckpt"},
    {"id": "llama, stage 3", "config": CONFIG, "checkpointing": "ckpt", "zero3": True},
]


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.skipif(not find_spec("deepspeed") or not can_trace(), reason="needs DeepSpeed, torch and transformers")
def test_our_rank_allocates_what_deepspeeds_layers_do(tmp_path: Path, warm_python: Path) -> None:
    """The same events, storages and parameters, in the same order."""
    assert_same_events("run_auto_tp.py", CASES, tmp_path, warm_python)


@pytest.mark.slow
@pytest.mark.skipif(not can_trace(), reason="tracing needs torch and transformers")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ledger_and_schedule_agree_on_a_tensor_parallel_rank(stage: int) -> None:
    from zeroplan.trace.api import trace_model

    layout = ParallelLayout(gpus=8, tp=2, whole_vocabulary=True)
    workload = Workload.of(micro_batch=2, seq_len=64)
    tape = trace_model(CONFIG, "AutoModelForCausalLM", options_for(workload, layout=layout, zero3=stage == 3)).expand(2, 64)
    spec = load_model(CONFIG)
    case = Case(spec, workload, Cluster(gpus=8), ZeroConfig.of(stage), parallel=layout)
    assert tape.parameters.shapes == case.parameters.shapes
    assert ledger_and_schedule_differ(case, find_engine("deepspeed"), tape) == {}


def test_what_a_rank_holds() -> None:
    """A whole embedding, norms, and halves of all other matrices, the head's among them."""
    parameters = load_model(CONFIG).parameters
    whole, local = parameters, local_parameters(parameters, "llama", 2, whole_vocabulary=True)
    shapes = dict(zip(local.names, local.shapes, strict=True))
    assert shapes["model.embed_tokens.weight"] == (1000, 256)
    assert shapes["lm_head.weight"] == (500, 256)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (256, 128)
    kept = sum(256 for name in local.names if "norm" in name) + 1000 * 256
    assert local.total == kept + (whole.total - kept) // 2


@pytest.mark.torch
@pytest.mark.skipif(not find_spec("deepspeed") or not can_trace(), reason="needs DeepSpeed and transformers")
def test_what_auto_tp_rejects_is_what_its_converter_rejects() -> None:
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
    from transformers import CONFIG_MAPPING

    for family in sorted(set(FAMILIES) & set(CONFIG_MAPPING)):
        plan = getattr(CONFIG_MAPPING[family], "base_model_tp_plan", None) or {}
        try:
            TPPlanConverter.convert(plan)
        except ValueError as fault:
            assert auto_tp_rejects(family), family
            assert all(style in str(fault) for style in auto_tp_rejects(family).rpartition("styles ")[2].split(", "))
        else:
            assert not auto_tp_rejects(family), family


def test_a_mixture_whose_plan_names_no_experts_keeps_them_whole() -> None:
    parameters = load_model(QWEN2_MOE).parameters
    local = local_parameters(parameters, "qwen2_moe", 2, whole_vocabulary=True)
    shapes = dict(zip(local.names, local.shapes, strict=True))
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (128, 256)
    assert shapes["model.layers.0.mlp.experts.down_proj"] == (4, 256, 64)
    assert shapes["model.layers.0.mlp.shared_expert.gate_proj.weight"] == (192, 256)


def test_stage_3_shards_what_auto_tp_keeps_over_all_ranks() -> None:
    """zero.Init has sharded embedding and norms over 8 ranks; halves of the rest are shared by the 4 that have them."""
    layout = ParallelLayout(gpus=8, tp=2, whole_vocabulary=True)
    spec, engine = load_model(CONFIG), find_engine("deepspeed")
    case = Case(spec, Workload.of(micro_batch=2, seq_len=64), Cluster(gpus=8), ZeroConfig.of(3), parallel=layout)
    _, rank = engine.ledger(case)
    shards = dict(zip(case.parameters.names, rank.shards, strict=True))
    assert shards["model.embed_tokens.weight"] == 1000 * 256 // 8
    assert shards["model.norm.weight"] == 256 // 8
    assert shards["lm_head.weight"] == 500 * 256 // 4
    assert shards["model.layers.0.self_attn.o_proj.weight"] == 256 * 128 // 4
    assert [group[0] for _, group in rank.param_groups] == [0, 1]  # the embedding's group is met first
    _, plain = engine.ledger(replace(case, zero_init=False))
    assert set(plain.ranks_of) == {4}


def asked(**given: Any) -> Ask:
    plain = {"model": CONFIG, "gpus": 8, "depth": "formula", "seq_len": 64, "vram": "80G"}
    return Ask(**plain | given)


def test_states_are_sharded_over_what_tensor_parallelism_leaves() -> None:
    (plan,) = estimate_report(asked(tp=2, stage=2, offload_optimizer="none")).plans
    assert plan.stage == 2
    local = local_parameters(load_model(CONFIG).parameters, "llama", 2, whole_vocabulary=True)
    assert plan.gpu.model_states == pytest.approx(2 * local.total + 14 * local.total / 4, rel=0.01)
    report = estimate_report(asked(tp=2))
    assert {one.stage for one in report.plans} == {0, 1, 2, 3}
    assert {one.fits for one in report.plans if one.stage == 3} == {None}  # DeepSpeed divides its layers in a way of its own
    assert {one.fits for one in report.plans if one.stage == 0} == {
        None
    }  # ranks behind the first mask gradients for their norm


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tp": 2, "sp": True}, "deepspeed has data parallelism and tp and ulysses and pp and ep only, and no sp"),
        ({"tp": 2, "model": "mistralai/Mixtral-8x7B-v0.1"}, "AutoTP rejects mixtral's tp_plan for its partition styles moe_tp"),
        ({"tp": 2, "model": "Qwen/Qwen3-30B-A3B"}, "AutoTP rejects qwen3_moe's tp_plan"),
        ({"tp": 3}, "tp 3 does not divide 1 × 8 = 8 ranks"),
        ({"tp": 8}, "tp 8 does not divide the 4 KV heads"),
        ({"tp": 2, "model": CONFIG | {"tie_word_embeddings": True}}, "a vocabulary that embedding and head share"),
        ({"cp": 2, "dtype": "bf16"}, "deepspeed has data parallelism and tp and ulysses and pp and ep only, and no cp"),
    ],
)
def test_what_is_not_modelled_is_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        estimate_report(asked(**given))


def ds_config(**section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": section,
    }


def test_a_ds_config_says_the_degree() -> None:
    """The triple of batch sizes counts all ranks, those that share matrices included, as DeepSpeed's own check does."""
    report = estimate_report(asked(ds_config=ds_config(autotp_size=4) | {"train_batch_size": 8}))
    assert report.cluster["layout"]["tp"] == 4
    assert not [one for one in report.plans[0].unmodelled if "tensor_parallel" in one.key]
    assert "tensor_parallel" not in [
        one.key for one in estimate_report(asked(ds_config=ds_config(autotp_size=1))).plans[0].unmodelled
    ]
    with pytest.raises(BadInput, match=r"autotp_size 3 does not divide the 8 ranks"):
        estimate_report(asked(ds_config=ds_config(autotp_size=3)))
    with pytest.raises(BadInput, match=r"autotp_size 4 needs that many ranks"):
        estimate_report(asked(gpus=1, ds_config=ds_config(autotp_size=4)))
    with pytest.raises(BadInput, match=r"says 4 .*the flag 2"):
        estimate_report(asked(tp=2, ds_config=ds_config(autotp_size=4)))


@pytest.mark.parametrize(
    "changed",
    [
        ds_config(autotp_size=2, vocab_parallel_lm_head=True),
        ds_config(autotp_size=2, tp_overlap_comm=True),
        ds_config(autotp_size=2) | {"zero_optimization": {"stage": 3}},
    ],
)
def test_what_of_the_section_is_not_planned_is_named(changed: dict[str, Any]) -> None:
    (plan,) = estimate_report(asked(ds_config=changed)).plans
    assert plan.fits is None
    assert "tensor_parallel" in [one.key for one in plan.unmodelled]


def test_the_first_card_bears_the_other_ranks_contexts() -> None:
    """R12, R13, A00 and A01: 2004 MiB outside torch on the second card, and 522 to 526 more on the first."""
    engine, cluster = find_engine("deepspeed"), Cluster(gpus=2)
    found = engine.outside_torch(Workload(), ZeroConfig.of(2), cluster, layout=ParallelLayout(gpus=2, tp=2))
    assert found.total / 2**20 == pytest.approx(2528, abs=10)
    assert engine.other_contexts(ParallelLayout(gpus=8, tp=8)) == 7
    assert not engine.outside_torch(Workload(), ZeroConfig.of(2), Cluster(gpus=8)).others
