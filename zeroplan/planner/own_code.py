"""A run on the program's own model code, traced where that program is installed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.engines.registry import find_engine
from zeroplan.interop.setups import Setup
from zeroplan.planner.request import Request

#: The key under which a file's own model code stands among what is left out, and one that its code has a field for.
MODEL, HEAD = "model", "lora_head"
_SAYS = "LitGPT's own model is traced; reported runs of earlier versions needed up to 10 % more, and none was measured here"


def with_own_code(request: Request, setup: Setup) -> Request:
    """Return the request with LitGPT's own model and loss on one GPU; as it is where LitGPT is not installed, with quantised
    weights, or under a strategy that shards.

    A model that the command line names in place of the file's stays.
    """
    lit = setup.lit_model
    named = request.model == setup.model and request.quantize is None and setup.quantize is None
    if lit is None or not named or request.seq_len is None:
        return request
    if any(zero.stage for zero in find_engine(request.engine).options()):  # one that shards
        return request
    if find_spec("litgpt") is None or find_spec("torch") is None:
        return request
    from zeroplan.trace.litgpt import batch_of, litgpt_module

    micro_batch = request.micro_batch or 1
    module = litgpt_module(lit, seq_len=request.seq_len)
    if module is None:
        return request
    others = tuple(one for one in request.unmodelled if one.key not in (MODEL, HEAD))
    return replace(
        request,
        model=module,
        inputs=batch_of(micro_batch, request.seq_len),
        micro_batch=micro_batch,
        lora_rank=None,
        lora_targets=(),
        lora_dropout=False,
        unmodelled=(*others, Unmodelled(MODEL, Effect.MORE, _SAYS)),
    )
