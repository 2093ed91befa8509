"""``recommend`` and ``recommend --layouts`` model the step of one configuration alike."""

from __future__ import annotations

import pytest

from zeroplan.core.rates import rates_of
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.search.cost import CostModel
from zeroplan.search.layout_counts import rank_counts
from zeroplan.search.layout_time import LayoutCost


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    ("engine", "stage"), [("fsdp2", 2), ("fsdp2", 3), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)]
)
def test_both_answers_give_a_configuration_the_same_time(engine: str, stage: int, nodes: int) -> None:
    given = {"offload_optimizer": "none", "offload_param": "none"} if engine == "deepspeed" else {}
    asked = Ask(
        model="meta-llama/Llama-3.1-8B", engine=engine, gpu="H100", gpus=8, nodes=nodes, seq_len=4096, stage=stage, **given
    )
    resolved = resolve(asked)
    case, counts, rates = resolved.cases[0], rank_counts(resolved, {}), rates_of(resolved.cluster.gpu, gpus=8)
    laid_out = LayoutCost(case, counts, rates, resolved.engine).time().total
    alone = CostModel(resolved.engine, case.spec, resolved.cluster, rates).step_time(case.workload, case.zero, counts).total
    assert alone == pytest.approx(laid_out, rel=0.06)
