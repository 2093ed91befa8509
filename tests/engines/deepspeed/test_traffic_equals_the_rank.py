"""What traffic says of parameters is what the rank says, whatever the persistence thresholds are."""

from __future__ import annotations

import pytest

from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.deepspeed.rank import deepspeed_rank
from zeroplan.engines.deepspeed.traffic_facts import Sizes
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask

MODELS = ("openai-community/gpt2", "Qwen/Qwen2.5-0.5B")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("threshold", [0, 100_000, 1 << 40])
@pytest.mark.parametrize("model_threshold", [None, 0, 5_000, 1_000_000])
def test_gathers_are_those_of_the_rank(model: str, threshold: int, model_threshold: int | None) -> None:
    section = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    if model_threshold is not None:
        section["stage3_model_persistence_threshold"] = model_threshold
    config = {"zero_optimization": section, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    (case,) = resolve(Ask(model=model, ds_config=config, gpus=4)).cases
    zero: ZeroConfig = case.zero
    rank = deepspeed_rank(case.spec.parameters, case.workload, zero, case.layout)
    sizes = Sizes.of(
        case.spec,
        zero.stage3.param_persistence_threshold,
        zero.stage3.model_persistence_threshold,
        zero.buckets.reduce_bucket_size,
    )
    kept = rank.persistent_params
    assert sizes.persistent == sum(rank.numel[p] for p in kept)
    assert sizes.tensors == len(rank.numel) - len(kept)
    assert sizes.trained_tensors == len(rank.trained)
    assert (sizes.params, sizes.trainable) == (sum(rank.numel), sum(rank.numel[p] for p in rank.trained))
