"""The plan of a captured script that calls an engine: the engine's schedule over the script's own tape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zeroplan.capturing.result import Captured, info_of
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import OptimizerKind, Precision
from zeroplan.engines.registry import find_engine
from zeroplan.interop.programs.megatron_lm import MegatronLm
from zeroplan.models.stored import of_data as spec_of_data
from zeroplan.planner.estimate import Estimate, estimate_runs
from zeroplan.planner.merge import with_files
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import PLAIN, ZERO3, RecordedRun
from zeroplan.run.ask import Ask
from zeroplan.tape.codec import from_json

if TYPE_CHECKING:
    from zeroplan.core.plan import Report
    from zeroplan.planner.simulated import Simulated

_DEEPSPEED = "deepspeed"
#: Under this key stand the arguments of an engine that builds the model itself, where they describe it.
_ARGUMENTS = "arguments"
_TYPES: Mapping[str, Any] = {"optimizer_kind": OptimizerKind, "precision": Precision}


@dataclass(frozen=True, slots=True)
class ResolvedArguments:
    """The arguments of an engine's own program, as it resolved them; messages name them by this class."""

    said: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return them by name."""
        return dict(self.said)


def ask_of(captured: Captured, cluster: Cluster, alloc_conf: str = "") -> Ask:
    """Return the run that a captured script hands to its engine, as the planner is asked for it.

    Args:
        captured: what was captured, with an engine.
        cluster: the machine.
        alloc_conf: the caching allocator's settings.
    """
    engine = captured.engine
    machine = {
        "gpus": cluster.gpus,
        "nodes": cluster.nodes,
        "gpu": cluster.gpu.name,
        "vram": cluster.vram,
        "cpu_ram": cluster.cpu_ram,
    }
    asked = {name: value for name, value in machine.items() if value is not None}
    if _ARGUMENTS in engine:
        files = (ResolvedArguments(engine[_ARGUMENTS]),)
        return Ask(files=files, program=MegatronLm.name, alloc_conf=alloc_conf or None, unmodelled=_left_out(captured), **asked)
    tapes = {way: tuple(from_json(one) for one in held["tapes"]) for way, held in engine["tapes"].items()}
    recorded = RecordedRun(tapes, int(engine["buffers"]) + int(engine["beside"]))
    return Ask(
        model=spec_of_data(engine["spec"]),
        recorded=recorded,
        engine=engine["engine"],
        alloc_conf=alloc_conf or None,
        unmodelled=_left_out(captured),
        **asked,
        **{name: _TYPES[name](value) if name in _TYPES else value for name, value in engine["said"].items()},
    )


def _left_out(captured: Captured) -> tuple[Unmodelled, ...]:
    found = [Unmodelled(key, Effect(effect), says) for key, effect, says in captured.unmodelled]
    if captured.stopped is not None:
        at = captured.stopped
        found.append(Unmodelled("stopped", Effect.MORE, f"{at.file}:{at.line}: {at.why}; what follows is in no figure"))
    return tuple(found)


def planned(
    captured: Captured, cluster: Cluster, alloc_conf: str = "", *, others: bool = True
) -> tuple[Report, tuple[Simulated, ...]]:
    """Return the report (the run as the script starts it, then the engine's other stages and offloads), and each plan's run.

    Raises:
        BadInput: what the planner refuses of the engine's arguments.
    """
    ask = ask_of(captured, cluster, alloc_conf)
    found = estimate_runs(ask)
    run = found.runs[0]
    if run is None:
        raise BadInput(
            "the script's own step makes no tape", where=captured.command, remedy="zeroplan estimate plans the model"
        )
    plan = _beyond(found.report.plans[0], captured, ask, run.tape.activation_peak)
    first = plan.model_copy(update={"capture": info_of(captured)})
    further = list(_others(ask, captured, first)) if others else []
    plans = (first, *(one.report.plans[0] for one in further))
    report = found.report.model_copy(
        update={
            "plans": plans,
            "workload": {**found.report.workload, "steps": captured.steps, **captured.workload},
            "warnings": (*found.report.warnings, *captured.notes),
        }
    )
    return report, (run, *(one.runs[0] for one in further if one.runs[0] is not None))


def at_ranks(
    captured: Captured, cluster: Cluster, shapes: Sequence[tuple[int, int]], alloc_conf: str = ""
) -> tuple[MemoryPlan, ...]:
    """Return the run's plans among other numbers of processes, each of which takes the micro batches that were captured.

    Args:
        captured: what was captured, with an engine.
        cluster: the machine, whose numbers of GPUs and nodes are those of the capture.
        shapes: GPUs a node, and nodes, of each plan.
        alloc_conf: the caching allocator's settings.

    Raises:
        BadInput: what the planner refuses of the engine's arguments, as a mesh that such ranks do not fill.
    """
    said = captured.engine["said"]
    if isinstance(config := said.get("ds_config"), Mapping):  # a total batch would be shared out anew
        work = estimate_runs(ask_of(captured, cluster), relief=False).report.workload
        batch = {"train_micro_batch_size_per_gpu": work["micro_batch"], "gradient_accumulation_steps": work["grad_accum"]}
        said = {**said, "ds_config": {key: one for key, one in config.items() if key != "train_batch_size"} | batch}
    pinned = replace(captured, engine={**captured.engine, "said": said})
    found = []
    for gpus, nodes in shapes:
        here = replace(cluster.resized(gpus) if cluster.assumes_host else replace(cluster, gpus=gpus), nodes=nodes)
        found.append(planned(pinned, here, alloc_conf, others=False)[0].plans[0])
    return tuple(found)


def _beyond(plan: MemoryPlan, captured: Captured, ask: Ask, step: int) -> MemoryPlan:
    """Return the plan, open where the script takes more outside its micro batches than the plan has, or is another than its
    arguments describe.
    """
    engine = captured.engine
    more = []
    peak = plan.gpu.peak_allocated or 0
    if _ARGUMENTS in engine:
        more = list(_disagreements(engine, ask))
    elif engine["before"] > peak:
        says = f"the script holds {engine['before']:,} bytes on the GPU before {engine['line']} hands the model over"
        more.append(Unmodelled("before the engine", Effect.MORE, says))
    if engine.get("outside", 0) > step:
        says = f"beside the model, an evaluation takes {engine['outside']:,} bytes, a micro batch {step:,}"
        more.append(Unmodelled("evaluation", Effect.MORE, says))
    if not more:
        return plan
    from zeroplan.core.plan import Verdict

    update: dict[str, Any] = {"unmodelled": (*plan.unmodelled, *more)}
    if plan.verdict is not Verdict.DOES_NOT_FIT:
        update |= {"verdict": Verdict.UNKNOWN, "fits": None, "decides": ", ".join(one.key for one in more)}
    return plan.model_copy(update=update)


def _disagreements(engine: Mapping[str, Any], ask: Ask) -> Iterator[Unmodelled]:
    """Yield where the model or the batch that an engine's setup made is another than its arguments describe."""
    if "differs" in engine:
        yield Unmodelled("batch", Effect.UNKNOWN, engine["differs"])
    if "built" not in engine:
        yield Unmodelled("model", Effect.UNKNOWN, "the model was not built: that the arguments describe it is not checked")
        return
    resolved = resolve(with_files(ask)[0])
    case = replace(resolved.cases[0], pp_rank=engine["pp_rank"])
    described = sum(resolved.engine.held_elements(case, ()))
    if described != engine["built"]:
        says = f"setup builds {engine['built']:,} parameters on this rank, the arguments describe {described:,}"
        yield Unmodelled("model", Effect.UNKNOWN, says)


def _others(ask: Ask, captured: Captured, first: MemoryPlan) -> Iterator[Estimate]:
    """Yield the estimates of the engine's other stages and offloads, by the fewest changed keys; those that it refuses are left
    out.
    """
    tapes = captured.engine.get("tapes", {})
    alike = PLAIN in tapes and ZERO3 in tapes and tapes[PLAIN]["shapes"][-1] == tapes[ZERO3]["shapes"][-1]
    seen = {(first.stage, first.offload_optimizer, first.offload_param)}
    for zero in find_engine(first.engine).options():
        key = (zero.stage, str(zero.offload_optimizer.device), str(zero.offload_param.device))
        if key in seen or "nvme" in key:
            continue
        seen.add(key)
        other = ask
        if not alike and (zero.stage == 3) != (first.stage == 3) and ask.engine == _DEEPSPEED:
            continue
        if isinstance(ask.ds_config, Mapping):
            other = other.replace(ds_config=_changed(ask.ds_config, *key))
        else:
            other = other.replace(stage=key[0], offload_optimizer=key[1], offload_param=key[2])
        if key[1] != "none":
            other = other.replace(optimizer_kind=None, torch_adam=None)
        try:
            found = estimate_runs(other)
        except BadInput:
            continue
        if found.runs and found.runs[0] is not None:
            yield found


def _changed(config: Mapping[str, Any], stage: int, optimizer: str, param: str) -> dict[str, Any]:
    """Return a ds_config at another stage, with other offloads."""
    zero = dict(config.get("zero_optimization") or {})
    zero["stage"] = stage
    for name, device in (("offload_optimizer", optimizer), ("offload_param", param)):
        held = zero.pop(name, None)
        if device != "none":
            zero[name] = {**(held if isinstance(held, Mapping) else {}), "device": device}
    return {**config, "zero_optimization": zero}
