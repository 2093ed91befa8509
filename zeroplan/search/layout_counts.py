"""What a rank's micro batch takes of kernels and bytes under a layout."""

from __future__ import annotations

from dataclasses import replace
from math import log2

from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import Float8Recipe
from zeroplan.engines.case import Case
from zeroplan.ledger.work import Counts, count_tape, guess_counts, matrices
from zeroplan.planner.resolve import Resolved
from zeroplan.planner.tapes import ExpandedTapes, NoTapeError, expand_for
from zeroplan.search.layout_host import with_ring
from zeroplan.tapes import shipped
from zeroplan.techniques.compiled import COMPILED

#: Ranks that share experts, at most, of which a tape is looked for.
_MOST_EXPERT_RANKS = 1024


def rank_counts(resolved: Resolved, known: dict[str, Counts]) -> Counts:
    """Return the counts over all blocks of the model, on a shipped tape where there is one, or that of the engine's own layers;
    compiled graphs are traced.

    What was traced here before must not decide, or the answer would depend on earlier ones. Ranks that share experts do as much
    whatever their number, so the tape of the nearest number serves; of a ring's ranks that of as many tokens, and what it adds.

    Args:
        resolved: the layout.
        known: counts that were found before, which these are added to.
    """
    case = resolved.cases[0]
    if resolved.engine.own_layers:
        whole = _unstaged(case)
        layout, work = whole.layout, whole.workload
        casts = work.technique(Float8Recipe)
        key = f"{layout.tp} {layout.sp} {layout.cp} {layout.ep} {work.recomputation} {casts}"
        if key not in known:
            own = resolved.engine.own_tape(whole)
            known[key] = _guessed(case) if own is None else replace(count_tape(own), casts=casts is not None)
        return known[key]
    options = resolved.engine.trace_options(case)
    if options.key not in known:
        powers = (1 << power for power in range(1, _MOST_EXPERT_RANKS.bit_length()))
        near = sorted(powers, key=lambda ranks: (abs(log2(ranks / options.mesh.ep)), ranks))
        shared = [options.on_ranks(ep=ranks) for ranks in near] if options.mesh.ep > 1 else []
        for one in (options, replace(options, halves=False), *shared, options.on_ranks(cp=1)):
            tape = shipped.find(case.spec, one)
            if tape is not None:
                found = count_tape(expand_for(tape, case))
                known[options.key] = found if one.mesh.cp == options.mesh.cp else with_ring(found, case)
                break
        else:
            known[options.key] = with_ring(_guessed(case), case) if case.workload.compile is None else _compiled(resolved)
    return known[options.key]


def _compiled(resolved: Resolved) -> Counts:
    """Return the counts of compiled graphs. Raises BadInput: where they cannot be traced."""
    try:
        return count_tape(ExpandedTapes(resolved.engine).of(resolved.cases[0]))
    except NoTapeError as error:
        raise BadInput(str(error), where=COMPILED.where, remedy=error.remedy) from None


def ships_tape(resolved: Resolved) -> bool:
    """Return whether a tape of just this layout is shipped."""
    case = resolved.cases[0]
    return not resolved.engine.own_layers and shipped.find(case.spec, resolved.engine.trace_options(case)) is not None


def _unstaged(case: Case) -> Case:
    """Return the case with all blocks on each rank."""
    if case.parallel is None or case.parallel.pp == 1:
        return case
    return replace(case, parallel=replace(case.parallel, pp=1, vpp=1))


def _guessed(case: Case) -> Counts:
    batch = case.workload.batch
    tokens = batch.rows * (batch.seq_len or 0) // (case.layout.cp * case.layout.tp)
    return guess_counts(matrices(case.spec), case.workload, tokens)
