"""What is saved between two steps (:class:`zeroplan.core.saving.Saving`)."""

from __future__ import annotations

from zeroplan.core.errors import BadInput
from zeroplan.core.saving import Saving, StateDict
from zeroplan.techniques.base import Facts, Technique


class SavingTechnique(Technique[Saving]):
    """A save between two steps. `engines` are those whose state dict can leave the whole model on every GPU."""

    name = "whole state dict on each GPU"
    kind = Saving
    where = "--save"
    engines = ("fsdp",)
    refusal = "{engine} keeps no whole state dict on its GPUs"
    remedy = "use --save full, or --engine fsdp"
    searched = True

    def require(self, value: Saving, facts: Facts) -> None:
        """Refuse a whole state dict on every GPU where the engine has none.

        Raises:
            BadInput: naming the flag.
        """
        if value.state_dict is StateDict.FULL_GPU and not self.taken_by(facts.engine):
            raise BadInput(self.refusal.format(engine=facts.engine.name), where=self.where, remedy=self.remedy)
