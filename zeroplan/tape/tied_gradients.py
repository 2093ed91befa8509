"""The gradients of a parameter that two modules share, handed over one by one and not as autograd's sum.

For engines in which the sum is made elsewhere than where the model computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zeroplan.tape.edit import TapeEdit
from zeroplan.tape.expanded import ExpandedTape, Op


def with_gradients_apart(tape: ExpandedTape) -> ExpandedTape:
    """Return `tape` with one ``GRAD`` for each gradient of a shared parameter, in place of the sum; as it is without any.

    A sum is a gradient right after whose allocation other gradients of its size are freed, and nothing else happens before it
    is handed over.
    """
    if tape.shapes:
        tape = replace(tape, shapes=tuple(with_gradients_apart(shape) for shape in tape.shapes))
    sums = dict(_sums(tape))
    if not sums:
        return tape
    edit = TapeEdit(tape)
    for at, (total, *parts) in sums.items():
        op, arg, _, kind, module = edit.event(at)
        edit.drop((total, *parts))
        edit.replace(at, *[(op, arg, tape.arg[part], kind, module) for part in parts])
    return edit.result()


def _sums(tape: ExpandedTape) -> Iterator[tuple[int, list[int]]]:
    """Yield the place of each ``GRAD`` of a sum, with the places of the sum's allocation and of its parts' frees."""
    size = tape.storage_bytes
    for at, op in enumerate(tape.op):
        if op != Op.GRAD:
            continue
        total, begin = tape.aux[at], at - 1
        while begin >= 0 and tape.op[begin] == Op.FREE:
            begin -= 1
        frees = list(range(begin + 1, at))
        if begin < 0 or (tape.op[begin], tape.arg[begin]) != (Op.ALLOC, total):
            continue
        parts = [place for place in frees if size[tape.arg[place]] == size[total]]
        if len(parts) > 1 and len(parts) == len(frees):
            yield at, [begin, *parts]
