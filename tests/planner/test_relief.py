"""Knobs that lower a plan's memory."""

from __future__ import annotations

import pytest

from zeroplan.planner.estimate import estimate_runs
from zeroplan.planner.relief import _fused_head
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.techniques.liger import Liger


@pytest.mark.parametrize(("engine", "micro", "offered"), [("ddp", 8, True), ("zeroplan", 8, False), ("ddp", 1, False)])
def test_a_fused_head_is_a_knob_where_logits_and_loss_are_a_large_part(engine: str, micro: int, offered: bool) -> None:
    model, length = ("HuggingFaceTB/SmolLM2-135M", 512) if micro > 1 else ("EleutherAI/pythia-160m", 64)
    ask = Ask(model=model, vram="24G", engine=engine, stage=0, micro_batch=micro, seq_len=length)
    resolved, run = resolve(ask), estimate_runs(ask).runs[0]
    assert run is not None
    changes = list(_fused_head(resolved.engine, resolved.cases[0], run, None))
    assert [one.flags for one in changes] == (["--liger"] if offered else [])
    assert all(one.case.workload.has(Liger) for one in changes)
