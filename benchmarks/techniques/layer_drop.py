"""Progressive layer dropping on one device: is a step's time in proportion to the layers that it keeps?

    python -m benchmarks.techniques.layer_drop [--layers 24] [--width 1536] [--micro 8] [--seq 2048] [--steps 40]

Three trainings of one Llama: with all layers, with layers dropped at a theta of 0.5 throughout (gamma is large, so that it has
fallen after the first step), and with the first layer alone, which tells what a step costs outside of the layers. The goal: the
dropped steps' time is within 5 % of the whole step's times the share of layers that they kept.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.kernels.measure import machine, save
from benchmarks.techniques.training import WARM_STEPS, arguments, engine_of, planned, release, timed
from zeroplan.core.layer_drop import LAYER_DROP, ProgressiveLayerDrop

#: Theta is 0.5 after one step.
RULE = ProgressiveLayerDrop(theta=0.5, gamma=100.0)


class _FirstAlone(ProgressiveLayerDrop):
    """Keeps one layer."""

    def kept(self, step: int, layers: int, seed: int) -> tuple[bool, ...]:
        """Return which blocks a step keeps: the first."""
        return tuple(layer == 0 for layer in range(layers))


def main() -> None:
    """Times the three trainings and compares them."""
    given = arguments(__doc__ or "")
    rows: dict[str, Any] = {}
    shares: list[float] = []
    for name, section in (("all layers", {}), ("dropped", {LAYER_DROP: RULE.as_section()})):
        engine = engine_of(given, section)
        drop = engine.techniques.layer_drop
        kept: list[float] = []

        def note(drop: Any = drop, kept: list[float] = kept, layers: int = given.layers) -> None:
            if drop is not None:  # the engine has drawn the next step's layers by now
                kept.append(sum(drop.rule.kept(drop.step - 1, layers, drop.seed)) / layers)

        rows[name] = timed(engine, given, steps=given.steps, after=note)
        if drop is not None:
            shares = kept[WARM_STEPS:]
            drop.rule = _FirstAlone(RULE.theta, RULE.gamma)
            rows["first layer"] = timed(engine, given, steps=max(given.steps // 4, 2))
        release(engine)
    share = statistics.fmean(shares)
    whole, dropped = statistics.median(rows["all layers"]["ms"]), statistics.fmean(rows["dropped"]["ms"])
    first = statistics.median(rows["first layer"]["ms"])
    layer = (whole - first) / (given.layers - 1)
    outside = first - layer
    found = {
        "kept": share,
        "expected_kept": RULE.mean_kept(WARM_STEPS, WARM_STEPS + given.steps, given.layers),
        "ratio": dropped / whole,
        "over_kept": dropped / whole / share,
        "outside_share": outside / whole,
        "layers_over_kept": (dropped - outside) / (whole - outside) / share,
        **planned(given, {LAYER_DROP: RULE.as_section()}),
    }
    for name, row in rows.items():
        peak = f"{row['peak_allocated'] / 2**30:8.3f} GiB" if "peak_allocated" in row else ""
        print(f"{name:12s} {statistics.fmean(row['ms']):9.2f} ms {peak}")
    print("  ".join(f"{name} {value:.4g}" for name, value in found.items() if value is not None))
    where = machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    sizes = {name: getattr(given, name) for name in ("layers", "width", "vocab", "micro", "seq", "steps")}
    save("techniques_layer_drop", {"machine": where, "sizes": sizes, "rows": rows, **found}, given.out)


if __name__ == "__main__":
    main()
