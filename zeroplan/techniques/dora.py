"""DoRA: adapters beside a learned magnitude of each output (Liu et al. 2024, arXiv 2402.09353).

What is added to LoRA, as peft 0.21 computes it (``tuners/lora/dora.py``): a vector ``lora_magnitude_vector`` with an entry for
each output of an adapted layer, which is trained; the norm of the rows of ``W + s B A`` in each forward, for which ``B A`` is
made by passing an identity through the adapters, in the shape of ``W``; and the layer's output, scaled by magnitude over norm.
The norm is detached, so that its temporaries end in the forward. Without dropout the layer's own output is used again, with it
the input that was dropped passes ``W`` once more. The tape is traced from peft's own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from zeroplan.core.errors import BadInput
from zeroplan.core.option import WORK, Option
from zeroplan.core.workload import Lora, QuantizedBase
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.techniques.base import Facts, OptionValues, TakesTechniques, Technique

if TYPE_CHECKING:
    from zeroplan.models.spec import ModelSpec

#: The end of the name of an adapter's second matrix, behind which peft registers the magnitudes, and of theirs.
_SECOND, _MAGNITUDES = "lora_B.default.weight", "lora_magnitude_vector.default.weight"


@dataclass(frozen=True, slots=True)
class Dora:
    """Adapters learn a magnitude of each output, too."""

    @property
    def key(self) -> str:
        """A short name for tapes."""
        return "dora"

    def adapted(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of peft's ``LoraConfig``."""
        return {**config, "use_dora": True}


class DoraTechnique(Technique[Dora]):
    """DoRA beside LoRA."""

    name = "DoRA"
    kind = Dora
    where = "--dora"
    dora = Option(bool, False, "Adapters learn a magnitude of each output, too (DoRA; with --lora-rank).", WORK, page=True)
    keys: ClassVar[Mapping[str, Mapping[str, str]]] = {
        **{program: {"use_dora": "dora"} for program in ("peft", "hf-trainer", "trl", "llama-factory", "ms-swift")},
        "axolotl": {"peft_use_dora": "dora"},
    }
    engines = ("ddp", "fsdp2", "deepspeed")
    refusal = "DoRA is not modelled under {engine}"
    remedy = "use --engine ddp, fsdp2 or deepspeed"
    apart = ("--compile",)
    because = "compiled blocks with DoRA are not modelled"
    looped = True

    def value(self, asked: OptionValues, engine: TakesTechniques) -> Dora | None:
        """Return DoRA where ``--dora`` asks for it."""
        return Dora() if asked[DoraTechnique.dora] else None

    def require(self, value: Dora, facts: Facts) -> None:
        """Refuse DoRA without adapters, and beside what peft does not run it with or nothing here models."""
        super().require(value, facts)
        work, where = facts.workload, self.where
        if not work.has(Lora):
            raise BadInput("magnitudes of adapters without adapters", where=where, remedy="give --lora-rank 16 as well")
        if work.has(QuantizedBase):
            what = "its norms read the base's weights in 16 bits again and again, which is not modelled"
            raise BadInput(what, where=work.quantized_by, remedy=f"leave it or {where} out")

    def require_sharding(self, value: Dora, engine: TakesTechniques, zero: ZeroConfig) -> None:
        """Refuse DeepSpeed's stage 3, which has released the base's weights where DoRA reads them outside of their layer."""
        if engine.name == "deepspeed" and zero.stage == 3:
            raise BadInput(
                "DoRA reads weights of the base outside of their layers, where stage 3 has released them",
                where=self.where,
                remedy="use --stage 2, or --engine fsdp2",
            )

    def trained(self, value: Dora, spec: ModelSpec) -> ModelSpec:
        """Return the model with a vector of magnitudes behind each pair of adapters."""
        from zeroplan.models.spec import Tensor

        units = []
        for unit in spec.units:
            experts = [tensor.name for tensor in unit.tensors if len(tensor.shape) == 3 and "base_layer." in tensor.name]
            if experts:
                raise BadInput(
                    f"peft has no DoRA for stacked experts such as {experts[0][:80]}",
                    where=self.where,
                    remedy="name other layers by --lora-targets",
                )
            tensors: list[Tensor] = []
            for tensor in unit.tensors:
                tensors.append(tensor)
                if tensor.name.endswith(_SECOND):
                    tensors.append(Tensor(tensor.name.removesuffix(_SECOND) + _MAGNITUDES, tensor.shape[:1]))
            units.append(replace(unit, tensors=tuple(tensors)))
        return replace(spec, units=tuple(units))

    def described(self, value: Dora) -> Mapping[str, Any]:
        """Return what a report's JSON shows."""
        return {"dora": True}
