"""Host phases are those of any step: what the first one left is there in the forwards that follow."""

from __future__ import annotations

import pytest

import zeroplan


@pytest.mark.parametrize(("engine", "what"), [("deepspeed", "offload_optimizer"), ("fsdp2", "offload_param")])
def test_states_are_there_in_later_forwards(engine: str, what: str) -> None:
    (plan,) = zeroplan.estimate("Qwen/Qwen2.5-0.5B", engine=engine, stage=3, seq_len=1024, **{what: "cpu"})
    first, last = (next(peak for peak in plan.cpu.peaks if peak.phase == phase) for phase in ("forward", "step"))
    states = [next(one.bytes for one in peak.alive if one.buffer == "optim.exp_avg") for peak in (first, last)]
    assert states[0] == states[1] > 0
