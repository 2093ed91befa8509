"""What a loss over preferences passes: pairs of a chosen and a rejected sample (:class:`zeroplan.core.preferences.PairLoss`), a
reference model, and KTO's second batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from zeroplan.core.option import Option
from zeroplan.core.preferences import PairLoss
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import Objective, Reference, Workload
from zeroplan.techniques.base import Facts, FileFacts, Technique
from zeroplan.techniques.quantized_base import QuantizedBaseTechnique

if TYPE_CHECKING:
    from zeroplan.tape.expanded import ExpandedTape


class PairLossTechnique(Technique[PairLoss]):
    """A loss over pairs. `engines` are those of which it is known in which dtype a loss outside the model gets its logits, and
    `measured` the losses that runs on a GPU have measured.

    Files and ``--task`` say the options: whether a chosen and a rejected sample pass together (`pairs`), and how they meet in a
    loss over all their logits (`pair_loss`).
    """

    name = "pair loss"
    kind = PairLoss
    where = "--task"
    in_forms = True  # it follows from the pairs
    leaf = "pair_loss"
    pairs = Option(bool, False)
    pair_loss = Option[PairLoss | None](PairLoss, None)
    engines = ("ddp", "deepspeed", "fsdp")
    measured: ClassVar[Mapping[str, tuple[PairLoss, ...]]] = {"ddp": (PairLoss.RANKING, PairLoss.RANKING_AND_NLL)}

    def left_out(self, value: PairLoss, facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return how sure the figures of the logits are."""
        if value in self.measured.get(facts.engine.name, ()):
            return ()
        unknown = f"the dtype in which {facts.engine.name} hands the logits to the loss"
        says = "the loss over whole logits was measured on no GPU" if self.taken_by(facts.engine) else unknown
        return (Unmodelled("task", Effect.UNKNOWN, says),)


class ReferenceTechnique(Technique[Objective]):
    """A model that answers beside the trained one, and a second batch for KTO's KL term (`kl_batch`)."""

    name = "reference model"
    kind = Objective
    where = "--task"
    decides = "reference"
    reference = Option[Reference | None](Reference, None, merges=False)
    kl_batch = Option(bool, False)

    def of(self, workload: Workload) -> Objective | None:
        """Return the objective, where it asks more than the trained model's own batch."""
        found = workload.objective
        return found if found.reference is not None or found.kl_batch else None

    def filled(self, value: Reference, facts: FileFacts) -> Mapping[str, Any] | Unmodelled:
        """Return the reference beside a base in whole numbers."""
        if facts.files[QuantizedBaseTechnique.quantize] is None:
            return {"reference": value}
        says = "the forward of the quantised model without adapters"
        return Unmodelled(f"task {facts.task}", Effect.MORE, says)

    def instructions(self, value: Objective) -> tuple[str, ...]:
        """Return who answers beside the trained model, and the second batch."""
        said = []
        if value.reference is not None:
            base = value.reference is Reference.BASE
            who = "the model with its adapters switched off" if base else "a frozen copy of the model"
            said.append(f"ask {who} as the reference")
        return (*said, *(["pass a second batch for the KL term"] if value.kl_batch else []))
