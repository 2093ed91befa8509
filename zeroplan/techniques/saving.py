"""What is saved between two steps (:class:`zeroplan.core.saving.Saving`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput, member_named
from zeroplan.core.option import RUNS, WORK, Option
from zeroplan.core.saving import Saver, Saving, StateDict
from zeroplan.techniques.base import Facts, FileFacts, OptionValues, TakesTechniques, Technique


class SavingTechnique(Technique[Saving]):
    """A save between two steps. `engines` are those whose state dict can leave the whole model on every GPU.

    Files alone say that the run `saves`, in the form of FSDP's `state_dict`, None for the program's default, by the code of
    `saver`.
    """

    name = "whole state dict on each GPU"
    kind = Saving
    where = "--save"
    decides = "saves"
    save = Option[str | None](
        str,
        None,
        "Save between steps: sharded, full (gathered on the first rank), or full-gpu (FSDP 1, on every GPU).",
        WORK,
        metavar="FORM",
        without=RUNS,
    )
    save_by = Option[str | None](
        str,
        None,
        "Whose code saves: loop (your own), accelerate, trainer or lightning. [loop]",
        WORK,
        metavar="WHO",
        without=RUNS,
    )
    save_only_model = Option(bool, False, "Save no optimizer states.", WORK, without=RUNS, merges=False)
    saves = Option(bool, False, merges=False)
    state_dict = Option[str | None](str, None, merges=False)
    saver = Option[str | None](str, None, merges=False)
    engines = ("fsdp",)
    refusal = "{engine} keeps no whole state dict on its GPUs"
    remedy = "use --save full, or --engine fsdp"

    def value(self, asked: OptionValues, engine: TakesTechniques) -> Saving | None:
        """Return what is saved between steps."""
        form, by = asked[SavingTechnique.save], asked[SavingTechnique.save_by]
        model_alone = asked[SavingTechnique.save_only_model]
        if form is None:
            for where, said in (("--save-by", by), ("--save-only-model", model_alone)):
                if said:
                    raise BadInput("nothing is saved", where=where, remedy="give --save sharded or --save full as well")
            return None
        found = member_named(StateDict, form, where="--save"), member_named(Saver, by or Saver.LOOP, where="--save-by")
        return Saving(*found, optimizer=not model_alone)

    def filled(self, value: bool, facts: FileFacts) -> Mapping[str, Any]:
        """Return saving by the program, in its form; a flag decides the form where the file leaves it open."""
        found = {}
        for option, theirs in ((SavingTechnique.save, "state_dict"), (SavingTechnique.save_by, "saver")):
            said, ours = facts.files.values.get(theirs), facts.flags[option]
            if said is not None and ours not in (None, said):
                raise BadInput(f"the file says {said}, the flag {ours}", where=option.where, remedy="change one of the two")
            found[option.name] = ours or said
        alone = any(said[SavingTechnique.save_only_model] for said in (facts.flags, facts.files))
        return {**found, "save": found["save"] or "full", "save_only_model": alone} if value else {}

    def require(self, value: Saving, facts: Facts) -> None:
        """Refuse a whole state dict on every GPU where the engine has none."""
        if value.state_dict is StateDict.FULL_GPU:
            super().require(value, facts)

    def instructions(self, value: Saving) -> tuple[str, ...]:
        """Return what is saved."""
        return (f"save {value.state_dict} states{'' if value.optimizer else ', the model alone'}",)

    def described(self, value: Saving) -> Mapping[str, Any]:
        """Return the form, whose code saves, and whether optimizer states are saved."""
        return {
            "saving": {"state_dict": value.state_dict.value, "saver": value.saver.value, "optimizer": value.optimizer},
        }
