"""The lines that engines share: cuBLAS's workspaces, a quantised base's scales, and one for each kind of optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from zeroplan.core.buffers import ALWAYS, FROM_FIRST_STEP, Buffer, Phase, Place
from zeroplan.core.optimizer_row import Domain, Optimizer
from zeroplan.ledger.derive import fraction
from zeroplan.ledger.line import LedgerBuilder


class MultiplyingRank(Protocol):
    """The fact that the line reads."""

    @property
    def cublas_workspace(self) -> int:
        """Bytes of one cuBLAS workspace on this GPU."""
        ...


def add_workspace_line(lines: LedgerBuilder, phases: tuple[Phase, ...] = FROM_FIRST_STEP) -> None:
    """Register it; `phases` are those in which an engine's process has them."""

    @lines.add(Buffer.WORKSPACE, Place.HBM, phases)
    def cublas_workspace(c: MultiplyingRank) -> int:
        """cuBLAS's workspaces: one for the forward's thread, one for the backward's.

        Source: aten/src/ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize
        """
        return 2 * c.cublas_workspace


class QuantizedRank(Protocol):
    """The fact that the line of a quantised base's scales reads."""

    @property
    def quant_states_bytes(self) -> int:
        """Bytes of the scales of a quantised base's weights, and of the tables of their levels."""
        ...


def add_quant_states_line(lines: LedgerBuilder, buffer: Buffer) -> None:
    """Register it; `buffer` is the kind of the weights that the scales stand beside."""

    @lines.add(buffer, Place.HBM, ALWAYS, state=True)
    def quant_states(c: QuantizedRank) -> int:
        """Scales of a quantised base's weights, whole on every rank. See Note [Quantised bases that are sharded].

        Source: bitsandbytes 0.50, functional.py, QuantState (an attribute of its layer, so that no engine divides it)
        """
        return c.quant_states_bytes


class SteppedRank(Protocol):
    """The facts that the lines of optimizer states read."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, whose row lists the states."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of one element of a state."""
        ...

    @property
    def factored(self) -> int | None:
        """Elements of factored second moments; None where flat parts leave nothing to factor."""
        ...

    @property
    def state_scales(self) -> int | None:
        """Bytes of the scales of 8-bit states; None where they follow from the elements."""
        ...

    @property
    def whole_states(self) -> int:
        """Elements whose states an 8-bit optimizer keeps in fp32."""
        ...


#: Bytes of an fp32 element.
_WIDE = 4
#: Returns a number of elements, given an engine's rank.
Count = Callable[[Any], int]

#: The purpose of each kind of state.
STATE_DOCS = {
    Buffer.OPTIM_EXP_AVG: "Running mean of the gradients (Adam's and Lion's first moment).",
    Buffer.OPTIM_EXP_AVG_SQ: "Running mean of the squared gradients (Adam's second moment).",
    Buffer.OPTIM_EXP_AVG_SQ_FRESH: "A second moment that goes on after the other is frozen, to tell how far that is off.",
    Buffer.OPTIM_MOMENTUM: "Momentum (SGD, Muon).",
    Buffer.OPTIM_SUM: "Sum of the squared gradients (Adagrad), or running mean of the squared changes (Adadelta).",
    Buffer.OPTIM_MAX_EXP_AVG_SQ: "Largest running mean of the squared gradients so far (amsgrad).",
    Buffer.OPTIM_AVERAGE: "Mean of the parameters over the steps (ASGD).",
    Buffer.OPTIM_PREVIOUS_GRAD: "The step's gradients, for the next step (Rprop).",
    Buffer.OPTIM_STEP_SIZE: "A step size for each element (Rprop).",
    Buffer.OPTIM_FACTORED: "Adafactor's second moment: of a matrix its rows and columns, of a flat part all.",
    Buffer.OPTIM_SCALE: "One fp32 scale for every block of each 8- or 4-bit state: 256 or 128 elements.",
    Buffer.OPTIM_ERROR_FEEDBACK: "What compression left out, kept for the next step (1-bit optimizers).",
}


def state_bytes(c: SteppedRank, buffer: Buffer, counts: Mapping[Domain, Count]) -> int:
    """Return the bytes of one kind of state on this rank; `counts` are the elements of each domain."""
    total = 0
    for state in c.optimizer.states:
        count = counts.get(state.domain)
        if state.buffer is not buffer or count is None:
            continue
        if state.domain is Domain.ALL and not count(c):
            continue
        whole = c.whole_states if state.domain is Domain.ALL else 0
        if buffer is Buffer.OPTIM_SCALE and c.state_scales is not None:
            total = total + c.state_scales
        elif state.factored and c.factored is not None:
            total = total + c.factored * (state.element or c.state_bytes)
        elif state.element:
            total = total + count(c) * state.element * state.per_master
        elif state.per_master:
            total = total + count(c) * c.state_bytes * state.per_master
        else:
            narrow = count(c) - whole if whole else count(c)
            total = total + fraction(narrow, state.numerator, state.denominator)
            if whole:
                total = total + _WIDE * whole
    return total


def add_state_lines(
    lines: LedgerBuilder,
    place: Place,
    count: Count,
    *,
    rest: Count = lambda c: c.rest,
    matrix: Count | None = lambda c: c.matrix,
    suffix: str = "",
) -> None:
    """Register a line for every kind of state at `place`.

    Each of `count`, `rest` and `matrix` takes the engine's facts and returns a number of elements.

    Args:
        lines: the ledger under construction.
        place: where the states are kept.
        count: elements that the optimizer steps at this place.
        rest: the part of `count` that an optimizer of matrices leaves to another; by default all of ``facts.rest``.
        matrix: the part of `count` that an optimizer of matrices takes itself; by default all of ``facts.matrix``.
            None where the engine has lines of its own for the states of matrices.
        suffix: ends the lines' names, which must differ from place to place.
    """
    counts = {Domain.ALL: count, Domain.REST: rest} | ({Domain.MATRIX: matrix} if matrix is not None else {})
    for buffer, doc in STATE_DOCS.items():

        def formula(c: Any, buffer: Buffer = buffer) -> int:
            return state_bytes(c, buffer, counts)

        formula.__name__ = buffer.value.replace(".", "_") + suffix
        formula.__doc__ = f"{doc}\n\nSource: core/optimizers.py; created by the first step that is not skipped"
        lines.add(buffer, place, FROM_FIRST_STEP, state=True)(formula)
