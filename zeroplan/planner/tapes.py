"""Where a case's tape comes from: shipped or cached (no torch), else traced now and cached."""

from __future__ import annotations

import sys

from zeroplan.core.errors import BadInput
from zeroplan.core.tape import Stream
from zeroplan.engines.base import Case, Engine
from zeroplan.tapes import find_tape, get_tape


class NoTapeError(Exception):
    """There is no tape and none can be made; the text says why."""


def stream_of(engine: Engine, case: Case) -> Stream:
    """The case's tape, expanded for its micro batch and sequence length.

    Raises:
        NoTapeError: when the model cannot be traced here.
    """
    spec, workload = case.spec, case.workload
    if not spec.config or not spec.has_shapes:
        raise NoTapeError(f"{spec.name}: {spec.source} gives parameters but no architecture to trace")
    zero3 = engine.trace_options(case).zero3
    try:
        tape = find_tape(spec, workload, zero3=zero3)
        if tape is None:
            if sys.stderr.isatty():
                print(f"tracing {spec.name}, once …", file=sys.stderr)
            tape = get_tape(spec, workload, zero3=zero3)
        return tape.expand(workload.micro_batch, workload.seq_len or 1, workload.lora_rank)
    except BadInput as error:
        raise NoTapeError(str(error)) from None
