"""Gradients that stay between steps as zeros: ``zero_grad(set_to_none=False)``, torch's default before 2.0."""

from __future__ import annotations

from zeroplan.core.option import RUNS, WORK, Option
from zeroplan.techniques.base import Technique


class KeptGradientsTechnique(Technique[bool]):
    """Gradients stay between steps."""

    name = "kept gradients"
    kind = bool
    where = "--no-set-to-none"
    leaf = "set_to_none"
    set_to_none = Option(
        bool,
        True,
        "zero_grad frees gradients, or keeps them as zeros (--engine ddp).",
        WORK,
        flag="--set-to-none/--no-set-to-none",
        without=RUNS,
    )
    engines = ("ddp",)
    refusal = "{engine} frees gradients after each step"
    remedy = "leave it out"

    def instructions(self, value: bool) -> tuple[str, ...]:
        """Return the call."""
        return ("call optimizer.zero_grad(set_to_none=False)",)
