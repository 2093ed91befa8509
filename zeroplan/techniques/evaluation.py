"""An evaluation between two steps (:mod:`zeroplan.core.evaluation`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zeroplan.core.errors import BadInput
from zeroplan.core.evaluation import Evaluation
from zeroplan.core.option import RUNS, WORK, Option
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.techniques.base import Facts, OptionValues, TakesTechniques, Technique

if TYPE_CHECKING:
    from zeroplan.tape.expanded import ExpandedTape


class EvaluationTechnique(Technique[Evaluation]):
    """An evaluation between two steps."""

    name = "evaluation"
    kind = Evaluation
    where = "--eval-batch"
    eval_batch = Option[int | None](
        int, None, "Evaluate between steps, with so many samples a GPU and pass.", WORK, least=1, without=RUNS
    )
    eval_logits = Option(
        int,
        0,
        "Batches whose logits the evaluation keeps on the GPU (eval_accumulation_steps). [0]",
        WORK,
        least=1,
        without=RUNS,
    )
    engines = ("fsdp2", "ddp", "deepspeed", "fsdp")

    def value(self, asked: OptionValues, engine: TakesTechniques) -> Evaluation | None:
        """Return the evaluation between steps."""
        batch, kept = asked[EvaluationTechnique.eval_batch], asked[EvaluationTechnique.eval_logits]
        if batch is None:
            if kept:
                raise BadInput("logits without an evaluation", where="--eval-logits", remedy="give --eval-batch 8 as well")
            return None
        return Evaluation(batch, kept, casts=engine.casts_outputs)

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

    def instructions(self, value: Evaluation) -> tuple[str, ...]:
        """Return its samples."""
        return (f"evaluate in passes of at most {value.batch} samples a GPU",)

    def described(self, value: Evaluation) -> Mapping[str, Any]:
        """Return samples of a pass, and batches whose logits stay."""
        return {"evaluation": {"batch": value.batch, "kept": value.kept}}
