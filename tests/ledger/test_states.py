"""The ZeRO paper's laws of model states, in the plans that users get.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", figure 1.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroplan import estimate

GB = 10**9


def model_states(params: int, *, nodes: int, stage: int, optimizer: str = "adamw") -> int:
    plans = estimate(params=params, gpus=8, nodes=nodes, stage=stage, optimizer=optimizer, depth="formula")
    return next(plan for plan in plans if plan.offload_optimizer == "none").gpu.model_states


def test_the_papers_trillion_parameters() -> None:
    assert model_states(10**12, nodes=1, stage=0) == 16 * 10**12
    assert model_states(10**12, nodes=128, stage=3) / GB == pytest.approx(16, rel=0.03)


@settings(max_examples=40)
@given(st.integers(10**9, 10**13), st.integers(1, 512), st.sampled_from(["adamw", "lion", "sgd"]))
def test_totals_fall_with_the_stage_and_with_the_ranks(params: int, nodes: int, optimizer: str) -> None:
    """Of models large enough that padding does not weigh."""
    totals = [model_states(params, nodes=nodes, stage=stage, optimizer=optimizer) for stage in range(4)]
    assert totals == sorted(totals, reverse=True)
    for stage in range(4):
        assert model_states(params, nodes=2 * nodes, stage=stage, optimizer=optimizer) <= totals[stage]
