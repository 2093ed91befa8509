"""Graphs that ``torch.compile`` makes of blocks or of the whole model (:class:`zeroplan.core.workload.Compilation`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from zeroplan.core.errors import BadInput, member_named
from zeroplan.core.model_config import SEQ2SEQ_LM
from zeroplan.core.option import WORK, Option
from zeroplan.core.sparse_attention import SparseAttention
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import CheckpointPolicy, Compilation, Lora
from zeroplan.techniques.base import Facts, FileFacts, OptionValues, TakesTechniques, Technique
from zeroplan.techniques.checkpointing import CheckpointingTechnique
from zeroplan.techniques.float8 import Float8Technique
from zeroplan.techniques.quantized_base import QuantizedBaseTechnique

if TYPE_CHECKING:
    from zeroplan.tape.expanded import ExpandedTape

_BETWEEN = (
    Effect.LESS,
    "graphs of what lies between the units, such as the loss, keep fewer tensors; eager ones are counted",
)
_WORDS = {"pp": "pipeline stages", "dp_replicate": "replicas of the shards"}


class CompiledTechnique(Technique[Compilation]):
    """Compiled graphs.

    Attributes:
        degrees: beside which an engine trains compiled blocks, apart from data parallelism: parameters that ranks divide do
            not trace in the runtime.
        whole: how a whole compiled model differs from its compiled blocks, which are counted.
        multiplies_in_float8: engines whose graphs are known with 8-bit products.
        eager_first: engines whose first micro batch of a compiled model runs as written: guards of parameters' aliases do
            not trace there.
    """

    name = "compile"
    kind = Compilation
    where = "--compile"
    shown = "compile"
    decides = "compile"
    compile = Option[str | None](
        str,
        None,
        "Parts of the model that torch.compile makes graphs of: blocks, checkpointed-blocks (which recompute within their "
        "graphs) or model (--engine zeroplan, fsdp2 or ddp).",
        WORK,
        metavar="PARTS",
        wins=True,
        merges=False,
    )
    engines = ("zeroplan", "fsdp2", "ddp")
    refusal = "compiled models are not planned under {engine}"
    remedy = "use --engine zeroplan, fsdp2 or ddp"
    apart = ("--quantize", "--images", "--lengths", "--checkpoint-policy")
    because = "compiled graphs with {flag} are not modelled"
    looped = in_forms = True
    degrees: ClassVar[Mapping[str, tuple[str, ...]]] = {"zeroplan": ("pp",), "fsdp2": ("dp_replicate",)}
    whole: ClassVar[Mapping[str, tuple[Effect, str]]] = {
        "fsdp2": (Effect.MORE, "no GPU has measured a model that is compiled as a whole"),
        "ddp": (Effect.UNKNOWN, "one graph, or one for each of DDP's buckets; compiled blocks and an eager loss are counted"),
    }
    eager_first = ("zeroplan",)
    multiplies_in_float8 = ("zeroplan",)

    def value(self, asked: OptionValues, engine: TakesTechniques) -> Compilation | None:
        """Return what is compiled."""
        said = asked[CompiledTechnique.compile]
        if said is not None and hasattr(asked.values.get("model"), "named_parameters"):
            raise BadInput("live modules are planned as written", where="compile", remedy="leave it out")
        return None if said is None else member_named(Compilation, said, where=self.where)

    def filled(self, value: str, facts: FileFacts) -> Mapping[str, Any] | Unmodelled:
        """Return compiled graphs under an engine that plans them; under another, or beside what no graph is traced with, they
        stand among what is left out.
        """
        said = facts.files
        selective = CheckpointPolicy.parse(said[CheckpointingTechnique.checkpoint_policy]).selective
        eight = said[Float8Technique.fp8] is not None and facts.engine.name not in self.multiplies_in_float8
        others = selective or eight or said[QuantizedBaseTechnique.quantize] is not None or facts.degrees
        if self.taken_by(facts.engine) and not others:
            return {"compile": value}
        return self.without_graphs(facts.key(CompiledTechnique.compile))

    def without_graphs(self, key: str) -> Unmodelled:
        """Return what a plan of a compiled run leaves out that counts its eager graphs."""
        return Unmodelled(key, Effect.UNKNOWN, "compiled graphs keep other tensors than eager ones, which are counted")

    def require(self, value: Compilation, facts: Facts) -> None:
        """Refuse other engines, and what no compiled graph is traced with."""
        super().require(value, facts)
        if facts.has(Float8Technique.where) and facts.engine.name not in self.multiplies_in_float8:
            refused = self.because.format(flag=Float8Technique.where)
            raise BadInput(refused, where=Float8Technique.where, remedy=f"leave it or {self.where} out")
        if value is Compilation.CHECKPOINTED and facts.workload.recomputation is None:
            raise BadInput(
                "the checkpoints of checkpointed-blocks are those of gradient checkpointing, which is off",
                where=self.where,
                remedy="give --gradient-checkpointing, or use blocks",
            )
        if facts.workload.objective.pair_loss is not None:
            what = "compiled blocks below a loss over pairs are not modelled"
            raise BadInput(what, where=self.where, remedy="leave it out")

    def starts_eager(self, engine: TakesTechniques) -> bool:
        """Return whether the first micro batch of a compiled model runs as written."""
        return engine.name in self.eager_first

    def require_degrees(self, value: Compilation, facts: Facts) -> None:
        """Refuse sparse attention, and degrees beside which the engine trains no compiled models."""
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
