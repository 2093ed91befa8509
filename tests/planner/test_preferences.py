"""DPO's reference model under DeepSpeed: whole on every rank below stage 3, beside the trained one from its loading on."""

from __future__ import annotations

import pytest

from zeroplan.core.plan import MemoryPlan
from zeroplan.core.workload import Reference
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.request import Request

GPT2 = 124_439_808


def plan(stage: int, reference: Reference | None, *, lora_rank: int | None = None) -> MemoryPlan:
    request = Request(
        model="openai-community/gpt2", stage=stage, gpus=2, vram="80G", seq_len=256, pairs=True, lora_rank=lora_rank,
        offload_optimizer="none", offload_param="none", reference=reference,
    )  # fmt: skip
    return estimate_report(request).plans[0]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_second_model_stands_beside_the_first_in_16_bits(stage: int) -> None:
    alone, beside = plan(stage, None), plan(stage, Reference.MODEL)
    (line,) = [one for one in beside.lines if one.buffer == "param.reference"]
    assert line.bytes == 2 * GPT2
    assert beside.gpu.model_states - alone.gpu.model_states == line.bytes
    rounded = beside.gpu.live_after_step - alone.gpu.live_after_step - line.bytes  # blocks that the allocator does not split
    assert 0 <= rounded < line.bytes // 16
    assert beside.gpu.phases["load"] >= alone.gpu.phases["load"] + line.bytes
    assert beside.fits is None  # no run was measured
    assert [one.key for one in beside.unmodelled] == ["reference"]


def test_without_adapters_the_trained_model_answers_itself() -> None:
    """Its forward without gradients comes after the model's own, and adds nothing between steps."""
    alone, beside = plan(2, None, lora_rank=8), plan(2, Reference.BASE, lora_rank=8)
    assert beside.gpu.live_after_step == alone.gpu.live_after_step
    assert beside.gpu.phases["forward"] >= alone.gpu.phases["forward"]
    assert beside.fits is None


def test_at_stage_3_the_answer_is_open() -> None:
    found = plan(3, Reference.MODEL)
    assert found.fits is None
    assert [one.key for one in found.unmodelled] == ["reference"]
    assert not [one for one in found.lines if one.buffer == "param.reference" and one.bytes]
