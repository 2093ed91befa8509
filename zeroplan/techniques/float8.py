"""Linear layers that multiply in 8-bit floats (:mod:`zeroplan.core.float8`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import (
    FLOAT8_CAPABILITY,
    MEGATRON_RECIPES,
    MXFP8_CAPABILITY,
    RUNTIME_RECIPES,
    TORCHAO_RECIPES,
    Bf16Layers,
    Float8Recipe,
    parse_recipe,
)
from zeroplan.core.option import RUNS, SEARCHES, WORK, Option
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import DType
from zeroplan.techniques.base import Facts, FileFacts, OptionValues, TakesTechniques, Technique


class Float8Technique(Technique[Float8Recipe]):
    """Products of 8-bit floats."""

    name = "fp8"
    kind = Float8Recipe
    where = "--fp8"
    shown = "fp8"
    decides = "fp8"
    fp8 = Option[str | None](
        str,
        None,
        "Linear layers multiply in 8 bits: tensorwise, blockwise, rowwise, rowwise_with_gw_hp (torchao), delayed, mxfp8.",
        WORK,
        metavar="RECIPE",
        without=(*(verb for verb in SEARCHES if verb != "recommend"), *RUNS),
        wins=True,
        merges=False,
    )
    engines = ("fsdp2", "ddp", "zeroplan", "megatron")
    recipes: ClassVar[Mapping[str, tuple[Float8Recipe, ...]]] = {  # others run torchao's
        "zeroplan": RUNTIME_RECIPES,
        "megatron": MEGATRON_RECIPES,
    }
    shares = ("megatron",)  # whose ranks may share more than samples
    refusal = "8-bit products are not modelled under {engine}"
    remedy = "use --engine fsdp2, ddp, zeroplan or megatron"
    apart = ("--lora-rank",)
    because = "adapters beside 8-bit products are not modelled"

    def value(self, asked: OptionValues, engine: TakesTechniques) -> Float8Recipe | None:
        """Return the recipe of the products."""
        name = asked[Float8Technique.fp8]
        return None if name is None else parse_recipe(name)

    def filled(self, value: str, facts: FileFacts) -> Mapping[str, Any] | Unmodelled:
        """Return 8-bit products under an engine that plans them; elsewhere, and beside adapters, they are left out."""
        if self.taken_by(facts.engine) and "lora_rank" not in facts.files.values and not facts.degrees:
            return {"fp8": value}
        return Unmodelled(facts.key(Float8Technique.fp8), Effect.UNKNOWN, "fp8 products; bf16 ones are counted")

    def written(self, value: Float8Recipe, program: str) -> Mapping[str, Any]:
        """Return the runtime's key."""
        return {"float8": str(value)} if program == "zeroplan" else {}

    def instructions(self, value: Float8Recipe) -> tuple[str, ...]:
        """Return the recipe."""
        return (f"multiply in 8 bits by the recipe {value}",)

    def require(self, value: Float8Recipe, facts: Facts) -> None:
        """Refuse other arithmetic, and cards without such products."""
        work = facts.workload
        if work.numerics.dtype is not DType.BF16:
            what = f"8-bit products stand in for bf16's, not {work.numerics.dtype}'s"
            raise BadInput(what, where=self.where, remedy="use --dtype bf16")
        super().require(value, facts)
        known = self.recipes.get(facts.engine.name, TORCHAO_RECIPES)
        if value not in known:
            what = f"{value} is not a recipe of {facts.engine.name}"
            raise BadInput(what, where=self.where, remedy=f"use {', '.join(known[:-1])} or {known[-1]}")
        if facts.cluster.gpu.amd:
            what = f"8-bit products of {facts.cluster.gpu.name} are not modelled: ROCm's were not read"
            raise BadInput(what, where=self.where, remedy="leave it out")
        blocks = value is Float8Recipe.MXFP8
        if facts.cluster.gpu.capability < (MXFP8_CAPABILITY if blocks else FLOAT8_CAPABILITY):
            what = f"{facts.cluster.gpu.name} has no 8-bit floats{' with a scale for each 32 of them' if blocks else ''}"
            raise BadInput(what, where=self.where, remedy=f"leave it out, or name {'a B200' if blocks else 'an H100'}")

    def require_degrees(self, value: Float8Recipe, facts: Facts) -> None:
        """Refuse ranks that share more than samples."""
        if facts.shared and facts.engine.name not in self.shares:
            raise BadInput("8-bit products are modelled for data parallelism alone", where=self.where, remedy=facts.alone)


class Bf16LayersTechnique(Technique[Bf16Layers]):
    """Blocks at the model's ends that 8-bit products leave out: keys of the included runtime's file."""

    name = "blocks in bf16"
    kind = Bf16Layers
    where = "zeroplan.num_layers_at_start_in_bf16"
    engines = ("zeroplan",)
    refusal = "blocks in bf16 beside others in 8 bits are not modelled under {engine}"
    remedy = "use --engine zeroplan, or leave the keys out"

    def written(self, value: Bf16Layers, program: str) -> Mapping[str, Any]:
        """Return the runtime's keys."""
        return self.described(value) if program == "zeroplan" else {}

    def instructions(self, value: Bf16Layers) -> tuple[str, ...]:
        """Return which blocks they are."""
        return (f"leave the first {value.at_start} and the last {value.at_end} blocks in bf16",)

    def described(self, value: Bf16Layers) -> Mapping[str, Any]:
        """Return both numbers."""
        return {"num_layers_at_start_in_bf16": value.at_start, "num_layers_at_end_in_bf16": value.at_end}


FLOAT8 = Float8Technique()
