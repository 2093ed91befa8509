"""A recording with other sizes put in equals one that is played anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.workloads import flat_workload
from zeroplan.core.cluster import Cluster
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.deepspeed import simulation
from zeroplan.engines.deepspeed.engine import DeepSpeed
from zeroplan.engines.deepspeed.job import rank_of
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.engines.deepspeed.schedule import record_deepspeed
from zeroplan.engines.deepspeed.simulation import Recordings
from zeroplan.models.load import load_model
from zeroplan.planner.tapes import expanded_tape_of
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.expanded import ExpandedTape

SPEC = load_model("meta-llama/Llama-3.2-1B")
ENGINE = DeepSpeed()


def _case(stage: int, micro_batch: int) -> tuple[Case, ExpandedTape]:
    workload = flat_workload(micro_batch=micro_batch, seq_len=512, gradient_checkpointing=True)
    case = Case(SPEC, workload, Cluster(gpus=2), ZeroConfig.of(stage))
    return case, expanded_tape_of(ENGINE, case)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_other_micro_batches_are_put_in(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    played = []

    def counted(rank: DeepSpeedRank, tape: ExpandedTape, **rest: Any) -> Recorder:
        played.append(tape)
        return record_deepspeed(rank, tape, **rest)

    monkeypatch.setattr(simulation, "record_deepspeed", counted)
    kept = Recordings()
    for micro_batch in (8, 16, 24, 16):
        case, stream = _case(stage, micro_batch)
        rank = rank_of(case, stream.parameters).at(1)
        found, fresh = kept.of(case, stream, rank, 0), record_deepspeed(rank, stream)
        assert found.value == fresh.value
        assert (found.code, found.marks) == (fresh.code, fresh.marks)
        assert found.labels_of(found.handles) == fresh.labels_of(fresh.handles)
    assert len(played) == 1


def test_another_layout_is_played() -> None:
    case, stream = _case(2, 8)
    kept = Recordings()
    rank = rank_of(case, stream.parameters)
    first = kept.of(case, stream, rank, 0)
    assert kept.of(case, stream, rank, 0) is first
    small = replace(case, zero=case.zero.but(reduce_bucket_size=1 << 20))
    assert kept.of(small, stream, rank_of(small, stream.parameters), 0).value != first.value
