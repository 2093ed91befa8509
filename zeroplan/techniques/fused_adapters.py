"""Fused adapters: LoRA's products and the MLP's gate in functions of autograd, by the part of a block (axolotl's kernels).

What each keeps is told by :mod:`zeroplan.trace.fused_adapters`. Base weights are read outside of their layers, so DeepSpeed's
stage 3 is left out; so is FSDP 2, where axolotl shards each adapter as a unit of its own, which stays gathered.
Source: axolotl 0.18, monkeypatch/lora_kernels.py, monkeypatch/accelerate/fsdp2.py (_process_lora_module_for_fsdp)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from zeroplan.core.errors import BadInput
from zeroplan.core.option import RUNS, WORK, Option
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.techniques.base import Facts, FileFacts, OptionValues, TakesTechniques, Technique

if TYPE_CHECKING:
    from zeroplan.tape.expanded import ExpandedTape

#: The parts of a block that programs switch one by one, and their layers.
LAYERS = {"mlp": ("gate_proj", "up_proj", "down_proj"), "qkv": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",)}
PARTS = tuple(LAYERS)
_FEWER = "fused adapters keep fewer tensors"
#: Beginnings of the types of models whose layers axolotl fuses in a further way.
_OTHERS = ("gemma4", "llama4", "qwen3_5")


@dataclass(frozen=True, slots=True)
class FusedAdapters:
    """The parts whose adapters are fused, where each of their layers has some."""

    parts: tuple[str, ...] = PARTS

    @property
    def key(self) -> str:
        """A short name for tapes."""
        return "fused-adapters" + ("" if self.parts == PARTS else "".join(f"+{part}" for part in self.parts))

    def running(self, model: Any) -> AbstractContextManager[None]:
        """Let a model run with them while the context lasts."""
        from zeroplan.trace.fused_adapters import fused_adapters

        return fused_adapters(model, {part: LAYERS[part] for part in self.parts})

    def fused_in(self, tape: ExpandedTape) -> bool:
        """Return whether a tape has them: peft's modules of parts whose layers all have adapters are not entered."""
        from zeroplan.tape.expanded import Op

        names = {index: module.name.split(".") for index, module in enumerate(tape.modules) if ".lora_A." in module.name}
        adapted = {part for name in names.values() for part in name}
        fused = {layer for part in self.parts if adapted.issuperset(LAYERS[part]) for layer in LAYERS[part]}
        entered = {arg for op, arg in zip(tape.op, tape.arg, strict=True) if op == Op.ENTER}
        return not any(fused.intersection(names[index]) for index in entered & names.keys())


class FusedAdaptersTechnique(Technique[FusedAdapters]):
    """Fused adapters, which files alone switch on."""

    name = "fused adapters"
    kind = FusedAdapters
    where = "lora_*_kernel"
    fused_adapters = Option(str, "", "", WORK, without=RUNS, merges=False)  #: names of :data:`PARTS`, by comma
    #: Keys of axolotl, and the parts that they mean.
    switches: ClassVar[Mapping[str, str]] = {f"lora_{part}_kernel": part for part in PARTS}
    engines = ("ddp", "deepspeed")
    refusal = "fused adapters are not modelled under {engine}"
    remedy = "use --engine ddp"
    apart = ("--compile",)
    because = "{flag} with fused adapters is not modelled"
    decides = "fused_adapters"

    def value(self, asked: OptionValues, engine: TakesTechniques) -> FusedAdapters | None:
        """Return the parts that a file asks for."""
        said = asked[FusedAdaptersTechnique.fused_adapters].split(",")
        parts = tuple(part for part in PARTS if part in said)
        return FusedAdapters(parts) if parts else None

    def filled(self, value: Any, facts: FileFacts) -> Mapping[str, Any] | Unmodelled:
        """Return the parts where each rank has the model's matrices whole; else that they are in no figure."""
        zero = (facts.files.values.get("ds_config") or {}).get("zero_optimization")
        stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
        beside = any(one.values.get(name) for name in ("dora", "compile") for one in (facts.files, facts.flags))
        if (
            beside
            or facts.degrees
            or not self.taken_by(facts.engine)
            or (facts.engine.name == "deepspeed" and stage not in (0, 1, 2))
        ):
            return Unmodelled(facts.key(FusedAdaptersTechnique.fused_adapters), Effect.LESS, _FEWER)
        return {"fused_adapters": value}

    def require_sharding(self, value: FusedAdapters, engine: TakesTechniques, zero: ZeroConfig) -> None:
        """Refuse DeepSpeed's stage 3, whose hooks gather nothing for what is read outside of its layer."""
        if engine.name == "deepspeed" and zero.stage == 3:
            what = "fused adapters read weights outside of their layers, where stage 3 has released them"
            raise BadInput(what, where=self.where, remedy="use --stage 2, or set each of these keys to false")

    def left_out(self, value: FusedAdapters, facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return what is counted as peft's own: further layers, or all where the tape is that of a model which runs so."""
        says = f"further {_FEWER}" if facts.spec.model_type.startswith(_OTHERS) else ""
        if tape is not None and not value.fused_in(tape):
            says = f"{_FEWER}; peft's are counted, since no tape of others is at hand"
        return (Unmodelled(self.where, Effect.LESS, says),) if says else ()

    def instructions(self, value: FusedAdapters) -> tuple[str, ...]:
        """Return the parts."""
        return (f"fuse the adapters of {', '.join(value.parts)}, as axolotl does",)

    def described(self, value: FusedAdapters) -> Mapping[str, Any]:
        """Return the parts."""
        return {"fused_adapters": ",".join(value.parts)}
