"""DeepSpeed's AutoEP: our layer against DeepSpeed's own, our plan against its engine, partitions by hand, and refusals."""

from __future__ import annotations

import json
from collections import Counter
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.engines.deepspeed.beside_deepspeed import assert_same_events
from tests.engines.deepspeed.scripts import rows_of
from tests.engines.deepspeed.test_auto_tp import CONFIG
from tests.engines.test_contract import ledger_and_schedule_differ
from zeroplan.core.auto_ep import SHARED, with_auto_ep
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.deepspeed.rank import deepspeed_rank
from zeroplan.engines.registry import find_engine
from zeroplan.models.load import load_model
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask
from zeroplan.tape.options import options_for
from zeroplan.tapes import can_trace

_MATRICES = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = {
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
MIXTRAL: dict[str, Any] = CONFIG | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN3 = CONFIG | _MATRICES | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16}
QWEN2 = (
    CONFIG
    | _MATRICES
    | {
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 8,
        "shared_expert_intermediate_size": 192,
        "mlp_only_layers": [1],
    }
)
DEEPSEEK2 = (
    CONFIG
    | _MATRICES
    | _LATENT
    | {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "n_group": 1,
        "topk_group": 1,
    }
)
DEEPSEEK3 = (
    CONFIG
    | _MATRICES
    | _LATENT
    | {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_group": 4,
        "topk_group": 2,
    }
)
MODELS = {one["model_type"]: one for one in (MIXTRAL, QWEN3, QWEN2, DEEPSEEK2, DEEPSEEK3)}

PLAIN: dict[str, Any] = {"config": MIXTRAL, "ranks": 2, "batch": 2, "checkpointing": "none", "zero3": False}
LAYERS = [
    PLAIN | {"id": "mixtral"},
    PLAIN | {"id": "mixtral, every rank has all experts", "ranks": 1},
    PLAIN | {"id": "qwen3_moe, recomputed", "config": QWEN3, "ranks": 8, "checkpointing": "ckpt"},
    PLAIN | {"id": "qwen2_moe, stage 3, a dense block", "config": QWEN2, "zero3": True},
    PLAIN | {"id": "deepseek_v3, groups of experts", "config": DEEPSEEK3, "ranks": 4},
    PLAIN | {"id": "deepseek_v2, one sample", "config": DEEPSEEK2, "batch": 1},
]


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.skipif(not find_spec("deepspeed") or not can_trace(), reason="needs DeepSpeed, torch and transformers")
def test_our_layer_allocates_what_deepspeeds_class_does(tmp_path: Path, warm_python: Path) -> None:
    """The same events, storages and parameters, in the same order."""
    assert_same_events("run_auto_ep.py", LAYERS, tmp_path, warm_python)


def real_case(name: str, stage: int, ep: int, *, rank: int = 0, window: int = 1, **zero: Any) -> dict[str, Any]:
    """A case of run_auto_ep_engine.py on one of four ranks."""
    small = {"intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    section = {"stage": stage, "reduce_bucket_size": 700_000, "stage3_param_persistence_threshold": 1000} | zero
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": window,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": section,
    }
    model = MIXTRAL | small | {"vocab_size": 320, "num_local_experts": 4}
    return {"id": name, "model": model, "ranks": 4, "rank": rank, "ep": ep, "config": config, "least": 90_000}


ENGINE = [
    real_case("stage 0", 0, 2),
    real_case("stage 1, last rank", 1, 2, rank=3),
    real_case("stage 2", 2, 2),
    real_case("stage 2, every rank has all experts", 2, 1, window=2),
    real_case("stage 3", 3, 2, window=2),
    real_case("stage 3, experts of one rank", 3, 4),
    real_case("stage 3, every rank has all experts", 3, 1),
]


def on_the_host(case: dict[str, Any]) -> Counter[int]:
    """What DeepSpeed allocates where the model is made, and on no GPU: copies of experts, or new ones in fp32 at stage 3."""
    count = case["model"]["hidden_size"] * case["model"]["intermediate_size"] * case["model"]["num_local_experts"] // case["ep"]
    layers = case["model"]["num_hidden_layers"]
    if case["config"]["zero_optimization"]["stage"] == 3:
        return Counter({4 * count: 3 * layers})
    return Counter({4 * count: 4 * layers, 2 * count: 6 * layers})


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.skipif(not find_spec("deepspeed") or not can_trace(), reason="needs DeepSpeed, torch and transformers")
def test_a_rank_allocates_what_deepspeeds_engine_does(tmp_path: Path, warm_python: Path) -> None:
    """The same sizes at initialisation, and in the same order in each step."""
    rows = rows_of("run_auto_ep_engine.py", ENGINE, tmp_path, warm_python)
    for case, row in zip(ENGINE, rows, strict=True):
        (_, ours), *our_steps = row["ours"]
        (_, theirs), *their_steps = row["theirs"]
        assert Counter(theirs) == Counter(ours) + on_the_host(case), row["id"]
        for one, other in zip(our_steps, their_steps, strict=True):
            assert sorted(one[1]) == sorted(other[1]), row["id"]  # a set decides in which order process groups gather
            if case["config"]["zero_optimization"]["stage"] < 3:
                assert one[1] == other[1], row["id"]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(not can_trace(), reason="tracing needs torch and transformers")
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_the_traced_rank_has_the_planned_parameters(kind: str) -> None:
    from zeroplan.trace.api import trace_model

    layout = ParallelLayout(gpus=8, ep=4, own_experts=True, auto_ep=True)
    traced = trace_model(MODELS[kind], "AutoModelForCausalLM", options_for(Workload(), layout=layout)).expand(2, 64).parameters
    planned = with_auto_ep(load_model(MODELS[kind]).parameters, kind, 4)
    for column in ("names", "shapes", "trainable", "autocast", "blocks", "embeddings"):
        assert getattr(planned, column) == getattr(traced, column), column
    assert planned.modules == tuple(own for own in traced.modules if own)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(not can_trace(), reason="tracing needs torch and transformers")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ledger_and_schedule_agree_on_a_rank(stage: int) -> None:
    from zeroplan.trace.api import trace_model

    layout = ParallelLayout(gpus=8, ep=4, own_experts=True, auto_ep=True)
    workload = Workload.of(micro_batch=2, seq_len=64)
    tape = trace_model(MIXTRAL, "AutoModelForCausalLM", options_for(workload, layout=layout, zero3=stage == 3)).expand(2, 64)
    case = Case(load_model(MIXTRAL), workload, Cluster(gpus=8), ZeroConfig.of(stage), parallel=layout)
    assert ledger_and_schedule_differ(case, find_engine("deepspeed"), tape) == {}


def test_experts_are_divided_among_the_ranks_that_hold_them() -> None:
    """By hand: of 8 experts of 3 · 64 · 256 elements, a rank of 4 has 2; 16 ranks have 4 that hold the same."""
    spec = load_model(QWEN2)
    parameters = with_auto_ep(spec.parameters, "qwen2_moe", 4)
    layout = ParallelLayout(16, ep=4, own_experts=True, auto_ep=True)
    experts = 3 * 2 * 3 * 64 * 256  # of three blocks
    routers = 3 * 8 * 256
    dense = sum(prod(shape) for shape in parameters.shapes) - experts
    assert dense == spec.parameters.total - 4 * experts
    two = deepspeed_rank(parameters, Workload(), ZeroConfig.of(2), layout)
    assert two.stepped_at_once == [-(-dense // 32) * 2, experts // 4]
    assert two.before_sharing == spec.parameters.total
    three = deepspeed_rank(parameters, Workload(), ZeroConfig.of(3), layout)
    assert [sum(three.numel[p] for p in group) for _, group in three.param_groups] == [dense - routers, routers, experts]
    assert three.stepped_at_once[1:] == [routers // 16, experts // 4]
    assert three.sharded == sum(-(-three.numel[p] // three.ranks_of[p]) for p in three.trained)
    assert {three.ranks_of[p] for p in three.experts} == {4}


def test_the_trainer_lists_routers_behind_the_rest() -> None:
    """It hands DeepSpeed a list of the model's parameters, to whose end those go that AutoEP puts in their place."""
    parameters = with_auto_ep(load_model(MIXTRAL).parameters, "mixtral", 4)
    layout = ParallelLayout(8, ep=4, own_experts=True, auto_ep=True)
    dense, *_ = deepspeed_rank(parameters, Workload.of(detached_loss=True), ZeroConfig.of(2), layout).param_groups
    assert [parameters.names[p].endswith("router.gate.weight") for p in dense[1]][-5:] == [False, True, True, True, True]


def asked(**given: Any) -> Ask:
    plain = {"model": MIXTRAL, "gpus": 8, "depth": "formula", "seq_len": 64, "gpu": "H100", "engine": "deepspeed"}
    return Ask(**plain | given)


def config(size: int = 2, stage: int = 2, **keys: Any) -> dict[str, Any]:
    section = {"enabled": True, "autoep_size": size} | keys
    return {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}} | {
        "expert_parallel": section
    }


def test_a_plan_has_a_ranks_experts() -> None:
    """Flag and file say the same; at stage 0 a rank has all that is not experts, and a quarter of those."""
    plans = estimate_report(asked(ep=4)).plans
    assert {plan.stage for plan in plans} == {0, 1, 2, 3}
    (flag,) = estimate_report(asked(ep=4, stage=0, offload_optimizer="none")).plans
    report = estimate_report(asked(ds_config=config(4, stage=0)))
    (file,) = report.plans
    assert (report.cluster["layout"]["ep"], report.cluster["layout"]["expert_shard_group"]) == (4, 2)
    assert file.gpu.model_states == flag.gpu.model_states
    assert "expert_parallel" not in [one.key for one in (*file.unmodelled, *flag.unmodelled)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ep": 3}, "ep 3 does not divide the 8 experts"),
        ({"ep": 8, "gpus": 4}, "ep 8 does not divide the 4 ranks"),
        ({"ep": 2, "tp": 2}, "--tp: is not modelled beside AutoEP"),
        ({"ep": 2, "ulysses": 2}, "--ulysses: is not modelled beside AutoEP"),
        ({"ep": 2, "lora_rank": 8}, "adapters beside AutoEP"),
        ({"ep": 2, "dtype": "fp32"}, "AutoEP is modelled in 16 bits"),
        ({"ep": 2, "optimizer": "muon", "stage": 2}, "muon steps whole matrices"),
        ({"ep": 2, "model": CONFIG}, "llama has no experts to share"),
        ({"ep": 2, "model": MIXTRAL | {"hidden_act": "gelu"}, "stage": 2}, "AutoEP computes silu"),
        ({"ep": 2, "model": "mistralai/Mixtral-8x7B-v0.1", "stage": 2}, "more than the 178,956,971 of a parameter group"),
        ({"ep": 4, "ds_config": config(2)}, r"says 2 \(autoep_size\), the flag 4"),
        ({"ds_config": config() | {"zero_optimization": {"stage": 2, "reduce_scatter": False}}}, "reduce scatter must be"),
        ({"ds_config": config() | {"zero_optimization": {"stage": 2, "contiguous_gradients": False}}}, "contiguous gradients"),
    ],
)
def test_what_deepspeed_refuses_or_is_not_modelled(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        estimate_report(asked(**given))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ds_config": config(4), "gpu": "A100-80G"}, "products are Triton's"),
        ({"ds_config": config(4), "model": DEEPSEEK3}, "AutoEP of deepseek_v3 is planned"),
        ({"ds_config": config(1, stage=3)}, "stage 3 with every rank's own experts is planned"),
        ({"ep": 4, "stage": 2, "offload_optimizer": "cpu"}, "AutoEP with an offload is planned"),
        ({"ds_config": config(4), "lora_rank": 8}, "AutoEP with LoRA"),
        ({"ds_config": config(2), "model": CONFIG}, "AutoEP of llama"),
        ({"ep": 4, "stage": 2, "offload_optimizer": "none", "deepspeed_version": "0.19.2"}, "only 0.19.8's AutoEP was read"),
    ],
)
def test_what_is_not_known_leaves_the_answer_open(given: dict[str, Any], said: str) -> None:
    (plan,) = estimate_report(asked(**given)).plans
    assert plan.fits is None
    assert [one for one in plan.unmodelled if one.key == "expert_parallel" and said in one.says], plan.unmodelled


def test_a_search_plans_data_parallelism_and_says_so() -> None:
    from zeroplan.search.candidates_file import candidate_of
    from zeroplan.search.search_options import SearchOptions, resolve_search

    resolved = resolve_search(asked(), SearchOptions())
    for size in (1, 4):
        candidate = candidate_of(config(size), resolved, asked(), False)
        assert [one.key for one in candidate.unmodelled] == ["expert_parallel"]


def test_a_shipped_mixture_fits_or_not() -> None:
    """Measured kinds of runs answer; the interval holds a rank that receives twice the tokens, which its layers exchange."""
    plans = estimate_report(asked(model="mistralai/Mixtral-8x7B-v0.1", ep=8, depth=None, cpu_ram="2T", stage=1)).plans
    assert [plan.fits for plan in plans if plan.offload_optimizer == "none"] == [False]
    (plan,) = estimate_report(
        asked(
            model="mistralai/Mixtral-8x7B-v0.1", ep=8, depth=None, cpu_ram="2T", gpu="B200", stage=1, offload_optimizer="none"
        )
    ).plans
    assert plan.fits is True
    low, high = plan.gpu.interval
    routed = 2 * 2048 * 4096 * 2  # one tensor of the rows that a micro batch of 2,048 tokens sends, each token's twice
    assert high - low > 3 * routed


@pytest.mark.parametrize(
    ("stage", "ep", "gpus", "more"),
    [(2, 2, 2, 640 + 388), (1, 1, 2, 388 + 486), (0, 2, 2, 640 + 388 + 282), (2, 4, 8, 640 + 486), (3, 2, 2, 640 + 2 * 486)],
)
def test_experts_have_communicators_of_their_own(stage: int, ep: int, gpus: int, more: int) -> None:
    engine, layout = find_engine("deepspeed"), ParallelLayout(gpus, ep=ep, own_experts=True, auto_ep=True)
    nccl = [engine.nccl_bytes(Workload(), ZeroConfig.of(stage), one) for one in (layout, ParallelLayout(gpus))]
    assert nccl[0] - nccl[1] == more << 20


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.skipif(not can_trace(), reason="tracing needs torch and transformers")
def test_measured_runs_are_met() -> None:
    """Ranks among fake ones, whose collectives return at once, reserve otherwise at stage 3."""
    from benchmarks.mesh.auto_ep import CASES, MEASURED, TWO_GPUS, figures

    rows = {row["id"]: row for row in map(json.loads, MEASURED.read_text().splitlines())}
    for case in (*CASES, *TWO_GPUS):
        row, told = rows[case.id], figures(case, measured_rank=True)
        near = 0.06 if case in CASES and case.stage == 3 else 0.002
        assert told["allocated"] == pytest.approx(row["allocated"], rel=1e-4), case.id
        assert told["reserved"] == pytest.approx(row["reserved"], rel=near), case.id
        assert case in CASES or told["total"] == pytest.approx(row["total"], rel=0.002), case.id


def test_keys_that_change_the_layer_are_named() -> None:
    (plan,) = estimate_report(asked(ds_config=config(combine_impl="legacy_bmm", top_k=1))).plans
    assert {"expert_parallel.combine_impl", "expert_parallel.top_k"} < {one.key for one in plan.unmodelled}


def test_defaults_that_are_written_out_change_nothing() -> None:
    named = {"combine_impl": "weighted_sum", "gate_up_impl": "separate", "use_grouped_mm": True, "preset_model": "mixtral"}
    (plan,) = estimate_report(asked(ds_config=config(4, **named))).plans
    assert not [one for one in plan.unmodelled if one.key.startswith("expert_parallel")]
    assert set(SHARED) == set(MODELS)
