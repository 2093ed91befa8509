"""A technique of one's own: the one file that the recipe of ``docs/extending.md`` asks for. A soft prompt of trained tokens, of
which the program keeps a copy as it was at first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from zeroplan.core.buffers import ALWAYS, Buffer, Place
from zeroplan.core.errors import BadInput
from zeroplan.core.option import RUNS, WORK, Option
from zeroplan.ledger.line import LedgerBuilder
from zeroplan.techniques.base import Facts, HoldsTrained, KeptBlocks, OptionValues, TakesTechniques, Technique

if TYPE_CHECKING:
    from zeroplan.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class SoftPrompt:
    """So many trained vectors."""

    tokens: int


_lines = LedgerBuilder()


@_lines.add(Buffer.OPTIM_ANCHOR, Place.HBM, ALWAYS)
def first_prompt(c: HoldsTrained) -> int:
    """The vectors as they were at first."""
    return sum(c.original_bytes * c.parameters.numel[p] for p in _prompts(c))


def _prompts(c: HoldsTrained) -> list[int]:
    return [p for p, name in enumerate(c.parameters.names) if name.endswith("soft_prompt.weight")]


class SoftPromptTechnique(Technique[SoftPrompt]):
    """Trained vectors in front of each sample."""

    name = "soft prompt"
    kind = SoftPrompt
    where = "--soft-prompt"
    soft_prompt = Option[int | None](int, None, "Trained vectors in front of a sample.", WORK, least=1, page=True, without=RUNS)
    keys: ClassVar[Mapping[str, Mapping[str, str]]] = {"trl": {"soft_prompt_tokens": "soft_prompt"}}
    engines = ("ddp",)
    refusal = "a soft prompt is not modelled under {engine}"
    remedy = "use --engine ddp"
    lines = _lines.ledger()

    def value(self, asked: OptionValues, engine: TakesTechniques) -> SoftPrompt | None:
        """Return the prompt that the option asks for."""
        tokens = asked[SoftPromptTechnique.soft_prompt]
        return None if tokens is None else SoftPrompt(tokens)

    def require(self, value: SoftPrompt, facts: Facts) -> None:
        """Refuse more vectors than a sample has tokens."""
        super().require(value, facts)
        if value.tokens >= (facts.workload.batch.seq_len or 0):
            raise BadInput("a prompt as long as the sample", where=self.where, remedy="use fewer vectors")

    def trained(self, value: SoftPrompt, spec: ModelSpec) -> ModelSpec:
        """Return the model with the vectors beside its embedding."""
        from zeroplan.models.spec import Tensor

        first = spec.units[0]
        width = first.tensors[0].shape[-1]
        vectors = Tensor("soft_prompt.weight", (value.tokens, width))
        return replace(spec, units=(replace(first, tensors=(*first.tensors, vectors)), *spec.units[1:]))

    def blocks(self, value: SoftPrompt, rank: HoldsTrained) -> KeptBlocks:
        """Return the one block of the line."""
        return KeptBlocks(Buffer.OPTIM_ANCHOR, (first_prompt(rank),))

    def described(self, value: SoftPrompt) -> Mapping[str, Any]:
        """Return what JSON shows."""
        return {"soft_prompt": value.tokens}
