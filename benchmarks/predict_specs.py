"""Predicts runs that are still to be measured, so that their figures can be committed before any row exists.

    python -m benchmarks.predict_specs SPECS.jsonl … --out benchmarks/results/blind_NAME_predicted.json [--gpu "NVIDIA H200"]

Each spec becomes the request that its row will become (benchmarks/rows.py). Bytes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.measure.spec import OPTIONAL, Spec
from benchmarks.rows import request_of
from zeroplan.core.errors import BadInput
from zeroplan.planner.estimate import estimate_runs
from zeroplan.simulate.allocator.config import VARIABLES


def row_to_be(spec: Spec, gpu: str) -> dict[str, Any]:
    """Return the fields of the spec's row that say what runs."""
    own = asdict(spec)
    unset = {f.name: f.default for f in fields(Spec)}
    row: dict[str, Any] = {name: own[name] for name in OPTIONAL if own[name] != unset[name] and own[name] not in ({}, None)}
    row |= {name: own[name] for name in ("id", "engine", "model", "world", "dtype", "stage", "micro_batch", "seq_len", "attn")}
    row |= {"lora_rank": spec.lora_rank, "gradient_accumulation_steps": spec.grad_accum, "gpu": gpu}
    if spec.quantize is not None and spec.quantize != "int8":
        row["adapter_dtype"] = spec.dtype  # peft makes adapters in the dtype of a 4-bit layer's products
    row |= {"gradient_checkpointing": spec.checkpointing, "zero_overrides": spec.zero}
    row["alloc_conf"] = ",".join(spec.env[name] for name in VARIABLES if name in spec.env)
    return row | ({"ds_overrides": spec.ds} if spec.ds else {}) | ({"opt_params": spec.optimizer} if spec.optimizer else {})


def predict(spec: Spec, gpu: str) -> dict[str, Any]:
    """The peaks of a spec's one plan, or why there is none."""
    try:
        (run,) = estimate_runs(request_of(row_to_be(spec, gpu), depth="simulated")).runs
    except BadInput as error:
        return {"id": spec.id, "refused": str(error)}
    assert run is not None
    found = run.plan.gpu
    saved = {} if spec.save is None else {"save": found.phases["save"], "host_save": run.plan.cpu.phases["save"]}
    return {
        "id": spec.id,
        "peak_allocated": found.peak_allocated,
        "peak_reserved": found.peak_reserved,
        "total": found.total,
        "interval": found.interval,
        "peak_phase": found.peak_phase,
        **saved,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("specs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu", default="NVIDIA H200")
    args = parser.parse_args()
    lines = [line for path in args.specs for line in path.read_text().splitlines() if line.strip()]
    found = []
    for line in lines:
        found.append(predict(Spec.from_dict(json.loads(line)), args.gpu))
        print(json.dumps(found[-1]), flush=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
