"""A curriculum by sequence length on one device: time and peak of a scheduled training beside the whole one.

    python -m benchmarks.techniques.curriculum [--layers 24] [--width 1536] [--micro 8] [--seq 2048] [--shortest 128]

Both trainings have as many steps. In the scheduled one the length grows evenly from `--shortest` to `--seq` over all steps, in
multiples of 64. Memory: the greatest allocated bytes are those of the longest step, as planned; what is reserved shows what
growing sequences cost the caching allocator.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.kernels.measure import machine, save
from benchmarks.techniques.training import arguments, engine_of, planned, release, timed
from zeroplan.core.curriculum import CURRICULUM_LEARNING, Curriculum, CurriculumKind

_MULTIPLE = 64


def main() -> None:
    """Times both trainings and compares them."""
    given = arguments(__doc__ or "", shortest=128)
    grows = Curriculum(given.shortest, given.seq, CurriculumKind.FIXED_LINEAR, given.steps, min(_MULTIPLE, given.shortest))
    section = {CURRICULUM_LEARNING: grows.as_section()}
    rows: dict[str, Any] = {}
    for name, one in (("scheduled", section), ("whole", {})):
        engine = engine_of(given, one)
        lengths: list[int] = []

        def note(engine: Any = engine, lengths: list[int] = lengths) -> None:
            lengths.append(engine.curriculum_seqlen() or given.seq)

        rows[name] = timed(engine, given, steps=given.steps, warm=0, after=note)
        rows[name] |= {"lengths": lengths, "tokens": given.micro * sum(lengths)}
        release(engine)
    short, whole = rows["scheduled"], rows["whole"]
    once = 2  # steps in which kernels are loaded and the caching allocator fills
    found = {
        "time_ratio": sum(short["ms"][once:]) / sum(whole["ms"][once:]),
        "token_ratio": sum(short["lengths"][once:]) / sum(whole["lengths"][once:]),
        **planned(given, section),
    }
    if "peak_allocated" in whole:
        found |= {name: short[name] / whole[name] for name in ("peak_allocated", "peak_reserved")}
    for name, row in rows.items():
        peaks = (
            f"{row['peak_allocated'] / 2**30:8.3f} GiB {row['peak_reserved'] / 2**30:8.3f}" if "peak_allocated" in row else ""
        )
        print(f"{name:10s} {sum(row['ms'][once:]) / 1e3:8.2f} s {row['tokens']:>9d} tokens {peaks}")
    print("  ".join(f"{name} {value:.4g}" for name, value in found.items() if value is not None))
    where = machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    sizes = {name: getattr(given, name) for name in ("layers", "width", "vocab", "micro", "seq", "steps", "shortest")}
    save("techniques_curriculum", {"machine": where, "sizes": sizes, "rows": rows, **found}, given.out)


if __name__ == "__main__":
    main()
