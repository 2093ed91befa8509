"""tune(): the fastest configuration on this machine, by running the few that are predicted to be fast.

Note [What is run next]
    Predictions are off in common ways: a host that is slow, links that are slower than their preset. So the time of a
    candidate that was not run is expected to be its predicted time, times how far the runs so far were off; of those that
    are bound by the same thing (host, GPU, link) where any was run, else of all. The next to run is the one with the least
    expected time. A tuning ends after `runs` runs, or when nothing is expected to be faster than the best measured.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Unpack

from zeroplan.core.errors import BadInput
from zeroplan.core.gpus import DEFAULT_GPU
from zeroplan.core.sizes import GIB
from zeroplan.core.workload import Compilation
from zeroplan.engines.registry import DEFAULT_VERIFIED
from zeroplan.planner.options import TuneOptions, require_known
from zeroplan.run.ask import Ask
from zeroplan.search.api import run_search
from zeroplan.search.machine import look, preset_of
from zeroplan.search.policy import HOPE
from zeroplan.search.results import Recommendation
from zeroplan.search.search_options import SearchOptions
from zeroplan.simulate.allocator.config import VARIABLES
from zeroplan.tuning.results import Outcome, Trial, Trials, Tuned, Tuning, key_of
from zeroplan.validate.api import verify
from zeroplan.validate.machine import VerifyMachine, find_machine, ranks_to_use
from zeroplan.validate.results import Comparison
from zeroplan.validate.runs import to_stderr

#: Runs that a tuning takes, steps of each, and candidates that it chooses from.
RUNS, STEPS, CANDIDATES = 5, 6, 10


Run = Callable[[Recommendation], Trial]


def tune(
    model: Any,
    *,
    runs: int = RUNS,
    steps: int = STEPS,
    folder: str | os.PathLike[str] | None = None,
    global_batch: int | None = None,
    candidates: int = CANDIDATES,
    hope: float = HOPE,
    progress: Callable[[str], None] | None = None,
    **options: Unpack[TuneOptions],
) -> Tuning:
    """Run the best predicted configurations on this machine, and rank them by what they measure.

    Args:
        model: a catalog or hub id, a path, or a config as a dict. Weights are random.
        runs: configurations to run at most, those that `folder` holds already counted.
        steps: optimizer steps of each; the first is not timed.
        folder: where results are kept as they come; a tuning that was cut off goes on from there. None keeps none.
        global_batch: sequences an optimizer step; None lets the batch follow from the micro batch.
        candidates: configurations to choose from: the best predicted of each stage, offload and checkpointing.
        hope: a candidate is run while it is expected to take less than this many times the best measured.
        progress: called with a line of text for each thing that begins; None prints the lines to stderr.
        options: :class:`zeroplan.planner.options.TuneOptions`.

    Returns:
        Every candidate, the fastest measured first. One that runs out of memory or dies is recorded, and not run again.

    Raises:
        BadInput: a value that cannot be used, nothing that fits, or a folder with the results of another question.
        TypeError: an argument that does not exist, with the nearest name.
    """
    require_known(options, TuneOptions.__annotations__, "tune")
    for where, value in (("--runs", runs), ("--steps", steps), ("--candidates", candidates)):
        if value < 1:
            raise BadInput(f"{value} is out of range", where=where, remedy="use 1 or more")
    machine = find_machine()
    if machine.launched:
        raise BadInput("starts its own ranks", where="tune", remedy="call it without torchrun")
    ranks = ranks_to_use(machine, options.get("gpus"))
    given: dict[str, Any] = {name: value for name, value in options.items() if name != "gpus" and value is not None}
    if options.get("compile") is not None and machine.device == "cpu":
        raise BadInput("compiled plans are of a GPU's graphs", where="--compile", remedy="leave it out on a CPU")
    if options.get("compile") == Compilation.MODEL:
        raise BadInput("verify's loop compiles blocks", where="--compile", remedy="use --compile blocks or auto")
    again = given.pop("gradient_checkpointing", None)
    search = SearchOptions(global_batch=global_batch, gradient_checkpointing=again, shown=candidates, explain=False)
    request = Ask(**{"engine": DEFAULT_VERIFIED, "from_scratch": True, **given}, model=model, **_described(machine, ranks))
    found = run_search(request, search)
    if not found.ranking:
        raise BadInput("no configuration fits this machine", where="tune", remedy="ask zeroplan recommend what would help")
    question = {
        "model": found.model,
        "workload": {**given, "global_batch": global_batch, "gradient_checkpointing": again},
        "machine": {**machine.describe(), "ranks": ranks},
    }
    trials = Trials.of(folder, question)

    def run(one: Recommendation) -> Trial:
        with _alloc_conf(one.alloc_conf):
            return _measured(model, one, ranks, steps, given, progress or partial(to_stderr, verb="tune"))

    measure(found.ranking, trials, run, runs, hope)
    ranking = ranked(found.ranking, trials)
    return Tuning(
        found.model, question["machine"], ranking, len(trials.found), found.warnings, predicted=bool(preset_of(machine.name))
    )


def _described(machine: VerifyMachine, ranks: int) -> dict[str, Any]:
    """Return the fields of a request for this machine. A CPU's ranks share its memory, unknown rates are the default's."""
    host = look(".").memory
    vram = machine.memory or max(GIB, host // (2 * ranks))
    return {"gpus": ranks, "gpu": preset_of(machine.name) or DEFAULT_GPU.name, "vram": vram, "cpu_ram": host}


@contextmanager
def _alloc_conf(text: str) -> Iterator[None]:
    """Start ranks with these settings of torch's allocator."""
    before = {name: os.environ.get(name) for name in VARIABLES}
    if text:
        os.environ.update(dict.fromkeys(VARIABLES, text))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _measured(
    model: Any, one: Recommendation, ranks: int, steps: int, given: dict[str, Any], progress: Callable[[str], None]
) -> Trial:
    """Run one configuration by :func:`zeroplan.verify`. Its memory is not judged here: a tuning asks for the time."""
    work, config = one.workload, one.ds_config()
    decided: dict[str, Any] = {"gradient_checkpointing": work.gradient_checkpointing}
    decided["compile"] = None if work.compile is None else work.compile.value
    if config is None:
        decided |= {"stage": one.zero.stage, "micro_batch": work.batch.micro_batch, "grad_accum": work.batch.grad_accum}
        decided |= {"offload_optimizer": one.plan.offload_optimizer, "offload_param": one.plan.offload_param}
        kept = given
    else:
        decided["ds_config"] = config
        taken = ("micro_batch", "grad_accum", "dtype", "optimizer", "stage", "offload_optimizer", "offload_param")
        kept = {name: value for name, value in given.items() if name not in taken}
    drift = verify(model, gpus=ranks, steps=steps, progress=progress, **{"engine": DEFAULT_VERIFIED, **kept, **decided})
    return trial_of(drift.comparisons[0])


def trial_of(comparison: Comparison) -> Trial:
    """Return how a run ended, with what it measured."""
    measured = comparison.measurement
    if measured.out_of_memory is not None:
        return Trial(Outcome.OUT_OF_MEMORY, says=comparison.verdict)
    if measured.failure or not measured.step_seconds:
        return Trial(Outcome.FAILED, says=comparison.verdict)
    return Trial(Outcome.MEASURED, measured.step_seconds, measured.total if measured.device == "cuda" else None)


def measure(candidates: Sequence[Recommendation], trials: Trials, run: Run, runs: int, hope: float = HOPE) -> None:
    """Run candidates until `runs` have been run or none is expected to be the fastest; see Note [What is run next]."""
    by_key = {key_of(one): one for one in candidates}
    while len(trials.found) < runs:
        left = [key for key in by_key if key not in trials.found]
        if not left:
            return
        key = min(left, key=lambda name: _per_token(by_key[name], expected(by_key[name], by_key, trials)))
        best = min((_per_token(by_key[name], seconds) for name, seconds in _seconds(by_key, trials)), default=None)
        if best is not None and _per_token(by_key[key], expected(by_key[key], by_key, trials)) > best * hope:
            return
        trials.begin(key)
        try:
            trial = run(by_key[key])
        except (KeyboardInterrupt, SystemExit):  # SIGTERM is the latter
            trials.forget()
            raise
        except BadInput as error:  # what the engine refuses to run here
            trial = Trial(Outcome.FAILED, says=str(error))
        trials.end(key, trial)


def _per_token(one: Recommendation, seconds: float) -> float:
    """Return the seconds a token: steps of different batches are compared by it."""
    return seconds / (one.tokens_per_second * one.step_seconds)


def _seconds(by_key: dict[str, Recommendation], trials: Trials) -> Iterator[tuple[str, float]]:
    for key, trial in trials.found.items():
        if key in by_key and trial.step_seconds:
            yield key, trial.step_seconds


def expected(one: Recommendation, by_key: dict[str, Recommendation], trials: Trials) -> float:
    """Return the seconds that a candidate's step is expected to take, after what was measured."""
    off = [(by_key[key], seconds / by_key[key].step_seconds) for key, seconds in _seconds(by_key, trials)]
    alike = [ratio for other, ratio in off if other.time.bound == one.time.bound]
    ratios = alike or [ratio for _, ratio in off] or [1.0]
    return one.step_seconds * statistics.median(ratios)


def ranked(candidates: Sequence[Recommendation], trials: Trials) -> tuple[Tuned, ...]:
    """Return the candidates: measured ones fastest first, then those not run by what is expected, then those that died."""
    by_key = {key_of(one): one for one in candidates}
    found = [Tuned(one, trials.found.get(key), expected(one, by_key, trials)) for key, one in by_key.items()]

    def order(one: Tuned) -> tuple[int, float]:
        if one.tokens_per_second is not None:
            return 0, -one.tokens_per_second
        return 1 if one.trial is None else 2, one.expected / one.tokens

    return tuple(sorted(found, key=order))
