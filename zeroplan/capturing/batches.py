"""Whether the steps that a script took stand for those it would take: the shapes of its loaders' batches, and its forwards.

Note [Batches beyond the captured steps]
    A loader that a pass of training draws from is read on, after the script and without the model, for :data:`SECONDS`. A
    batch no dimension of which is larger than that of one which the model saw costs no more than it. Where a loader's batches
    hold no tensors, or no loader is there, the forwards of the steps are compared by what they allocate, from the second on:
    the first also makes what is kept for all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zeroplan.capturing.spans import BACKWARD, FIRST, FORWARD
from zeroplan.tape.expanded import Op

#: Seconds for which loaders are read on.
SECONDS = 10.0
#: A tensor's place within a batch, and its shape.
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class BatchesSeen(NamedTuple):
    """What was found.

    Attributes:
        says: one sentence.
        open: whether steps that cost more may follow.
    """

    says: str
    open: bool


class Pass:
    """One pass of training over a loader.

    Args:
        rest: the batches that follow.
        backwards: backward passes before it.
    """

    def __init__(self, rest: Iterator[Any], backwards: int) -> None:
        self.rest, self.backwards = rest, backwards
        self.drawn: list[Shapes] = []


def shapes_of(batch: Any, name: str = "") -> Shapes:
    """Return the shapes of a batch's tensors, each by its place."""
    shape = getattr(batch, "shape", None)
    if isinstance(shape, tuple):
        return ((name, tuple(shape)),) if shape else ()
    if isinstance(batch, Mapping):
        held = [(str(key), value) for key, value in batch.items()]
    elif isinstance(batch, (list, tuple)):
        held = [(str(key), value) for key, value in enumerate(batch)]
    else:
        held = [(key, value) for key, value in getattr(batch, "__dict__", {}).items() if getattr(value, "shape", None)]
    return tuple(one for key, value in held for one in shapes_of(value, f"{name}.{key}" if name else key))


def read_on(passes: Sequence[Pass], backwards: int, seconds: float = SECONDS) -> BatchesSeen | None:
    """Return what the loaders hold beside the batches that the model saw; None where their batches hold no tensors.

    Args:
        passes: those of the script.
        backwards: backward passes by now; a program may have drawn batches ahead of them.
        seconds: the longest that this may take.
    """
    until = time.monotonic() + seconds
    found = [one for one in (_read_on(one, backwards, until) for one in passes if any(one.drawn)) if one is not None]
    return next((one for one in found if one.open), found[0] if found else None)


def _read_on(one: Pass, backwards: int, until: float) -> BatchesSeen | None:
    seen = one.drawn[: max(1, backwards - one.backwards)]
    kinds = set(seen)
    larger: dict[Shapes, int] = {}
    lesser: set[Shapes] = set()
    index, why = len(seen), "the loader ends there"

    def note(shapes: Shapes) -> None:
        if shapes in kinds or shapes in larger or shapes in lesser:
            return
        if any(_covers(kind, shapes) for kind in kinds):
            lesser.add(shapes)
        else:
            larger[shapes] = index

    for shapes in one.drawn[len(seen) :]:
        note(shapes)
        index += 1
    try:
        while time.monotonic() < until:
            batch = next(one.rest, None)
            if batch is None:
                break
            note(shapes_of(batch))
            index += 1
        else:
            why = "there was no time for more"
    except Exception as error:
        why = f"the next one fails: {' '.join(f'{type(error).__name__}: {error}'.split())[:80]}"
    whole = why == "the loader ends there"
    read = f"{len(seen)} batches went through the model, {index} were looked at ({why})"
    if larger:
        worst, none = max(larger, key=_elements), ("", ())
        largest = max(seen, key=_elements)
        more = next((one for one in worst if not any(_covers((kept,), (one,)) for kept in largest)), none)
        same = next((kept for kept in largest if kept[0] == more[0]), none)
        says = f"{read}; batch {larger[worst]} has {_text(*more)}, the largest that the model saw {_text(*same)}"
        return BatchesSeen(says, open=True)
    if len(kinds) == 1 and not lesser:
        return BatchesSeen(f"{read}, all of one shape", open=False)
    if whole:
        return BatchesSeen(f"{read}, none larger than those", open=False)
    return BatchesSeen(f"{read}; their shapes differ, so that a larger one may follow", open=True)


def _covers(large: Shapes, small: Shapes) -> bool:
    return len(large) == len(small) and all(
        a == b and len(x) == len(y) and all(i >= j for i, j in zip(x, y, strict=True))
        for (a, x), (b, y) in zip(large, small, strict=True)
    )


def _elements(shapes: Shapes) -> int:
    total = 0
    for _, shape in shapes:
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


def _text(name: str, shape: tuple[int, ...]) -> str:
    """A tensor of a batch by its name and shape."""
    return f"{name or 'a tensor'} of {' x '.join(map(str, shape)) or 'no shape'}"


def forwards_differ(events: Any, sizes: Sequence[Any], ends: Sequence[int], apart: Sequence[int] = ()) -> BatchesSeen | None:
    """Compare what the forwards of the steps allocate; None where fewer than three steps are there.

    Args:
        events: the tape, with columns ``op`` and ``arg``.
        sizes: each storage's size.
        ends: the number of events at the end of each step.
        apart: events of steps that ran in another way, for plans of other stages, and are not compared.
    """
    if len(ends) < 3:
        return None
    spans = zip([0, *ends[:-1]], ends, strict=True)
    steps = [_forward(events, sizes, *span) for span in spans if not any(span[0] <= at < span[1] for at in apart)]
    compared, which = (steps[1:], f"steps 2 to {len(ends)}") if len(steps) > 2 else (steps, "the first two steps")
    if len(set(compared)) == 1:
        return BatchesSeen(f"the forwards of {which} allocate the same", open=False)
    return BatchesSeen(f"the forwards of {which} allocate different sizes, so that a larger one may follow", open=True)


def _forward(events: Any, sizes: Sequence[Any], begin: int, end: int) -> tuple[Any, ...]:
    """The sizes that the forwards of a step allocate: of all spans of a forward that a backward follows."""
    alloc, mark = int(Op.ALLOC), int(Op.MARK)
    kept: list[Any] = []
    now: list[Any] = []
    forward: list[Any] = []
    for op, arg in zip(events.op[begin:end], events.arg[begin:end], strict=True):
        if op == alloc:
            now.append(sizes[arg])
        elif op == mark:
            if arg == FIRST + FORWARD:
                forward = now
            elif arg == FIRST + BACKWARD:
                kept, forward = kept + forward, []
            now = []
    return tuple(kept)
