"""An evaluation between two steps, and batches of samples that differ in length: what runs with other shapes than a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroplan.core.evaluation import Evaluation
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import Workload
from zeroplan.techniques.base import Facts, Technique

if TYPE_CHECKING:
    from zeroplan.tape.expanded import ExpandedTape

_ENGINES = ("fsdp2", "ddp", "deepspeed", "fsdp")


class LengthsTechnique(Technique[tuple[int, ...]]):
    """Samples that differ in length, padded batch by batch."""

    name = "lengths"
    kind = tuple
    where = "--lengths"
    engines = _ENGINES
    searched = True

    def of(self, workload: Workload) -> tuple[int, ...] | None:
        """Return the lengths."""
        return workload.batch.lengths or None

    def require(self, value: tuple[int, ...], facts: Facts) -> None:
        """Refuse nothing: under other engines the plan says what no figure holds."""

    def left_out(self, value: tuple[int, ...], facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return what batches of other lengths reserve, where the tape has none of them or the engine does not play them."""
        if self.taken_by(facts.engine) and tape is not None and tape.shapes:
            return ()
        return (Unmodelled("lengths", Effect.MORE, "what is reserved when batches differ in length"),)


class EvaluationTechnique(Technique[Evaluation]):
    """An evaluation between two steps."""

    name = "evaluation"
    kind = Evaluation
    where = "--eval-batch"
    engines = _ENGINES
    searched = True

    def require(self, value: Evaluation, facts: Facts) -> None:
        """Refuse nothing: under other engines the plan says what no figure holds."""

    def left_out(self, value: Evaluation, facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return that it is in no figure, where its forward may need more than the training's: with more samples, with logits
        that stay, or with whole samples where the training's ranks share each (accelerate 1.15, accelerator.py:
        ``disable_in_eval``).
        """
        if self.taken_by(facts.engine) and tape is not None and tape.evaluation is not None:
            return ()
        if not value.kept and value.batch * facts.degrees["ulysses"] <= facts.workload.batch.micro_batch:
            return ()
        says = f"an evaluation with {value.batch} samples a GPU is in no figure"
        return (Unmodelled("evaluation", Effect.MORE, says),)
