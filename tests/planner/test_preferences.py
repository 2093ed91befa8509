"""Preference training from flags and files: what passes beside the samples, and what is refused or left open."""

from __future__ import annotations

from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan
from zeroplan.ds_config.reader import read_ds_config
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

LLAMA = "meta-llama/Llama-3.2-1B"
BASE = Ask(model=LLAMA, engine="ddp", gpu="H200", micro_batch=2, seq_len=512, gradient_checkpointing=True)
#: What TRL's recipe says beside its defaults to be the same run as BASE.
RECIPE: dict[str, Any] = {
    "model_name_or_path": LLAMA,
    "max_length": 512,
    "per_device_train_batch_size": 2,
    "trl_version": "1.16",
    "save_strategy": "no",
}


def the_plan(**asked: Any) -> MemoryPlan:
    return estimate_report(BASE.replace(**asked)).plans[0]


@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_a_task_without_a_file_is_what_trl_does_by_default(task: str) -> None:
    flags = the_plan(task=task, detached_loss=True).gpu
    (file,) = estimate_report(Ask(files=[RECIPE], program="trl", task=task, gpu="H200")).plans
    assert (flags.peak_allocated, flags.peak_reserved) == (file.gpu.peak_allocated, file.gpu.peak_reserved)


def test_kto_passes_twice_the_batches_of_one_sample_each() -> None:
    """Its reference is a second model, which holds 4 bytes a parameter; the batch for the KL term leaves nothing behind."""
    kto, dpo, plain = the_plan(task="kto"), the_plan(task="dpo"), the_plan(chunked_head=True)
    assert kto.gpu.live_after_step is not None
    assert plain.gpu.live_after_step is not None
    assert kto.gpu.live_after_step - plain.gpu.live_after_step == pytest.approx(4 * 1_235_814_400, rel=1e-3)
    assert kto.gpu.peak_allocated is not None
    assert dpo.gpu.peak_allocated is not None
    assert kto.gpu.peak_allocated < dpo.gpu.peak_allocated  # whose pass has two samples
    assert kto.fits is True


@pytest.mark.parametrize("task", ["kto", "dpo"])
def test_a_second_forward_of_the_same_engine_at_stage_3_is_left_open(task: str) -> None:
    (plan,) = estimate_report(BASE.replace(engine="deepspeed", stage=3, task=task, lora_rank=8)).plans
    assert plan.fits is None
    assert [one.key for one in plan.unmodelled] == ["reference"]


def test_a_reference_at_stage_3_is_sharded_and_gathers_as_far_as_its_own_config_lets_it() -> None:
    two = BASE.replace(engine="deepspeed", gpus=2, stage=3)
    asked, alone = (
        estimate_report(two.replace(**said)).plans[0] for said in ({"task": "dpo"}, {"pairs": True, "chunked_head": True})
    )
    assert asked.fits is True
    assert asked.gpu.live_after_step is not None
    assert alone.gpu.live_after_step is not None
    persistent = 2 * 33 * 2048  # the norms, which no step of an optimizer releases
    assert asked.gpu.live_after_step - alone.gpu.live_after_step == 1_235_814_400 + persistent
    bounded = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {}}}
    zero = {"stage": 3, "stage3_max_live_parameters": 1, "stage3_prefetch_bucket_size": 0}
    one_by_one = two.replace(task="dpo", stage=None, micro_batch=None, ds_config=bounded | {"zero_optimization": zero})
    (plan,) = estimate_report(one_by_one).plans
    # Of two models' sixteen layers, no more than those at work are gathered.
    assert asked.gpu.phases["forward"] - plan.gpu.phases["forward"] > 2 * 1_000_000_000


def test_what_the_trainer_fills_in_is_not_there_when_the_reference_is_made() -> None:
    said = {
        "stage": 3,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 7,
        "reduce_bucket_size": "auto",
    }
    said |= {"offload_optimizer": {"device": "cpu"}}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": said}
    zero = read_ds_config(config, hidden_size=64).zero
    assert (zero.stage3.prefetch_bucket_size, zero.buckets.reduce_bucket_size) == (int(0.9 * 64 * 64), 64 * 64)
    before = zero.before_training
    assert (before.stage3.prefetch_bucket_size, before.buckets.reduce_bucket_size) == (50_000_000, 500_000_000)
    assert (before.stage3.param_persistence_threshold, before.offloads_optimizer, before.stage) == (7, False, 3)


@pytest.mark.torch
def test_orpo_is_traced_over_whole_logits_and_measured_under_ddp() -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32_000}
    orpo, plain = the_plan(model=config, task="orpo"), the_plan(model=config, pairs=True)
    assert orpo.gpu.peak_allocated is not None
    assert plain.gpu.peak_allocated is not None
    fp32 = 4 * 4 * 512 * 32_000
    # The kernel's gradient beside the logits, which autocast and accelerate made fp32, and the chosen ones' log-softmax.
    assert orpo.gpu.peak_allocated > 2.5 * fp32
    assert (orpo.fits, orpo.unmodelled) == (True, ())
    sharded = the_plan(model=config, task="orpo", engine="deepspeed", stage=2)
    assert (sharded.fits, [one.key for one in sharded.unmodelled]) == (None, ["task"])


@pytest.mark.parametrize("task", ["grpo", "ppo", "gkd"])
def test_what_generates_is_refused_by_name(task: str) -> None:
    with pytest.raises(BadInput, match=f"--task: a step of {task} is not modelled.*use one of dpo.*--from"):
        the_plan(task=task)


def test_sft_is_the_plain_run() -> None:
    assert the_plan(task="sft") == the_plan()


def test_of_grpo_the_head_sees_the_completion_alone_behind_what_it_generates() -> None:
    """The hidden states of 256 of 768 tokens are picked: the rest of the plan is that of SFT over as many tokens."""
    recipe = {key: value for key, value in RECIPE.items() if key != "max_length"}
    grpo = {**recipe, "max_completion_length": 256, "num_generations": 2}
    (plan,) = estimate_report(Ask(files=[grpo], program="trl", gpu="H200")).plans
    sft = {**RECIPE, "max_length": 768}
    shares = {
        share: estimate_report(Ask(files=[sft], program="trl", task="sft", gpu="H200", labelled_share=share)).plans[0]
        for share in (1.0, 1 / 3)
    }
    training = {phase: nbytes for phase, nbytes in plan.gpu.phases.items() if phase != "generation"}
    assert training == pytest.approx(shares[1 / 3].gpu.phases, rel=1e-3)  # other blocks are cut
    # The forward ends in the head: fp32 hidden states of the tokens that are not picked, and their part of a tile in bf16.
    spared = (4 * 2048 + 2 * 32_768) * (2 * 767 - 2 * 256)
    assert shares[1.0].gpu.phases["forward"] - plan.gpu.phases["forward"] == pytest.approx(spared, rel=0.1)
    assert (plan.fits, [one.key for one in plan.unmodelled]) == (None, ["generation"])


@pytest.mark.long
@pytest.mark.torch
def test_llama_factorys_pairs_keep_a_softmax_of_all_logits_and_ask_the_model_without_adapters() -> None:
    recipe = {"model_name_or_path": LLAMA, "stage": "dpo", "finetuning_type": "lora", "template": "llama3", "dataset": "x"}
    recipe |= {"cutoff_len": 512, "per_device_train_batch_size": 1, "bf16": True}
    dpo, simpo = (
        estimate_report(Ask(files=[{**recipe, "pref_loss": loss}], program="llama-factory", gpu="H200")).plans[0]
        for loss in ("sigmoid", "simpo")
    )
    fp32 = 4 * 2 * 512 * 128_256
    assert simpo.gpu.phases["forward"] - simpo.gpu.phases["step"] > 2 * fp32
    assert dpo.gpu.phases["forward"] - simpo.gpu.phases["forward"] > fp32  # both samples' logits of a second forward
    assert [one.key for plan in (dpo, simpo) for one in plan.unmodelled] == ["task", "task"]
    assert (dpo.fits, simpo.fits) == (None, None)
