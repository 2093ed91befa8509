"""A mixture of quantization on one device: what rounding the weights costs a step, and its memory beside the plan.

    python -m benchmarks.techniques.quantize_training [--layers 24] [--width 1536] [--micro 8] [--seq 2048] [--groups 8]

Trainings of one Llama: with weights as they are, and rounded to 8 bits from the first step on, to the nearest and
stochastically, at stage 1 (rounded once a step) and at stage 3 (rounded at each gather, as on many GPUs).
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.kernels.measure import machine, save
from benchmarks.techniques.training import arguments, engine_of, planned, release, timed
from zeroplan.core.quantize_training import QUANTIZE_TRAINING, QuantizeTraining


def main() -> None:
    """Times the trainings and compares them."""
    given = arguments(__doc__ or "", groups=8, steps=12)
    rows: dict[str, Any] = {}
    for stage in (1, 3):
        zero = {"zero_optimization": {"stage": stage}}
        for rounding in ("none", "nearest", "stochastic"):
            rule = QuantizeTraining(8, 8, 1, 0, given.groups, rounding=rounding) if rounding != "none" else None
            section = zero if rule is None else {**zero, QUANTIZE_TRAINING: rule.as_section()}
            engine = engine_of(given, section)
            row = timed(engine, given, steps=given.steps)
            row |= planned(given, section)
            release(engine)
            rows[f"stage {stage}, {rounding}"] = row
            took = statistics.median(row["ms"])
            peaks = [f"{row[key] / 2**30:9.4f} GiB" for key in ("peak_allocated", "planned_peak") if row.get(key)]
            print(f"stage {stage} {rounding:12s} {took:9.2f} ms  " + "  planned ".join(peaks), flush=True)
    where = machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    sizes = {name: getattr(given, name) for name in ("layers", "width", "vocab", "micro", "seq", "steps", "groups")}
    save("techniques_quantize_training", {"machine": where, "sizes": sizes, "rows": rows}, given.out)


if __name__ == "__main__":
    main()
