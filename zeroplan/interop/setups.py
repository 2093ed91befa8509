"""A Setup is what other programs' files say of a training run: an Ask, and what no option of a run holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zeroplan.core.unmodelled import Unmodelled
from zeroplan.interop.training import NO_TRAINING, Training
from zeroplan.run.ask import MESH_OPTIONS, Ask

#: Names that mean the setup's own, and no option of its ask.
_OWN = ("task", "method", "program", "files", "unmodelled", "degrees")


@dataclass(frozen=True, slots=True)
class Setup:
    """One run as files describe it.

    Attributes:
        program: the short name of the program that owns the first file, such as ``trl``.
        title: the program as people write it, with the version whose defaults are assumed.
        files: the files that were read.
        method: ``full``, ``lora``, ``qlora``, or the program's own word for another way.
        task: ``sft``, ``pretrain``, ``dpo``, …; empty where no file says.
        ask: the options that the files say, each with the key that said it. Keys of degrees of parallelism stand among
            `unmodelled`, too, for verbs without layouts.
        open: options that the file cannot hold and no line of it tells, with what is missing: a flag gives them.
        training: what moves training and no memory, which written files carry.
        assumed: what the program's defaults decide, one clause each.
        unmodelled: keys that no option holds.
        unknown: keys that the program does not have.
    """

    program: str
    title: str = ""
    files: tuple[str, ...] = ()
    method: str = "full"
    task: str = ""
    ask: Ask = field(default_factory=Ask)
    open: Mapping[str, str] = field(default_factory=dict)
    training: Training = NO_TRAINING
    assumed: tuple[str, ...] = ()
    unmodelled: tuple[Unmodelled, ...] = ()
    unknown: tuple[str, ...] = ()

    def value(self, name: str) -> Any:
        """Return what the files say of an option, or a field of the setup; None where they leave an option open."""
        return getattr(self, name) if name in _OWN else self.ask.values.get(name)

    def key(self, name: str) -> str:
        """Return the key that said an option; its name where none is known."""
        return self.ask.source(name) or name

    @property
    def ranks(self) -> int | None:
        """The ranks that the files start; None where they do not say how many."""
        return self.ask.gpus * self.ask.nodes if "gpus" in self.ask else None

    @property
    def ds_config(self) -> Mapping[str, Any] | None:
        """The ds_config that the files bring."""
        found = self.ask.ds_config
        return found if isinstance(found, Mapping) else None

    @property
    def degrees(self) -> dict[str, Any]:
        """The degrees of parallelism that the files say, by their options' names."""
        return {name: self.ask.values[name] for name in MESH_OPTIONS if name in self.ask}

    def saying(self, by: Mapping[str, str] | None = None, **values: Any) -> Setup:
        """Return the setup with other values of options, and the keys that said them."""
        return replace(self, ask=self.ask.replace(**values).by(by or {}))

    @property
    def what(self) -> str:
        """Task and method in a few words, such as ``sft, lora``."""
        return ", ".join(part for part in (self.task, self.method) if part)

    @property
    def line(self) -> str:
        """One line that says what was read, by which program's rules, and what was assumed."""
        head = f"{self.title} ({self.what})" if self.what else self.title
        parts = [f"{head}: {', '.join(self.files)}"]
        if self.assumed:
            parts.append(f"assumed: {', '.join(self.assumed)}")
        if self.unknown:
            parts.append(f"no keys of {self.title.rpartition(' ')[0]}: {', '.join(self.unknown)}")
        return "; ".join(parts)
