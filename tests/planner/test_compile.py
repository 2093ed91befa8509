"""``--compile``: what is refused, what its answer says, and what files say of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.step.case import SHAPES
from benchmarks.step.speed_table import active_flops, cells
from zeroplan.core.errors import BadInput
from zeroplan.core.plan import Report
from zeroplan.interop.readers import read_setup
from zeroplan.interop.setups import Setup
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import expanded_tape_of
from zeroplan.run.ask import Ask

TINY: dict[str, Any] = {**SHAPES["toy"], "model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def planned(**fields: Any) -> Report:
    return estimate_report(Ask(model=TINY, micro_batch=2, seq_len=64, vram="24G", cpu_ram="64G", from_scratch=True, **fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"engine": "deepspeed", "stage": 2}, "not planned under deepspeed"),
        ({"engine": "fsdp2", "fp8": "tensorwise", "gpu": "H100"}, "with --fp8"),
        ({"engine": "ddp", "lora_rank": 4, "quantize": "nf4"}, "with --quantize"),
        ({"engine": "fsdp2", "gpus": 4, "tp": 2}, "data parallelism, and on replicas of the shards, alone; leave --tp out"),
        ({"engine": "zeroplan", "gpus": 4, "tp": 2}, "data parallelism, and on pipeline stages, alone; leave --tp out"),
        ({"engine": "fsdp2", "gradient_checkpointing": True, "checkpoint_policy": "selective"}, "with --checkpoint-policy"),
        ({"engine": "zeroplan", "stage": 3, "compile": "checkpointed-blocks"}, "give --gradient-checkpointing, or use blocks"),
        ({"engine": "fsdp2", "compile": "layers"}, "use one of blocks, checkpointed-blocks, model"),
    ],
)
def test_what_no_graph_is_traced_with_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as error:
        resolve(Ask(model=TINY, **{"compile": "blocks", **fields}))
    assert said in str(error.value)
    assert "--compile" in str(error.value)


def test_compiled_stages_own_what_plain_ones_own_and_promise_nothing() -> None:
    asked: dict[str, Any] = {"engine": "zeroplan", "stage": 2, "gpus": 4, "pp": 2, "grad_accum": 2, "depth": "formula"}
    untied = {**TINY, "tie_word_embeddings": False}
    eager, compiled = (
        estimate_report(Ask(model=untied, seq_len=64, vram="24G", **asked, compile=how)) for how in (None, "blocks")
    )
    assert compiled.plans[0].lines == eager.plans[0].lines
    assert compiled.plans[0].fits is None


def test_fewer_tensors_are_kept_and_the_answer_says_how() -> None:
    eager, compiled = (planned(engine="fsdp2", stage=3, gpus=2, compile=how) for how in (None, "blocks"))
    assert "compile" not in eager.workload
    assert compiled.workload["compile"] == "blocks"
    one, other = eager.plans[0], compiled.plans[0]
    assert other.depth == "simulated"
    assert other.fits is True
    assert other.gpu.model_states == one.gpu.model_states
    phases = [plan.gpu.phases["forward"] for plan in (one, other)]
    assert phases[1] < phases[0]


def test_what_no_gpu_has_measured_is_of_unknown_fit() -> None:
    for how, effect in (("model", "unknown"), ("blocks", "more")):
        plan = planned(engine="ddp", gpus=2, compile=how).plans[0]
        assert plan.fits is None
        assert [(one.key, one.effect.value) for one in plan.unmodelled] == [("--compile", effect)]


@pytest.mark.long
def test_a_whole_models_blocks_run_as_written_where_fsdp2_checkpoints_them() -> None:
    plans = {
        (how, again): planned(engine="fsdp2", stage=3, gpus=2, compile=how, gradient_checkpointing=again).plans[0]
        for how, again in (("blocks", False), ("model", False), ("model", True), (None, True))
    }
    assert {plan.depth for plan in plans.values()} == {"simulated"}
    for again in (False, True):
        assert plans["model", again].fits is None
        assert "compiled as a whole" in plans["model", again].unmodelled[0].says
    peaks = {key: plan.gpu.peak_allocated or 0 for key, plan in plans.items()}
    assert peaks["model", False] < peaks["blocks", False]  # the loss makes no fp32 copies of the logits
    assert peaks["model", True] < peaks[None, True]


def test_the_runtimes_first_micro_batch_needs_what_an_eager_one_needs() -> None:
    eager, compiled = (planned(engine="zeroplan", stage=3, gpus=2, compile=how).plans[0].gpu for how in (None, "blocks"))
    # But for the loss of an earlier one, which the first does not find: a block of 512 bytes.
    assert eager.phases["forward"] - compiled.phases["forward"] in (0, 512)
    assert compiled.activations is not None
    assert eager.activations is not None
    assert compiled.activations < eager.activations


def test_what_the_first_micro_batch_reserves_is_given_back() -> None:
    # As large as the allocator's segments of 20 MiB do not hide.
    request = Ask(model=TINY, micro_batch=64, seq_len=256, gpus=2, engine="zeroplan", stage=3, compile="blocks")
    resolved = resolve(request)
    case = resolved.cases[0]
    tape = expanded_tape_of(resolved.engine, case)
    marks = resolved.engine.simulate(case, tape).runs[0].marks
    first = max(mark.peak_reserved for mark in marks[: 1 + [mark.name for mark in marks].index("step0")])
    later = [mark.peak_reserved for mark in marks if mark.name in ("bwd", "step1", "step2")][2:]
    assert later
    alone = resolved.engine.simulate(case, replace(tape, shapes=())).runs[0]
    assert max(later) < first
    assert max(later) == alone.peak_reserved  # as if there had been no other
    assert resolved.engine.simulate(case, tape).runs[0].peak_reserved == first


TRAINER = {"output_dir": "o", "learning_rate": 1e-4, "bf16": True}
AXOLOTL = {"base_model": "gpt2", "micro_batch_size": 1, "datasets": [{"path": "a", "type": "alpaca"}]}
ACCELERATE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}

WITHIN = {
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True},
    "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True},
}


def said_of(setup: Setup) -> list[str]:
    return [one.key for one in setup.unmodelled if "graphs" in one.says]


@pytest.mark.parametrize(
    ("file", "compiled", "left_out"),
    [
        (TRAINER, None, []),
        (TRAINER | {"torch_compile": True}, "model", []),
        (TRAINER | {"torch_compile_backend": "inductor"}, "model", []),
        (TRAINER | {"torch_compile_mode": "reduce-overhead"}, None, ["torch_compile_mode"]),
        (TRAINER | {"torch_compile": True, "torch_compile_backend": "cudagraphs"}, None, ["torch_compile"]),
        (AXOLOTL | {"torch_compile": True}, "model", []),
        (ACCELERATE | {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "model", []),
        (ACCELERATE | {"dynamo_config": {"dynamo_backend": "NO"}}, None, []),
        (ACCELERATE | {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}}, "blocks", []),
        (ACCELERATE | WITHIN, "checkpointed-blocks", []),
    ],
)
def test_files_say_what_is_compiled(file: dict[str, Any], compiled: str | None, left_out: list[str]) -> None:
    setup = read_setup(file)
    assert (setup.ask.value("compile"), said_of(setup)) == (compiled, left_out)


def test_a_file_under_deepspeed_leaves_compiled_graphs_out() -> None:
    file = TRAINER | {"torch_compile": True, "deepspeed": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}}
    report = estimate_report(Ask(model=TINY, seq_len=64, files=[file]))
    assert "compile" not in report.workload
    assert "torch_compile" in [one.key for one in report.plans[0].unmodelled]


def test_a_file_brings_what_it_compiles() -> None:
    file = TRAINER | {"torch_compile": True, "fsdp": "full_shard", "fsdp_config": {"version": 2}}
    report = estimate_report(Ask(model=TINY, seq_len=64, gpus=2, files=[file], depth="formula"))
    assert report.workload["compile"] == "model"


def test_the_speed_table_names_each_case_once_and_counts_flops() -> None:
    two = cells(2)
    assert len(two) == len(set(two)) == 58
    assert {cell.shape for cell in two} == {"llama-1b", "llama-8b", "qwen3-moe-small"}
    # toy: two blocks of 64 x (2 x 64 + 2 x 32) and 3 x 64 x 128 weights, a head of 64 x 512; 4 heads of 16 see 128 tokens.
    weights = 2 * (64 * 192 + 3 * 64 * 128) + 64 * 512
    assert active_flops("toy", 128) == 6 * weights + 12 * 2 * 64 * 128
