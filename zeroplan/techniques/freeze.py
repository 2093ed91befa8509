"""Frozen parts of a model that is trained as a whole: their parameters get no gradient and no optimizer states, and what only
their gradients would need is not kept. The tape is traced with them frozen.

Programs name them by a rule: towers of a model with images or sound, all but the last blocks, names that match a pattern.

Source: LLaMA-Factory 0.9.6, model/adapter.py (``_setup_full_tuning``, ``_setup_freeze_tuning``), model_utils/visual.py;
ms-swift 4.6, arguments/tuner_args.py (``_init_multimodal_full``), utils/torch_utils.py (``freeze_parameters``); axolotl 0.18,
utils/freeze.py
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from zeroplan.core.errors import BadInput
from zeroplan.core.option import RUNS, WORK, Option
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import Lora, Precision
from zeroplan.techniques.base import Facts, OptionValues, TakesTechniques, Technique

if TYPE_CHECKING:
    from zeroplan.models.spec import ModelSpec, SpecUnit, Tensor
    from zeroplan.tape.expanded import ExpandedTape


#: Modules of each part of a model with images or sound, as transformers names them; the first part that has one owns it.
_PARTS = {
    "projector": ("multi_modal_projector", "merger", "connector", "embed_vision", "embed_audio", "resampler", "mlp_AR"),
    "vision": ("visual", "vision_tower", "vision_model", "vision_encoder", "audio_tower", "audio_model", "vpm", "apm"),
    "language": ("language_model", "lm_head"),
}


@dataclass(frozen=True, slots=True)
class FreezeRule:
    """What a program's keys freeze.

    Attributes:
        key: that says so.
        parts: of a model with images or sound: vision, projector, language.
        prefixes: of the names of frozen parameters.
        blocks: how many of the last blocks are trained alone, of the first ones where negative; None for no such rule.
        modules: of those blocks, what is trained; all for whole ones.
        beside: what is trained beside those blocks, by a part of the name.
        patterns: regular expressions at the beginning of the only names that are trained; None for no such rule.
        half: whether frozen parameters are in 16 bits beside trained ones in fp32.
        skips_frozen: whether blocks that train nothing are not checkpointed, and the embedding's output gets no gradient
            for the others' sake; transformers checkpoints all blocks, and lets it have one.
        to_inputs: whether the embedding's output gets a gradient without checkpoints, too.
    """

    key: str
    parts: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    blocks: int | None = None
    modules: tuple[str, ...] = ("all",)
    beside: tuple[str, ...] = ()
    patterns: tuple[str, ...] | None = None
    half: bool = False
    skips_frozen: bool = False
    to_inputs: bool = False

    def frozen(self, names: Collection[str]) -> Iterator[str]:
        """Yield the names of frozen parameters among all of a model's."""
        towers = any(_part(name) in ("vision", "projector") for name in names)
        trained = self._in_blocks(names)
        for name in names:
            tower = towers and _part(name) in self.parts
            matched = self.patterns is None or any(re.match(pattern, name) for pattern in self.patterns)
            if tower or name.startswith(self.prefixes or ("\0",)) or not trained(name) or not matched:
                yield name

    def _in_blocks(self, names: Collection[str]) -> Callable[[str], bool]:
        if self.blocks is None:
            return lambda _: True
        numbers = {int(found[1]) for name in names if _part(name) in ("", "language") and (found := _BLOCK.search(name))}
        total = 1 + max(numbers, default=-1)
        which = range(max(0, total - self.blocks), total) if self.blocks > 0 else range(min(-self.blocks, total))
        inside = [f".{i}.{'' if module == 'all' else module}" for i in which for module in self.modules]
        projector = "projector" not in self.parts
        return lambda name: any(one in name for one in (*inside, *self.beside)) or (projector and _part(name) == "projector")


_BLOCK = re.compile(r"\.(\d+)\.")


def _part(name: str) -> str:
    """Return the part of a model with images or sound in which a parameter lies; empty for none."""
    pieces = set(name.split("."))
    return next((part for part, modules in _PARTS.items() if pieces.intersection(modules)), "")


def _names(text: str, where: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@dataclass(frozen=True, slots=True)
class FrozenParts:
    """Parts that are not trained, by the names of their modules, and a program's rule for more."""

    parts: tuple[str, ...]
    rule: FreezeRule | None = None

    @property
    def key(self) -> str:
        """A short name for tapes."""
        told = "+".join(sorted(self.parts))
        short = told if len(told) < 80 else hashlib.sha256(told.encode()).hexdigest()[:16]
        flags = [name for name in ("half", "skips_frozen", "to_inputs") if getattr(self.rule, name, False)]
        return "-".join(["frozen", *(["blocks"] if self.by_block else []), *flags, short])

    @property
    def by_block(self) -> bool:
        """Whether parts are named by a number, as blocks of a stack are."""
        return any(piece.isdigit() for part in self.parts for piece in part.split("."))

    @property
    def half(self) -> bool:
        """Whether frozen parameters are in 16 bits beside trained ones in fp32."""
        return self.rule is not None and self.rule.half

    def holds(self, name: str) -> bool:
        """Return whether a parameter lies in one of the parts: a part's names follow one another in the parameter's."""
        return any(f".{part}." in f".{name}." for part in self.parts)

    def freeze(self, model: Any, *, autocast: bool = False) -> None:
        """Freeze the parts of a module. Under autocast over 16 bits, what is trained may be in fp32."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if self.holds(name):
                parameter.requires_grad_(False)
        for parameter in model.parameters() if autocast and self.half else ():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        if self.rule is not None and self.rule.to_inputs:
            model.enable_input_require_grads()

    def checkpoint(self, model: Any) -> None:
        """Change which blocks of a module with checkpoints have them."""
        if self.rule is not None and self.rule.skips_frozen:
            from zeroplan.trace.selective import checkpoint_trained

            checkpoint_trained(model)


class FreezeTechnique(Technique[FrozenParts]):
    """Parts of the model are frozen."""

    name = "frozen parts"
    kind = FrozenParts
    where = "--freeze"
    freeze = Option[Sequence[str]](
        object, (), "Parts that are not trained, by comma: visual,embed_tokens.", WORK, read=_names, text=str, without=RUNS
    )
    freeze_rule = Option[FreezeRule | None](object, None)
    engines = ("ddp", "fsdp2", "deepspeed")
    refusal = "frozen parts are not modelled under {engine}, but of a module: estimate(module, inputs=...)"
    remedy = "use --engine ddp, fsdp2 or deepspeed"
    apart = ("--compile", "--quantize")
    because = "frozen parts beside it are not modelled"
    unsearched = "a search takes all parameters as trained"
    shown = "freeze"

    def value(self, asked: OptionValues, engine: TakesTechniques) -> FrozenParts | None:
        """Return the parts that the option names, and files' rule but beside adapters, which freeze all."""
        parts, rule = tuple(asked.values.get("freeze", ())), asked.values.get("freeze_rule")
        rule = None if asked.values.get("lora_rank") else rule
        return FrozenParts(parts, rule) if parts or rule else None

    def named(self, value: FrozenParts, spec: ModelSpec) -> FrozenParts | None:
        """Return the parts that a rule freezes of the model; None where it has none of them."""
        if value.rule is None:
            return value
        names = {name: None for unit in spec.units for one in _singles(unit) for name in _all(one)}
        frozen = set(value.rule.frozen(names))
        parts = (*value.parts, *_modules(list(names), frozen))
        return replace(value, parts=parts) if parts else None

    def require(self, value: FrozenParts, facts: Facts) -> None:
        """Refuse frozen parts beside adapters, which freeze all, and parts that a model has not."""
        try:
            super().require(value, facts)
        except BadInput as error:
            raise error if value.rule is None else BadInput(error.what, where=value.rule.key, remedy=error.remedy) from None
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
        singles = [one for unit in spec.units for one in _singles(unit)]
        names = {name: tensor for one in singles for name, tensor in _all(one).items()}
        for part in value.parts:
            if not any(FrozenParts((part,)).holds(name) for name in names):
                pieces = {piece for name in names for piece in name.split(".")[:-1]}
                shown = ", ".join(sorted(one for one in pieces if one.isidentifier())[:12])
                raise BadInput(f"no parameter lies in {part!r}", where=self.where, remedy=f"whole parts are frozen: {shown} …")
        owners = {name for name in names if value.holds(name)}
        owners |= {tensor.tied_to for name, tensor in names.items() if name in owners and tensor.tied_to}
        units = []
        for one in singles:
            trains = [tensor.trainable and not {name, tensor.tied_to} & owners for name, tensor in _all(one).items()]
            tensors = tuple(replace(tensor, trainable=on) for tensor, on in zip(one.tensors, trains, strict=True))
            units.append(replace(one, tensors=tensors))
        frozen = replace(spec, units=tuple(_joined(units)))
        if not frozen.trainable:
            if value.rule is None:
                raise BadInput("nothing is left to train", where=self.where, remedy="name fewer parts")
            remedy = "name another model, or mend the key"
            raise BadInput(f"nothing of {spec.name} is left to train", where=value.rule.key, remedy=remedy)
        return frozen

    def left_out(self, value: FrozenParts, facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return that frozen parameters are smaller than the figures take them, where a program's are."""
        if value.rule is None or not value.half or facts.workload.numerics.precision is not Precision.AUTOCAST:
            return ()
        return (Unmodelled(value.rule.key, Effect.LESS, "frozen parameters are in 16 bits, and are counted in fp32"),)

    def described(self, value: FrozenParts) -> Mapping[str, Any]:
        """Return the parts."""
        return {self.shown: value.parts}


def _singles(unit: SpecUnit) -> Iterator[SpecUnit]:
    """Yield the modules of a unit by themselves."""
    for number in range(unit.first, unit.first + unit.count):
        yield replace(unit, first=number, count=1)


def _joined(units: Sequence[SpecUnit]) -> Iterator[SpecUnit]:
    """Yield units again as they were but where neighbours differ now."""
    for _, alike in groupby(units, key=lambda one: (one.name, one.tensors)):
        group = list(alike)
        yield replace(group[0], count=len(group))


def _all(unit: SpecUnit) -> dict[str, Tensor]:
    """Return the tensors of a unit of one module by their full names."""
    prefix = unit.name.replace("{}", str(unit.first))
    return {".".join(filter(None, (prefix, tensor.name))): tensor for tensor in unit.tensors}


def _modules(names: Sequence[str], frozen: Collection[str]) -> Iterator[str]:
    """Yield the modules that hold frozen parameters alone, from the outermost inwards, and single parameters beside them."""
    inside: dict[str, list[str]] = {}
    for name in names:
        pieces = name.split(".")
        for depth in range(1, len(pieces) + 1):
            inside.setdefault(".".join(pieces[:depth]), []).append(name)
    done: set[str] = set()
    for module, held in inside.items():
        if held[0] not in done and all(name in frozen for name in held):
            done |= set(held)
            yield module
