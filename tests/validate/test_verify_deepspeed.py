"""DeepSpeed's own parallelism on two gloo ranks, beside its plans: real DeepSpeed, every case in one launch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from zeroplan.planner.request import Request
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import ExpandedTapes
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
        request = Request(**{"model": LLAMA, "seq_len": 64, "engine": "deepspeed", "from_scratch": True, "gpus": 2, **one})
        resolved = resolve(request)
        engine, raw = resolved.engine.for_verify(one["ds_config"], device="cpu", own_module=False)
        (case,) = resolved.cases
        case = type(case)(**{name: getattr(case, name) for name in case.__dataclass_fields__} | {"cluster": cluster})
        cases.append(case)
        jobs.append(job_of(case, engine, raw=raw, steps=2))
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


def require_as_planned(one: Comparison, within: float = 0.001) -> None:
    """Ask for totals that were judged, and are the plan's."""
    judged = [row for row in one.totals if row.judged]
    assert [row.name for row in judged] == ["live after a step", "peak of tensors"], one.verdict
    for row in judged:
        assert row.planned
        assert abs(row.difference or 0) <= max(within * row.planned, 1 << 14), one.verdict


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_each_kind_is_as_planned() -> None:
    """AutoTP, Ulysses with stage 3, and AutoEP, in turn: none leaves anything that the next would meet."""
    divided, shared, experts = run_together(
        {"tp": 2, "ds_config": ds_config(1)},
        {"ulysses": 2, "ds_config": ds_config(3)},
        {"ep": 2, "ds_config": ds_config(2), "model": MIXTURE},
    )
    require_as_planned(divided)
    require_as_planned(shared)
    require_as_planned(experts, 0.01)
