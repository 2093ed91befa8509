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

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.option import Option
from zeroplan.core.unmodelled import Unmodelled
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig

if TYPE_CHECKING:
    from zeroplan.models.spec import ModelSpec
    from zeroplan.tape.expanded import ExpandedTape

V = TypeVar("V")


class TakesTechniques(Protocol):
    """What a technique reads of an engine: its name, and the techniques that an engine of one's own says that it takes."""

    @property
    def name(self) -> str:
        """What users write after ``--engine``."""

    @property
    def techniques(self) -> frozenset[str]:
        """Names of techniques, by :attr:`Technique.name`."""


class Asked(Protocol):
    """Where a technique reads its options."""

    def __getitem__(self, option: Option[V]) -> V:
        """Return an option's value, its default where nobody said one."""


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
    """

    engine: TakesTechniques
    workload: Workload
    spec: ModelSpec
    cluster: Cluster
    degrees: Mapping[str, int]
    shared: bool = False
    task: str | None = None
    alone: str = ""


class Technique(Generic[V]):
    """One way to change a run; `V` is the class of the value that a workload carries where it is on.

    Options are class attributes (:class:`~zeroplan.core.option.Option`), and their names are those of the attributes. A value
    that changes the model that is traced has the methods of :class:`zeroplan.tape.options.TracedTechnique`.

    Attributes:
        name: in messages and for engines of one's own.
        kind: the class of the value.
        where: the flag that refusals name.
        keys: how files say it: a program, or ``peft`` for ``LoraConfig``, then its key, then the option's name.
        engines: names of the engines that take it; None where all do.
        refusal: what is said under another engine; ``{engine}`` stands for its name.
        remedy: the way out.
        looped: whether the training loops of ``verify`` and ``tune`` do it.
        searched: whether searches know its time and memory.
    """

    name: ClassVar[str]
    kind: ClassVar[type[Any]]
    where: ClassVar[str] = ""
    keys: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    engines: ClassVar[Sequence[str] | None] = None
    refusal: ClassVar[str] = ""
    remedy: ClassVar[str] = ""
    looped: ClassVar[bool] = False
    searched: ClassVar[bool] = False

    @property
    def options(self) -> tuple[Option[Any], ...]:
        """Its options, in the order of the help."""
        return tuple(one for one in vars(type(self)).values() if isinstance(one, Option))

    def value(self, asked: Asked) -> V | None:
        """Return the value that its own options ask for; None where the technique is off.

        Raises:
            BadInput: options that contradict each other.
        """
        return None

    def of(self, workload: Workload) -> V | None:
        """Return the value that a workload carries; None where the technique is off."""
        found: V | None = workload.technique(self.kind)
        return found

    def taken_by(self, engine: TakesTechniques) -> bool:
        """Return whether an engine takes the technique."""
        return self.engines is None or engine.name in self.engines or self.name in engine.techniques

    def require(self, value: V, facts: Facts) -> None:
        """Refuse what the technique does not go together with. The default refuses engines that do not take it.

        Raises:
            BadInput: naming the flag, with the reason and a way out.
        """
        if not self.taken_by(facts.engine):
            raise BadInput(self.refusal.format(engine=facts.engine.name), where=self.where, remedy=self.remedy)

    def require_degrees(self, value: V, facts: Facts) -> None:
        """Refuse degrees of parallelism that the technique does not go together with.

        Raises:
            BadInput: naming the conflict.
        """

    def require_sharding(self, value: V, engine: TakesTechniques, zero: ZeroConfig) -> None:
        """Refuse a stage or an offload that the technique does not go together with; tables leave out what is refused.

        Raises:
            BadInput: naming the conflict.
        """

    def trained(self, value: V, spec: ModelSpec) -> ModelSpec:
        """Return the model with the parameters that the technique adds: ledger lines, gradients and states follow from them."""
        return spec

    def expanded(self, value: V, tape: ExpandedTape, workload: Workload) -> ExpandedTape:
        """Return the tape of a micro batch changed where the technique computes in another way than what was traced."""
        return tape

    def left_out(self, value: V, facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return what no figure holds of the technique; `tape` is what the figures were simulated with."""
        return ()

    def written(self, value: V, program: str) -> Mapping[str, Any]:
        """Return the keys of a program, or of ``peft``'s ``adapter_config.json``, that ask for the technique."""
        return {}

    def described(self, value: V) -> Mapping[str, Any]:
        """Return what a report's JSON shows of the technique, by names that no other technique has."""
        return {}
