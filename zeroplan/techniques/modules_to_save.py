"""Modules trained whole beside adapters: peft's ``modules_to_save``, which other programs call ``additional_target``.

peft wraps a module of such a name: the module stays, frozen and unused, and a copy of it is trained and run. A tied head gets
a matrix of its own. Copies have the module's dtype; under DDP over weights in 16 bits they train in 16 bits beside fp32
adapters, where they are counted in fp32, as LLaMA-Factory makes them. The tape is traced from peft's own code.
Source: peft 0.21, ``utils/other.py`` (``ModulesToSaveWrapper``, ``_set_trainable``)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.option import WORK, Option
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import Lora, Precision
from zeroplan.techniques.base import Facts, FileFacts, OptionValues, TakesTechniques, Technique

if TYPE_CHECKING:
    from zeroplan.models.spec import ModelSpec, SpecUnit, Tensor
    from zeroplan.tape.expanded import ExpandedTape


def _names(value: Any, where: str) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
        raise BadInput(f"{value!r:.60} is no list of names", where=where, remedy="write embed_tokens,lm_head")
    return tuple(sorted({part.strip() for part in parts if part.strip()}))


@dataclass(frozen=True, slots=True)
class ModulesToSave:
    """Modules whose full names end so are trained whole, as copies."""

    names: tuple[str, ...]

    @property
    def key(self) -> str:
        """A short name for tapes."""
        return "saved" + "".join(f"+{name}" for name in self.names)

    def adapted(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of peft's ``LoraConfig``."""
        return {**config, "modules_to_save": list(self.names)}


class ModulesToSaveTechnique(Technique[ModulesToSave]):
    """Modules trained whole beside LoRA."""

    name = "modules_to_save"
    kind = ModulesToSave
    where = "--modules-to-save"
    modules_to_save = Option[Sequence[str]](
        object,
        (),
        "Modules trained whole beside adapters, by comma: embed_tokens,lm_head.",
        WORK,
        metavar="NAMES",
        read=_names,
        text=str,
        merges=False,
    )
    keys: ClassVar[Mapping[str, Mapping[str, str]]] = {
        **{program: {"modules_to_save": "modules_to_save"} for program in ("peft", "ms-swift")},
        **{program: {"lora_modules_to_save": "modules_to_save"} for program in ("trl", "axolotl")},
        "llama-factory": {"additional_target": "modules_to_save"},
    }
    engines = ("ddp", "fsdp2", "deepspeed")
    refusal = "modules trained whole beside adapters are not modelled under {engine}"
    remedy = "use --engine ddp, fsdp2 or deepspeed"
    apart = ("--compile",)
    because = "compiled blocks beside modules trained whole are not modelled"
    decides = "modules_to_save"
    looped = True

    def filled(self, value: Any, facts: FileFacts) -> Mapping[str, Any] | Unmodelled:
        """Return the modules, or that no figure holds them where the engine decides otherwise."""
        if self.taken_by(facts.engine):
            return {"modules_to_save": value}
        says = f"modules trained whole beside the adapters, under {facts.engine.name}"
        return Unmodelled(facts.key(ModulesToSaveTechnique.modules_to_save), Effect.MORE, says)

    def value(self, asked: OptionValues, engine: TakesTechniques) -> ModulesToSave | None:
        """Return the modules that ``--modules-to-save`` names."""
        names = _names(asked[ModulesToSaveTechnique.modules_to_save], self.where)
        return ModulesToSave(names) if names else None

    def require(self, value: ModulesToSave, facts: Facts) -> None:
        """Refuse modules without adapters."""
        super().require(value, facts)
        if not facts.workload.has(Lora):
            raise BadInput("modules beside adapters without adapters", where=self.where, remedy="give --lora-rank 16 as well")

    def require_degrees(self, value: ModulesToSave, facts: Facts) -> None:
        """Refuse ranks that share a model."""
        self.require_unshared(facts, "modules trained whole beside adapters are modelled under data parallelism alone")

    def trained(self, value: ModulesToSave, spec: ModelSpec) -> ModelSpec:
        """Return the model with a copy behind each module of such a name.

        Raises:
            BadInput: a name that no module with parameters of its own has, or one that adapters change.
        """
        found: set[str] = set()
        moved: dict[str, str] = {}
        units = tuple(_copied(unit, value.names, found, moved) for unit in spec.units)
        missing = [name for name in value.names if name not in found]
        if missing:
            raise _no_module(spec, missing[0], self.where)
        tied = tuple(replace(unit, tensors=tuple(_owned(one, moved) for one in unit.tensors)) for unit in units)
        return replace(spec, units=tied)

    def left_out(self, value: ModulesToSave, facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return that copies may be narrower than adapters."""
        numerics = facts.workload.numerics
        if facts.engine.name != "ddp" or numerics.precision is not Precision.HALF_AUTOCAST:
            return ()
        return (
            Unmodelled(
                self.where, Effect.LESS, "copies of 16-bit modules are counted in fp32, as adapters; peft keeps 16 bits"
            ),
        )

    def setting(self, value: ModulesToSave) -> list[str]:
        """Return the names."""
        return list(value.names)

    def described(self, value: ModulesToSave) -> Mapping[str, Any]:
        """Return the names."""
        return {"modules_to_save": list(value.names)}


def _layer(tensor: Tensor) -> str:
    return tensor.name.rpartition(".")[0]


def _copied(unit: SpecUnit, names: Sequence[str], found: set[str], moved: dict[str, str]) -> SpecUnit:
    """Return the unit with copies behind the tensors of layers of such names; `moved` gets old and new names of the others."""
    tensors: list[Tensor] = []
    prefix = next(unit.names())
    layers = dict.fromkeys(_layer(tensor) for tensor in unit.tensors)
    for layer in layers:
        own = [tensor for tensor in unit.tensors if _layer(tensor) == layer]
        full = ".".join(part for part in (prefix, layer) if part)
        ends = {name for name in names if full.endswith(name)}
        if not ends or "lora_" in full or full.endswith("base_layer"):
            tensors += own
            continue
        found |= ends
        for kind, trainable in (("original_module", False), ("modules_to_save.default", True)):
            for tensor in own:
                leaf = tensor.name.rpartition(".")[2]
                name = ".".join(part for part in (layer, kind, leaf) if part)
                tied = None if trainable else tensor.tied_to
                tensors.append(replace(tensor, name=name, trainable=trainable, tied_to=tied))
                if not trainable:
                    moved.update({f"{one}.{tensor.name}": f"{one}.{name}" for one in unit.names()})
    return replace(unit, tensors=tuple(tensors))


def _owned(tensor: Tensor, moved: Mapping[str, str]) -> Tensor:
    """Return the tensor with the present name of the one that it is tied to."""
    owner = tensor.tied_to
    return tensor if owner is None else replace(tensor, tied_to=moved.get(owner, owner))


def _no_module(spec: ModelSpec, name: str, where: str) -> BadInput:
    leaves = dict.fromkeys(
        ".".join(part for part in (next(unit.names()), _layer(tensor)) if part).rpartition(".")[2]
        for unit in spec.units
        for tensor in unit.tensors
        if "lora_" not in tensor.name and "base_layer" not in tensor.name
    )
    remedy = did_you_mean(name, leaves) or f"its modules are {', '.join(list(leaves)[:12])}"
    return BadInput(f"{name[:80]!r} is no module of {spec.name} that adapters leave", where=where, remedy=remedy)
