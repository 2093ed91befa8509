"""Chooses the renderer of an answer that is printed or shown in a notebook."""

from __future__ import annotations

from html import escape

from zeroplan.core.display import Printable
from zeroplan.core.plan import MemoryPlan
from zeroplan.report.plans import plan_html, plan_text


def answer_text(answer: Printable) -> str:
    """Return the answer as text for a terminal."""
    if isinstance(answer, MemoryPlan):
        return plan_text(answer)
    from zeroplan.report.drift import drift_text
    from zeroplan.validate.results import Drift

    return drift_text(answer) if isinstance(answer, Drift) else repr(answer)


def answer_html(answer: Printable) -> str:
    """Return the answer as an HTML fragment for a notebook's cell."""
    return plan_html(answer) if isinstance(answer, MemoryPlan) else f"<pre>{escape(answer_text(answer))}</pre>"
