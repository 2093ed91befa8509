"""What an answer says, before it is text or a page: both are made of one Sheet, beside tables and pictures of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from zeroplan.core.plan import MemoryPlan
from zeroplan.report.terminal import Terminal


@dataclass(frozen=True)
class Sheet:
    """The words of an answer.

    Attributes:
        name: of the model.
        request: what was asked for, the model first.
        verdict: the answer in a sentence or two.
        fits: in which colour it is said: whether what decides fits; None where that is not known.
        plan: what decides; None where no single plan does.
        sentences: what stands behind the verdict, each with its rank on the first screen (:mod:`zeroplan.report.screen`).
        remarks: what else to know, the most severe first.
    """

    name: str
    request: str
    verdict: str
    fits: bool | None
    plan: MemoryPlan | None
    sentences: tuple[tuple[int, str], ...]
    remarks: tuple[str, ...]

    @cached_property
    def notes(self) -> list[str]:
        """The notes below the answer: what was said beside the sentences, each text once."""
        return list(dict.fromkeys(self.remarks))

    def lines(self, terminal: Terminal) -> list[str]:
        """Return the verdict as lines of a terminal."""
        return terminal.verdict(self.verdict, self.fits)

    def blocks(self, terminal: Terminal) -> list[tuple[int, list[str]]]:
        """Return the lines of the verdict and of each sentence, with their ranks."""
        behind = [(rank, terminal.wrap(text) if text else []) for rank, text in self.sentences]
        return [(0, self.lines(terminal)), *behind]

    def page(self, *body: str, bar: str = "", made: Mapping[str, str] | None = None, scripts: Iterable[str] = ()) -> str:
        """Return the page: the verdict's card with a bar of memory, then HTML, then the notes.

        Args:
            body: fragments of HTML.
            bar: HTML between the verdict and its sentences.
            made: of :func:`~zeroplan.report.page.page`, as `scripts`.
        """
        from zeroplan.report.html_parts import card, items, mark_of, paragraphs, verdict_card
        from zeroplan.report.page import page

        head = verdict_card(self.verdict, mark_of(self.plan), bar, paragraphs(*(text for _, text in self.sentences)))
        lead = self.request.removeprefix(f"{self.name}: ")
        return page(self.name, lead, [head, *body, card("Notes", items(self.notes), mark="notes")], made=made, scripts=scripts)
