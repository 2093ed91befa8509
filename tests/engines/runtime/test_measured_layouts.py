"""Which of the runtime's meshes may be said to fit: those that GPUs have measured."""

from __future__ import annotations

import pytest

from zeroplan.core.cluster import Cluster
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.models.load import load_model


@pytest.mark.parametrize(
    ("layout", "stage", "named"),
    [
        (ParallelLayout(gpus=4, tp=2, sp=True), 2, []),
        (ParallelLayout(gpus=4, ep=2), 2, []),
        (ParallelLayout(gpus=4, ep=4), 3, []),
        (ParallelLayout(gpus=4, tp=2), 3, []),
        (ParallelLayout(gpus=4, pp=2), 2, ["--pp"]),
        (ParallelLayout(gpus=4, cp=2), 3, []),
        (ParallelLayout(gpus=8, tp=2, cp=2), 1, ["--cp"]),
    ],
)
def test_a_mesh_that_no_gpu_measured_is_named(layout: ParallelLayout, stage: int, named: list[str]) -> None:
    model = load_model("Qwen/Qwen3-30B-A3B" if layout.ep > 1 else "Qwen/Qwen3-8B")
    case = Case(model, Workload(), Cluster(gpus=layout.gpus), ZeroConfig.of(stage), parallel=layout)
    assert [one.key for one in find_engine("zeroplan").unmodelled(case)] == named
