"""The dtype in which gradients are reduced, where the program says it: FSDP2's ``MixedPrecisionPolicy``."""

from __future__ import annotations

from zeroplan.core.workload import DType, Workload
from zeroplan.techniques.base import Technique


class ReducedGradientsTechnique(Technique[DType]):
    """Gradients that are reduced in a dtype of the program's choice."""

    name = "reduce dtype"
    kind = DType
    where = "--reduce-dtype"
    engines = ("fsdp2",)
    refusal = "{engine} has no such policy"
    remedy = "leave it out, or use --engine fsdp2"
    searched = True

    def of(self, workload: Workload) -> DType | None:
        """Return the dtype."""
        return workload.numerics.reduce_dtype


REDUCED_GRADIENTS = ReducedGradientsTechnique()
