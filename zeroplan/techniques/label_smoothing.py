"""Label smoothing by transformers' Trainer, over whole logits outside the model (:mod:`zeroplan.trace.label_smoothing`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from zeroplan.core.errors import BadInput
from zeroplan.core.option import RUNS, WORK, Option
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import ChunkedHead, Precision
from zeroplan.techniques.base import Facts, FileFacts, OptionValues, TakesTechniques, Technique
from zeroplan.techniques.cut_cross_entropy import CutCrossEntropy
from zeroplan.techniques.liger import Liger, LigerTechnique

if TYPE_CHECKING:
    from zeroplan.tape.expanded import ExpandedTape


@dataclass(frozen=True, slots=True)
class LabelSmoothing:
    """The Trainer smooths labels by `share`, of which no memory follows; `wide`: the wrapper around the model makes its logits
    fp32.
    """

    wide: bool
    share: float = field(compare=False)

    @property
    def key(self) -> str:
        """A short name for tapes."""
        return "smoothed" + ("-fp32" if self.wide else "")

    def loss(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Run a model on a batch, and return the loss."""
        from zeroplan.trace.label_smoothing import smoothed_loss

        return smoothed_loss(model, batch, wide=self.wide)


class LabelSmoothingTechnique(Technique[LabelSmoothing]):
    """The Trainer's label smoothing."""

    name = "label smoothing"
    kind = LabelSmoothing
    where = "--label-smoothing"
    label_smoothing = Option[float | None](
        float,
        None,
        "Smooth labels by this share: 0.1 (the Trainer's label_smoothing_factor).",
        WORK,
        metavar="SHARE",
        without=RUNS,
    )
    keys: ClassVar[Mapping[str, Mapping[str, str]]] = {"hf-trainer": {"label_smoothing_factor": "label_smoothing"}}
    engines = ("ddp", "fsdp", "fsdp2", "deepspeed")
    refusal = "a loss of smoothed labels outside the model is not modelled under {engine}"
    remedy = "use --engine ddp, fsdp2, fsdp or deepspeed"
    apart = ("--compile", "--images")
    because = "label smoothing beside it is not modelled"

    def filled(self, value: Any, facts: FileFacts) -> Mapping[str, Any] | Unmodelled:
        """Return the share, or that no figure holds the logits that it reads where the files ask for Liger's loss."""
        if not facts.files[LigerTechnique.liger]:
            return {"label_smoothing": value}
        key = facts.key(LabelSmoothingTechnique.label_smoothing)
        return Unmodelled(key, Effect.MORE, "labels are smoothed over whole logits, which Liger's loss does not hold")

    def value(self, asked: OptionValues, engine: TakesTechniques) -> LabelSmoothing | None:
        """Return the smoothing; none where its share is 0."""
        share = asked[LabelSmoothingTechnique.label_smoothing]
        return LabelSmoothing(engine.casts_outputs, share) if share else None

    def setting(self, value: LabelSmoothing) -> float:
        """Return the share."""
        return value.share

    def require(self, value: LabelSmoothing, facts: Facts) -> None:
        """Refuse other losses beside it, and tasks without a label for each row of logits."""
        super().require(value, facts)
        work = facts.workload
        liger = work.technique(Liger)
        both = {
            "--liger": liger is not None and "fused_loss" in liger.parts,
            "--cut-cross-entropy": work.has(CutCrossEntropy),
            "loss": work.has(ChunkedHead) or work.objective.pair_loss is not None or work.objective.reference is not None,
        }
        for where, on in both.items():
            if on:
                raise BadInput(
                    "it holds no logits, which label smoothing reads", where=where, remedy=f"leave it or {self.where} out"
                )
        if facts.spec.auto_class.endswith("QuestionAnswering"):
            raise BadInput(
                "answers to questions have no labels, which the Trainer smooths", where=self.where, remedy="leave it out"
            )

    def require_degrees(self, value: LabelSmoothing, facts: Facts) -> None:
        """Refuse ranks that share a model."""
        self.require_unshared(facts, "label smoothing over ranks that share a model is not modelled")

    def left_out(self, value: LabelSmoothing, facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return that a model in 16 bits without autocast hands over narrower logits."""
        if not value.wide or facts.workload.numerics.precision is not Precision.PURE:
            return ()
        return (Unmodelled(self.where, Effect.LESS, "logits that nothing makes fp32 are counted in fp32"),)

    def described(self, value: LabelSmoothing) -> Mapping[str, Any]:
        """Return that it is on."""
        return {"label_smoothing": True}
