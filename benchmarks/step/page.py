"""The page of the docs that shows the runtime beside other engines, from the results of the step and offload benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.step.case import Case
from zeroplan.report.table import render

RESULTS = Path(__file__).resolve().parents[1] / "results"


def runtime_speed() -> str:
    """Write the runtime beside other engines: tokens a second and memory, in the same runs."""
    out = [
        "# The runtime beside others",
        "",
        "The same model, weights and batches under each engine, each case in fresh processes, one after another on the same",
        "GPUs (`python -m benchmarks.step.compare`; torch 2.11, DeepSpeed 0.19.8, transformers 5.17). The first steps repeat",
        "one batch, and a ratio counts only if the losses fall alike. fp32: gradients are reduced in fp32, else in bf16.",
        "Memory is the worst rank's peak by torch's allocator. The last two columns are the runtime's figures over the peer's,",
        "where both were timed compiled and not those of its faster form. Hosts differ between tables: compare within one.",
    ]
    for path in sorted((RESULTS / "step").glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        groups: dict[tuple[int, str, int, int], list[dict[str, Any]]] = {}
        for row in rows:
            if "fault" not in row:
                groups.setdefault((row["ranks"], row["shape"], row["micro"], row["seq"]), []).append(row)
        for (ranks, shape, micro, seq), members in groups.items():
            compiled = ", blocks compiled or not" if any(Case.parse(row["case"]).compiled for row in members) else ""
            title = f"## {shape}, {ranks} × {members[0]['gpu']}, micro batch {micro} × {seq} tokens{compiled}"
            headers = ["engine", "stage", "ms a step", "tokens/s", "allocated GB", "reserved GB", "tokens/s", "reserved"]
            out += ["", title, "", render(headers, _step_table(members), "github")]
    out += ["", *_overlap(RESULTS / "step"), "", *_offload_speed(RESULTS / "offload_h100.jsonl")]
    return "\n".join(out)


def _step_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return a row a case; beside a peer's stands what the faster form of the runtime, compiled or not, reached in the same
    run.
    """
    cases = [(Case.parse(row["case"]), row) for row in rows]
    cases.sort(key=lambda pair: (pair[0].group, pair[0].engine != "zeroplan", str(pair[0])))
    table = []
    for case, row in cases:
        ours = [mine for other, mine in cases if other.engine == "zeroplan" and case.is_beside(other)]
        ours = [mine for mine in ours if mine["command"] == row["command"]]
        ratios = ["", ""]
        if ours:
            best = max(ours, key=lambda mine: mine["tokens_per_s"])
            ratios = [
                f"× {best['tokens_per_s'] / row['tokens_per_s']:.2f}",
                f"{best['peak_reserved'] / row['peak_reserved']:.2f}",
            ]
        stage = ", ".join([str(case.stage), *(["fp32"] if case.fp32_reduce else []), *(["ckpt"] if case.checkpointing else [])])
        memory = [f"{row[key] / 1e9:.2f}" for key in ("peak_allocated", "peak_reserved")]
        table.append([case.label, stage, f"{row['step_ms']:.1f}", f"{row['tokens_per_s']:,}", *memory, *ratios])
    return table


def _overlap(folder: Path) -> list[str]:
    """Write what a profile of one step shows of communication behind computation."""
    rows = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    table = [
        [
            r["case"],
            r["shape"],
            str(r["ranks"]),
            f"{r['communication_ms']:.1f}",
            f"{r['hidden_ms'] / r['communication_ms']:.0%}",
        ]
        for r in rows
        if r.get("communication_ms")
    ]
    text = "Kernel times of one profiled step: what NCCL's kernels take, and how much of that ran beside computation."
    return ["## Overlap", "", text, "", render(["case", "shape", "ranks", "communication ms", "hidden"], table, "github")]


def _offload_speed(path: Path) -> list[str]:
    """Write offload to the host beside DeepSpeed's."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if "fault" not in row]
    peers = {row["case"].partition(":")[2]: row for row in rows if row["case"].startswith("deepspeed:")}
    table = []
    for row in rows:
        engine, _, group = row["case"].partition(":")
        peer, ratios = peers.get(group), ["", ""]
        if peer is not None and engine == "zeroplan":
            ratios = [f"× {row['tokens_per_s'] / peer['tokens_per_s']:.2f}", f"{row['host_peak'] / peer['host_peak']:.2f}"]
        figures = [
            f"{row['step_ms']:.0f}",
            f"{row['tokens_per_s']:,}",
            *(f"{row[k] / 1e9:.2f}" for k in ("peak_reserved", "host_peak")),
        ]
        table.append([engine, group, *figures, *ratios])
    headers = ["engine", "stage and what leaves", "ms a step", "tokens/s", "GPU reserved GB", "host GB", "tokens/s", "host"]
    text = [
        f"`python -m benchmarks.offload.compare`, {rows[0]['shape']} on one {rows[0]['gpu']} with 16 cores. opt: the optimizer",
        "is on the host; all: the parameters, too; free: without clipping, so that updates begin in the backward; delayed:",
        "with the delayed update. The last two columns are the runtime's figures over DeepSpeed's.",
    ]
    return ["## Offload", "", *text, "", render(headers, table, "github")]
