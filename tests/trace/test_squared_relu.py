"""A square under autocast is a power, which runs in fp32: its input's fp32 copy is kept for the backward."""

from __future__ import annotations

import pytest

from zeroplan.core.model_config import CAUSAL_LM
from zeroplan.tape.expanded import Mark, Op
from zeroplan.tape.options import Arithmetic, TraceOptions

pytestmark = pytest.mark.torch
INNER, TOKENS = 480, 64
CONFIG = {
    "model_type": "persimmon",
    "architectures": ["PersimmonForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
}


@pytest.mark.parametrize(("arithmetic", "copies"), [(Arithmetic.AUTOCAST, 2), (Arithmetic.HALF, 0)])
def test_the_fp32_copy_of_a_squared_relu_is_kept(arithmetic: Arithmetic, copies: int) -> None:
    """Each block keeps one: an H100 reserved 15 % more than was planned of a Persimmon of 1.5 billion parameters."""
    from zeroplan.trace.api import trace_model

    tape = trace_model(CONFIG, CAUSAL_LM, TraceOptions(arithmetic=arithmetic)).expand(1, TOKENS, None)
    alive: dict[int, int] = {}
    for op, arg, size in zip(tape.op, tape.arg, tape.aux, strict=True):
        if op == Op.ALLOC:
            alive[arg] = size
        elif op == Op.FREE:
            alive.pop(arg, None)
        elif op == Op.MARK and arg == Mark.FORWARD_END:
            break
    assert sum(size == 4 * TOKENS * INNER for size in alive.values()) == copies
