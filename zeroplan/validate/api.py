"""verify(): predicts, runs and measures a request's configurations on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from zeroplan.core.errors import BadInput
from zeroplan.core.plan import ModelInfo
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.ds_config.source import load_source
from zeroplan.engines.base import Case, Engine
from zeroplan.engines.registry import DEFAULT_VERIFIED, engine_names, find_engine
from zeroplan.planner.describe import describe_workload
from zeroplan.planner.request import Request
from zeroplan.planner.resolve import Resolved, resolve
from zeroplan.planner.tapes import ExpandedTapes
from zeroplan.validate.builtin import builtin_request
from zeroplan.validate.compare import compare
from zeroplan.validate.job import STEPS, VerifyJob, ended_early, job_of
from zeroplan.validate.launch import Launch
from zeroplan.validate.machine import Machine, find_machine, ranks_to_use
from zeroplan.validate.measured import measurement_of
from zeroplan.validate.planned import Planned, predict
from zeroplan.validate.results import Comparison, Drift, Measurement

if TYPE_CHECKING:
    from zeroplan.validate.live import Live

#: How far the total may be from the plan, as a fraction.
TOLERANCE = 0.02
#: Seconds without any sign of life from any rank after which a run is ended.
TIMEOUT = 300.0

Say = Callable[[str], None]


def verify(
    model: Any = None,
    *,
    inputs: Any = None,
    tolerance: float = TOLERANCE,
    timeout: float = TIMEOUT,
    steps: int = STEPS,
    progress: Say | None = None,
    **options: Any,
) -> Drift:
    """Run training for a few steps on what this machine has, and hold the plan against the measurement.

    Args:
        model: a catalog or hub id, a path, or a config as a dict; none runs a built-in set within five minutes. Weights are
            random, so nothing is downloaded but the config. With `inputs`, a live ``nn.Module``, which is run itself.
        inputs: one micro batch for a live module: the keyword arguments of its forward as a dict, or its positional ones. The
            forward's result is, or has as `loss`, the loss; of any other tensor the mean is taken.
        tolerance: how far the total may be from the plan, as a fraction; owned buffers must be equal.
        timeout: seconds without a sign of life from any rank after which the run is ended.
        steps: optimizer steps; peaks repeat from the second applied one on.
        progress: called with a line of text as things happen; by default they are printed to stderr.
        options: the fields of :class:`zeroplan.planner.request.Request`, such as ``engine="fsdp2"`` (``"zeroplan"`` unless
            given), ``stage=2``, ``gpus=2``, ``ds_config=…``.

    Returns:
        Every configuration's plan beside its measurement. Out of memory, and ranks that die or hang, are results.

    Raises:
        BadInput: a value that cannot be used, or what the engine refuses to run.
    """
    say = progress or _to_stderr
    if not 0 < tolerance < 1:
        raise BadInput(f"{tolerance} is no fraction", where="--tolerance", remedy="write 2 % as 0.02")
    if not timeout > 0:
        raise BadInput(f"{timeout} is no time", where="--timeout", remedy="give seconds, such as 300")
    if steps < 2:
        raise BadInput(f"{steps} is too few", where="--steps", remedy="use 2 or more: peaks repeat from the second on")
    live = _live(model, inputs, options)
    machine = find_machine()
    ranks = ranks_to_use(machine, options.pop("gpus", None))
    given: dict[str, Any] = {"model": model} if model is not None else builtin_request(machine)
    if options.get("ds_config") is not None and model is None:
        given.pop("micro_batch")  # the file's to say
    if live is not None:
        given["micro_batch"], given["seq_len"] = live.shape()
    fields = {"engine": DEFAULT_VERIFIED, **given, **{k: v for k, v in options.items() if v is not None}}
    cluster = machine.cluster(ranks)
    resolved = resolve(Request(**fields, gpus=cluster.gpus, nodes=cluster.nodes))
    cases = [replace(case, cluster=cluster) for case in resolved.cases if not _lacks_path(case)]
    lacking = sum(_lacks_path(case) for case in resolved.cases)
    which = "1 configuration with NVMe is" if lacking == 1 else f"{lacking} configurations with NVMe are"
    left_out = [f"{which} left out: give nvme_path in a --ds-config"] if lacking else []
    if not cases:
        raise BadInput("NVMe without a folder", where="--offload-optimizer", remedy="give nvme_path in a --ds-config")
    raw = _raw(options.get("ds_config"))
    engine, raw = resolved.engine.for_verify(raw, device=machine.device, own_module=live is not None)
    resolved = replace(resolved, engine=engine)
    jobs = [job_of(case, engine, _label(case), raw=raw, steps=steps, timeout=timeout, live=live) for case in cases]
    run = _run_here if machine.launched else _run_launched
    streams = _streams(engine, model, live)
    comparisons, skipped = run(resolved, streams, cases, jobs, machine, ranks, tolerance, say, model is None)
    spec = resolved.spec
    return Drift(
        model=ModelInfo(name=spec.name, params=spec.params, trainable=spec.trainable, source=spec.source),
        workload=describe_workload(resolved.workload),
        machine={**machine.describe(), "ranks": ranks},
        tolerance=tolerance,
        warnings=(*resolved.warnings, *left_out, *skipped),
        within=all(comparison.within for comparison in comparisons),
        comparisons=tuple(comparisons),
    )


def _live(model: Any, inputs: Any, options: dict[str, Any]) -> Live | None:
    """The user's module and batch, where there is a batch."""
    if inputs is None:
        return None
    if not hasattr(model, "named_parameters"):
        raise BadInput("inputs are for a live nn.Module", where="inputs", remedy="leave them out: others get random tokens")
    for name in ("micro_batch", "seq_len"):
        if options.get(name) is not None:
            raise BadInput("the batch says it", where=name, remedy="leave it out, or give another batch")
    for name in ("lora_rank", "gradient_checkpointing"):
        if options.get(name):
            raise BadInput("is not done to a live module", where=name, remedy="give the module as it is to be trained")
    from zeroplan.validate.live import live_of, require_no_rank

    require_no_rank()
    engine = find_engine(options.get("engine") or DEFAULT_VERIFIED, where="engine")
    if not engine.takes_modules:
        others = [name for name in engine_names() if find_engine(name).takes_modules]
        what = f"{engine.name} builds its models itself, which a live module is not for"
        raise BadInput(what, where="engine", remedy=f"use {' or '.join(others)}")
    return live_of(model, inputs)


def _streams(engine: Engine, model: Any, live: Live | None) -> ExpandedTapes:
    if live is None:
        return ExpandedTapes(engine)
    from zeroplan.validate.live import LiveExpandedTapes

    return LiveExpandedTapes(engine, live, model)


def _to_stderr(text: str) -> None:
    print(f"zeroplan verify: {text}", file=sys.stderr, flush=True)


def _label(case: Case) -> str:
    zero = case.zero
    text = f"stage {zero.stage}"
    if zero.offload_optimizer:
        text += f", optimizer {zero.offload_optimizer.device}"
    return text + (f", parameters {zero.offload_param.device}" if zero.offload_param else "")


def _lacks_path(case: Case) -> bool:
    """Whether a table's option goes to NVMe without saying where."""
    parts = (case.zero.offload_optimizer, case.zero.offload_param)
    return any(part.device is OffloadDevice.NVME and part.nvme_path is None for part in parts)


def _raw(source: Any) -> Mapping[str, Any] | None:
    if source is None or isinstance(source, dict):
        return source
    return load_source(source)[0]  # once more, as resolve keeps what it makes of it


_Outcome = tuple[list[Comparison], list[str]]


def _run_launched(
    resolved: Resolved,
    streams: ExpandedTapes,
    cases: Sequence[Case],
    jobs: Sequence[VerifyJob],
    machine: Machine,
    ranks: int,
    tolerance: float,
    say: Say,
    builtin: bool,
) -> _Outcome:
    """Ranks of our own: on GPUs one torchrun a configuration, so that each starts clean; on a CPU one for all of them."""
    comparisons: list[Comparison] = []
    skipped: list[str] = []
    alone = machine.device == "cuda"
    planned: list[Planned | None] = [None] * len(cases)
    waiting = list(range(len(cases)))
    while waiting:
        taken = waiting[:1] if alone else list(waiting)
        if alone and builtin:
            first = planned[taken[0]] = predict(resolved.engine, cases[taken[0]], streams)
            if first.plan.fits is False:
                skipped.append(f"{jobs[taken[0]].label} is left out: the plan does not fit this GPU")
                waiting.remove(taken[0])
                continue
        launch = Launch([jobs[i] for i in taken], ranks, machine.device, _progress(jobs, taken, say), timeout=jobs[0].timeout)
        what = jobs[taken[0]].label if len(taken) == 1 else f"{len(taken)} configurations"
        say(f"{what}: starting {ranks} {'rank' if ranks == 1 else 'ranks'} ({machine.device})")
        try:
            launch.start()
            for i in taken:  # while the ranks start
                planned[i] = planned[i] or predict(resolved.engine, cases[i], streams)
            results = launch.finish()
        finally:
            launch.close()
        for place, i in enumerate(taken):
            got = results.get(place, [])
            if not got and place and not launch.failure:
                break
            measured = measurement_of(got, device=machine.device, ranks=ranks, failure=launch.failure)
            plan = planned[i]
            assert plan is not None
            comparisons.append(_compared(plan, measured, tolerance, jobs[i], say))
            waiting.remove(i)
            if measured.failure or measured.out_of_memory:
                break  # what follows it is started anew
    return comparisons, skipped


def _progress(jobs: Sequence[VerifyJob], taken: Sequence[int], say: Say) -> Callable[[int, str], None]:
    def show(place: int, doing: str) -> None:
        if _worth_saying(doing):
            say(f"{jobs[taken[place]].label}: {doing}")

    return show


def _worth_saying(doing: str) -> bool:
    """Whether a rank's line is one for people: the ends of phases are signs of life only."""
    return not doing.endswith("done")


def _compared(plan: Planned, measured: Measurement, tolerance: float, job: VerifyJob, say: Say) -> Comparison:
    comparison = compare(plan, measured, tolerance)
    say(f"{job.label}: {comparison.verdict}")
    return comparison


def _told(say: Say | None, label: str, doing: str) -> None:
    if say is not None and _worth_saying(doing):
        say(f"{label}: {doing}")


def _run_here(
    resolved: Resolved,
    streams: ExpandedTapes,
    cases: Sequence[Case],
    jobs: Sequence[VerifyJob],
    machine: Machine,
    ranks: int,
    tolerance: float,
    say: Say,
    builtin: bool,
) -> _Outcome:
    """Within a torchrun: this process is one of its ranks; every rank gets every result."""
    import os

    from zeroplan.validate.rank.exchange import everyone, from_first
    from zeroplan.validate.rank.worker import EXIT_EARLY, join, run_here

    place = join(jobs[0], machine.device, int(os.environ.get("LOCAL_RANK", "0")))
    first = machine.rank == 0
    comparisons: list[Comparison] = []
    skipped: list[str] = []
    for case, job in zip(cases, jobs, strict=True):
        planned = from_first(partial(predict, resolved.engine, case, streams))
        if builtin and planned.plan.fits is False:
            skipped.append(f"{job.label} is left out: the plan does not fit this GPU")
            continue
        result = run_here(job, place, partial(_told, say if first else None, job.label))
        if ended_early(result):  # the other ranks may wait for this one in vain, so torchrun is to end them
            measured = measurement_of([result], device=machine.device, ranks=ranks)
            _to_stderr(f"{job.label}: {compare(planned, measured, tolerance).verdict}")
            os._exit(EXIT_EARLY)
        measured = measurement_of(everyone(result), device=machine.device, ranks=ranks, nodes=case.cluster.nodes)
        comparison = compare(planned, measured, tolerance)
        if first:
            say(f"{job.label}: {comparison.verdict}")
        comparisons.append(comparison)
    return comparisons, skipped
