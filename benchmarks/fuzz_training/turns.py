"""Plain trainings in which a gradient that is zero up to rounding lies on the other side of zero.

Rprop and Lion step by a sign. Where rounding decides that sign, two correct trainings part by a whole step; no tolerance tells
such a step from a fault. So the step itself is taken: an element counts as in doubt if the optimizer's update jumps between two
gradients that rounding does not tell apart, and plain torch trains again with the other gradient in that element.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import combinations, islice, product

import torch
from torch import nn

from benchmarks.fuzz_training.case import Case
from benchmarks.fuzz_training.plain import CHANGE, FP32, Plain, Trained, train

#: The gradient of an element at a step: the number of the step, of the parameter and of the element, and the value.
Turn = tuple[int, int, int, float]
#: Elements that are turned at a time, and trainings in all.
MOST, TRIES = 2, 300


class Notes:
    """What a training's gradients are before each step."""

    def __init__(self) -> None:
        self.steps: list[list[torch.Tensor]] = []

    def __call__(self, plain: Plain) -> None:
        self.steps.append([_grad(master).double().clone() for master in plain.masters])


class Jumps:
    """The elements in doubt of a training, each with the gradients that it may have.

    Args:
        rounding: by step and parameter, the largest distance by which rounding moves a gradient.
        zeros: by step and parameter, the elements whose gradient is exactly zero however one rounds.
    """

    def __init__(self, rounding: list[list[float]], zeros: list[list[torch.Tensor]]) -> None:
        self._rounding, self._zeros = rounding, zeros
        self.found: list[list[Turn]] = []
        self._step = 0

    def __call__(self, plain: Plain) -> None:
        if self._step == len(self._rounding):
            return
        rounding, zeros = self._rounding[self._step], self._zeros[self._step]
        up, down = (_after_step(plain, [sign * far for far in rounding]) for sign in (1, -1))
        for i, (master, above, below) in enumerate(zip(plain.masters, up, down, strict=True)):
            if not master.numel():
                continue
            smooth = CHANGE["fp32"] * (master - plain.start[i]).abs().max() + FP32 * master.abs().max()
            jumps = ((above - below).abs() > smooth) & ~zeros[i]
            for element in jumps.flatten().nonzero().flatten().tolist():
                value = _grad(master).flatten()[element].item()
                others = {value + rounding[i], value - rounding[i], *((0.0,) if abs(value) <= rounding[i] else ())}
                self.found.append([(self._step, i, element, other) for other in sorted(others)])
        self._step += 1


class Turned:
    """Gives elements other gradients."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns, self._step = turns, 0

    def __call__(self, plain: Plain) -> None:
        for step, i, element, value in self._turns:
            if step == self._step:
                _grad(plain.masters[i]).view(-1)[element] = value
        self._step += 1


def _grad(master: nn.Parameter) -> torch.Tensor:
    assert master.grad is not None
    return master.grad


def _after_step(plain: Plain, shifts: list[float]) -> list[torch.Tensor]:
    """The masters after a step whose gradients are shifted; nothing of `plain` changes."""
    masters, optimizer = copy.deepcopy((plain.masters, plain.optimizer))
    for mine, master, shift in zip(masters, plain.masters, shifts, strict=True):
        mine.grad = _grad(master) + shift
    optimizer.step()
    return [master.detach() for master in masters]


def jumps(case: Case, slack: float, nudges: Sequence[float]) -> list[list[Turn]]:
    """By element in doubt, the other gradients that rounding may give it.

    Args:
        case: the training, in fp32.
        slack: how many times as far as rounding moves plain torch itself.
        nudges: factors on the loss that make the backward round otherwise.
    """
    own = Notes()
    train(case, look=own)
    others = [Notes() for _ in range(len(nudges) + 1)]
    for nudge, notes in zip(nudges, others[1:], strict=True):
        train(case, nudge=nudge, look=notes)
    train(case, wider=True, look=others[0])
    rounding, zeros = [], []
    for step, grads in enumerate(own.steps):
        apart = [[(grad - other.steps[step][i]).abs() for other in others] for i, grad in enumerate(grads)]
        rounding.append([slack * max((one.max().item() for one in each if one.numel()), default=0.0) for each in apart])
        zeros.append([(grad == 0) & (sum(each) == 0) for grad, each in zip(grads, apart, strict=True)])
    found = Jumps(rounding, zeros)
    train(case, look=found)
    return found.found


def turned(case: Case, doubts: list[list[Turn]]) -> Iterator[Trained]:
    """Trainings with other gradients in one element in doubt, then in two, as long as there are not too many."""
    many = (turns for count in range(1, MOST + 1) for few in combinations(doubts, count) for turns in product(*few))
    for turns in islice(many, TRIES):
        yield train(case, look=Turned(turns))
