"""Holds a case's ranks against plain torch.

How far may two correct trainings be apart? Both round, in other places: the runtime adds gradients of micro batches and of
ranks in its own order. In fp32 that is worth 1e-5 of a parameter's largest change, and a few units in the last place of its
values. Where more is found, plain torch trains again: in a wider precision, and with a factor on the loss that makes it round
otherwise. The largest distance of these from the first is what rounding does to this very case; two correct trainings are at
most about twice as far apart, and ``SLACK`` doubles it once more, in each parameter. A lost, doubled or stale gradient
moves a parameter by a good part of its whole change, some hundred times as much. In 16 bits rounding is coarse; there it is the
masters that are compared, so that nothing hides behind the last place of the parameters, which must be their masters' values in
16 bits exactly.

Two jumps are followed to their cause, so that no bound is wider for them. Where an optimizer steps by the sign of a gradient
that rounding decides, plain torch trains with the other sign, too (`turns`). Where masters are set to their 16-bit parameters,
those elements that lie between two 16-bit values may be either (`Trained.doubts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import getitem
from typing import Any

import torch

from benchmarks.fuzz_training import plain, turns
from benchmarks.fuzz_training.case import Case
from benchmarks.fuzz_training.plain import CHANGE, DTYPES, FP32, Trained
from benchmarks.fuzz_training.pool import Answer, Pool

#: How many times as far as rounding moves plain torch itself.
SLACK = 4.0
#: Factors on the loss that make the backward round otherwise.
NUDGES = (1.37, 0.83, 1.1, 0.6)
#: Relative to the largest value.
VALUE = {"fp32": 2.0**-21, "bf16": 2.0**-7, "fp16": 2.0**-10}
#: Optimizers that step by a sign.
SIGNS = ("rprop", "lion")
#: The kinds of outcomes in which the runtime did what it should.
WELL = ("equal", "refused", "both-refuse")


@dataclass(frozen=True)
class Outcome:
    """``equal``, ``refused``, ``different``, ``crash``, ``hang``; where plain torch raises ``both-refuse``, or ``accepted`` if
    the runtime trains; and the reason.
    """

    kind: str
    reason: str = ""

    @property
    def is_well(self) -> bool:
        """Whether the runtime did what it should."""
        return self.kind in WELL


class _Reference:
    """Plain torch's training of a case, and others that tell what rounding does to it, if they are asked for."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.own = plain.train(case)

    @cached_property
    def others(self) -> list[Trained]:
        made = [plain.train(self._case, nudge=nudge) for nudge in NUDGES]
        if self._case.float8:  # which stands in for bf16 alone
            return made
        # Autograd may refuse in the wider precision alone, where a cast is no copy.
        with suppress(RuntimeError):
            made.append(plain.train(self._case, wider=True))
        return made

    def spread(self, attribute: str, *keys: Any, doubt: torch.Tensor | float = 0.0) -> float:
        """How far rounding may put two trainings apart, beyond `doubt`, in one tensor: an attribute of them, and keys in it."""
        own, *others = [reduce(getitem, keys, getattr(one, attribute)) for one in (self.own, *self.others)]
        return SLACK * max(_distance(own, other, doubt) for other in others)


def judge(case: Case, pool: Pool) -> Outcome:
    """Trains `case` on both sides and compares."""
    pool.begin(case)
    reference, raised = None, ""
    try:
        reference = _Reference(case)
    except RuntimeError as fault:
        raised = _first_line(str(fault))
    answers = pool.end()
    if reference is None:
        return _where_torch_raises(answers, raised)
    for kind in ("hang", "crash"):
        wrong = [f"rank {rank}: {answer.value}" for rank, answer in enumerate(answers) if answer.kind == kind]
        if wrong:
            others = [answer.value for answer in answers if answer.kind == "refused"]
            return Outcome(kind, "; ".join([wrong[0], *(f"others refused: {said}" for said in others[:1])]))
    refused = [answer.value for answer in answers if answer.kind == "refused"]
    if refused:
        return (
            Outcome("refused", refused[0]) if _is_one_line(refused[0]) else Outcome("crash", f"refused in lines: {refused[0]}")
        )
    found = _different(case, answers, reference, reference.own)
    if (
        found
        and case.optimizer in SIGNS
        and any(not _different(case, answers, reference, own) for own in _turned(case, answers))
    ):
        return Outcome("equal", "but for a sign that rounding decides")
    return Outcome("different", found) if found else Outcome("equal")


def _turned(case: Case, answers: list[Answer]) -> Iterator[Trained]:
    """Plain trainings in which elements in doubt step the other way, those first that are farthest from the runtime's."""
    own, masters = plain.train(case), answers[0].value.masters

    def far(doubt: list[turns.Turn]) -> float:
        _, i, element, _ = doubt[0]
        name = list(own.masters)[i]
        return abs((masters[name] - own.masters[name]).flatten()[element].item()) if name in masters else 0.0

    yield from turns.turned(case, sorted(turns.jumps(case, SLACK, NUDGES), key=far, reverse=True))


def _where_torch_raises(answers: list[Answer], raised: str) -> Outcome:
    """The outcome where plain torch raises an error whose first line is `raised`: ours, or torch's own, must come here, too."""
    for answer in answers:
        if answer.kind == "well":
            return Outcome("accepted", raised)
        if answer.kind == "hang" or (answer.kind == "crash" and raised not in answer.value):
            return Outcome(answer.kind, f"{answer.value}; plain torch raises {raised}")
    return Outcome("both-refuse", raised)


def _first_line(said: str) -> str:
    return said.splitlines()[0][:150]


def _is_one_line(said: str) -> bool:
    return "\n" not in said and 0 < len(said) < 600


def _different(case: Case, answers: list[Answer], reference: _Reference, own: Trained) -> str:
    """Describe what differs from `own`, plain torch's training; empty if nothing does. `reference` tells the bounds."""
    first: Trained = answers[0].value
    narrow = VALUE[case.precision]
    for rank, answer in enumerate(answers):
        mine, theirs = answer.value.seen[0], own.seen[rank]
        if [label for label, _ in mine] != [label for label, _ in theirs]:
            return f"rank {rank} saw {[label for label, _ in mine]}"
        for i, ((label, value), (_, expected)) in enumerate(zip(mine, theirs, strict=True)):
            bound = narrow * _largest(expected)
            distance = _distance(value, expected)
            if not distance <= bound:
                bound += reference.spread("seen", rank, i, 1)
                if not distance <= bound:
                    return f"{label} on rank {rank}: {distance:.3g} apart, {bound:.3g} allowed"
    for name, expected in own.masters.items():
        if name not in first.masters or not expected.numel():
            continue
        change = _distance(expected, own.start[name])
        bound = CHANGE[case.precision] * change + FP32 * _largest(expected)
        distance = _distance(first.masters[name], expected, own.doubts[name])
        if not distance <= bound:
            bound += reference.spread("masters", name, doubt=own.doubts[name])
            if not distance <= bound:
                return f"master {name}: {distance:.3g} apart, {bound:.3g} allowed, it changed by {change:.3g}"
    return _different_state(case, first, reference, own)


def _different_state(case: Case, first: Trained, reference: _Reference, own: Trained) -> str:
    """Describe the parameters and buffers of a state dict that differ from plain torch's; empty if none does."""
    if set(first.state) != set(own.state):
        return f"the state has other names: {sorted(set(first.state) ^ set(own.state))}"
    for name, expected in own.state.items():
        value = first.state[name]
        if value.dtype != expected.dtype:
            return f"{name} is {value.dtype}, not {expected.dtype}"
        if name in first.masters and not case.changes:
            if not torch.equal(first.masters[name].to(DTYPES[case.dtype]), value):
                return f"parameter {name} is not its master: {_distance(first.masters[name], value):.3g} apart"
            continue
        bound = VALUE[case.precision] * _largest(expected)
        if name in own.start:
            bound += CHANGE[case.precision] * _distance(expected, own.start[name])
        distance = _distance(value, expected)
        if not distance <= bound:
            bound += reference.spread("state", name)
            if not distance <= bound:
                return f"{name}: {distance:.3g} apart, {bound:.3g} allowed"
    return ""


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _distance(one: torch.Tensor, other: torch.Tensor, doubt: torch.Tensor | float = 0.0) -> float:
    """The largest distance of two elements, beyond what is in doubt of them."""
    if one.shape != other.shape:
        return float("inf")
    return _largest(((one.double() - other.double()).abs() - doubt).clamp(min=0)) if one.numel() else 0.0
