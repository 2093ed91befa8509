"""Progressive layer dropping: which blocks of a model a step leaves out.

The rule is Algorithm 1 of Zhang and He, Accelerating Training of Transformer-Based Language Models with Progressive Layer
Dropping (arXiv 2010.13369); keys and θ(t) are those of DeepSpeed's ``runtime/progressive_layer_drop.py``, which 0.19.8 removed.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from typing import Any

from zeroplan.core.errors import BadInput

#: The section's name.
LAYER_DROP = "progressive_layer_drop"


@dataclass(frozen=True, slots=True)
class ProgressiveLayerDrop:
    """The schedule of one training.

    Attributes:
        theta: θ̄, which θ falls to; the last block is kept with about this probability in the end.
        gamma: how fast θ falls, for each step.

    Raises:
        BadInput: naming the key that is impossible.
    """

    theta: float = 0.5
    gamma: float = 0.001

    def __post_init__(self) -> None:
        for name, most in (("theta", 1.0), ("gamma", math.inf)):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and 0 <= value <= most and math.isfinite(value)):
                said = "is no share from 0 to 1" if name == "theta" else "is no rate of 0 or more"
                raise BadInput(f"{value!r} {said}", where=name, remedy="write 0.5" if name == "theta" else "write 0.001")

    def theta_at(self, step: int) -> float:
        """Return θ(t) = (1 − θ̄) e^(−γt) + θ̄ after `step` steps: 1 before the first."""
        return (1.0 - self.theta) * math.exp(-self.gamma * step) + self.theta

    def keep_probabilities(self, step: int, layers: int) -> tuple[float, ...]:
        """Return the probability with which each of `layers` blocks is kept: 1 − l/L · (1 − θ(t)), with l from 0.

        So the first block is always kept, and none has the probability 0.
        """
        falls = 1.0 - self.theta_at(step)
        return tuple(1.0 - layer / layers * falls for layer in range(layers))

    def kept(self, step: int, layers: int, seed: int) -> tuple[bool, ...]:
        """Return which blocks the step after `step` others keeps. It follows from the arguments alone, on every machine."""
        draw = random.Random(f"{seed}:{step}")
        return tuple(draw.random() < probability for probability in self.keep_probabilities(step, layers))

    def mean_kept(self, first: int, last: int, layers: int) -> float:
        """Return the expected share of blocks that the steps after `first` to `last` - 1 others keep."""
        return math.fsum(sum(self.keep_probabilities(step, layers)) / layers for step in range(first, last)) / (last - first)

    def as_section(self) -> dict[str, Any]:
        """Return the section of a ds_config."""
        return {"enabled": True, **asdict(self)}
