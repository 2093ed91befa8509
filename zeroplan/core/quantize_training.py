"""Mixture of quantization: weights that are rounded to fewer and fewer bits while they are trained.

Keys and rule are those of DeepSpeed's ``quantize_training`` (``runtime/quantize.py`` of 0.4 and 0.5, whose offset counts as
here), which 0.19.7 removed. Masters keep their full precision: what forward and backward see is rounded, and the gradient of
what they see goes to the masters, as in quantisation-aware training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from zeroplan.core.errors import BadInput

#: The section's name.
QUANTIZE_TRAINING = "quantize_training"

#: Elements that are rounded at once, at most.
CHUNK = 1 << 22

_FEWEST, _MOST = 3, 16
_KINDS, _ROUNDINGS = ("symmetric", "asymmetric"), ("nearest", "stochastic")


class Rounding(NamedTuple):
    """How the weights of one step are rounded.

    Attributes:
        bits: of an integer.
        real: the share of the weights as they are in what the model sees (``fp16_mixed_quantize``).
    """

    bits: int
    real: float


@dataclass(frozen=True, slots=True)
class QuantizeTraining:
    """The schedule of one training.

    Attributes:
        start_bits: of the first steps that round.
        target_bits: of the last.
        quantize_period: steps after which a bit goes; each bit takes as long again as all before it.
        schedule_offset: steps before weights are rounded at all.
        quantize_groups: parts of each weight that have a scale of their own.
        q_type: symmetric or asymmetric.
        rounding: nearest or stochastic.
        quantize_change_ratio: by how much the share of unrounded weights falls a step after a change; None without mixing.

    Raises:
        BadInput: naming the key that is impossible.
    """

    start_bits: int = 16
    target_bits: int = 8
    quantize_period: int = 1000
    schedule_offset: int = 1000
    quantize_groups: int = 1
    q_type: str = "symmetric"
    rounding: str = "nearest"
    quantize_change_ratio: float | None = None

    def __post_init__(self) -> None:
        for name, least, most in (
            ("start_bits", _FEWEST, _MOST),
            ("target_bits", _FEWEST, _MOST),
            ("quantize_period", 1, None),
            ("schedule_offset", 0, None),
            ("quantize_groups", 1, None),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
                known = f"{least} to {most}" if most is not None else f"{least} or more"
                raise BadInput(f"{value!r} is no whole number of {known}", where=_PATHS[name], remedy="write one")
        if self.target_bits > self.start_bits:
            what = f"{self.target_bits} is more than the {self.start_bits} bits of the start"
            raise BadInput(what, where=_PATHS["target_bits"], remedy="write no more than start_bits")
        for name, known_values in (("q_type", _KINDS), ("rounding", _ROUNDINGS)):
            if getattr(self, name) not in known_values:
                what = f"{getattr(self, name)!r} is not known"
                raise BadInput(what, where=_PATHS[name], remedy=f"use {' or '.join(known_values)}")
        ratio = self.quantize_change_ratio
        if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1):
            what = f"{ratio!r} is no share of more than 0 up to 1"
            raise BadInput(what, where=_PATHS["quantize_change_ratio"], remedy="write 0.001")

    def at(self, step: int) -> Rounding | None:
        """Return how weights are rounded after `step` steps; None for not at all."""
        if step < max(self.schedule_offset, 1):
            return None
        since = step - self.schedule_offset
        changes = [self.quantize_period << k for k in range(self.start_bits - self.target_bits)]
        passed = [change for change in changes if change <= since]
        real = 0.0
        if self.quantize_change_ratio is not None:  # it falls from the training's start on, and again after each change
            falling = since - passed[-1] if passed else step
            real = max(0.0, 1.0 - falling * self.quantize_change_ratio)
        return Rounding(self.start_bits - len(passed), real)

    @property
    def symmetric(self) -> bool:
        """Whether zero is an integer's zero."""
        return self.q_type == "symmetric"

    @property
    def stochastic(self) -> bool:
        """Whether noise decides which way a weight is rounded."""
        return self.rounding == "stochastic"

    def words(self, largest: int) -> int:
        """Return the fp32 words that rounding works in, for weights of at most `largest` elements: a part of a weight, noise
        for it, and three numbers a group.
        """
        return min(CHUNK, largest) * (2 if self.stochastic else 1) + 3 * self.quantize_groups

    def as_section(self) -> dict[str, Any]:
        """Return the section of a ds_config."""
        found: dict[str, Any] = {
            "enabled": True,
            "quantize_bits": {"start_bits": self.start_bits, "target_bits": self.target_bits},
            "quantize_schedule": {"quantize_period": self.quantize_period, "schedule_offset": self.schedule_offset},
            "quantize_groups": self.quantize_groups,
            "quantize_algo": {"q_type": self.q_type, "rounding": self.rounding},
        }
        if self.quantize_change_ratio is not None:
            found["fp16_mixed_quantize"] = {"enabled": True, "quantize_change_ratio": self.quantize_change_ratio}
        return found


#: Where each attribute stands in the section.
_PATHS = {
    "start_bits": "quantize_bits.start_bits",
    "target_bits": "quantize_bits.target_bits",
    "quantize_period": "quantize_schedule.quantize_period",
    "schedule_offset": "quantize_schedule.schedule_offset",
    "quantize_groups": "quantize_groups",
    "q_type": "quantize_algo.q_type",
    "rounding": "quantize_algo.rounding",
    "quantize_change_ratio": "fp16_mixed_quantize.quantize_change_ratio",
}
