"""The rate at which candidates are judged: ``python -m benchmarks.recommend.rate``. Writes ``benchmarks/results/rate.json``.

For each problem: floors a second (what prunes), predicted step times a second (what orders), simulations a second over the
candidates that survive the floors, and the seconds of a whole answer in a process that has nothing at hand but shipped tapes.
Seconds are those that this process computes, whatever else the machine does; all of it is one thread.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroplan.run.ask import Ask
from zeroplan.search.api import run_search
from zeroplan.search.cost import CostModel
from zeroplan.search.memory import Memory
from zeroplan.search.recommend import rank_all
from zeroplan.search.search_options import ResolvedSearch, SearchOptions, candidates_of, resolve_search

RESULT = Path(__file__).resolve().parent.parent / "results" / "rate.json"
_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Task:
    """A question to the search: a model, GPUs, and GiB of each."""

    model: str
    gpus: int
    vram: int

    @property
    def request(self) -> Ask:
        """Return the request, with sequences of 1024."""
        return Ask(model=self.model, gpus=self.gpus, gpu="H100", vram=f"{self.vram}G", seq_len=1024)


TASKS = (
    Task("meta-llama/Llama-3.2-1B", 1, 24),
    Task("meta-llama/Llama-3.2-1B", 4, 24),
    Task("Qwen/Qwen2.5-0.5B", 4, 24),
    Task("meta-llama/Llama-3.2-3B", 4, 40),
    Task("meta-llama/Llama-3.1-8B", 8, 80),
    Task("meta-llama/Llama-3.1-70B", 8, 24),  # nothing fits
)


def repeated(run: Callable[[], int]) -> float:
    """Units of work a second: `run` does some and says how many."""
    done, begin = 0, time.process_time()
    while (spent := time.process_time() - begin) < _SECONDS:
        done += run()
    return done / spent


def rates(problem: ResolvedSearch, request: Ask) -> dict[str, Any]:
    """Candidates a second by each kind of judgement."""
    memory = Memory(problem.engine, problem.spec, problem.cluster)
    cost = CostModel(problem.engine, problem.spec, problem.cluster, problem.rates)
    space = candidates_of(problem, request, SearchOptions())

    def floors() -> int:
        for candidate in space:
            memory.cannot_fit(candidate)
        return len(space)

    def times() -> int:
        for candidate in space:
            cost.step_time(candidate.workload, candidate.zero, memory.counts(candidate))
        return len(space)

    floors(), times()  # sums over parameters and tapes, once a model
    found: dict[str, Any] = {"candidates": len(space), "floors_a_second": round(repeated(floors))}
    found["step_times_a_second"] = round(repeated(times))
    left = [one for one in space if not memory.cannot_fit(one) and memory.runnable(one)]
    for one in left:
        memory.counts(one)
    begin = time.process_time()
    rank_all(left, memory, cost)
    spent = time.process_time() - begin
    return found | {"survivors": len(left), "simulations_a_second": round(memory.simulated / spent, 1) if left else None}


def main() -> None:
    """Run the command line."""
    gc.set_threshold(50_000, 20, 100)  # as the command line has it (zeroplan/cli/main.py)
    rows = []
    for task in TASKS:
        begin = time.process_time()
        whole = run_search(task.request)
        seconds = time.process_time() - begin
        row = {"model": task.model, "gpus": task.gpus, "vram_gib": task.vram, "answer_seconds": round(seconds, 2)}
        row |= {"answer_simulated": whole.simulated, "fits": whole.best is not None}
        rows.append(row | rates(resolve_search(task.request, SearchOptions()), task.request))
        print(json.dumps(rows[-1]), flush=True)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
