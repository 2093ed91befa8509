"""A frozen base whose linear layers are quantised, beside adapters (:mod:`zeroplan.core.quantization`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from zeroplan.core.errors import BadInput
from zeroplan.core.quantization import PackedWeights
from zeroplan.core.workload import QuantizedBase
from zeroplan.techniques.base import Facts, TakesTechniques, Technique


class QuantizedBaseTechnique(Technique[QuantizedBase]):
    """A quantised base. `packed`: methods of packed weights that an engine's plans know."""

    name = "quantised base"
    kind = QuantizedBase
    where = "--quantize"
    engines = ("ddp", "fsdp2", "deepspeed", "fsdp")
    searched = True
    packed: ClassVar[Mapping[str, tuple[str, ...]]] = {"fsdp2": ("gptq", "awq"), "ddp": ("gptq", "awq", "torchao")}

    def takes_packed(self, engine: TakesTechniques, method: str) -> bool:
        """Return whether an engine's plans know packed weights of a method."""
        return method in self.packed.get(engine.name, ())

    def require(self, value: QuantizedBase, facts: Facts) -> None:
        """Refuse a base in a format that is not modelled under the engine.

        Raises:
            BadInput: naming it.
        """
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
        """Refuse ranks that share more than samples.

        Raises:
            BadInput: naming the flag or key.
        """
        if facts.shared:
            what = "quantised bases are modelled for data parallelism alone"
            raise BadInput(what, where=value.named_by, remedy=facts.alone)


QUANTIZED_BASE = QuantizedBaseTechnique()
