"""Holds modelled times of layouts against steps on two GPUs (HSDP on four).

    python -m benchmarks.layouts.two_gpus predict FILE [--gpu H200] [--cases CASE …]
    python -m benchmarks.layouts.two_gpus measure FILE [--cases CASE …]
    python -m benchmarks.layouts.two_gpus compare PREDICTED MEASURED

``predict`` writes a line of JSON for each case, on any machine; ``measure`` runs each under ``zeroplan verify`` and writes what
was measured. ``compare`` prints both. A time is the median of the steps after the first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.rates import rates_of
from zeroplan.models.load import load_model
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.search.cost import CostModel
from zeroplan.search.layout_counts import rank_counts
from zeroplan.search.layout_time import LayoutCost

DENSE, MIXTURE = "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-30B-A3B"
#: What is unlike the models of these names: a head of its own, for stages, and as many blocks as two cards of 80 GB train.
_CHANGED: dict[str, dict[str, Any]] = {DENSE: {"tie_word_embeddings": False}, MIXTURE: {"num_hidden_layers": 6}}
_SECONDS = 120  # that a case may take
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
    "1B, HSDP 2 × 2": {"model": DENSE, "micro_batch": 2, "stage": 3, "gpus": 4, "dp_replicate": 2},
    "mixture, dp 2, ZeRO-3": {"model": MIXTURE, "micro_batch": 1, "stage": 3},
    "mixture, ep 2": {"model": MIXTURE, "micro_batch": 1, "stage": 3, "ep": 2},
    "1B, DeepSpeed, stage 1": _DEEPSPEED | {"stage": 1},
    "1B, DeepSpeed, stage 2": _DEEPSPEED | {"stage": 2},
    "1B, DeepSpeed, stage 3": _DEEPSPEED | {"stage": 3},
    "1B, DeepSpeed, AutoTP 2": _DEEPSPEED | {"stage": 1, "tp": 2, "micro_batch": 4},
    "1B, DeepSpeed, pp 2, 8 micro batches": _DEEPSPEED | {"stage": 1, "pp": 2, "grad_accum": 8},
}


def _model(name: str, folder: Path) -> str:
    """Write the config of a model, as changed here, and return the folder's path."""
    path = folder / name.rpartition("/")[2] / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**load_model(name).config, **_CHANGED[name]}))
    return str(path.parent)


def request_of(case: dict[str, Any], folder: Path) -> Ask:
    """Return a case as a request, whose model's config is written under `folder`."""
    return Ask(**(_SHARED | case | {"model": _model(case["model"], folder)}))


def predict(case: dict[str, Any], folder: Path, gpu: str) -> dict[str, Any]:
    """Return the modelled seconds of a step on such GPUs, and their parts."""
    resolved = resolve(request_of(case, folder).replace(gpu=gpu))
    cluster, one = resolved.cluster, resolved.cases[0]
    rates, counts = rates_of(cluster.gpu, cluster.network, cluster.gpus), rank_counts(resolved, {})
    cost = LayoutCost(one, counts, rates, resolved.engine).time()
    row: dict[str, Any] = {"seconds": cost.total, "parts": {name: value for name, value in cost.parts.items() if value}}
    if one.parallel is None:  # which recommend answers without --layouts, too
        alone = CostModel(resolved.engine, resolved.spec, cluster, rates)
        row["seconds_of_recommend"] = alone.step_time(one.workload, one.zero, counts).total
    return row


def measure(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the seconds of a step on two GPUs of this machine."""
    words = [_model(case["model"], folder)]
    for name, value in (_SHARED | case).items():
        flag = "--" + name.replace("_", "-")
        if name != "model":
            words += [flag] if value is True else [flag, str(value)]
    kept = folder / "run.json"
    command = [sys.executable, "-m", "zeroplan", "verify", *words, "--steps", "12", "--json"]
    with kept.open("w") as out:
        try:
            code = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done in {_SECONDS} s"}
    try:
        ranks = json.loads(kept.read_text())["comparisons"]
    except (json.JSONDecodeError, KeyError):
        return {"failed": code.stderr[-600:]}
    seconds = [one for one in _named("step_seconds", ranks) if one]
    return {"seconds": max(seconds)} if seconds else {"failed": "no time"}


def _named(name: str, data: Any) -> list[float]:
    """Return every value of a name in nested data."""
    if isinstance(data, dict):
        return [value for key, value in data.items() if key == name] + [
            found for value in data.values() for found in _named(name, value)
        ]
    return [found for value in data for found in _named(name, value)] if isinstance(data, list) else []


def compare(predicted: Path, measured: Path) -> None:
    """Print predicted beside measured, in Markdown."""
    found = {row["case"]: row for row in map(json.loads, measured.read_text().splitlines())}
    print("| case | predicted, ms | measured, ms | predicted over measured |\n|---|---:|---:|---:|")
    for row in map(json.loads, predicted.read_text().splitlines()):
        run = found.get(row["case"], {})
        if "seconds" in row and "seconds" in run:
            ours, theirs = row["seconds"] * 1e3, run["seconds"] * 1e3
            print(f"| {row['case']} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} |")
        else:
            print(f"| {row['case']} | {row.get('refused', '')} | {run.get('failed', '')[-80:]} | |")


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("verb", choices=("predict", "measure", "compare"))
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--gpu", default="H100", help="for predict")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES, metavar="CASE")
    asked = parser.parse_args()
    if asked.verb == "compare":
        return compare(*asked.files)
    with TemporaryDirectory() as folder, asked.files[0].open("w") as out:
        for name in asked.cases:
            case = CASES[name]
            begin = time.perf_counter()
            try:
                row = predict(case, Path(folder), asked.gpu) if asked.verb == "predict" else measure(case, Path(folder))
            except BadInput as error:
                row = {"refused": str(error)}
            out.write(json.dumps({"case": name, **row}, ensure_ascii=False) + "\n")
            out.flush()
            print(name, row, f"{time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return None


if __name__ == "__main__":
    main()
