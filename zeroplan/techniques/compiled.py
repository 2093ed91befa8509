"""Graphs that ``torch.compile`` makes of blocks or of the whole model (:class:`zeroplan.core.workload.Compilation`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from zeroplan.core.errors import BadInput
from zeroplan.core.model_config import SEQ2SEQ_LM
from zeroplan.core.sparse_attention import SparseAttention
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import Compilation, Lora
from zeroplan.techniques.base import Facts, TakesTechniques, Technique

if TYPE_CHECKING:
    from zeroplan.tape.expanded import ExpandedTape

_BETWEEN = (
    Effect.LESS,
    "graphs of what lies between the units, such as the loss, keep fewer tensors; eager ones are counted",
)
_WORDS = {"pp": "pipeline stages"}


class CompiledTechnique(Technique[Compilation]):
    """Compiled graphs.

    Attributes:
        degrees: beside which an engine trains compiled blocks, apart from data parallelism: parameters that ranks divide do
            not trace in the runtime.
        whole: how a whole compiled model differs from its compiled blocks, which are counted.
        eager_first: engines whose first micro batch of a compiled model runs as written: guards of parameters' aliases do
            not trace there.
    """

    name = "compile"
    kind = Compilation
    where = "--compile"
    engines = ("zeroplan", "fsdp2", "ddp")
    refusal = "compiled models are not planned under {engine}"
    remedy = "use --engine zeroplan, fsdp2 or ddp"
    looped = True
    searched = True
    degrees: ClassVar[Mapping[str, tuple[str, ...]]] = {"zeroplan": ("pp",)}
    whole: ClassVar[Mapping[str, tuple[Effect, str]]] = {
        "fsdp2": (Effect.MORE, "no GPU has measured a model that is compiled as a whole"),
        "ddp": (Effect.UNKNOWN, "one graph, or one for each of DDP's buckets; compiled blocks and an eager loss are counted"),
    }
    eager_first = ("zeroplan",)

    def starts_eager(self, engine: TakesTechniques) -> bool:
        """Return whether the first micro batch of a compiled model runs as written."""
        return engine.name in self.eager_first

    def require_degrees(self, value: Compilation, facts: Facts) -> None:
        """Refuse sparse attention, and degrees beside which the engine trains no compiled models.

        Raises:
            BadInput: naming what may be compiled.
        """
        if facts.workload.has(SparseAttention):
            raise BadInput("compiled blocks with sparse attention are not planned", where=self.where, remedy="leave it out")
        beside = self.degrees.get(facts.engine.name, ())
        if facts.shared and any(degree > 1 for name, degree in facts.degrees.items() if name not in beside):
            also = "".join(f", and on {_WORDS[name]}," for name in beside)
            what = f"compiled models are planned for data parallelism{also} alone"
            raise BadInput(what, where=self.where, remedy=facts.alone)

    def left_out(self, value: Compilation, facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return what no figure holds of a model that is compiled as a whole, and of graphs that no GPU has measured."""
        if value is Compilation.MODEL:
            return (Unmodelled(self.where, *self.whole.get(facts.engine.name, _BETWEEN)),)
        what = "adapters" if facts.workload.has(Lora) else "an encoder-decoder" if facts.spec.auto_class == SEQ2SEQ_LM else ""
        says = f"no GPU has measured compiled blocks with {what}"
        return (Unmodelled(self.where, Effect.MORE, says),) if what else ()


COMPILED = CompiledTechnique()
