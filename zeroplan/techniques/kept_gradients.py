"""Gradients that stay between steps as zeros: ``zero_grad(set_to_none=False)``, torch's default before 2.0."""

from __future__ import annotations

from zeroplan.core.workload import Workload
from zeroplan.techniques.base import Technique


class KeptGradientsTechnique(Technique[bool]):
    """Gradients stay between steps."""

    name = "kept gradients"
    kind = bool
    where = "--no-set-to-none"
    engines = ("ddp",)
    refusal = "{engine} frees gradients after each step"
    remedy = "leave it out"
    searched = True

    def of(self, workload: Workload) -> bool | None:
        """Return True where ``zero_grad`` keeps them."""
        return None if workload.loop.set_to_none else True
