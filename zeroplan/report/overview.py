"""The answer of ``recommend`` without a model, as text and JSON: the largest models that the machine can train."""

from __future__ import annotations

from typing import Any

from zeroplan.core.units import format_count, format_gib
from zeroplan.report.recommendation import answer_text
from zeroplan.report.table import render
from zeroplan.search.catalog import Overview
from zeroplan.search.files import Files
from zeroplan.search.reasons import name_of


def overview_text(found: Overview, style: str = "plain", *, files: Files | None = None) -> str:
    """Return one row for each method and model, largest first, and below them the answer for the largest full fine-tune.

    Args:
        found: what was found.
        style: plain, github, html or csv.
        files: what was written, and how to start it.
    """
    headers = ["method", "model", "parameters", "how", "total", "host", "tokens/s"]
    rows = []
    for row in found.rows:
        for name, params, one in row.found:
            how = name_of(one.zero)
            figures = [format_gib(one.plan.gpu.total), format_gib(one.plan.cpu.per_node, digits=0)]
            rows.append([row.method.name, name, format_count(params), how, *figures, f"{one.tokens_per_second:,.0f}"])
        if not row.found:
            rows.append([row.method.name, "nothing", "-", "-", "-", "-", "-"])
    table = render(headers, rows, style)
    if style in ("csv", "html"):
        return table
    parts = ["The largest models of the catalog that fit, by method (one sequence a GPU, checkpointing):", "", table, ""]
    if found.best is None:
        parts += ["No model of the catalog can be trained in full here."]
        return "\n".join([*parts, *(f"warning: {text}" for text in found.warnings)])
    parts += ["The largest full fine-tune:", answer_text(found.best, style, files=files)]
    return "\n".join(parts)


def overview_json(found: Overview) -> dict[str, Any]:
    """Return the same as one object that JSON can hold."""
    return {
        "schema": 1,
        "warnings": list(found.warnings),
        "methods": [
            {
                "method": row.method.name,
                "models": [{"model": name, "params": params, **one.to_dict()} for name, params, one in row.found],
            }
            for row in found.rows
        ],
        "best": None if found.best is None else found.best.to_dict(),
    }
