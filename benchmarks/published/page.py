"""The page of published figures, made from ``rows.jsonl``: docs/generate.py writes it."""

from __future__ import annotations

from itertools import groupby

from benchmarks.published.rows import FIGURES, Row, load_rows, shown
from zeroplan.report.table import render

_RELATIONS = {"equal": "", "at most": "≤ ", "at least": "≥ "}


def published() -> str:
    """Every figure beside its plan, by source; misses with their reasons."""
    rows = load_rows()
    missed = [row for row in rows if row.miss]
    out = [
        "# Figures that papers print",
        "",
        f"{len(rows)} figures of memory from papers, and what is planned for the same run: {len(rows) - len(missed)} hold,",
        f"{len(missed)} do not, and [say why](#misses). `python -m benchmarks.published` plans them again; each has a test.",
        "",
        "A printed figure is met where the plan is within one of its last digit: papers cut digits off as often as they round.",
        "`≤` is a limit that a run is reported to have kept, such as the memory of the card that trained it; `≥` one that it",
        "is reported to have broken. Most of what these papers print are formulas and configurations: **none prints the memory",
        "that a run was measured to use**, so that these rows cannot show how accurate a plan is;",
        "[measured rows](accuracy.md) do.",
        "",
    ]
    for source, of_source in groupby(rows, lambda row: row.source):
        out += [f"## {source}", "", table(list(of_source)), ""]
    out += ["## Misses", ""]
    out += [f"- **{row.source}, {row.what}**: {row.miss}" for row in missed] or ["None."]
    return "\n".join([*out, "", *_NOT_HELD])


def table(rows: list[Row]) -> str:
    """Return rows as a table in Markdown."""
    cells = [
        [
            row.what,
            FIGURES[row.figure][0],
            _RELATIONS[row.holds] + row.published,
            shown(row.planned),
            "miss" if row.miss else "",
        ]
        for row in rows
    ]
    return render(["which", "figure", "published", "planned", ""], cells, "github")


_NOT_HELD = [
    "## What the rows assume",
    "",
    "- Megatron-LM's runs are planned as Megatron-Core 0.16 with its own layers, without the distributed optimizer, in fp16.",
    "  Whole layers are recomputed, but in the rows of Korthikanti et al. The micro batch is 1 where none is printed.",
    "- Table 2 of Korthikanti et al. prints formulas; *published* is their value for the models of its table 3.",
    "- The slides name sizes and ways alone: shapes of models and numbers of GPUs are ours. ZeRO's *in theory* counts states",
    "  alone, against 32 GB; what ran must be smaller. The shares of a model are planned as one GPU's states, times the ways.",
    "- DeepSeek-V3 is planned as Megatron-Core's, on H100s, which have an H800's memory; its last stage has one layer.",
    "",
    "## What could not be held against a plan",
    "",
    "- **The ultra-scale playbook's measured runs** (Hugging Face, 2025): its text prints formulas, held above; its memory",
    "  profiles and its grids of some 4,000 runs are drawn, and the files of those runs were not to be had. They trained with",
    "  nanotron, whose layers zeroplan does not describe.",
    "- **Memory bars of Korthikanti et al.** (figure 1) and **cached memory of ZeRO** (figure 7): drawn without numbers.",
    "- **DeepSeek-V3's memory**: its report names the layout and prints no figure of memory.",
    "",
]
