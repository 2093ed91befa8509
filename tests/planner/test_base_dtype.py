"""Frozen weights under adapters: the dtype in which programs read them, or the one of ``--base-dtype``."""

from __future__ import annotations

from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.planner.estimate import estimate_report
from zeroplan.report.words import work_text
from zeroplan.run.ask import Ask

LLAMA = "meta-llama/Llama-2-7b-hf"
GIB = 1 << 30


def states(**asked: Any) -> tuple[float, str]:
    """Return the GiB of model states and the line on the workload."""
    request = Ask(model=LLAMA, seq_len=512, lora_rank=16, depth="formula", **asked)
    report = estimate_report(request)
    return report.plans[0].gpu.model_states / GIB, work_text(report.workload)


def test_ddp_reads_a_16_bit_base_unless_it_is_asked_for_fp32() -> None:
    half, words = states(engine="ddp")
    assert 12.5 < half < 13.7
    assert "LoRA rank 16 over bf16 weights (--base-dtype)" in words
    whole, words = states(engine="ddp", base_dtype="fp32")
    assert whole - half == pytest.approx(2 * 6_738_415_616 / GIB, rel=0.01)
    assert "over fp32 weights" in words


def test_sharded_bases_follow_it_too() -> None:
    half, _ = states(engine="fsdp2", stage=3, gpus=2)
    whole, _ = states(engine="fsdp2", stage=3, gpus=2, base_dtype="fp32")
    assert whole - half == pytest.approx(6_738_415_616 / GIB, rel=0.01)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"engine": "ddp", "base_dtype": "fp16"}, "ddp keeps no frozen weights in fp16 beside --dtype bf16; use bf16 or fp32"),
        ({"engine": "deepspeed", "stage": 2, "base_dtype": "fp32"}, "deepspeed keeps no frozen weights in fp32"),
        ({"engine": "ddp", "base_dtype": "bf16", "quantize": "nf4"}, "the base is quantised"),
        ({"engine": "ddp", "base_dtype": "bf16", "lora_rank": None}, "no frozen weights without adapters"),
    ],
)
def test_a_base_that_the_engine_does_not_keep_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        estimate_report(Ask(**{"model": LLAMA, "seq_len": 512, "lora_rank": 16, **asked}))
    assert said in str(refused.value)


def test_a_quantised_base_is_read_tensor_by_tensor() -> None:
    """Llama-2-7B in NF4 trains on a host of 12.7 GB."""
    request = Ask(
        model=LLAMA,
        engine="ddp",
        gpu="T4",
        cpu_ram="12.7G",
        dtype="fp16",
        quantize="nf4",
        lora_rank=16,
        seq_len=512,
        depth="formula",
    )
    (plan,) = estimate_report(request).plans
    assert plan.cpu.per_node < 4 * GIB


def test_numbers_beyond_64_bits_are_no_plan_of_activations() -> None:
    (plan,) = estimate_report(
        Ask(model="meta-llama/Llama-3.2-1B", ds_config={"train_micro_batch_size_per_gpu": 999_999_999_999})
    ).plans
    assert plan.gpu.peak_allocated is None
    assert plan.fits is not True
