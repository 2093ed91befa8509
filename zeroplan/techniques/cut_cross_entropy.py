"""Cut cross-entropy: head and loss in one kernel that never holds logits (Wijmans et al. 2024, arXiv 2411.09009).

What it keeps is told by :mod:`zeroplan.trace.cut_cross_entropy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.option import RUNS, WORK, Option
from zeroplan.core.workload import ChunkedHead
from zeroplan.techniques.base import Facts, OptionValues, TakesTechniques, Technique
from zeroplan.techniques.liger import Liger


@dataclass(frozen=True, slots=True)
class CutCrossEntropy:
    """The loss never holds logits."""

    @property
    def key(self) -> str:
        """A short name for tapes."""
        return "cut-cross-entropy"

    def running(self, model: Any) -> AbstractContextManager[None]:
        """Let a model run with it while the context lasts."""
        from zeroplan.trace.cut_cross_entropy import cut_cross_entropy

        return cut_cross_entropy(model)


class CutCrossEntropyTechnique(Technique[CutCrossEntropy]):
    """Cut cross-entropy."""

    name = "cut cross-entropy"
    kind = CutCrossEntropy
    where = "--cut-cross-entropy"
    cut_cross_entropy = Option(bool, False, "Head and loss in one kernel that never holds logits.", WORK, without=RUNS)
    engines = ("ddp", "fsdp", "fsdp2", "deepspeed")
    refusal = "cut cross-entropy is not modelled under {engine}"
    remedy = "use --engine ddp, fsdp2, fsdp or deepspeed"

    def value(self, asked: OptionValues, engine: TakesTechniques) -> CutCrossEntropy | None:
        """Return it where ``--cut-cross-entropy`` asks for it."""
        return CutCrossEntropy() if asked[CutCrossEntropyTechnique.cut_cross_entropy] else None

    def require(self, value: CutCrossEntropy, facts: Facts) -> None:
        """Refuse other heads and losses, and what nothing here models."""
        super().require(value, facts)
        work = facts.workload
        liger = work.technique(Liger)
        both = {
            "--liger": liger is not None and "fused_loss" in liger.parts,
            "loss": work.has(ChunkedHead) or work.objective.pair_loss is not None,
        }
        for where, on in both.items():
            if on:
                raise BadInput(
                    "cut cross-entropy beside it is not modelled", where=where, remedy=f"leave it or {self.where} out"
                )

    def require_degrees(self, value: CutCrossEntropy, facts: Facts) -> None:
        """Refuse ranks that share a model."""
        self.require_unshared(facts, "cut cross-entropy over ranks that share a model is not modelled")

    def described(self, value: CutCrossEntropy) -> Mapping[str, Any]:
        """Return what a report's JSON shows."""
        return {"cut_cross_entropy": True}
