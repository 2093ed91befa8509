"""A tape is one of the dtype in which the engine gathers parameters, whatever the precision of the optimizer's."""

from __future__ import annotations

import pytest

from tests.validate.small import CONFIG
from zeroplan.planner import tapes
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import ExpandedTapes
from zeroplan.run.ask import Ask
from zeroplan.tape.options import TraceOptions


@pytest.mark.torch
@pytest.mark.parametrize(("engine", "arithmetic"), [("fsdp2", "half"), ("fsdp", "half"), ("ddp", "half-autocast")])
def test_adapters_run_in_the_dtype_of_their_gather(engine: str, arithmetic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP gathers fp32 adapters in 16 bits beside their base; under DDP they are fp32 in the products, too."""
    asked: list[TraceOptions] = []
    plain = tapes.lookup
    monkeypatch.setattr(tapes, "lookup", lambda spec, options, **more: asked.append(options) or plain(spec, options, **more))
    found = resolve(Ask(model=CONFIG, engine=engine, gpus=2, lora_rank=4, seq_len=64))
    ExpandedTapes(found.engine).of(found.cases[-1])
    assert {options.arithmetic.value for options in asked} == {arithmetic}
