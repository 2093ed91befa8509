"""Frozen parts of a model that is trained as a whole: their parameters get no gradient and no optimizer states, and what only
their gradients would need is not kept. The tape is traced with them frozen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zeroplan.core.errors import BadInput
from zeroplan.core.option import RUNS, WORK, Option
from zeroplan.core.workload import Lora
from zeroplan.techniques.base import Facts, OptionValues, TakesTechniques, Technique

if TYPE_CHECKING:
    from zeroplan.models.spec import ModelSpec, SpecUnit, Tensor


def _names(text: str, where: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@dataclass(frozen=True, slots=True)
class FrozenParts:
    """Parts that are not trained, by the names of their modules."""

    parts: tuple[str, ...]

    @property
    def key(self) -> str:
        """A short name for tapes."""
        return "frozen-" + "+".join(sorted(self.parts))

    def adapted(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of peft's ``LoraConfig`` as they are."""
        return dict(config)

    def holds(self, name: str) -> bool:
        """Return whether a parameter lies in one of the parts: a part's names follow one another in the parameter's."""
        return any(f".{part}." in f".{name}." for part in self.parts)

    def freeze(self, model: Any) -> None:
        """Freeze the parts of a module."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if self.holds(name):
                parameter.requires_grad_(False)


class FreezeTechnique(Technique[FrozenParts]):
    """Parts of the model are frozen."""

    name = "frozen parts"
    kind = FrozenParts
    where = "--freeze"
    freeze = Option[Sequence[str]](
        object, (), "Parts that are not trained, by comma: visual,embed_tokens.", WORK, read=_names, text=str, without=RUNS
    )
    engines = ("ddp", "fsdp2", "deepspeed")
    refusal = "frozen parts are not modelled under {engine}, but of a module: estimate(module, inputs=...)"
    remedy = "use --engine ddp, fsdp2 or deepspeed"
    apart = ("--compile", "--quantize")
    because = "frozen parts beside it are not modelled"
    unsearched = "a search takes all parameters as trained"
    shown = "freeze"

    def value(self, asked: OptionValues, engine: TakesTechniques) -> FrozenParts | None:
        """Return the parts that the option names."""
        parts = tuple(asked.values.get("freeze", ()))
        return FrozenParts(parts) if parts else None

    def require(self, value: FrozenParts, facts: Facts) -> None:
        """Refuse frozen parts beside adapters, which freeze all, and parts that a model has not."""
        super().require(value, facts)
        if facts.workload.has(Lora):
            raise BadInput("adapters freeze the whole model", where=self.where, remedy="leave it or --lora-rank out")

    def require_degrees(self, value: FrozenParts, facts: Facts) -> None:
        """Refuse ranks that share a model."""
        self.require_unshared(facts, "frozen parts over ranks that share a model are not modelled")

    def trained(self, value: FrozenParts, spec: ModelSpec) -> ModelSpec:
        """Return the model with the parts frozen.

        Raises:
            BadInput: a part without a parameter, single blocks, or nothing left to train.
        """
        if not spec.has_shapes:
            remedy = "give a model's id, folder or config.json"
            raise BadInput("a bare parameter count has no parts", where=self.where, remedy=remedy)
        names = {_full(unit, tensor): tensor for unit in spec.units for tensor in unit.tensors}
        for part in value.parts:
            if not any(FrozenParts((part,)).holds(name) for name in names):
                pieces = {piece for name in names for piece in name.split(".")[:-1]}
                shown = ", ".join(sorted(one for one in pieces if one.isidentifier())[:12])
                raise BadInput(f"no parameter lies in {part!r}", where=self.where, remedy=f"whole parts are frozen: {shown} …")
        owners = {name for name in names if value.holds(name)}
        owners |= {tensor.tied_to for name, tensor in names.items() if name in owners and tensor.tied_to}
        units = tuple(
            replace(
                unit,
                tensors=tuple(
                    replace(tensor, trainable=tensor.trainable and not {_full(unit, tensor), tensor.tied_to} & owners)
                    for tensor in unit.tensors
                ),
            )
            for unit in spec.units
        )
        frozen = replace(spec, units=units)
        if not frozen.trainable:
            raise BadInput("nothing is left to train", where=self.where, remedy="name fewer parts")
        return frozen

    def described(self, value: FrozenParts) -> Mapping[str, Any]:
        """Return the parts."""
        return {self.shown: value.parts}


def _full(unit: SpecUnit, tensor: Tensor) -> str:
    return ".".join(filter(None, (unit.name, tensor.name)))
