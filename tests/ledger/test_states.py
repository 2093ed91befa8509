"""The ZeRO paper's own numbers, and the laws of the bare formula."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroplan.ledger.deepspeed_estimator import OLD, estimate_zero2, estimate_zero3
from zeroplan.ledger.states import model_states

GB = 10**9


@pytest.mark.parametrize(("stage", "expected"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_figure_1_of_the_zero_paper(stage: int, expected: float) -> None:
    assert model_states(7_500_000_000, ranks=64, stage=stage) / GB == pytest.approx(expected, abs=0.05)


def test_the_papers_trillion_parameters() -> None:
    assert model_states(10**12) == 16 * 10**12
    assert model_states(10**12, ranks=1024, stage=3) / GB == pytest.approx(16, rel=0.03)


@given(st.integers(1, 10**13), st.integers(1, 4096), st.sampled_from([0, 4, 8, 12, 16]))
def test_totals_never_rise_with_the_stage(params: int, ranks: int, k: int) -> None:
    totals = [model_states(params, ranks=ranks, stage=stage, k=k) for stage in range(4)]
    assert totals == sorted(totals, reverse=True)


@given(st.integers(1, 10**13), st.integers(1, 2048), st.integers(0, 3))
def test_more_ranks_never_need_more(params: int, ranks: int, stage: int) -> None:
    assert model_states(params, ranks=2 * ranks, stage=stage) <= model_states(params, ranks=ranks, stage=stage)


def test_deepspeeds_printed_examples() -> None:
    """2,851 M parameters on 8 GPUs, as its documentation prints them (GiB, labelled GB there)."""
    params, largest = 2_851_598_336, 32_000_000
    gib = 2**30
    assert estimate_zero2(params, gpus=8, offload_optimizer=False, version=OLD).gpu / gib == pytest.approx(15.93, abs=0.01)
    today = estimate_zero2(params, gpus=8, offload_optimizer=False)
    assert today.gpu / gib == pytest.approx(11.28, abs=0.01)
    assert today.cpu / gib == pytest.approx(127.48, abs=0.01)
    assert estimate_zero2(params, gpus=8).gpu / gib == pytest.approx(5.31, abs=0.01)
    three = estimate_zero3(params, largest, gpus=8)
    assert three.gpu == 4 * largest
    assert three.cpu / gib == pytest.approx(71.71, abs=0.01)
    assert estimate_zero3(params, largest, gpus=8, offload_param=False).cpu / gib == pytest.approx(63.74, abs=0.01)


def test_the_estimators_agree_with_the_installed_deepspeed() -> None:
    stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
    stage2 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    for params, largest, gpus, nodes in ((2_851_598_336, 32_000_000, 8, 1), (10**10, 5 * 10**8, 4, 3), (999, 77, 1, 1)):
        for offload in (True, False):
            theirs = stage2.estimate_zero2_model_states_mem_needs(params, gpus, nodes, offload)
            ours = estimate_zero2(params, gpus=gpus, nodes=nodes, offload_optimizer=offload)
            assert theirs == (ours.cpu, ours.gpu)
            for offload_param in (True, False):
                for zero_init in (True, False):
                    cpu, gpu, _ = stage3.estimate_zero3_model_states_mem_needs(
                        params, largest, gpus, nodes, offload, offload_param, zero_init
                    )
                    mine = estimate_zero3(
                        params,
                        largest,
                        gpus=gpus,
                        nodes=nodes,
                        offload_optimizer=offload,
                        offload_param=offload_param,
                        zero_init=zero_init,
                    )
                    assert (cpu, gpu) == (mine.cpu, mine.gpu)
