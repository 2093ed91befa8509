"""LoRA: adapters of a low rank beside a frozen base, as peft 0.21 trains them (:mod:`zeroplan.models.lora`).

Of scaling (``lora_alpha``, rsLoRA) no memory follows. Programs' readers set the rank, the targets and the dropout themselves
(:mod:`zeroplan.interop.programs.adapters`), since each has defaults and conditions of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from zeroplan.core.errors import BadInput, member_named
from zeroplan.core.option import WORK, Option
from zeroplan.core.quantization import parse_quantization
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import DType, Lora, Precision
from zeroplan.techniques.base import Facts, OptionValues, TakesTechniques, Technique
from zeroplan.techniques.quantized_base import QuantizedBaseTechnique

if TYPE_CHECKING:
    from zeroplan.models.spec import ModelSpec
    from zeroplan.tape.expanded import ExpandedTape


def _names(text: str, where: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


class LoraTechnique(Technique[Lora]):
    """Adapters beside a frozen base. `lora_dropout`: they drop some of their input, which files alone say."""

    name = "LoRA"
    kind = Lora
    where = "--lora-rank"
    in_forms = True  # each writes peft's file
    lora_rank = Option[int | None](int, None, "Train LoRA adapters of this rank only.", WORK, least=1, page=True)
    lora_targets = Option[Sequence[str]](
        object, (), "Layers to adapt, by comma. [all linear layers]", WORK, read=_names, text=str, wins=True
    )
    base_dtype = Option[str | None](
        str,
        None,
        "Of frozen weights under adapters: that of --dtype, or fp32 (--engine ddp or fsdp2). [that of --dtype]",
        WORK,
        page=True,
        wins=True,
    )
    lora_dropout = Option(bool, False)
    off: ClassVar[Mapping[str, Any]] = {"lora_rank": None, "lora_targets": ()}

    def value(self, asked: OptionValues, engine: TakesTechniques) -> Lora | None:
        """Return the adapters that the options ask for."""
        rank, targets = asked[LoraTechnique.lora_rank], tuple(asked.values.get("lora_targets", ()))
        if targets and rank is None:
            raise BadInput("targets without a rank", where="--lora-targets", remedy="give --lora-rank 16 as well")
        return None if rank is None else Lora(rank, targets, asked[LoraTechnique.lora_dropout])

    def leaves(self, asked: OptionValues, engine: TakesTechniques) -> Mapping[str, Any]:
        """Return the division of dtypes, which ``--base-dtype`` says of frozen weights under adapters.

        Without it they are read in 16 bits, as programs do: ``from_pretrained`` takes the checkpoint's dtype (transformers 5),
        and peft makes adapters beside them fp32.
        """
        base, quantize, where = asked[LoraTechnique.base_dtype], asked[QuantizedBaseTechnique.quantize], "--base-dtype"
        wanted = None if base is None else member_named(DType, base, where=where)
        if asked[LoraTechnique.lora_rank] is None:
            if wanted is not None:
                raise BadInput("no frozen weights without adapters", where=where, remedy="give --lora-rank 16 as well")
            return {}
        if wanted is not None and quantize is not None:
            raise BadInput("the base is quantised", where=where, remedy="leave it or --quantize out")
        dtype = DType(asked.values.get("dtype", DType.BF16))
        frozen = engine.base_precision(dtype, None if quantize is None else parse_quantization(quantize))
        if wanted in (None, dtype):
            return {"precision": frozen}
        whole: Precision = engine.precision(dtype)
        if wanted is not DType.FP32 or whole is frozen:
            what = f"{engine.name} keeps no frozen weights in {wanted} beside --dtype {dtype}"
            raise BadInput(what, where=where, remedy=f"use {dtype}" + ("" if whole is frozen else " or fp32"))
        return {"precision": whole}

    def named(self, value: Lora, spec: ModelSpec) -> Lora:
        """Return the adapters with the names of the layers that they adapt."""
        from zeroplan.models.lora_targets import named_targets

        return replace(value, targets=named_targets(spec, value.targets)) if spec.has_shapes else value

    def trained(self, value: Lora, spec: ModelSpec) -> ModelSpec:
        """Return the model with its base frozen and adapters where peft registers them."""
        from zeroplan.models.lora import with_lora

        return with_lora(spec, value.rank, value.targets)

    def left_out(self, value: Lora, facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return the targets of which the model has no layer."""
        from zeroplan.models.lora import unmatched_targets

        missing = unmatched_targets(facts.spec, value.targets)
        says = f"no linear layer is called {', '.join(missing)[:60]}: peft passes over it"
        return (Unmodelled("--lora-targets", Effect.NONE, says),) if missing else ()

    def unlooped(self, value: Lora) -> str:
        """Return the dropout, which the loop's adapters do not have."""
        return "verify's loop has no dropout of what adapters read" if value.dropout else ""

    def written(self, value: Lora, program: str) -> Mapping[str, Any]:
        """Return the arguments of peft's ``LoraConfig``, or those of TRL's ``ModelConfig``."""
        targets = list(value.targets) or "all-linear"
        if program == "peft":
            return {"peft_type": "LORA", "r": value.rank, "target_modules": targets}
        trl = {"use_peft": True, "lora_r": value.rank, "lora_dropout": 0.0, "lora_target_modules": targets}
        return trl if program == "trl" else {}

    def instructions(self, value: Lora) -> tuple[str, ...]:
        """Return the rank."""
        return (f"train adapters of rank {value.rank} (LoRA)",)

    def described(self, value: Lora) -> Mapping[str, Any]:
        """Return rank, targets and dropout."""
        return {"lora_rank": value.rank, "lora_targets": value.targets, **({"lora_dropout": True} if value.dropout else {})}
