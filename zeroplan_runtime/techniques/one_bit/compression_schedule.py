"""What the ranks exchange in each step of an optimizer that compresses, by its hyperparameters and the step's number alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zeroplan.core.one_bit import local_steps


class Exchanged(Enum):
    """What the ranks average in a step: gradients in their own dtype, or gradients or momenta in one bit an element."""

    GRADIENT = "gradient"  # as ever, in its own dtype
    SIGNS_OF_GRADIENT = "signs of gradient"  # in one bit an element; the second moment stays
    SIGNS_OF_MOMENTUM = "signs of momentum"  # in one bit an element; the second moment stays
    NOTHING = "nothing"  # ranks step alone
    SIGNS_OF_CHANGE = "signs of change"  # of what the masters have changed since the last such step, in one bit an element


#: What is exchanged in steps that each rank takes with its own momentum.
LOCAL = (Exchanged.NOTHING, Exchanged.SIGNS_OF_CHANGE)


@dataclass(frozen=True, slots=True)
class CompressionStep:
    """One step.

    Attributes:
        exchanged: what the ranks average.
        second_step: how many steps have updated the second moment, this one included.
        begins: it is the first that exchanges momentum.
    """

    exchanged: Exchanged
    second_step: int
    begins: bool = False

    @property
    def compresses(self) -> bool:
        """Whether gradients stay each rank's own, and one bit an element is exchanged."""
        return self.exchanged is not Exchanged.GRADIENT


def _one_bit_adam(step: int, hyper: Mapping[str, Any]) -> CompressionStep:
    """1-bit Adam (Tang et al. 2021, algorithm 1): Adam up to ``freeze_step``."""
    freeze = int(hyper["freeze_step"])
    if step <= freeze:
        return CompressionStep(Exchanged.GRADIENT, step)
    return CompressionStep(Exchanged.SIGNS_OF_MOMENTUM, freeze, begins=step == freeze + 1)


def _zero_one_adam(step: int, hyper: Mapping[str, Any]) -> CompressionStep:
    """0/1 Adam (Lu et al. 2022, algorithm 1).

    The second moment is updated every step at first, and half as often after each ``var_update_scaler`` updates (κ, section 6);
    in between the gradient's signs are exchanged, after ``var_freeze_step`` the momentum's. With ``local_step_clipper`` above 1
    steps that are no multiples of an interval are then local; it is 1 at first, and twice as long after each
    ``local_step_scaler`` steps, up to the clipper.
    """
    freeze, times = int(hyper["var_freeze_step"]), int(hyper["var_update_scaler"])
    frozen, now = step > freeze, min(step, freeze)
    done, count, interval = 0, 0, 1
    while True:
        first = (done // interval + 1) * interval
        last = first + (times - 1) * interval
        if now <= last:
            count += max(0, (now - first) // interval + 1)
            break
        done, count, interval = last, count + times, 2 * interval
    if frozen and (most := local_steps(hyper)):
        interval = min(most, 2 ** min((step - freeze - 1) // int(hyper["local_step_scaler"]), most.bit_length()))
        exchanged = Exchanged.NOTHING if step % interval else Exchanged.SIGNS_OF_CHANGE
        return CompressionStep(exchanged, count, begins=step == freeze + 1)
    if frozen:
        return CompressionStep(Exchanged.SIGNS_OF_MOMENTUM, count, begins=step == freeze + 1)
    updates = now % interval == 0 and now >= first
    return CompressionStep(Exchanged.GRADIENT if updates else Exchanged.SIGNS_OF_GRADIENT, count)


#: What is exchanged in applied step number n, from 1, with these hyperparameters; by the one that names the warm-up's last
#: step, the first of the row's ``exchange``.
SCHEDULES: dict[str, Callable[[int, Mapping[str, Any]], CompressionStep]] = {
    "freeze_step": _one_bit_adam,
    "var_freeze_step": _zero_one_adam,
}
