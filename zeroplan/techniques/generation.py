"""Completions that the model generates before each step, and vLLM's engine on the GPUs that train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zeroplan.core.generation import Colocated, Generation
from zeroplan.core.option import Option
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.techniques.base import Facts, OptionValues, TakesTechniques, Technique

if TYPE_CHECKING:
    from zeroplan.tape.expanded import ExpandedTape

_GENERATED = "generation is counted, but two measured runs of GRPO reserved 4 % more than their plans"


class GenerationTechnique(Technique[Generation]):
    """Completions that the model generates between steps."""

    name = "generation"
    kind = Generation
    where = "--from"
    generation = Option[Generation | None](object, None)
    engines = ("ddp", "deepspeed")

    def value(self, asked: OptionValues, engine: TakesTechniques) -> Generation | None:
        """Return what files say is generated."""
        found = asked[GenerationTechnique.generation]
        return None if found is None else replace(found, casts=engine.casts_outputs)

    def left_out(self, value: Generation, facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return how sure the figures of completions and their cache are."""
        if self.taken_by(facts.engine) and tape is not None and tape.generation is not None:
            return (Unmodelled("generation", Effect.UNKNOWN, _GENERATED),)
        says = "the completions that are generated before a step, and their cache, are in no figure"
        return (Unmodelled("generation", Effect.MORE, says),)

    def described(self, value: Generation) -> Mapping[str, Any]:
        """Return the tokens of a prompt and of a completion."""
        return {"generation": {"prompt": value.prompt, "completion": value.completion}}


class ColocatedTechnique(Technique[Colocated]):
    """vLLM on the GPUs that train."""

    name = "colocated vLLM"
    kind = Colocated
    where = "--from"
    colocated = Option[Colocated | None](object, None)

    def value(self, asked: OptionValues, engine: TakesTechniques) -> Colocated | None:
        """Return what files say of vLLM."""
        return asked[ColocatedTechnique.colocated]

    def left_out(self, value: Colocated, facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return what of vLLM's memory is counted."""
        taken = f"vLLM takes {value.share:.0%} of each GPU for itself"
        says = "vLLM's share is counted; its CUDA graphs and the weights handed to it are not, and no GPU has measured it"
        counted = tape is not None and facts.cluster.vram is not None
        return (Unmodelled("use_vllm", Effect.MORE, says if counted else taken),)

    def described(self, value: Colocated) -> Mapping[str, Any]:
        """Return its share, and whether it sleeps."""
        return {"colocated": {"share": value.share, "sleeps": value.sleeps}}
