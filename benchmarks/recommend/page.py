"""The page of what was measured of recommendations, made from benchmarks/results: docs/generate.py writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zeroplan.core.sizes import GIB
from zeroplan.report.table import render

RESULTS = Path(__file__).resolve().parent.parent / "results"


def _results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def measured() -> str:
    """Grids, step times, margins and rates."""
    grids, speeds, margins, rate = (_results(name) for name in ("recommend", "speeds", "margins", "rate"))
    return "\n".join([*_grids(grids), *_speeds(speeds), *_margins(margins), *_rates(rate)])


_HEAD = ["GPU", "measured", "ran", "best reached", "within 15 %", "Kendall's τ", "fit said, died", "no fit said, died"]


def _score(one: dict[str, Any]) -> list[str]:
    """A grid's cells under the head."""
    return [
        one["gpu"],
        str(one["measured"]),
        str(one["ran"]),
        f"{one['reached_of_best']:.0%}",
        f"{one['within_15_percent']:.0%}",
        f"{one['kendall_tau']:.2f}",
        str(len(one["said_to_fit_and_died"])),
        f"{one['of_those_died']} of {one['said_not_to_fit']}",
    ]


def _blind() -> list[str]:
    """The grid whose ranking was committed before any of it was measured."""
    names = {"compared": "as predicted before", "compared_4_ranks": "with that kind of host's rates, by `doctor --calibrate`"}
    rows = []
    for name, what in names.items():
        (one,) = _results(f"recommend_blind/{name}")["setups"]
        rows.append([what, *_score(one)])
    return [
        "## Ranked before measured",
        "",
        "Most of the grids above had been seen while step times were modelled. This one, Qwen2.5-1.5B on four GPUs held to",
        "32 GiB, was ranked and the ranking committed before any of it ran, on hosts that no rate was taken from. Memory held:",
        "what was said to fit ran, what was said not to fit died. Time did not: these hosts are slow while four ranks run, so",
        "where the host bounds the step it took up to 2.9 times as long. Calibrate where speed matters.",
        "",
        render(["ranking", *_HEAD], rows, "github"),
        "",
    ]


def _grids(grids: dict[str, Any]) -> list[str]:
    head = ["grid", *_HEAD]
    rows = [[f"`{one['setup']}`", *_score(one)] for one in grids["setups"]]
    out = [
        "# Recommendations, measured",
        "",
        "A grid is a model, a number of GPUs held to a memory cap (the figure behind the ×, in GiB), and a dozen or more",
        "candidates, near misses included. Each candidate is trained under DeepSpeed 0.19.8, alone on its host, and the same",
        "candidates are ranked by `recommend --candidates`. *Best reached*: the recommended one's share of the best measured",
        "tokens a second. `benchmarks/recommend/grid.sh` measures, `python -m benchmarks.recommend.measure compare` compares.",
        "",
        render(head, rows, "github"),
        "",
        *_blind(),
    ]
    for one in grids["setups"]:
        out += [f"## {one['setup']}", "", _table(one["table"]), ""]
    ends = [
        f"- {row['engine'] if row['ok'] else row['id']}: "
        + (f"losses {row['losses'][0]} to {row['losses'][-1]} over {len(row['losses'])} steps" if row["ok"] else row["error"])
        for row in grids["emitted"]
    ]
    if ends:
        out += ["The config that was written for Llama-3.2-1B on one 24 GB card, trained as it is:", "", *ends, ""]
    return out


def _table(lines: list[dict[str, Any]]) -> str:
    """Candidates as ranked. What did not run has no measured figures."""
    rows = [
        [
            line["choice"],
            "yes" if line["fits"] else "no",
            "yes" if line["ran"] else "out of memory",
            f"{line['predicted_seconds']:.3f}",
            f"{line['measured_seconds']:.3f}" if line["ran"] else "-",
            f"{line['off']:+.0%}" if line["ran"] else "-",
            f"{line['predicted_reserved'] / GIB:.2f}",
            f"{line['measured_reserved'] / GIB:.2f}" if line["ran"] else "-",
        ]
        for line in lines
    ]
    head = ["candidate", "said to fit", "ran", "s predicted", "s measured", "off", "GiB reserved, predicted", "measured"]
    return render(head, rows, "github")


def _speeds(speeds: dict[str, Any]) -> list[str]:
    names = {
        "fitted": "grids, rows that rates were fitted to",
        "held_out": "grids, rows held out",
        "shared_host": "older runs: marks that wait for the device, hosts that several shared",
    }
    rows = [
        [what, str(speeds[name]["rows"])]
        + [f"{speeds[name][key]:.0%}" for key in ("within_15_percent", "within_25_percent")]
        + [f"{speeds[name]['kendall_tau']:.2f}"]
        for name, what in names.items()
        if name in speeds
    ]
    return [
        "## Step times",
        "",
        "Rates of the host (µs a kernel, a hook, an operation; GB/s of its optimizer and memory) are fitted to every second",
        "row of all grids, together with the older runs (`python -m benchmarks.recommend.speeds --fit`). The other rows are",
        "held out of the fit, but not of the modelling: every row of the grids on four GPUs had been seen when the causes",
        "below were looked for in DeepSpeed's source. Before that, with rates from one GPU alone, the two grids on four",
        "reached 84 % and 93 % of the best, had 40 % and 100 % of step times within 15 %, and a τ of 0.41 and 0.40. The",
        "causes are a reduction at stage 1 that the host issues behind the backward; a wait for each gradient's test for",
        "overflow at stage 0 and with offload; recomputation that stops before a block's last product; copies around",
        "stage 3's collectives; the last buckets, which nothing hides; and what a hidden collective takes from the kernels",
        "beside it, which was measured apart. The model that came of this met `llama1b_4x24` and the rest of `llama3b_4x40`",
        "unseen: 97 % and 93 % of the best, 91 % and 88 % within 15 %, a τ of 0.73 and 0.71, and one run at stage 3 that was",
        "said to fit died. Looked for since: pages of expandable segments, which a full card maps one by one; what a hidden",
        "all-reduce takes, less than a gather does; and how a run on a full card goes on after its first steps. The later",
        "rows of `qwen05b_1x24` (from `2 micro 4` on) came after that and were not modelled on.",
        "",
        render(["runs", "count", "within 15 %", "within 25 %", "Kendall's τ"], rows, "github"),
        "",
    ]


def _margins(margins: dict[str, Any]) -> list[str]:
    unsafe = ", ".join(f"`{name}` by {-value:.1%}" for name, value in margins["false_safe_rows"].items())
    return [
        "## Margins",
        "",
        f"Of {margins['rows']} runs whose device memory is known, {margins['false_safe']} used more than the upper end of the",
        f"interval said{f' ({unsafe})' if unsafe else ''}; half of them were within {margins['median_margin']:.1%} of it",
        "(`python -m benchmarks.recommend.margins`).",
        "",
    ]


def _rates(rate: list[dict[str, Any]]) -> list[str]:
    rows = [
        [
            row["model"],
            f"{row['gpus']} × {row['vram_gib']} GiB",
            str(row["candidates"]),
            f"{row['floors_a_second']:,}",
            f"{row['step_times_a_second']:,}",
            f"{row['simulations_a_second']:g}" if row["simulations_a_second"] else "-",
            f"{row['answer_seconds']:.2f} s" + ("" if row["fits"] else ", nothing fits"),
        ]
        for row in rate
    ]
    head = ["model", "machine", "candidates", "floors a second", "step times a second", "simulations a second", "whole answer"]
    return [
        "## How fast candidates are judged",
        "",
        "On one core, from shipped tapes (`python -m benchmarks.recommend.rate`).",
        "",
        render(head, rows, "github"),
        "",
    ]
