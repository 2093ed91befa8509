"""What a model generates before a step: a cache that grows by copies, and nothing that stays."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workloads import flat_workload, with_flat
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.generation import Generation
from zeroplan.core.plan import MemoryPlan
from zeroplan.core.workload import Precision
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.models.load import load_model
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.tapes import expanded_tape_of
from zeroplan.run.ask import Ask
from zeroplan.tape.expanded import ExpandedTape, Op
from zeroplan.tape.generation import MOST_LENGTHS, lengths_of

LLAMA = "meta-llama/Llama-3.2-1B"
LAYERS, HEADS, KV_HEADS, WIDTH, WORDS, PARAMS = 16, 32, 8, 64, 128_256, 1_235_814_400
RECIPE: dict[str, Any] = {
    "model_name_or_path": LLAMA,
    "per_device_train_batch_size": 2,
    "max_completion_length": 24,
    "max_prompt_length": 232,
    "num_generations": 2,
    "save_strategy": "no",
}


def tape_of(precision: Precision, completion: int = 24) -> ExpandedTape:
    work = flat_workload(micro_batch=2, seq_len=256, precision=precision, gradient_checkpointing=True)
    work = with_flat(work, generation=Generation(256 - completion, completion))
    case = Case(load_model(LLAMA), work, Cluster.of(gpus=1, gpu="H200"), ZeroConfig.of(0))
    generation = expanded_tape_of(find_engine("ddp"), case).generation
    assert generation is not None
    return generation


def peaks(tape: ExpandedTape) -> tuple[int, int]:
    """The most bytes at once behind the prompts, whose forward ends with logits, and what is left in the end."""
    sizes: dict[int, int] = {}
    now = most = 0
    logits = 2 * WORDS * 2
    first, behind = -1, False
    for op, arg, aux, *_ in tape.events():
        if op == Op.ALLOC:
            assert arg not in sizes
            sizes[arg] = aux
            now += aux
            first = arg if first < 0 and aux == logits else first
        else:
            now -= sizes.pop(arg)
            behind = behind or arg == first
        most = max(most, now) if behind else 0
    return most, now


def test_the_last_token_has_every_layers_cache_and_one_layers_for_each_query_head() -> None:
    most, left = peaks(tape_of(Precision.MIXED))
    token = 2 * KV_HEADS * WIDTH * 2  # a layer's keys, or its values, of two samples in bf16
    assert most == 255 * 2 * token * (LAYERS + HEADS // KV_HEADS)
    assert left == 0


def test_under_autocast_keys_are_fp32_and_weights_are_cast_for_each_token() -> None:
    most, left = peaks(tape_of(Precision.AUTOCAST))
    token = 2 * KV_HEADS * WIDTH * 2
    cache = 255 * LAYERS * 3 * token  # keys twice as wide as values
    drawn = 2 * WORDS * (2 + 4 + 4)  # the head's cast stays while the logits are made
    assert 2 * PARAMS * 0.99 + cache < most < 2 * PARAMS + cache + drawn
    assert left == 0


def test_few_lengths_stand_for_all() -> None:
    assert lengths_of(Generation(10, 4)) == [11, 12, 13]
    many = lengths_of(Generation(512, 4096))
    assert (len(many), many[0], many[-1]) == (MOST_LENGTHS, 513, 4607)


def test_a_generation_batch_is_divided_among_ranks() -> None:
    assert Generation(8, 8).rows(4, 3, 2) == 12
    assert Generation(8, 8, micro_batches=5).rows(4, 3, 2) == 20
    assert Generation(8, 8, of_all_ranks=64).rows(4, 3, 2) == 32


def plan_of(**said: Any) -> MemoryPlan:
    return estimate_report(Ask(files=[{**RECIPE, **said}], program="trl", task="grpo", gpu="H200", gpus=2)).plans[0]


def test_stage_3_gathers_the_whole_model_and_records_a_new_trace_each_time() -> None:
    zero = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    whole = plan_of(deepspeed=zero)
    live = whole.gpu.live_after_step
    assert live is not None
    assert whole.gpu.phases["generation"] > live + 2 * PARAMS * 0.99
    assert (whole.fits, [one.key for one in whole.unmodelled]) == (None, ["generation"])
    by_vllm = plan_of(deepspeed=zero, use_vllm=True)
    assert "generation" not in by_vllm.gpu.phases
    # Without a trace nothing is gathered ahead of the forward.
    assert by_vllm.gpu.phases["forward"] - whole.gpu.phases["forward"] > 1_000_000_000
    assert [one.key for one in by_vllm.unmodelled] == ["use_vllm"]


@pytest.mark.parametrize("said", [{"cache_implementation": "static"}, {"reward_model_name_or_path": "some/model"}])
def test_other_caches_and_models_are_named(said: dict[str, Any]) -> None:
    plan = plan_of(**said)
    assert plan.fits is None
    assert set(said) <= {one.key for one in plan.unmodelled}


def test_a_colocated_vllm_has_its_share_of_the_card_all_the_time_or_between_two_steps() -> None:
    """Awake it adds to the training's peak; asleep it stands on what a step leaves, behind an emptied cache."""
    awake = plan_of(use_vllm=True, vllm_gpu_memory_utilization=0.45)
    (line,) = [line for line in awake.lines if line.buffer == "device.rollout"]
    outside = awake.gpu.outside_torch or 0
    assert awake.gpu.total == (awake.gpu.peak_reserved or 0) + outside
    assert outside > line.bytes == round(0.45 * (Cluster.of(gpu="H200").usable_vram or 0))
    asleep = plan_of(use_vllm=True, vllm_gpu_memory_utilization=0.45, vllm_enable_sleep_mode=True)
    own = outside - line.bytes
    assert asleep.gpu.outside_torch == own
    assert asleep.gpu.total == (asleep.gpu.live_after_step or 0) + own + line.bytes
    assert (awake.fits, asleep.fits) == (None, None)
    much = plan_of(use_vllm=True, vllm_gpu_memory_utilization=0.95, per_device_train_batch_size=8)
    assert (much.fits, much.misfits) == (False, ("gpu",))


def test_without_a_card_vllms_share_is_named() -> None:
    report = estimate_report(Ask(files=[{**RECIPE, "use_vllm": True}], program="trl", task="grpo"))
    (said,) = report.plans[0].unmodelled
    assert (said.key, said.says) == ("use_vllm", "vLLM takes 30% of each GPU for itself")
    with pytest.raises(BadInput, match="is no share of a card"):
        estimate_report(Ask(files=[{**RECIPE, "use_vllm": True, "vllm_gpu_memory_utilization": 30}], program="trl"))
