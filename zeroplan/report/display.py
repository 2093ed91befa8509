"""Chooses the renderer of an answer that is printed or shown in a notebook."""

from __future__ import annotations

from zeroplan.core.plan import MemoryPlan
from zeroplan.core.plumbing.display import Printable
from zeroplan.report.plans import plan_html, plan_text


def answer_text(answer: Printable) -> str:
    """Return the answer as text for a terminal."""
    if isinstance(answer, MemoryPlan):
        return plan_text(answer)
    from zeroplan.search.results import Recommendation
    from zeroplan.search.scaling import Scaling
    from zeroplan.validate.results import Drift

    if isinstance(answer, Recommendation):
        from zeroplan.report.recommendation import recommendation_text

        return recommendation_text(answer)
    if isinstance(answer, Scaling):
        from zeroplan.report.scaling import scaling_text

        return scaling_text(answer)
    from zeroplan.report.drift import drift_text

    return drift_text(answer) if isinstance(answer, Drift) else repr(answer)


def answer_html(answer: Printable) -> str:
    """Return the answer as an HTML fragment for a notebook's cell."""
    from zeroplan.report.notebook import text_html

    return plan_html(answer) if isinstance(answer, MemoryPlan) else text_html(answer_text(answer))
