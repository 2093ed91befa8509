"""Completions that the model generates before each step, and vLLM's engine on the GPUs that train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroplan.core.generation import Colocated, Generation
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.techniques.base import Facts, Technique

if TYPE_CHECKING:
    from zeroplan.tape.expanded import ExpandedTape

_GENERATED = "generation is counted, but two measured runs of GRPO reserved 4 % more than their plans"


class GenerationTechnique(Technique[Generation]):
    """Completions that the model generates between steps."""

    name = "generation"
    kind = Generation
    where = "--from"
    engines = ("ddp", "deepspeed")
    searched = True

    def require(self, value: Generation, facts: Facts) -> None:
        """Refuse nothing: under other engines the plan says what no figure holds."""

    def left_out(self, value: Generation, facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return how sure the figures of completions and their cache are."""
        if self.taken_by(facts.engine) and tape is not None and tape.generation is not None:
            return (Unmodelled("generation", Effect.UNKNOWN, _GENERATED),)
        says = "the completions that are generated before a step, and their cache, are in no figure"
        return (Unmodelled("generation", Effect.MORE, says),)


class ColocatedTechnique(Technique[Colocated]):
    """vLLM on the GPUs that train."""

    name = "colocated vLLM"
    kind = Colocated
    where = "--from"
    searched = True

    def left_out(self, value: Colocated, facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return what of vLLM's memory is counted."""
        taken = f"vLLM takes {value.share:.0%} of each GPU for itself"
        says = "vLLM's share is counted; its CUDA graphs and the weights handed to it are not, and no GPU has measured it"
        counted = tape is not None and facts.cluster.vram is not None
        return (Unmodelled("use_vllm", Effect.MORE, says if counted else taken),)


GENERATION = GenerationTechnique()
