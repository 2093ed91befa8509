"""A sample of the shipped tapes, traced again: the same events, to the byte."""

from __future__ import annotations

import pytest

from zeroplan.core.tape_options import Checkpointing, TraceOptions, auto_class_of
from zeroplan.models.load import load_model
from zeroplan.tapes import shipped

pytestmark = [pytest.mark.torch, pytest.mark.slow]
trace = pytest.importorskip("zeroplan.trace.api")


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("meta-llama/Llama-3.2-1B", TraceOptions()),
        ("Qwen/Qwen2.5-0.5B", TraceOptions(zero3=True)),
        ("openai-community/gpt2-medium", TraceOptions()),
        ("meta-llama/Llama-3.2-1B", TraceOptions(checkpointing=Checkpointing.NON_REENTRANT)),
    ],
)
def test_a_shipped_tape_is_what_tracing_gives(model: str, options: TraceOptions) -> None:
    spec = load_model(model)
    stored = shipped.find(spec, options)
    assert stored is not None
    again = trace.trace_model(spec.config, auto_class_of(spec.config), options)
    for batch, length in ((1, 512), (3, 777)):
        one, two = stored.expand(batch, length), again.expand(batch, length)
        assert (one.op, one.arg, one.aux) == (two.op, two.arg, two.aux)
        assert one.modules == two.modules
        assert one.params == two.params
