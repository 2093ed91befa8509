"""A technique: one way to change a run, in one file.

A file holds the value that a workload carries where the technique is on, and a subclass of :class:`Technique` that tells the
rest of it: its options, the keys of programs that ask for it, the engines that take it, what it conflicts with, what it does
to the model and to the tape, and how it is described. :mod:`zeroplan.techniques.table` has
a row for each, and nothing else names one. ``docs/extending.md`` tells how to add one.

Here alone, beside ``zeroplan/engines``, stand names of engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from zeroplan.core.buffers import Buffer
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.option import Option
from zeroplan.core.option import OptionValues as OptionValues
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.unmodelled import Unmodelled
from zeroplan.core.workload import ChunkedHead, Compilation, DType, Lora, Precision, QuantizedBase, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ledger.line import Ledger

if TYPE_CHECKING:
    from zeroplan.core.parameters import Parameters
    from zeroplan.core.quantization import Base
    from zeroplan.models.spec import ModelSpec
    from zeroplan.tape.expanded import ExpandedTape

V = TypeVar("V")
_USUAL = Workload()


class TakesTechniques(Protocol):
    """What a technique reads of an engine: its name, and the techniques that an engine of one's own says that it takes."""

    @property
    def name(self) -> str:
        """What users write after ``--engine``."""

    @property
    def techniques(self) -> frozenset[str]:
        """Names of techniques, by :attr:`Technique.name`."""

    @property
    def dialect(self) -> object | None:
        """How it reads a ds_config; None if it reads none."""

    @property
    def casts_outputs(self) -> bool:
        """Whether the wrapper around the model makes what it returns fp32."""

    def precision(self, dtype: DType) -> Precision:
        """Return the division of dtypes for `dtype`."""

    def base_precision(self, dtype: DType, base: Base | None) -> Precision:
        """Return the same for adapters beside a base that is kept as `base` says."""


class HoldsTrained(Protocol):
    """What a technique's lines read of a rank (:class:`~zeroplan.engines.torch_rank.TorchRank`)."""

    @property
    def workload(self) -> Workload:
        """What is computed."""

    @property
    def parameters(self) -> Parameters:
        """The model's parameters."""

    @property
    def original_bytes(self) -> int:
        """Bytes of one trained parameter, as the optimizer sees it."""

    @property
    def plain(self) -> bool:
        """Whether parameters are whole tensors."""

    @property
    def chunks(self) -> tuple[int, ...]:
        """Elements of each parameter that this rank's optimizer holds."""

    @property
    def sharded_trainable(self) -> int:
        """Elements of this rank's chunks of trained parameters."""

    @property
    def largest_trained(self) -> int:
        """Elements of this rank's chunk of the largest trained parameter."""


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """Blocks of the GPU that a technique keeps beside the engine's.

    Attributes:
        buffer: what is kept from the initialisation on.
        kept: the bytes of each.
        temporary: what passes behind each step.
        passing: the bytes of each, which is freed before the next.
        together: how many of each are there at one moment.
    """

    buffer: Buffer
    kept: tuple[int, ...]
    temporary: Buffer = Buffer.OPTIM_TEMP
    passing: tuple[int, ...] = ()
    together: int = 1


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a technique reads of a run that files describe, where flags may say more.

    Attributes:
        files: what the files say.
        flags: what the flags say.
        engine: who trains.
        degrees: whether files ask for degrees of parallelism.
        task: what is trained for, in the files' words.
    """

    files: OptionValues
    flags: OptionValues
    engine: TakesTechniques
    degrees: bool
    task: str

    def key(self, option: Option[Any]) -> str:
        """Return the key that said an option."""
        return self.files.source(option.name) or option.name


@dataclass(frozen=True, slots=True)
class Facts:
    """What a technique's rules read of a run.

    Attributes:
        engine: who trains.
        workload: what is computed.
        spec: the model.
        cluster: the machine.
        degrees: of parallelism, by the names of their options.
        shared: whether ranks share more than samples.
        task: what ``--task`` says; None where it says nothing.
        alone: the way out where data parallelism alone is modelled: which options to leave out.
        schedule: of a pipeline's micro batches.
        partition: how layers are divided over pipeline stages (:class:`~zeroplan.engines.case.Case`).
    """

    engine: TakesTechniques
    workload: Workload
    spec: ModelSpec
    cluster: Cluster
    degrees: Mapping[str, int]
    shared: bool = False
    task: str | None = None
    alone: str = ""
    schedule: str = ""
    partition: str = ""

    def has(self, flag: str) -> bool:
        """Return whether a run has what a flag asks for; ``loss`` stands for one that reads no whole logits at once."""
        work, degree = self.workload, self.degrees.get(flag[2:])
        if degree is not None:
            return degree > 1
        again = work.recomputation
        return {
            "--task": self.task is not None,
            "--lora-rank": work.has(Lora),
            "--quantize": work.has(QuantizedBase),
            "--compile": work.has(Compilation),
            "--fp8": work.has(Float8Recipe),
            "--images": work.batch.media is not None,
            "--lengths": bool(work.batch.lengths),
            "--checkpoint-policy": again is not None and again.selective,
            "loss": work.has(ChunkedHead) or work.objective.pair_loss is not None,
        }[flag]


class Technique(Generic[V]):
    """One way to change a run; `V` is the class of the value that a workload carries where it is on.

    Options are class attributes (:class:`~zeroplan.core.option.Option`), and their names are those of the attributes. A value
    that changes the model that is traced has the methods of :class:`zeroplan.tape.options.TracedTechnique`.

    Attributes:
        name: in messages and for engines of one's own.
        kind: the class of the value.
        where: the flag that refusals name.
        keys: how files say it: a program, or ``peft`` for ``LoraConfig``, then its key, then the option's name.
        leaf: the field of a workload's part that carries it, if no value among its techniques does.
        engines: names of the engines that take it; None where all do.
        refusal: what is said under another engine; ``{engine}`` stands for its name. Empty where it is not refused there, but
            the plan says what no figure holds.
        remedy: the way out.
        apart: flags of what it is not modelled beside.
        because: what is said of those; ``{flag}`` stands for the flag.
        decides: the option of files that is not taken as it is: :meth:`filled` decides; empty for none.
        lines: what it adds to the ledger of each engine that takes it: formulas over the engine's rank.
        looped: whether the training loops of ``verify`` and ``tune`` do it.
        in_forms: whether each form that ``recommend`` writes sees to it, so that no key of the program asks for it.
        unsearched: why no search knows its time and memory; empty where searches do.
        shown: the name by which a report's JSON shows the value; empty where :meth:`described` shows more.
        off: what a report's JSON shows where the technique is off.
    """

    name: ClassVar[str]
    kind: ClassVar[type[Any]]
    where: ClassVar[str] = ""
    leaf: ClassVar[str] = ""
    keys: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    engines: ClassVar[Sequence[str] | None] = None
    refusal: ClassVar[str] = ""
    remedy: ClassVar[str] = ""
    apart: ClassVar[Sequence[str]] = ()
    because: ClassVar[str] = ""
    decides: ClassVar[str] = ""
    lines: ClassVar[Ledger] = Ledger()
    looped: ClassVar[bool] = False
    in_forms: ClassVar[bool] = False
    unsearched: ClassVar[str] = ""
    shown: ClassVar[str] = ""
    off: ClassVar[Mapping[str, Any]] = {}

    @property
    def options(self) -> tuple[Option[Any], ...]:
        """Its options, in the order of the help."""
        return tuple(one for one in vars(type(self)).values() if isinstance(one, Option))

    def value(self, asked: OptionValues, engine: TakesTechniques) -> V | None:
        """Return the value that its own options ask for; None where the technique is off.

        Raises:
            BadInput: options that contradict each other.
        """
        return None

    def leaves(self, asked: OptionValues, engine: TakesTechniques) -> Mapping[str, Any]:
        """Return the fields of a workload's parts that its own options decide: by default those of an option's name.

        Raises:
            BadInput: options that contradict each other.
        """
        return {option.name: asked[option] for option in self.options if Workload.has_leaf(option.name)}

    def filled(self, value: Any, facts: FileFacts) -> Mapping[str, Any] | Unmodelled:
        """Return the options that stand where files say `value` for :attr:`decides`, or what the figures then leave out.

        Raises:
            BadInput: a flag that contradicts the files.
        """
        return {}

    def of(self, workload: Workload) -> V | None:
        """Return the value that a workload carries; None where the technique is off."""
        if self.leaf:
            carried: V = workload.leaf(self.leaf)
            return None if carried == _USUAL.leaf(self.leaf) else carried
        found: V | None = workload.technique(self.kind)
        return found

    def taken_by(self, engine: TakesTechniques) -> bool:
        """Return whether an engine takes the technique."""
        return self.engines is None or engine.name in self.engines or self.name in engine.techniques

    def require(self, value: V, facts: Facts) -> None:
        """Refuse what the technique does not go together with. The default refuses engines that do not take it, and what it is
        to stay apart from.

        Raises:
            BadInput: naming the flag, with the reason and a way out.
        """
        if self.refusal and not self.taken_by(facts.engine):
            raise BadInput(self.refusal.format(engine=facts.engine.name), where=self.where, remedy=self.remedy)
        self.require_apart(facts)

    def require_apart(self, facts: Facts) -> None:
        """Refuse what the technique is to stay apart from.

        Raises:
            BadInput: naming the flag.
        """
        flag = next((one for one in self.apart if facts.has(one)), None)
        if flag is not None:
            named = (facts.workload.quantized_by if flag == "--quantize" else "") or flag
            raise BadInput(self.because.format(flag=named), where=named, remedy=f"leave it or {self.where} out")

    def require_degrees(self, value: V, facts: Facts) -> None:
        """Refuse degrees of parallelism that the technique does not go together with.

        Raises:
            BadInput: naming the conflict.
        """

    def require_unshared(self, facts: Facts, what: str) -> None:
        """Refuse ranks that share a model, naming their flag."""
        shared = next((name for name, degree in facts.degrees.items() if degree > 1), "")
        if shared:
            raise BadInput(what, where=f"--{shared}", remedy=f"leave it or {self.where} out")

    def require_sharding(self, value: V, engine: TakesTechniques, zero: ZeroConfig) -> None:
        """Refuse a stage or an offload that the technique does not go together with; tables leave out what is refused.

        Raises:
            BadInput: naming the conflict.
        """

    def named(self, value: V, spec: ModelSpec) -> V | None:
        """Return the value with what the model's own names make of it; None where that is nothing."""
        return value

    def trained(self, value: V, spec: ModelSpec) -> ModelSpec:
        """Return the model with the parameters that the technique adds: ledger lines, gradients and states follow from them."""
        return spec

    def expanded(self, value: V, tape: ExpandedTape, workload: Workload) -> ExpandedTape:
        """Return the tape of a micro batch changed where the technique computes in another way than what was traced."""
        return tape

    def blocks(self, value: V, rank: Any) -> KeptBlocks | None:
        """Return the blocks of the GPU that :attr:`lines` stand for, on the rank that they read; None for none."""
        return None

    def left_out(self, value: V, facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return what no figure holds of the technique; `tape` is what the figures were simulated with."""
        return ()

    def unlooped(self, value: V) -> str:
        """Return why the training loops of ``verify`` and ``tune`` are none of such a run; empty where they are."""
        return "" if self.looped else f"verify's loop has no {self.name}"

    def setting(self, value: V) -> Any:
        """Return what the key of a program says that asks for the technique; None where none says it so."""
        return True

    def written(self, value: V, program: str) -> Mapping[str, Any]:
        """Return the key of a program, or of ``peft``'s ``adapter_config.json``, that asks for the technique: the first of
        :attr:`keys`; empty where it has none.
        """
        key, setting = next(iter(self.keys.get(program, ())), None), self.setting(value)
        return {} if key is None or setting is None else {key: setting}

    def instructions(self, value: V) -> tuple[str, ...]:
        """Return what a user's own program must do where no key of it is written."""
        return (f"train with {self.name}",)

    def described(self, value: V) -> Mapping[str, Any]:
        """Return what a report's JSON shows of the technique, by names that no other technique has."""
        return {self.shown: value} if self.shown else {}


class Degree(Technique[ParallelLayout]):
    """Ranks that share more than samples, which a layout carries in place of a workload.

    Attributes:
        of_layout: the degrees of a layout that are above 1 where the technique is on.
    """

    kind = ParallelLayout
    of_layout: ClassVar[Sequence[str]] = ()

    def divides(self, layout: ParallelLayout) -> bool:
        """Return whether the technique is on."""
        return any(getattr(layout, name) > 1 for name in self.of_layout)

    def require_layout(self, layout: ParallelLayout, facts: Facts) -> None:
        """Refuse what the degree does not divide, and what it does not go together with.

        Raises:
            BadInput: naming the flag.
        """

    def require_apart(self, facts: Facts) -> None:
        """Refuse what the degree is not modelled with."""
        flag = next((one for one in self.apart if facts.has(one)), None)
        if flag is not None:
            verb = "are" if self.name.endswith("s") else "is"
            what = f"{self.name} with {_WORDS.get(flag, flag)} {verb} not modelled"
            raise BadInput(what, where=self.where, remedy=f"leave {flag} out")

    def require_half(self, facts: Facts, what: str) -> None:
        """Refuse other arithmetic than that of 16 bits."""
        numerics = facts.workload.numerics
        if numerics.dtype.bytes != 2 or numerics.param_bytes == 4:
            raise BadInput(what, where="--dtype", remedy=f"use --dtype bf16, or {self.where} 1")


#: What flags ask for.
_WORDS = {"--lora-rank": "LoRA"}
