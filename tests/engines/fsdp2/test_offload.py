"""FSDP2's CPUOffloadPolicy: a measured run, and what is refused."""

from __future__ import annotations

import pytest

from benchmarks.rows import EXTRA, load_rows, request_of
from zeroplan.core.errors import BadInput
from zeroplan.planner.estimate import estimate_runs
from zeroplan.run.ask import Ask


def test_measured_run_is_exact() -> None:
    (row,) = (row for row in load_rows(EXTRA) if row["id"] == "K13")
    (run,) = estimate_runs(request_of(row, depth="simulated")).runs
    assert run is not None
    gpu, cpu = run.plan.gpu, run.plan.cpu
    assert gpu.peak_reserved == row["peak_reserved"]
    assert gpu.peak_allocated == pytest.approx(row["peak_allocated"], abs=4096)
    # All parameters of this model are powers of two but the embedding: its 1002 MiB get a block of 1024 MiB.
    assert cpu.pinned == 2 * (4 * row["n_params"] + (22 << 20))
    assert cpu.per_node == pytest.approx(row["host_rss_peak_all_ranks"], rel=0.005)


def test_several_ranks_gather_from_copies_of_their_chunks() -> None:
    request = Ask(
        model="meta-llama/Llama-3.2-1B",
        engine="fsdp2",
        stage=3,
        offload_optimizer="cpu",
        offload_param="cpu",
        gpus=4,
        seq_len=1024,
        depth="simulated",
    )
    (run,) = estimate_runs(request).runs
    assert run is not None
    # Between two steps nothing is left on the GPU but cuBLAS's workspaces and the loss.
    assert run.plan.gpu.live_after_step == pytest.approx(64 << 20, abs=64 << 10)
    assert run.plan.cpu.pinned == pytest.approx(8 * 1_235_814_400, rel=0.01)


@pytest.mark.parametrize(("optimizer", "param"), [("cpu", "none"), ("nvme", "nvme")])
def test_other_offloads_are_refused(optimizer: str, param: str) -> None:
    request = Ask(model="meta-llama/Llama-3.2-1B", engine="fsdp2", stage=3, offload_optimizer=optimizer, offload_param=param)
    with pytest.raises(BadInput, match="CPUOffloadPolicy"):
        estimate_runs(request)
