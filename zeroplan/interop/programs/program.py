"""The interface of a program whose files zeroplan reads. A new one is one module and one line of the registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from zeroplan.interop.programs.document import Document
from zeroplan.interop.setups import Setup


class Program(ABC):
    """One program.

    Attributes:
        name: what users write after ``--program``.
        title: as people write it.
        version: whose defaults and keys are assumed.
        base: the program on which it builds, whose keys it has too: a file with evidence of both is this one's.
        first: the oldest version that ``--program NAME==VERSION`` may name; None where it is known in one alone.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    version: ClassVar[str]
    base: ClassVar[str] = ""
    first: ClassVar[str | None] = None

    @property
    def label(self) -> str:
        """Title and version."""
        return f"{self.title} {self.version}"

    @abstractmethod
    def recognises(self, document: Document) -> tuple[str, ...]:
        """The document's keys that no other program has; empty where nothing shows that it is this program's."""

    def could_own(self, document: Document) -> bool:
        """Return whether the program would take the document, though nothing shows that it is its own."""
        return False

    def starts_own(self, document: Document) -> bool:
        """Whether the document's command starts the program's own code; else a script whose defaults may be others."""
        return True

    @abstractmethod
    def read(self, document: Document) -> Setup:
        """Read the run that the program makes of the document.

        Raises:
            BadInput: values of wrong types, files that are not there, or a run that no GPU has.
        """
