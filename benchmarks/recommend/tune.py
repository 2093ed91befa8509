"""The distance of ``zeroplan tune`` from the exhaustive best, on this machine.

    python -m benchmarks.recommend.tune OUT [--model meta-llama/Llama-3.2-1B] [--engine zeroplan] [--seq-len 1024] [--runs 5]

First a tuning of few runs; then every candidate is run, in a folder of its own, so that the exhaustive best is measured anew.
OUT gets both files of trials and ``compared.json``; exits with 1 if the tuning's best is more than 5 % slower.

Without a GPU, gloo ranks run on the CPU. There ``--host-limit MIB`` adds a third tuning, whose ranks get no more private memory
than that (``RLIMIT_DATA``), so that candidates die of it; it then goes on without the limit, and must leave them out.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeroplan.tuning.api import CANDIDATES, RUNS, tune
from zeroplan.tuning.results import Outcome, Tuning, key_of

#: How much slower than the exhaustive best the tuning's best may be.
MOST = 0.05


def speeds(found: Tuning) -> dict[str, float]:
    return {key_of(one.recommendation): one.tokens_per_second for one in found.ranking if one.tokens_per_second is not None}


def resumed(limit: int, tuned: Callable[[int], Tuning], runs: int) -> dict[str, Any]:
    """Tune under a limit of memory, go on without it, and tell what died and whether it was run again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit << 20, hard))
    try:
        before = tuned(runs)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    after = tuned(runs + 1)

    def died(found: Tuning) -> list[str]:
        trials = ((key_of(one.recommendation), one.trial) for one in found.ranking)
        return sorted(key for key, trial in trials if trial is not None and trial.outcome is Outcome.OUT_OF_MEMORY)

    return {"limit_mib": limit, "died": died(before), "still_out": died(after), "runs": [before.runs, after.runs]}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="meta-llama/Llama-3.2-1B")
    parser.add_argument("--engine", default="zeroplan")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--global-batch", type=int, default=None)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--candidates", type=int, default=CANDIDATES)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=None)
    parser.add_argument("--host-limit", type=int, default=None)
    asked = parser.parse_args()

    def tuned(name: str, runs: int, hope: float) -> Tuning:
        return tune(
            asked.model,
            runs=runs,
            steps=asked.steps,
            folder=asked.out / name,
            global_batch=asked.global_batch,
            candidates=asked.candidates,
            hope=hope,
            engine=asked.engine,
            seq_len=asked.seq_len,
            gpus=asked.gpus,
        )

    few = tuned("few", asked.runs, 1.25)
    every = tuned("every", asked.candidates, float("inf"))
    measured = speeds(every)
    best = few.best
    chosen = 0.0 if best is None else measured.get(key_of(best.recommendation), 0.0)
    reached = chosen / max(measured.values(), default=float("inf"))
    compared = {
        "model": asked.model,
        "machine": every.machine,
        "runs": few.runs,
        "candidates": len(every.ranking),
        "measured": len(measured),
        "reached": reached,
        "tokens_per_second": measured,
        "few": speeds(few),
        "died": {key_of(one.recommendation): one.trial.says for one in every.ranking if one.trial and one.trial.says},
    }
    if asked.host_limit is not None:
        compared["resumed"] = resumed(asked.host_limit, lambda runs: tuned("limited", runs, float("inf")), asked.runs)
    (asked.out / "compared.json").write_text(json.dumps(compared, indent=2) + "\n")
    print(f"{few.runs} of {len(every.ranking)} runs reach {reached:.1%} of the exhaustive best")
    sys.exit(0 if reached >= 1 - MOST else 1)


if __name__ == "__main__":
    main()
