"""Holds modelled times of layouts against steps on two GPUs, and on four.

    python -m benchmarks.layouts.two_gpus predict FILE [--gpu H200] [--profile FILE] [--cases CASE …]
    torchrun --nproc-per-node 2 -m benchmarks.layouts.steps FILE CASE …
    python -m benchmarks.layouts.two_gpus compare PREDICTED MEASURED

``predict`` writes a line of JSON for each case, on any machine where torch can trace the models, which stand for those of the
catalog whose tapes are shipped; a profile of the GPUs' machine (``zeroplan doctor --calibrate``) tells how fast its host is.
``steps`` runs them in the loops of ``zeroplan verify``, without its marks. ``compare`` prints both; the page on parallelism has
the last ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.ledger.work import count_tape
from zeroplan.models.load import load_model
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import ExpandedTapes
from zeroplan.report.table import render
from zeroplan.run.ask import Ask
from zeroplan.search.cost import CostModel
from zeroplan.search.layout_time import LayoutCost
from zeroplan.search.machine_rates import machine_rates
from zeroplan.search.policy import HOST_DECIDES

DENSE, LARGE, OTHER, MIXTURE = "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"
#: What is unlike the models of these names: a head of its own, for stages, and as many blocks as two cards of 80 GB train.
_CHANGED: dict[str, dict[str, Any]] = {
    DENSE: {"tie_word_embeddings": False},
    LARGE: {"num_hidden_layers": 8},
    OTHER: {"num_hidden_layers": 8},
    MIXTURE: {"num_hidden_layers": 6},
}
_SHARED: dict[str, Any] = {"engine": "fsdp2", "gpus": 2, "seq_len": 4096}
_DEEPSPEED: dict[str, Any] = {
    "engine": "deepspeed",
    "model": DENSE,
    "micro_batch": 2,
    **dict.fromkeys(("offload_optimizer", "offload_param"), "none"),
}
CASES: dict[str, dict[str, Any]] = {
    "1B, dp 2, ZeRO-3": {"model": DENSE, "micro_batch": 2, "stage": 3},
    "1B, dp 2, ZeRO-3, checkpointing": {"model": DENSE, "micro_batch": 4, "stage": 3, "gradient_checkpointing": True},
    "1B, tp 2": {"model": DENSE, "micro_batch": 4, "stage": 3, "tp": 2},
    "1B, tp 2 with split tokens": {"model": DENSE, "micro_batch": 4, "stage": 3, "tp": 2, "sp": True},
    "1B, cp 2": {"model": DENSE, "micro_batch": 4, "stage": 3, "cp": 2},
    "1B, pp 2, 8 micro batches": {"model": DENSE, "micro_batch": 2, "stage": 2, "pp": 2, "grad_accum": 8},
    "mixture, dp 2, ZeRO-3": {"model": MIXTURE, "micro_batch": 1, "stage": 3},
    "mixture, ep 2": {"model": MIXTURE, "micro_batch": 1, "stage": 3, "ep": 2},
    "1B, DeepSpeed, stage 1": _DEEPSPEED | {"stage": 1},
    "1B, DeepSpeed, stage 2": _DEEPSPEED | {"stage": 2},
    "1B, DeepSpeed, stage 3": _DEEPSPEED | {"stage": 3},
    "1B, DeepSpeed, AutoTP 2": _DEEPSPEED | {"stage": 1, "tp": 2, "micro_batch": 4},
    "1B, DeepSpeed, pp 2, 8 micro batches": _DEEPSPEED | {"stage": 1, "pp": 2, "grad_accum": 8},
    "8B blocks, dp 2, ZeRO-3": {"model": LARGE, "micro_batch": 2, "stage": 3},
    "8B blocks, tp 2": {"model": LARGE, "micro_batch": 4, "stage": 3, "tp": 2},
    "8B blocks, tp 2 with split tokens": {"model": LARGE, "micro_batch": 4, "stage": 3, "tp": 2, "sp": True},
    "8B blocks, cp 2": {"model": LARGE, "micro_batch": 4, "stage": 3, "cp": 2},
    "8B blocks, pp 2, 8 micro batches": {"model": LARGE, "micro_batch": 2, "stage": 2, "pp": 2, "grad_accum": 8},
    "8B blocks, DeepSpeed, stage 3": _DEEPSPEED | {"model": LARGE, "stage": 3},
    "8B blocks, DeepSpeed, AutoTP 2": _DEEPSPEED | {"model": LARGE, "stage": 1, "tp": 2, "micro_batch": 4},
    "mixture of 2 sequences, dp 2, ZeRO-3": {"model": MIXTURE, "micro_batch": 2, "stage": 3},
    "mixture of 2 sequences, ep 2": {"model": MIXTURE, "micro_batch": 2, "stage": 3, "ep": 2},
    "Qwen3 8B blocks, dp 2, ZeRO-3, checkpointing": {
        "model": OTHER,
        "micro_batch": 4,
        "stage": 3,
        "gradient_checkpointing": True,
    },
    "Qwen3 8B blocks, tp 2 with split tokens": {"model": OTHER, "micro_batch": 4, "stage": 3, "tp": 2, "sp": True},
    "Qwen3 8B blocks, cp 2": {"model": OTHER, "micro_batch": 4, "stage": 3, "cp": 2},
    "8B blocks, HSDP 2 × 2": {"model": LARGE, "micro_batch": 2, "stage": 3, "gpus": 4, "dp_replicate": 2},
    "8B blocks, dp 4, ZeRO-3": {"model": LARGE, "micro_batch": 2, "stage": 3, "gpus": 4},
    "8B blocks, dp 2 × tp 2": {"model": LARGE, "micro_batch": 4, "stage": 3, "gpus": 4, "tp": 2},
    "8B blocks, dp 2 × cp 2": {"model": LARGE, "micro_batch": 4, "stage": 3, "gpus": 4, "cp": 2},
    "8B blocks, dp 2 × pp 2, 8 micro batches": {
        "model": LARGE,
        "micro_batch": 2,
        "stage": 2,
        "gpus": 4,
        "pp": 2,
        "grad_accum": 8,
    },
    "mixture of 2 sequences, ep 4": {"model": MIXTURE, "micro_batch": 2, "stage": 3, "gpus": 4, "ep": 4},
    "1B, HSDP 2 × 2": {"model": DENSE, "micro_batch": 2, "stage": 3, "gpus": 4, "dp_replicate": 2},
    "1B, dp 4, ZeRO-3": {"model": DENSE, "micro_batch": 2, "stage": 3, "gpus": 4},
    "1B, dp 2 × tp 2": {"model": DENSE, "micro_batch": 4, "stage": 3, "gpus": 4, "tp": 2},
    "1B, dp 2 × cp 2": {"model": DENSE, "micro_batch": 4, "stage": 3, "gpus": 4, "cp": 2},
    "1B, dp 2 × pp 2, 8 micro batches": {"model": DENSE, "micro_batch": 2, "stage": 2, "gpus": 4, "pp": 2, "grad_accum": 8},
    "mixture, ep 4": {"model": MIXTURE, "micro_batch": 1, "stage": 3, "gpus": 4, "ep": 4},
}


RESULTS = Path(__file__).parent.parent / "results"
#: Of each run its steps, and what was predicted before it.
LAST = (
    ("layouts_h200_steps_seventh", "layouts_h200_predicted_seventh"),
    ("layouts_two_h200_steps_sixth", "layouts_two_h200_predicted_sixth"),
    ("layouts_four_h200_steps", "layouts_two_h200_predicted_fifth"),
    ("layouts_two_h200_steps_fourth", "layouts_two_h200_predicted_fourth"),
    ("layouts_two_h200_steps_fifth", "layouts_two_h200_predicted_fifth"),
)


def _model(name: str, folder: Path) -> str:
    """Write the config of a model, as changed here, and return the folder's path."""
    path = folder / name.rpartition("/")[2] / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**load_model(name).config, **_CHANGED[name]}))
    return str(path.parent)


def request_of(case: dict[str, Any], folder: Path) -> Ask:
    """Return a case as a request, whose model's config is written under `folder`."""
    return Ask(**(_SHARED | case | {"model": _model(case["model"], folder)}))


def predict(case: dict[str, Any], folder: Path, gpu: str, profile: Path | None) -> dict[str, Any]:
    """Return the modelled seconds of a step on such GPUs, and their parts."""
    resolved = resolve(request_of(case, folder).replace(gpu=gpu))
    cluster, one = resolved.cluster, resolved.cases[0]
    rates, counts = machine_rates(cluster, profile, []), count_tape(ExpandedTapes(resolved.engine).of(one))
    cost = LayoutCost(one, counts, rates, resolved.engine).time()
    slow = LayoutCost(one, counts, rates.on_slow_host(), resolved.engine).time().total
    parts = {name: value for name, value in cost.parts.items() if value}
    row: dict[str, Any] = {"seconds": cost.total, "slow_host_seconds": slow, "parts": parts}
    if one.parallel is None:  # which recommend answers without --layouts, too
        alone = CostModel(resolved.engine, resolved.spec, cluster, rates)
        row["seconds_of_recommend"] = alone.step_time(one.workload, one.zero, counts).total
    return row


def compare(predicted: Path, measured: Path) -> None:
    """Print predicted beside measured, in Markdown."""
    found = {row["case"]: row for row in map(json.loads, measured.read_text().splitlines())}
    print("| case | predicted, ms | by recommend | measured | over measured | by recommend |\n|---|---:|---:|---:|---:|---:|")
    for row in map(json.loads, predicted.read_text().splitlines()):
        run = found.get(row["case"], {})
        if "seconds" in row and "seconds" in run:
            ours, alone, theirs = (1e3 * one for one in (row["seconds"], row.get("seconds_of_recommend", 0.0), run["seconds"]))
            other = (
                f"{alone:.0f} | {theirs:.0f} | {ours / theirs:.2f} | {alone / theirs:.2f}"
                if alone
                else f" | {theirs:.0f} | {ours / theirs:.2f} | "
            )
            print(f"| {row['case']} | {ours:.0f} | {other} |")
        else:
            print(f"| {row['case']} | {row.get('refused', '')} | | | | |")


def steps_table() -> str:
    """Return the table of docs/parallelism.md: measured steps, over them what was predicted before, and a slow host's today."""

    def rows(name: str) -> list[dict[str, Any]]:
        return list(map(json.loads, (RESULTS / f"{name}.jsonl").read_text().splitlines()))

    def span(values: list[float], digits: int) -> str:
        ends = [f"{one:.{digits}f}" for one in (min(values), max(values))]
        return "–".join(dict.fromkeys(ends))

    slow = {row["case"]: row for row in rows("layouts_two_h200_slow_host")}
    found: dict[str, list[tuple[float, float]]] = {}
    for measured, first in LAST:
        told = {row["case"]: row for row in rows(first)}
        for run in rows(measured):
            found.setdefault(run["case"], []).append((run["running"], told[run["case"]]["seconds"] / run["running"]))
    shown = []
    for case, runs in found.items():
        last, bound = slow[case]["slow_host_seconds"], slow[case]["slow_host_seconds"] > HOST_DECIDES * slow[case]["seconds"]
        taken, ratios = ([one[at] for one in runs] for at in (0, 1))
        over = span([last / one for one in taken], 2) if bound else ""
        shown.append([case, span([1e3 * one for one in taken], 0), span(ratios, 2), over])
    return render(["steps of H200s", "ms in a row", "predicted before", "slow host"], shown, "github")


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("verb", choices=("predict", "compare"))
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--gpu", default="H100", help="for predict")
    parser.add_argument("--profile", type=Path, help="measured rates, for predict")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES, metavar="CASE")
    asked = parser.parse_args()
    if asked.verb == "compare":
        return compare(*asked.files)
    with TemporaryDirectory() as folder, asked.files[0].open("w") as out:
        for name in asked.cases:
            case = CASES[name]
            begin = time.perf_counter()
            try:
                row = predict(case, Path(folder), asked.gpu, asked.profile)
            except BadInput as error:
                row = {"refused": str(error)}
            out.write(json.dumps({"case": name, **row}, ensure_ascii=False) + "\n")
            out.flush()
            print(name, row, f"{time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return None


if __name__ == "__main__":
    main()
