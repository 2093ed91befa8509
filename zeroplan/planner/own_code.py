"""A run on the program's own model code, traced where that program is installed."""

from __future__ import annotations

from importlib.util import find_spec

from zeroplan.core.workload import DType
from zeroplan.interop.setups import Setup
from zeroplan.run.ask import Ask

#: Keys that its own code has: that code itself, and an adapter of the head.
_OWN = ("model", "lora_head")


def with_own_code(request: Ask, setup: Setup) -> Ask:
    """Return the request with LitGPT's own model and loss; as it is where LitGPT is not installed.

    A model that the command line names in place of the file's stays.
    """
    lit = setup.ask.lit_model
    if lit is None or request.model != setup.ask.model or request.seq_len is None or request.quantize != setup.ask.quantize:
        return request
    if find_spec("litgpt") is None or find_spec("torch") is None:
        return request
    from zeroplan.trace.litgpt import batch_of, litgpt_module

    micro_batch = request.micro_batch or 1
    module = litgpt_module(lit, seq_len=request.seq_len, converts=request.dtype != DType.FP16)
    if module is None:
        return request
    return request.replace(
        model=module,
        inputs=batch_of(micro_batch, request.seq_len),
        built=True,
        micro_batch=micro_batch,
        lora_rank=None,
        lora_targets=(),
        lora_dropout=False,
        adapter_dtype=None,
        mixed_units=lit.mixed_units,
        longest_first=lit.longest_first,
        unmodelled=tuple(one for one in request.unmodelled if one.key not in _OWN),
    )
