"""Where a case's tape comes from: shipped or cached (no torch), else traced now and cached."""

from __future__ import annotations

import sys

from zeroplan.core.errors import BadInput
from zeroplan.core.tape import ExpandedTape
from zeroplan.core.tape_format import Tape
from zeroplan.core.tape_sizes import KernelDevice
from zeroplan.core.workload import Workload
from zeroplan.engines.base import Case, Engine
from zeroplan.models.spec import ModelSpec
from zeroplan.tapes import find_tape, get_tape


class NoTapeError(Exception):
    """There is no tape and none can be made; the text says why."""


def _traced(spec: ModelSpec, workload: Workload, zero3: bool) -> Tape:
    try:
        return get_tape(spec, workload, zero3=zero3)
    except BadInput:
        raise
    except Exception as error:  # the model's own code runs here, and what it raises says only that it cannot be traced
        text = " ".join(str(error).split())[:160]
        raise NoTapeError(f"{spec.name} cannot be traced ({type(error).__name__}: {text})") from error


def expanded_tape_of(engine: Engine, case: Case) -> ExpandedTape:
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
            tape = _traced(spec, workload, zero3)
        device = KernelDevice.of(case.cluster.gpu)
        return tape.expand(workload.micro_batch, workload.seq_len or 1, workload.lora_rank, device=device)
    except BadInput as error:
        raise NoTapeError(str(error)) from None


class ExpandedTapes:
    """The expanded tapes of one request, whose cases differ in sharding only: each is looked for once, found or not."""

    #: Whether a CPU's kernels keep other tensors than CUDA's, for which tapes are made; None asks the model's config.
    differs: bool | None = None

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[str, ExpandedTape | NoTapeError] = {}

    def of(self, case: Case) -> ExpandedTape:
        """As :func:`expanded_tape_of`.

        Raises:
            NoTapeError: when the model cannot be traced here.
        """
        key = self._engine.trace_options(case).key
        if key not in self._known:
            try:
                self._known[key] = expanded_tape_of(self._engine, case)
            except NoTapeError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, NoTapeError):
            raise found
        return found
