"""Plans of the timed cases beside what they used: how far allocated and reserved memory, and the time of a step, are off.

    python3 -m benchmarks.step.predict [benchmarks/results/step/h200_x4_compiled.jsonl …] [--compiled]

Each row of ``benchmarks.step.compare`` is planned as its command ran it.
A row's allocated peak is over the timed steps, so the plan's leaves the runtime's first micro batch out, which runs uncompiled
since rows say so (`uncompiled_first`). What that one reserved stays, but where the runtime gives it back (`released_first`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.rows import GPUS
from benchmarks.step.case import MODEL_TYPES, SHAPES, Case
from zeroplan.core.errors import BadInput
from zeroplan.core.rates import rates_of
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.search.cost import CostModel
from zeroplan.search.memory import Memory
from zeroplan.search.space import Candidate
from zeroplan.techniques.compiled import CompiledTechnique

RESULTS = Path(__file__).resolve().parent.parent / "results" / "step"
MODELS = {"llama-1b": "meta-llama/Llama-3.2-1B", "llama-8b": "meta-llama/Llama-3.1-8B"}


def described(shape: str) -> dict[str, Any]:
    """Return the config of a shape that the catalog has not."""
    kind = MODEL_TYPES.get(shape, "llama")
    classes = {"llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
    return {"model_type": kind, "architectures": [classes[kind]], **SHAPES[shape]}


def request_of(row: dict[str, Any]) -> Ask:
    """Return the request whose one plan predicts this row."""
    case = Case.parse(row["case"])
    common: dict[str, Any] = {
        "model": MODELS.get(row["shape"]) or described(row["shape"]),
        "micro_batch": row["micro"],
        "seq_len": row["seq"],
        "gradient_checkpointing": case.checkpointing,
        "gpus": row["ranks"],
        "gpu": GPUS[row["gpu"]],
        "engine": case.engine,
        "from_scratch": True,
        "compile": ("checkpointed-blocks" if case.within else "blocks") if case.compiled else None,
    }
    if case.engine in ("zeroplan", "deepspeed"):
        return Ask(**common, ds_config=case.ds_config(row["micro"], row["ranks"]))
    if case.engine == "fsdp2" and not case.fp32_reduce:
        common["reduce_dtype"] = "bf16"
    return Ask(**common, stage=case.stage)


def errors(row: dict[str, Any]) -> tuple[float, float] | None:
    """Return how far the plan's allocated and reserved bytes are off, in per cent; None where nothing is planned."""
    with mock.patch.object(CompiledTechnique, "eager_first", ()):
        timed = estimate_report(request_of(row)).plans[0].gpu
    stays = row.get("uncompiled_first") and not row.get("released_first")
    whole = estimate_report(request_of(row)).plans[0].gpu if stays else timed
    if timed.peak_allocated is None or whole.peak_reserved is None:
        return None
    pairs = ((timed.peak_allocated, row["peak_allocated"]), (whole.peak_reserved, row["peak_reserved"]))
    allocated, reserved = (100 * (planned / used - 1) for planned, used in pairs)
    return allocated, reserved


def time_error(row: dict[str, Any]) -> float:
    """Return how far the predicted time of a step is off, in per cent: kernels are counted on the plan's own tape."""
    resolved = resolve(request_of(row))
    case = resolved.cases[0]
    memory = Memory(resolved.engine, case.spec, case.cluster)
    cost = CostModel(resolved.engine, case.spec, case.cluster, rates_of(case.cluster.gpu))
    counts = memory.counts(Candidate(case.zero, case.workload))
    return 100 * (1000 * cost.step_time(case.workload, case.zero, counts).total / float(row["step_ms"]) - 1)


def main() -> None:
    """Print a line a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=sorted(RESULTS.glob("*.jsonl")))
    parser.add_argument("--compiled", action="store_true", help="only compiled cases")
    arguments = parser.parse_args()
    for path in arguments.files:
        for row in map(json.loads, path.read_text().splitlines()):
            if "fault" in row or "peak_reserved" not in row or (arguments.compiled and not Case.parse(row["case"]).compiled):
                continue
            name = f"{row['shape']} {row['ranks']} x {row['micro']} {row['case']}"
            try:
                found = errors(row)
            except BadInput as error:
                print(f"{name:44} {error}")
                continue
            off = "no simulated plan" if found is None else f"allocated {found[0]:+6.2f} %   reserved {found[1]:+6.2f} %"
            off += f"   time {time_error(row):+6.1f} %"
            print(f"{name:44} {off}", flush=True)


if __name__ == "__main__":
    main()
