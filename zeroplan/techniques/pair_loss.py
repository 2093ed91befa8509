"""Losses over all logits of pairs: a chosen and a rejected sample (:class:`zeroplan.core.preferences.PairLoss`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from zeroplan.core.preferences import PairLoss
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import Workload
from zeroplan.techniques.base import Facts, Technique

if TYPE_CHECKING:
    from zeroplan.tape.expanded import ExpandedTape


class PairLossTechnique(Technique[PairLoss]):
    """A loss over pairs. `engines` are those of which it is known in which dtype a loss outside the model gets its logits, and
    `measured` the losses that runs on a GPU have measured.
    """

    name = "pair loss"
    kind = PairLoss
    where = "--task"
    engines = ("ddp", "deepspeed", "fsdp")
    searched = True
    measured: ClassVar[Mapping[str, tuple[PairLoss, ...]]] = {"ddp": (PairLoss.RANKING, PairLoss.RANKING_AND_NLL)}

    def of(self, workload: Workload) -> PairLoss | None:
        """Return the loss."""
        return workload.objective.pair_loss

    def require(self, value: PairLoss, facts: Facts) -> None:
        """Refuse nothing: under other engines the plan says what no figure holds."""

    def left_out(self, value: PairLoss, facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return how sure the figures of the logits are."""
        if value in self.measured.get(facts.engine.name, ()):
            return ()
        unknown = f"the dtype in which {facts.engine.name} hands the logits to the loss"
        says = "the loss over whole logits was measured on no GPU" if self.taken_by(facts.engine) else unknown
        return (Unmodelled("task", Effect.UNKNOWN, says),)
