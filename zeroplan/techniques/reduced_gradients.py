"""The dtype in which gradients are reduced, where the program says it: FSDP2's ``MixedPrecisionPolicy``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput, member_named
from zeroplan.core.option import RUNS, SEARCHES, WORK, Option
from zeroplan.core.workload import DType
from zeroplan.techniques.base import FileFacts, OptionValues, TakesTechniques, Technique

_NOT_SEARCHED = (*SEARCHES, *RUNS)


class ReducedGradientsTechnique(Technique[DType]):
    """Gradients that are reduced in a dtype of the program's choice."""

    name = "reduce dtype"
    kind = DType
    where = "--reduce-dtype"
    in_forms = True
    leaf = "reduce_dtype"
    decides = "reduce_dtype"
    reduce_dtype = Option[str | None](
        str,
        None,
        "In which gradients are reduced: fp32, or that of --dtype (--engine fsdp2). [fp32]",
        WORK,
        without=_NOT_SEARCHED,
        wins=True,
        merges=False,
    )
    engines = ("fsdp2",)
    refusal = "{engine} has no such policy"
    remedy = "leave it out, or use --engine fsdp2"

    def leaves(self, asked: OptionValues, engine: TakesTechniques) -> Mapping[str, Any]:
        """Return the dtype in which gradients are reduced, where it is not the engine's own."""
        said = asked[ReducedGradientsTechnique.reduce_dtype]
        if said is None:
            return {}
        found, dtype = member_named(DType, said, where=self.where), DType(asked.values.get("dtype", DType.BF16))
        if found not in (DType.FP32, dtype):
            what = f"gradients made in {dtype} are not reduced in {found}"
            raise BadInput(what, where=self.where, remedy=f"use fp32 or {dtype}")
        return {"reduce_dtype": found}

    def filled(self, value: str, facts: FileFacts) -> Mapping[str, Any]:
        """Return the files' dtype under an engine that has such a policy; ``products`` stands for that of the arithmetic."""
        dtype = facts.flags.values.get("dtype") or facts.files.values.get("dtype") or "bf16"
        return {"reduce_dtype": dtype if value == "products" else value} if self.taken_by(facts.engine) else {}


REDUCED_GRADIENTS = ReducedGradientsTechnique()
