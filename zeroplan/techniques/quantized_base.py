"""A frozen base whose linear layers are quantised, beside adapters (:mod:`zeroplan.core.quantization`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from zeroplan.core.errors import BadInput, member_named
from zeroplan.core.option import WORK, Option
from zeroplan.core.quantization import PackedWeights, Products, Quantization, parse_quantization
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import DType, QuantizedBase
from zeroplan.techniques.base import Facts, FileFacts, OptionValues, TakesTechniques, Technique
from zeroplan.techniques.older_transformers import before_5

if TYPE_CHECKING:
    from zeroplan.models.spec import ModelSpec


#: The rank of the adapters that come with ``--quantize`` where nobody says one.
ADAPTERS_RANK = 16


def lacks_adapters(asked: OptionValues) -> bool:
    """Return whether a quantised base is asked for without adapters: it is frozen, so nothing would be trained."""
    base = asked[QuantizedBaseTechnique.quantize] is not None and not asked[QuantizedBaseTechnique.built]
    return base and "lora_rank" not in asked.values


class QuantizedBaseTechnique(Technique[QuantizedBase]):
    """A quantised base. `packed`: methods of packed weights that an engine's plans know.

    Readers of files and the planner alone say the flag or key that says `quantize` (`quantized_by`), whether 4-bit weights are
    stored in bytes, which FSDP does not shard (`whole_base`), the adapters' dtype, and whether a live module came with its
    adapters and quantised layers (`built`).
    """

    name = "quantised base"
    kind = QuantizedBase
    where = "--quantize"
    in_forms = True
    decides = "quantize"
    quantize = Option[str | None](
        str,
        None,
        "Keep the frozen base in nf4, fp4 (or nf4-single, fp4-single), int8, gptq-4-128 or torchao-8-row.",
        WORK,
        page=True,
        merges=False,
    )
    adapter_dtype = Option[str | None](str, None, merges=False)
    quantized_by = Option(str, "--quantize")
    whole_base = Option(bool, False, merges=False)
    built = Option(bool, False)
    engines = ("ddp", "fsdp2", "deepspeed", "fsdp")
    packed: ClassVar[Mapping[str, tuple[str, ...]]] = {"fsdp2": ("gptq", "awq"), "ddp": ("gptq", "awq", "torchao")}

    def takes_packed(self, engine: TakesTechniques, method: str) -> bool:
        """Return whether an engine's plans know packed weights of a method."""
        return method in self.packed.get(engine.name, ())

    def value(self, asked: OptionValues, engine: TakesTechniques) -> QuantizedBase | None:
        """Return the frozen base whose linear layers are quantised, before transformers 5 in other layers and another place."""
        quantize, adapters = asked[QuantizedBaseTechnique.quantize], asked[QuantizedBaseTechnique.adapter_dtype]
        if quantize is None:
            if adapters is not None:
                raise BadInput("adapters without a quantised base", where="adapter_dtype", remedy="give quantize as well")
            return None
        kept, named_by = parse_quantization(quantize), asked[QuantizedBaseTechnique.quantized_by]
        if lacks_adapters(asked):
            remedy = f"give --lora-rank {ADAPTERS_RANK} to train adapters beside it"
            raise BadInput("a quantised base is frozen", where=named_by, remedy=remedy)
        older = before_5(asked)
        return QuantizedBase(
            kept,
            named_by=named_by,
            adapter_dtype=None if adapters is None else member_named(DType, adapters, where="adapter_dtype"),
            whole=asked[QuantizedBaseTechnique.whole_base] or isinstance(kept, PackedWeights),
            linear_experts=older and kept.products in (Products.NESTED, Products.SINGLE),
            on_host=older,
        )

    def filled(self, value: str, facts: FileFacts) -> Mapping[str, Any] | Unmodelled:
        """Return the base under an engine that plans it, sharded as the files say: on the GPU, by data parallelism, and at
        stage 3 in 4 bits; elsewhere it stands among what is left out.
        """
        files, key = facts.files, facts.key(QuantizedBaseTechnique.quantize)
        zero = (files.values.get("ds_config") or {}).get("zero_optimization")
        zero = zero if isinstance(zero, Mapping) else {}
        said = zero.get("offload_param")
        device = said.get("device") if isinstance(said, Mapping) else said
        offloads = files.values.get("offload_param", "none") != "none" or device not in (None, "none", False)
        elsewhere = offloads or facts.degrees or (value == Quantization.INT8 and zero.get("stage") == 3)
        if elsewhere or "lora_rank" not in files.values or not self.taken_by(facts.engine):
            says = f"base weights in {value} are counted in 16 bits, and their dequantised copies are not"
            return Unmodelled(key, Effect.UNKNOWN, says)
        kept = {name: files.values[name] for name in ("adapter_dtype", "whole_base") if name in files.values}
        return {"quantize": value, "quantized_by": key, **kept}

    def trained(self, value: QuantizedBase, spec: ModelSpec) -> ModelSpec:
        """Return the model whose linear layers are quantised."""
        from zeroplan.models.quantized import with_quantized_base

        return with_quantized_base(spec, linear_experts=value.linear_experts)

    def require(self, value: QuantizedBase, facts: Facts) -> None:
        """Refuse a base in a format that is not modelled under the engine."""
        packed = value.kept.method if isinstance(value.kept, PackedWeights) else ""
        if packed and not self.takes_packed(facts.engine, packed):
            raise BadInput(
                f"a base of {packed} is not modelled under {facts.engine.name}",
                where=value.named_by,
                remedy="use --engine ddp" + ("" if packed == "torchao" else " or fsdp2"),
            )
        if not self.taken_by(facts.engine):
            raise BadInput(
                f"a quantised base is not modelled under {facts.engine.name}",
                where=value.named_by,
                remedy="use --engine ddp, fsdp2 or deepspeed",
            )

    def require_degrees(self, value: QuantizedBase, facts: Facts) -> None:
        """Refuse ranks that share more than samples."""
        if facts.shared:
            what = "quantised bases are modelled for data parallelism alone"
            raise BadInput(what, where=value.named_by, remedy=facts.alone)

    def written(self, value: QuantizedBase, program: str) -> Mapping[str, Any]:
        """Return the arguments of TRL's ``ModelConfig`` for bitsandbytes."""
        if program != "trl" or not isinstance(value.kept, Quantization):
            return {}
        if value.kept is Quantization.INT8:
            return {"load_in_8bit": True}
        levels, _, single = value.kept.partition("-")
        return {"load_in_4bit": True, "bnb_4bit_quant_type": levels, "use_bnb_nested_quant": not single}

    def instructions(self, value: QuantizedBase) -> tuple[str, ...]:
        """Return how it is kept, and by what."""
        by = " by bitsandbytes" if isinstance(value.kept, Quantization) else ""
        return (f"load the frozen base in {value.kept}{by}",)

    def described(self, value: QuantizedBase) -> Mapping[str, Any]:
        """Return how it is kept, and what is unusual of it."""
        parts = {
            "adapter_dtype": None if value.adapter_dtype is None else str(value.adapter_dtype),
            "whole_base": value.whole,
            "linear_experts": value.linear_experts,
            "base_on_host": value.on_host,
        }
        return {"quantize": str(value.kept), **{name: one for name, one in parts.items() if one}}


QUANTIZED_BASE = QuantizedBaseTechnique()
