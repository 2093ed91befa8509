"""explain(): the formulas behind a plan's lines, with the user's numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.evaluation import Evaluation
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.ledger.line import Item, derived, glossary_of
from zeroplan.planner.estimate import allocator_config
from zeroplan.planner.formula import FORMULA
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask

if TYPE_CHECKING:
    from zeroplan.planner.tapes import ExpandedTapes
    from zeroplan.simulate.timeline import Timeline

_NAME = re.compile(r"[a-z][a-z_0-9]*")


@dataclass(frozen=True, slots=True)
class Derivation:
    """One line with the values of the names in its formula and what each name means."""

    item: Item
    values: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, slots=True)
class StageNote:
    """One pipeline rank.

    Attributes:
        rank: its place in the pipeline, counted from 0.
        blocks: of each of its chunks, the first block and the one behind the last.
        in_flight: the most micro batches, of all chunks together, that have run a forward and not its backward.
        peak_allocated: bytes; None at formula depth.
    """

    rank: int
    blocks: tuple[tuple[int, int], ...]
    in_flight: int
    peak_allocated: int | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """One configuration's lines, derived; of a pipeline those of one rank, which `stage` describes."""

    engine: str
    label: str
    derivations: tuple[Derivation, ...]
    stage: StageNote | None = None


def explain(request: Ask, line: str | None = None) -> list[Explanation]:
    """Derive every line of the request's plans, or only those whose buffer or line is named `line`. Of a pipeline every rank is
    derived, the one that allocates the most first.

    Raises:
        BadInput: a value that cannot be used, or a line that no plan has.
    """
    resolved = resolve(request)
    allocator_config(request.alloc_conf)  # no line depends on it, and a setting that torch does not take is refused
    tapes = None
    if resolved.depth != FORMULA:
        from zeroplan.planner.tapes import ExpandedTapes

        tapes = ExpandedTapes(resolved.engine)
    every: list[Explanation] = []
    for case in resolved.cases:
        ranks = [_explain(resolved.engine, replace(case, pp_rank=rank), tapes) for rank in range(case.layout.pp)]
        every += sorted(ranks, key=_needed, reverse=True)
    out = [replace(e, derivations=tuple(d for d in e.derivations if line in (None, *d.item.names))) for e in every]
    if not any(e.derivations for e in out):
        known = sorted({name for e in every for d in e.derivations for name in d.item.names})
        raise BadInput(
            f"no line {(line or '')[:60]!r} in these plans",
            where="--line",
            remedy=did_you_mean(line or "", known) or f"known: {', '.join(known)}",
        )
    return out


def _explain(engine: Engine, case: Case, tapes: ExpandedTapes | None) -> Explanation:
    ledger, facts = engine.ledger(case)
    meanings = glossary_of(type(facts))
    derivations = []
    for item in derived(ledger, facts):
        names = dict.fromkeys(_NAME.findall(item.formula))
        known = ((name, getattr(facts, name, None)) for name in names)
        values = tuple((name, value, meanings.get(name, "")) for name, value in known if isinstance(value, int))
        derivations.append(Derivation(item, values))
    timeline = None if tapes is None else _timeline(engine, case, tapes)
    if timeline is not None:
        derivations += _at_the_peak(engine, case, timeline, {d.item.buffer for d in derivations if d.item.place is Place.HBM})
    zero = case.zero
    label = f"stage {zero.stage}, optimizer {zero.offload_optimizer.device}, parameters {zero.offload_param.device}"
    stage = None if case.layout.pp == 1 else _stage(engine, case, timeline)
    return Explanation(f"{engine.name} {engine.version}", label, tuple(derivations), stage)


def _stage(engine: Engine, case: Case, timeline: Timeline | None) -> StageNote:
    from zeroplan.core.pipeline_order import PipelineOrder, in_flight, schedule_of

    layout = case.layout
    order = PipelineOrder(
        schedule_of(case.pipeline),
        case.pp_rank,
        layout.pp,
        layout.vpp,
        case.workload.batch.grad_accum,
        takes_fewer=bool(case.partition),
    )
    (flying,) = in_flight((action._replace(chunk=0) for action in order.actions()), 1)  # of all chunks together
    return StageNote(case.pp_rank, engine.blocks(case), flying, None if timeline is None else timeline.peak_allocated)


def _needed(one: Explanation) -> int:
    """Return what a pipeline rank allocates at most, or, where that is not known, what it keeps on the GPU."""
    if one.stage is not None and one.stage.peak_allocated is not None:
        return one.stage.peak_allocated
    return sum(d.item.bytes for d in one.derivations if d.item.place is Place.HBM)


def _timeline(engine: Engine, case: Case, tapes: ExpandedTapes) -> Timeline | None:
    """Return the simulated run; None where there is no tape."""
    from zeroplan.planner.tapes import NoTapeError

    if not engine.simulates(case):
        return None
    try:
        tape = tapes.of(case)
    except NoTapeError:
        return None
    return engine.simulate(case, tape).timeline


#: The purpose of buffers that have no formula.
_PURPOSES = {
    Buffer.ACTIVATION: "Tensors that autograd keeps for the backward.",
    Buffer.ACTIVATION_TEMP: "Temporaries and gradients of activations at that moment.",
    Buffer.ACTIVATION_CHECKPOINT: "Inputs of checkpointed blocks.",
    Buffer.COMM_ACTIVATION: "Outputs of collectives between tensor-parallel ranks.",
    Buffer.LOGITS: "The logits.",
    Buffer.INPUT: "The batch.",
    Buffer.PARAM_FULL: "Parameters gathered for the modules that run, or fetched ahead.",
    Buffer.GRAD_FULL: "Gradients that no reduction has taken yet.",
    Buffer.COMM_ALL_GATHER: "Inputs and outputs of gathers under way.",
    Buffer.COMM_REDUCE_SCATTER: "Inputs and outputs of reductions under way.",
}


def _at_the_peak(engine: Engine, case: Case, timeline: Timeline, known: set[Buffer]) -> list[Derivation]:
    """Return the buffers without a formula that are alive at the peak of allocated memory."""
    from zeroplan.engines.simulation import phase_of_mark

    phase: Phase = phase_of_mark(timeline.peak_mark())
    batch, length, samples = case.workload.batch.micro_batch, case.workload.batch.seq_len or 1, "micro_batch"
    evaluation = case.workload.technique(Evaluation)
    if phase is Phase.EVALUATION and evaluation is not None:
        batch, samples = evaluation.batch, "eval_batch"
    out = []
    for buffer, count in timeline.alive_by_buffer().items():
        if buffer in known:
            continue
        a_token, rest = divmod(count, batch * length)
        formula = f"simulated: alive at the peak, in {phase.value}"
        values: tuple[tuple[str, int, str], ...] = ()
        if a_token and buffer in (Buffer.ACTIVATION, Buffer.ACTIVATION_TEMP, Buffer.ACTIVATION_CHECKPOINT, Buffer.LOGITS):
            formula = f"{a_token:,} × {samples} × seq_len" + (f" + {rest:,}" if rest else "") + f" (alive in {phase.value})"
            values = ((samples, batch, "samples a GPU and pass"), ("seq_len", length, "tokens a sample"))
        purpose = _PURPOSES.get(buffer, "Temporaries of the schedule.")
        name = f"peak_{buffer.value.replace('.', '_')}"
        source = f"the tape, and {type(engine).__module__.rpartition('.')[0]}"
        item = Item(name, buffer, Place.HBM, (phase,), count, False, formula, purpose, source)
        out.append(Derivation(item, values))
    return out
