"""The optimizer-state lines that every engine shares: one a kind of state, for the elements that a rank steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from zeroplan.core.buffers import FROM_FIRST_STEP, Buffer, Place
from zeroplan.core.optimizer_row import Optimizer
from zeroplan.ledger.derive import fraction
from zeroplan.ledger.line import LedgerBuilder


class StateFacts(Protocol):
    """What the state lines read: the optimizer, the bytes of one master-wide element, and what Muon splits."""

    @property
    def optimizer(self) -> Optimizer:
        """Which states there are."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of one element of a state."""
        ...

    @property
    def matrix(self) -> int:
        """Elements that Muon updates."""
        ...

    @property
    def rest(self) -> int:
        """Elements that it leaves to Adam."""
        ...


#: Every kind of state with what it is for.
STATE_DOCS = {
    Buffer.OPTIM_EXP_AVG: "Running mean of the gradients (Adam's and Lion's first moment).",
    Buffer.OPTIM_EXP_AVG_SQ: "Running mean of the squared gradients (Adam's second moment).",
    Buffer.OPTIM_MOMENTUM: "Momentum (SGD, Muon).",
    Buffer.OPTIM_SUM: "Sum of the squared gradients (Adagrad).",
    Buffer.OPTIM_FACTORED: "Adafactor's second moment; on flat one-dimensional parts it cannot be factored.",
    Buffer.OPTIM_SCALE: "One fp32 scale for every 256 elements of each 8-bit state.",
    Buffer.OPTIM_ERROR_FEEDBACK: "What compression left out, kept for the next step (1-bit optimizers).",
}


def state_bytes(c: StateFacts, buffer: Buffer, count: int) -> int:
    """Bytes of one kind of state for `count` elements of this rank (Muon's split replaces them where it applies)."""
    total = 0
    for state in c.optimizer.states:
        if state.buffer is not buffer or not count:
            continue
        elements = {"all": count, "matrix": c.matrix, "rest": c.rest}[state.domain]
        if state.per_master:
            total = total + elements * c.state_bytes * state.per_master
        else:
            total = total + fraction(elements, state.numerator, state.denominator)
    return total


def add_state_lines(lines: LedgerBuilder, place: Place, count: Callable[[Any], int], *, suffix: str = "") -> None:
    """Register a line for every kind of state at `place`, for ``count(facts)`` elements."""
    for buffer, doc in STATE_DOCS.items():

        def formula(c: Any, buffer: Buffer = buffer) -> int:
            return state_bytes(c, buffer, count(c))

        formula.__name__ = buffer.value.replace(".", "_") + suffix
        formula.__doc__ = f"{doc}\n\nSource: core/optimizers.py; created by the first step that is not skipped"
        lines.add(buffer, place, FROM_FIRST_STEP, state=True)(formula)
