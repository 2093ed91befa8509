"""Resident memory of the runtime's offload against the plan's, on two gloo ranks in processes of their own.

On a CPU the device's buffers lie in the same memory: what stands of them is added to the plan of the host. A step's peak also
holds gradients that pass and gloo's own copies, so after the steps it is what stays that is held against the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.ranks import RankPool
from tests.validate.resident import grow
from zeroplan.core.arena.layout import ArenaLayout
from zeroplan.core.arena.owned_buffers import runtime_buffers
from zeroplan.core.buffers import Phase, Place
from zeroplan.engines.runtime.host import checkpoint_phases, host_phases

pytestmark = [pytest.mark.torch, pytest.mark.long]


@pytest.fixture
def pool() -> Iterator[RankPool]:
    made = RankPool()
    yield made
    made.stop()


def config(**section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": section,
        "zeroplan": {"nvme_in_memory": True},
    }


def test_growth_is_within_three_per_cent_of_the_plan_in_every_phase(pool: RankPool, tmp_path: Path) -> None:
    cpu, nvme = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path)}
    configs = [
        config(stage=2, offload_optimizer=cpu),
        config(stage=3, offload_optimizer=cpu, offload_param=cpu),
        config(stage=3, offload_optimizer=nvme),
        config(stage=3, offload_optimizer=nvme, offload_param={**nvme, "max_in_cpu": 0}),
    ]
    for ranks in pool.run(2, grow, configs):
        for case, found in zip(configs, ranks, strict=True):
            layout: ArenaLayout = found["layout"]
            host = host_phases(layout, 2 * found["params"])
            assert found["host"] == sum(host[-1].kept.values())
            late = checkpoint_phases(layout, host, after_init=0, after_step=0)
            peaks = {one.phase: one.peak for one in host} | {one.phase: one.host for one in late}
            for phase, (most, now) in found["phases"].items():
                planned = peaks[phase] + (found["device"] if phase is not Phase.LOAD else 0)
                measured = now if phase is Phase.STEP else most
                assert measured == pytest.approx(planned, rel=0.03), (case["zero_optimization"], phase)
            swapped = [row.bytes for row in runtime_buffers(layout) if row.place is Place.NVME]
            assert found["in_files"] == sum(swapped)
            assert found["files"] == sum(-(-count // 4096) * 4096 for count in swapped)
            assert bool(found["files"]) is (case["zero_optimization"]["offload_optimizer"] is nvme)
