"""What ``recommend --layouts`` answers for models that people train, on nodes that they rent: the table in docs/scale.md.

    python -m benchmarks.layouts.recommended [--only TEXT]

writes a line of JSON for each model, card and number of nodes to ``benchmarks/results/recommended_plans.jsonl``; ``--only``
makes those anew whose card or model contains a text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zeroplan.core.sizes import GIB
from zeroplan.report.layouts import layout_name, reason
from zeroplan.report.table import render
from zeroplan.run.ask import Ask
from zeroplan.search.layouts import search_layouts

RESULTS = Path(__file__).parents[1] / "results" / "recommended_plans.jsonl"
CARDS, NODES = ("H100", "A100-40G", "L40S"), (1, 2, 8, 64)
#: Models with their name in the table and their tokens a sample.
MODELS = {
    "meta-llama/Llama-3.1-8B": ("8B", 8192),
    "Qwen/Qwen3-32B": ("32B", 8192),
    "meta-llama/Llama-3.1-70B": ("70B", 8192),
    "meta-llama/Llama-3.1-405B": ("405B", 8192),
    "Qwen/Qwen3-30B-A3B": ("30B-A3B", 4096),
}


def row(model: str, card: str, nodes: int) -> dict[str, Any]:
    """Return the answer for a model on so many nodes of eight cards."""
    short, tokens = MODELS[model]
    answer = search_layouts(Ask(model=model, gpu=card, gpus=8, nodes=nodes, seq_len=tokens))
    found: dict[str, Any] = {"card": card, "nodes": nodes, "model": short}
    chosen = answer.chosen
    if chosen is None:
        least = min((one.plan.gpu.needed for one in answer.tried if one.plan.gpu.total), default=None)
        counted = min((one.least for one in answer.too_large), default=None)
        needs = min(size for size in (least, counted) if size is not None)
        return found | {"plan": "", "why": f"nothing fits: the smallest that was looked at needs {needs / GIB:.0f} GiB a GPU"}
    why = reason(answer) or "no layout that was tried is faster"
    if answer.plainest is not None:
        slower = 1 - answer.plainest.compared / chosen.compared
        why += f"; plainest within 3 %: {layout_name(answer.plainest)} ({100 * slower:.1f} % slower)"
    if answer.best is None:
        why += "; not known to fit"
    speed = chosen.tokens_per_second / (8 * nodes)
    return found | {"plan": layout_name(chosen), "tokens": round(speed), "why": why}


def rows() -> Iterator[tuple[str, str, int]]:
    """Yield model, card and nodes of each row, in the order of the table."""
    for card in CARDS:
        for model in MODELS:
            for nodes in NODES:
                yield model, card, nodes


def kept() -> list[dict[str, Any]]:
    """Return the rows that were made."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def recommended_plans() -> str:
    """Return the table of docs/scale.md."""
    shown = [
        [
            f"{one['nodes']} × 8 {one['card']}",
            one["model"],
            one["plan"],
            f"{one['tokens']:,}" if one["plan"] else "",
            one["why"],
        ]
        for one in kept()
    ]
    return render(["nodes", "model", "plan", "tokens/s a GPU", "why"], shown, "github")


def main() -> None:
    """Make the rows, and write each as it is made."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    before = {(one["model"], one["card"], one["nodes"]): one for one in kept()} if RESULTS.exists() else {}
    for model, card, nodes in rows():
        key = (MODELS[model][0], card, nodes)
        if key not in before or only in f"{model} {card}":
            before[key] = row(model, card, nodes)
            print(json.dumps(before[key], ensure_ascii=False), flush=True)
        keys = ((MODELS[name][0], where, count) for name, where, count in rows())
        ordered = [before[key] for key in keys if key in before]
        RESULTS.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in ordered))


if __name__ == "__main__":
    main()
