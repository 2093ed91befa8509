"""A rank of a job shares what was derived for another one, but for what differs among ranks."""

from __future__ import annotations

from functools import cached_property

import pytest

from tests.workloads import flat_workload
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.deepspeed.rank import DeepSpeedRank, deepspeed_rank
from zeroplan.models.load import load_model


def _derived(rank: DeepSpeedRank) -> dict[str, object]:
    names = {name for kind in type(rank).__mro__ for name, value in vars(kind).items() if isinstance(value, cached_property)}
    return {name: getattr(rank, name) for name in sorted(names)}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("stage", "offload"), [(1, "none"), (2, "none"), (2, "cpu"), (3, "none"), (3, "cpu")])
def test_another_rank_is_as_one_that_was_derived_by_itself(stage: int, offload: str, optimizer: str) -> None:
    parameters = load_model("distilbert/distilgpt2").parameters
    work, zero = flat_workload(optimizer=optimizer, grad_accum=2), ZeroConfig.of(stage, offload)
    first = deepspeed_rank(parameters, work, zero, ParallelLayout(8))
    _derived(first)
    other = first.at(5)
    assert other.numel is first.numel
    assert other.shards is first.shards
    assert _derived(other) == _derived(deepspeed_rank(parameters, work, zero, ParallelLayout(8), rank=5))
