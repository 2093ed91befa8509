"""Linear layers that multiply in 8-bit floats, as torchao's float8 training runs them (:mod:`zeroplan.core.float8`)."""

from __future__ import annotations

from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import FLOAT8_CAPABILITY, Float8Recipe, parse_recipe
from zeroplan.core.option import RUNS, SEARCHES, WORK, Option
from zeroplan.core.workload import DType, Lora
from zeroplan.techniques.base import Asked, Facts, Technique


class Float8Technique(Technique[Float8Recipe]):
    """Products of 8-bit floats."""

    name = "fp8"
    kind = Float8Recipe
    where = "--fp8"
    fp8 = Option[str | None](
        str,
        None,
        "Linear layers multiply in 8 bits (torchao): tensorwise, rowwise or rowwise_with_gw_hp (--engine fsdp2 or ddp).",
        WORK,
        metavar="RECIPE",
        without=(*(verb for verb in SEARCHES if verb != "recommend"), *RUNS),
        wins=True,
    )
    engines = ("fsdp2", "ddp")
    refusal = "8-bit products are not modelled under {engine}"
    remedy = "use --engine fsdp2 or ddp"
    searched = True

    def value(self, asked: Asked) -> Float8Recipe | None:
        """Return the recipe of the products.

        Raises:
            BadInput: an unknown name.
        """
        name = asked[Float8Technique.fp8]
        return None if name is None else parse_recipe(name)

    def require(self, value: Float8Recipe, facts: Facts) -> None:
        """Refuse other engines and arithmetic, adapters, which are not modelled beside them, and cards without such products.

        Raises:
            BadInput: naming the flag.
        """
        work = facts.workload
        if work.numerics.dtype is not DType.BF16:
            what = f"8-bit products stand in for bf16's, not {work.numerics.dtype}'s"
            raise BadInput(what, where=self.where, remedy="use --dtype bf16")
        if work.has(Lora):
            what = "adapters beside 8-bit products are not modelled"
            raise BadInput(what, where=self.where, remedy="leave --lora-rank out")
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
