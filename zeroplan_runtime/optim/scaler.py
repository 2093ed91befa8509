"""Loss scales for fp16, by DeepSpeed's rules (runtime/fp16/loss_scaler.py of 0.19.8)."""

from __future__ import annotations

from dataclasses import dataclass, field

from zeroplan.core.errors import BadInput


@dataclass(slots=True)
class LossScaler:
    """The factor on the loss, static or dynamic; bf16 and fp32 use the static scale 1.

    Attributes:
        scale: the factor.
        dynamic: change the factor: halve it on overflow, double it after `window` steps without one.
        window: steps without overflow after which the scale doubles.
        hysteresis: the overflow that halves the scale first: 2 tolerates one overflow.
        consecutive_hysteresis: a step without overflow restores the hysteresis; otherwise only a doubling does.
        min_scale: the least scale.
        stays_at_least: an overflow at `min_scale` is skipped; otherwise it ends the run.
        iteration: steps seen, skipped ones included.
        last_overflow: the iteration of the last overflow.
        left: the hysteresis that is left; at 1 the next overflow halves the scale.
    """

    scale: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0
    stays_at_least: bool = False
    iteration: int = 0
    last_overflow: int = -1
    left: int = field(default=-1)

    def __post_init__(self) -> None:
        if self.left < 0:
            self.left = self.hysteresis

    @property
    def can_fall(self) -> bool:
        """Whether an overflow may make the scale smaller."""
        return self.dynamic and self.scale > self.min_scale

    def update(self, overflow: bool) -> None:
        """Adapts the scale to one step's outcome.

        Raises:
            BadInput: on overflow at `min_scale`, when the scale cannot be halved, unless it stays there.
        """
        if not self.dynamic:
            return
        if overflow:
            if self.hysteresis == 1 or self.left == 1:
                if self.scale == self.min_scale and not self.stays_at_least:
                    raise BadInput(
                        f"the gradients overflow at the least loss scale, {self.min_scale:g}",
                        where="fp16.min_loss_scale",
                        remedy="train in bf16, or lower the learning rate",
                    )
                self.scale = max(self.scale / 2, self.min_scale)
            else:
                self.left -= 1
            self.last_overflow = self.iteration
        else:
            if self.consecutive_hysteresis:
                self.left = self.hysteresis
            stable = self.iteration - self.last_overflow - 1
            if stable > 0 and stable % self.window == 0:
                self.left = self.hysteresis
                self.scale *= 2
        self.iteration += 1

    def state_dict(self) -> dict[str, float]:
        """Returns the state for a checkpoint."""
        return {"scale": self.scale, "iteration": self.iteration, "last_overflow": self.last_overflow, "left": self.left}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continues from :meth:`state_dict`."""
        self.scale = float(state["scale"])
        self.iteration, self.last_overflow, self.left = (int(state[k]) for k in ("iteration", "last_overflow", "left"))
