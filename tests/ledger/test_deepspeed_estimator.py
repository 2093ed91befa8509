"""DeepSpeed's own estimator, as it is shown beside our figures."""

from __future__ import annotations

import pytest

from zeroplan.ledger.deepspeed_estimator import OLD, estimate_zero2, estimate_zero3


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
