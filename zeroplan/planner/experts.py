"""What uneven routing adds to a rank that shares experts.

Note [Uneven routing]
    A plan's figures are of balanced routing: a rank receives as many tokens as it sends. The upper end of its interval is of
    a rank that receives twice as many. That is an assumption, not a bound: before a router has learnt, or without a loss or
    bias that balances it, one rank may get more. Expert biases that are adjusted in each step hold the most loaded expert
    within a tenth of the mean, a balancing loss within about its double. Source: Wang et al. 2024, "Auxiliary-Loss-Free Load
    Balancing Strategy for Mixture-of-Experts" (arXiv 2408.15664), section 4 (MaxVio).
"""

from __future__ import annotations

from collections.abc import Mapping

from zeroplan.core.buffers import Buffer
from zeroplan.simulate.timeline import Note
from zeroplan.tape.expanded import ExpandedTape, Kind, Op

_EXPERTS = ".experts"
_ROUTED = frozenset({Buffer.ACTIVATION, Buffer.ACTIVATION_TEMP, Buffer.COMM_ACTIVATION})


def uneven(alive: Mapping[tuple[Buffer, Note], int], tape: ExpandedTape, *, outside: bool = False) -> int:
    """Return the bytes that a rank with twice the tokens has more: what its experts compute at the run's peak, or at their
    own peak in one micro batch where that is more. See Note [Uneven routing].

    Args:
        alive: bytes at the run's peak, by buffer and module.
        tape: the tape whose modules are meant.
        outside: the experts' parents exchange the tokens (AutoEP). Whatever these hold counts, of which some follows from the
            tokens that a rank sends.
    """
    experts = {index for index, module in enumerate(tape.modules) if module.name.endswith(_EXPERTS)}
    if outside:
        experts |= {tape.modules[index].parent for index in experts}
    at_peak = sum(count for (buffer, note), count in alive.items() if buffer in _ROUTED and note in experts)
    return max(at_peak, _peak(tape, experts))


def _peak(tape: ExpandedTape, experts: set[int]) -> int:
    """Return the most bytes that the experts' own tensors have at once in one micro batch."""
    sizes: dict[int, int] = {}
    now = peak = 0
    alloc, free, grad = int(Op.ALLOC), int(Op.FREE), int(Kind.GRAD)
    for op, arg, aux, kind, module in tape.events():
        if op == alloc and kind != grad and module in experts:
            sizes[arg] = aux
            now += aux
            peak = max(peak, now)
        elif op == free:
            now -= sizes.pop(arg, 0)
    return peak
