"""The recommendation against the truth: a grid of candidates, each measured under DeepSpeed on a capped GPU.

``python -m benchmarks.recommend.measure specs --setup NAME > specs.jsonl`` writes what ``benchmarks.measure.grid`` runs (one
at a time, ``--jobs 1``: speeds must not share a host). ``… compare --setup NAME ROWS.jsonl`` then holds its rows against the
ranking that the same candidates get from ``zeroplan.search``: whether the first of those that fit reaches the best measured
speed, how far step times are off, Kendall's τ, and what was said to fit and did not, or the other way round.

A cap on torch's allocator stands for a smaller card: what the card's driver leaves, less what lies outside torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure.spec import Spec
from benchmarks.recommend.speeds import kendall, within
from zeroplan.core.cluster import Cluster
from zeroplan.core.units import GIB
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.process import outside_torch
from zeroplan.planner.request import Request
from zeroplan.search.answer import Answer
from zeroplan.search.api import Wish, answer, problem_of
from zeroplan.search.given import candidate_of
from zeroplan.search.space import Candidate

RESULT = Path(__file__).resolve().parent.parent / "results" / "recommend.json"
_CPU = {"device": "cpu", "pin_memory": True}
_NAMES = {"": {}, "o": {"offload_optimizer": _CPU}, "op": {"offload_optimizer": _CPU, "offload_param": _CPU}}


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on a machine, and the candidates: (stage, offload, micro batch, checkpointing)."""

    model: str
    gpus: int
    vram: int
    seq_len: int
    grid: tuple[tuple[int, str, int, bool], ...]


SETUPS = {
    "llama1b_1x24": Setup(
        "meta-llama/Llama-3.2-1B",
        1,
        24,
        1024,
        (
            *((2, "o", m, again) for m in (1, 4, 8) for again in (False, True)),
            *((3, "o", m, True) for m in (1, 8)),
            *((3, "op", m, True) for m in (1, 8, 16)),
            (0, "", 1, True),
            (2, "", 1, True),
            (3, "", 1, True),
            (1, "o", 4, True),
        ),
    ),
    "qwen05b_1x24": Setup(
        "Qwen/Qwen2.5-0.5B",
        1,
        24,
        2048,
        tuple((s, o, m, again) for s, o in ((0, ""), (2, ""), (2, "o"), (3, "")) for m in (1, 4) for again in (False, True)),
    ),
    "llama1b_4x24": Setup(
        "meta-llama/Llama-3.2-1B",
        4,
        24,
        1024,
        tuple((s, o, m, again) for s, o in ((0, ""), (1, ""), (2, ""), (3, "")) for m in (1, 4) for again in (False, True)),
    ),
    "llama3b_4x40": Setup(
        "meta-llama/Llama-3.2-3B",
        4,
        40,
        1024,
        tuple((s, o, m, True) for s, o in ((1, ""), (2, ""), (2, "o"), (3, ""), (3, "op")) for m in (1, 4, 8)),
    ),
}


def request_of(setup: Setup) -> Request:
    """What a user would ask for."""
    return Request(
        model=setup.model,
        gpus=setup.gpus,
        gpu="H100",
        vram=setup.vram * GIB,
        cpu_ram=128 * GIB,
        seq_len=setup.seq_len,
    )


def specs(name: str, setup: Setup) -> Iterator[Spec]:
    """One measured run a candidate."""
    cluster = Cluster.of(gpus=setup.gpus, gpu="H100", vram=setup.vram * GIB)
    for index, (stage, offload, micro, again) in enumerate(setup.grid):
        zero = ZeroConfig.of(stage, "cpu" if offload else "none", "cpu" if offload == "op" else "none")
        workload = problem_of(request_of(setup), Wish()).workload
        outside = outside_torch("deepspeed", workload, zero, ranks=setup.gpus, capability=(9, 0))
        yield Spec(
            id=f"{name}-{index:02d}",
            model=setup.model,
            stage=stage,
            world=setup.gpus,
            micro_batch=micro,
            seq_len=setup.seq_len,
            checkpointing=again,
            zero=_NAMES[offload],
            cap=(cluster.usable_vram or 0) - outside.total,
            gib=float(setup.vram),
            steps=6,
        )


def ranked(name: str, setup: Setup) -> Answer:
    """The same candidates as zeroplan ranks them."""
    request, wish = request_of(setup), Wish()
    problem = problem_of(request, wish)
    given: list[Candidate] = [
        candidate_of(spec.ds_config(), problem, request, spec.checkpointing, index)
        for index, spec in enumerate(specs(name, setup))
    ]
    return answer(request, Wish(given=given))


def compare(name: str, setup: Setup, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The issue's figures for one setup."""
    measured = {int(row["id"].rsplit("-", 1)[1]): row for row in rows if row["id"].startswith(f"{name}-")}
    ranking = [one for one in ranked(name, setup).ranking if one.index in measured]
    ran = {i: row for i, row in measured.items() if row.get("ok", True)}
    died = {i for i, row in measured.items() if row.get("error") == "out of memory"}
    best = max((row["tokens_per_s"] for row in ran.values()), default=0.0)
    first = next((one for one in ranking if one.fits), None)
    reached = ran[first.index]["tokens_per_s"] / best if first is not None and first.index in ran and best else 0.0
    pairs = [(one.step_seconds, ran[one.index]["step_seconds"]) for one in ranking if one.index in ran]
    said_not = [one.index for one in ranking if one.fits is False]
    return {
        "setup": name,
        "measured": len(measured),
        "ran": len(ran),
        "reached_of_best": round(reached, 3),
        "within_15_percent": round(within(pairs, 0.15), 3) if pairs else None,
        "kendall_tau": round(kendall(pairs), 3) if len(pairs) > 1 else None,
        "said_to_fit_and_died": [one.index for one in ranking if one.fits and one.index in died],
        "said_not_to_fit": len(said_not),
        "of_those_died": sum(i in died for i in said_not),
        "table": [
            {
                "index": one.index,
                "fits": one.fits,
                "ran": one.index in ran,
                "predicted_seconds": round(one.step_seconds, 4),
                "measured_seconds": round(ran[one.index]["step_seconds"], 4) if one.index in ran else None,
            }
            for one in ranking
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("specs", "compare"))
    parser.add_argument("--setup", choices=sorted(SETUPS), action="append")
    parser.add_argument("rows", nargs="?", type=Path)
    arguments = parser.parse_args()
    names = arguments.setup or sorted(SETUPS)
    if arguments.verb == "specs":
        for name in names:
            for spec in specs(name, SETUPS[name]):
                print(json.dumps(spec.to_dict()))
        return
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines() if line.strip()]
    found = [compare(name, SETUPS[name], rows) for name in names]
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps([{k: v for k, v in one.items() if k != "table"} for one in found], indent=1))


if __name__ == "__main__":
    main()
