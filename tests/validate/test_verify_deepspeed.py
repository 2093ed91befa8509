"""DeepSpeed's own parallelism on two gloo ranks, beside its plans: real DeepSpeed, every case in one launch."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import ExpandedTapes
from zeroplan.run.ask import Ask
from zeroplan.validate.api import verify
from zeroplan.validate.job import job_of
from zeroplan.validate.machine import VerifyMachine
from zeroplan.validate.results import Comparison
from zeroplan.validate.runs import Runs

needs_deepspeed = pytest.mark.skipif(not find_spec("deepspeed"), reason="needs DeepSpeed")
pytestmark = [pytest.mark.torch]

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4000,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
MIXTURE = LLAMA | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 32,
}


def ds_config(stage: int, **more: Any) -> dict[str, Any]:
    """A config whose buckets are small, as the model is."""
    section: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 200_000}
    if stage == 3:
        section |= {"stage3_prefetch_bucket_size": 50_000, "stage3_param_persistence_threshold": 500}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": section,
        **more,
    }


def run_together(*asked: dict[str, Any]) -> list[Comparison]:
    """Run requests of any degrees on the same two ranks, one after another."""
    machine = VerifyMachine("cpu", 2, "cpu", None, (0, 0))
    cluster = machine.cluster(2)
    cases, jobs = [], []
    for one in asked:
        request = Ask(**{"model": LLAMA, "seq_len": 64, "engine": "deepspeed", "from_scratch": True, "gpus": 2, **one})
        resolved = resolve(request)
        engine, raw = resolved.engine.for_verify(one["ds_config"], device="cpu", own_module=False)
        (case,) = resolved.cases
        cases.append(replace(case, cluster=cluster))
        jobs.append(job_of(cases[-1], engine, raw=raw, steps=2))
    runs = Runs(
        engine=engine,
        tapes=ExpandedTapes(engine),
        cases=cases,
        jobs=jobs,
        machine=machine,
        ranks=2,
        tolerance=0.02,
        say=lambda _: None,
        skip_misfits=False,
    )
    return runs.run()


def require_as_planned(one: Comparison, within: float = 0.005) -> None:
    """Ask for totals that were judged, and are the plan's, on every stage of a pipeline.

    gloo's threads may hold what they reduced a little longer, on a busy machine beyond a peak.
    """
    for part in one.parts:
        judged = [row for row in part.totals if row.judged]
        assert [row.name for row in judged] == ["live after a step", "peak of tensors"], part.verdict
        for row in judged:
            assert row.planned
            most = within if row.name.startswith("live") else max(within, 0.06)
            assert abs(row.difference or 0) <= max(most * row.planned, 1 << 14), part.verdict


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_each_kind_is_as_planned() -> None:
    """AutoTP with stage 3, AutoEP and a pipeline, in turn: none leaves anything that the next would meet."""
    divided, experts, stages = run_together(
        {"tp": 2, "ds_config": ds_config(3)},
        {"ep": 2, "ds_config": ds_config(2), "model": MIXTURE},
        {"pp": 2, "ds_config": ds_config(1, gradient_accumulation_steps=3)},
    )
    require_as_planned(divided)
    require_as_planned(experts, 0.01)
    require_as_planned(stages)
    assert len(stages.stages) == 2


TIED = LLAMA | {"tie_word_embeddings": True}
GROUPS = {"pipeline": {"activation_checkpoint_interval": 2}, "gradient_accumulation_steps": 3}


@needs_deepspeed
@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_every_stage_of_each_kind_is_as_planned() -> None:
    """The same at the other stages, from sections of a ds_config, with adapters, recomputation and a tied head."""
    dense = [
        *({"ds_config": ds_config(stage)} for stage in range(4)),
        *({"ds_config": ds_config(stage, tensor_parallel={"autotp_size": 2})} for stage in range(3)),
        *({"ulysses": 2, "ds_config": ds_config(stage)} for stage in range(3)),
        {"ds_config": ds_config(2, sequence_parallel_size=2), "lora_rank": 4},
        {"ds_config": ds_config(3, gradient_accumulation_steps=2), "ulysses": 2, "gradient_checkpointing": True},
        {"pp": 2, "ds_config": ds_config(0), "partition": "uniform"},
        {"pp": 2, "ds_config": ds_config(1, **GROUPS)},
    ]
    mixtures = [
        *({"ep": 2, "ds_config": ds_config(stage), "model": MIXTURE} for stage in (0, 1, 3)),
        {"ds_config": ds_config(1, expert_parallel={"enabled": True, "autoep_size": 2}), "model": MIXTURE},
    ]
    (tied,) = run_together({"pp": 2, "ds_config": ds_config(1), "model": TIED, "partition": "type:transformer"})
    require_as_planned(tied)
    found = run_together(*dense, *mixtures)
    for one in found[: len(dense)]:
        require_as_planned(one)
    for one in found[len(dense) :]:
        require_as_planned(one, 0.01)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": "lion", "stage": 1}, "Lion is a kernel of its own"),
        ({"dtype": "fp16", "stage": 1}, "DeepSpeed has no fp16 on a CPU"),
        ({"quantize": "nf4", "lora_rank": 4, "stage": 1}, "trains no quantised base"),
        (
            {
                "ds_config": ds_config(3)
                | {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}}
            },
            "NVMe by an op",
        ),
        ({"pp": 2, "stage": 1, "model": LLAMA | {"model_type": "gemma"}}, "no list of gemma's layers"),
        ({"pp": 2, "stage": 1, "model": LLAMA | {"model_type": "mistral", "sliding_window": 32}}, "looks back 32 tokens alone"),
        ({"pp": 2, "stage": 2}, "PipelineModule takes stages 0 and 1"),
        ({"ep": 2, "stage": 1}, "llama has no experts to share"),
        ({"cp": 2, "stage": 1}, "and no cp"),
        ({"ds_config": ds_config(1, pipeline={"stages": 2})}, "the program makes the 2 stages of a PipelineModule"),
        ({"ds_config": ds_config(1, expert_parallel={"enabled": True, "autoep_size": 2})}, "expert_parallel: no plan has"),
        ({"ds_config": ds_config(1, tensor_parallel={"autotp_size": 2, "tp_overlap_comm": True})}, "autotp_size: no plan has"),
    ],
)
def test_what_does_not_run_here_is_one_line(given: dict[str, Any], said: str) -> None:
    asked = {"model": LLAMA, "engine": "deepspeed", "gpus": 2, "seq_len": 64, **given}
    with pytest.raises(BadInput, match=said):
        verify(asked.pop("model"), progress=lambda _: None, **asked)
