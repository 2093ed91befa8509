"""Linear layers that multiply in 8-bit floats, as torchao's float8 training runs them (:mod:`zeroplan.core.float8`)."""

from __future__ import annotations

from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import FLOAT8_CAPABILITY, Float8Recipe
from zeroplan.techniques.base import Facts, Technique


class Float8Technique(Technique[Float8Recipe]):
    """Products of 8-bit floats."""

    name = "fp8"
    kind = Float8Recipe
    where = "--fp8"
    engines = ("fsdp2", "ddp")
    refusal = "8-bit products are not modelled under {engine}"
    remedy = "use --engine fsdp2 or ddp"
    searched = True

    def require(self, value: Float8Recipe, facts: Facts) -> None:
        """Refuse other engines, and cards without such products.

        Raises:
            BadInput: naming the flag.
        """
        super().require(value, facts)
        if facts.cluster.gpu.capability < FLOAT8_CAPABILITY:
            what = f"{facts.cluster.gpu.name} has no 8-bit floats"
            raise BadInput(what, where=self.where, remedy="leave it out, or name an H100")

    def require_degrees(self, value: Float8Recipe, facts: Facts) -> None:
        """Refuse ranks that share more than samples.

        Raises:
            BadInput: naming the flag.
        """
        if facts.shared:
            raise BadInput("8-bit products are modelled for data parallelism alone", where=self.where, remedy=facts.alone)


FLOAT8 = Float8Technique()
