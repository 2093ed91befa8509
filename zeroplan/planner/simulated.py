"""Simulated depth: the engine's schedule is laid over the model's tape and run through the simulated allocator.

Note [Uneven routing]
    A plan's figures are of balanced routing: a rank receives as many tokens as it sends. The upper end of its interval is of
    a rank that receives twice as many. That is an assumption, not a bound: before a router has learnt, or without a loss or
    bias that balances it, one rank may get more. Expert biases that are adjusted in each step hold the most loaded expert
    within a tenth of the mean, a balancing loss within about its double. Source: Wang et al. 2024, "Auxiliary-Loss-Free Load
    Balancing Strategy for Mixture-of-Experts" (arXiv 2408.15664), section 4 (MaxVio).

A colocated vLLM that sleeps holds next to nothing. TRL empties torch's cache before it wakes vLLM, so between two steps there
are what a step leaves allocated, the process's own memory, and the share.

Note [Ranks of a ring]
    The last rank merges whole results of attention, the others halves: torch's ring puts these together by a concatenation
    (``_partial_update``), which is laid out by heads, where the next product takes channels, and so keeps a copy. A block holds
    it until its backward, also where the ring has saved the output itself. The last rank has the larger temporaries.

    Measured on two H200s (benchmarks/results/mesh.jsonl): the first rank of R04 and R25 had exactly one such copy for each of
    its 12 blocks more, that of R05, whose blocks are recomputed, exactly one.
    Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py (``_SDPAMerger._merge_one``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from zeroplan.core.buffers import ALWAYS, FROM_FIRST_STEP, Buffer, Phase, Place
from zeroplan.core.families import Family, family_of
from zeroplan.core.generation import Colocated
from zeroplan.core.plan import MemoryPlan, PeakShare, PlanLine
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.engines.process import Outside
from zeroplan.engines.simulation import Simulation, phase_of_mark
from zeroplan.engines.technique_lines import technique_host
from zeroplan.planner.fit import judged, left_out, unsure_at_limit, unsure_of_fragments
from zeroplan.planner.host import host_memory
from zeroplan.planner.limit import at_its_limit, run_on_card
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.timeline import Note
from zeroplan.tape.expanded import ExpandedTape, Kind, Op

SIMULATED = "simulated"
#: Buffers that hold the model's own computation.
_COMPUTATION = frozenset(
    {
        Buffer.ACTIVATION,
        Buffer.ACTIVATION_CHECKPOINT,
        Buffer.ACTIVATION_TEMP,
        Buffer.COMM_ACTIVATION,
        Buffer.LOGITS,
        Buffer.INPUT,
    }
)


@dataclass(frozen=True, slots=True)
class Simulated:
    """A plan with the run behind it, which other reports look into."""

    plan: MemoryPlan
    simulation: Simulation
    tape: ExpandedTape
    outside: Outside


def simulated_plan(
    formula: MemoryPlan, engine: Engine, case: Case, tape: ExpandedTape, config: AllocatorConfig | None = None
) -> Simulated:
    """Plan one configuration with activations, peaks and totals.

    Args:
        formula: the same configuration's plan at formula depth.
        engine: the engine whose schedule is played.
        tape: the model's tape, expanded for the workload's micro batch and sequence length.
        config: the caching allocator's settings; None takes torch's defaults.
    """
    unlimited = engine.simulate(case, tape, config)
    if tape.shapes:
        rising = replace(tape, shapes=tuple(sorted(tape.shapes, key=lambda shape: shape.activation_peak)))
        other = engine.simulate(case, rising, config).timeline  # the order that reuses the least
        unlimited = replace(unlimited, others=(*unlimited.others, other))
    local = case.cluster.gpus
    pinned = max((phase.pinned - phase.unmapped for phase in unlimited.host), default=0)
    outside = engine.outside_torch(case.workload, case.zero, case.cluster, pinned=pinned, layout=case.parallel)
    share, asleep = rollout_share(case)
    outside = replace(outside, rollout=0 if asleep else share)
    run = run_on_card(case, unlimited, outside, config)
    simulation, released = run.simulation, run.released
    timeline = simulation.timeline
    phase = phase_of_mark(timeline.peak_mark()).value
    alive = timeline.alive_by_buffer_and_note()
    low, high = run.interval
    between = with_rollout(simulation, outside, share) if asleep else 0
    low, high = max(low, between - outside.spread), max(high, between + outside.spread if between else 0)
    if case.layout.ep > 1:
        high += uneven(alive, tape, outside=case.layout.auto_ep)
    if case.layout.cp > 1:
        high += beyond_last_rank(case)
    live = simulation.held_after(Phase.STEP)
    gpu = formula.gpu.model_copy(
        update={
            "activations": tape.activation_peak,
            "bound": None,
            "live_after_step": formula.gpu.live_after_step if live is None else live,
            "peak_allocated": simulation.peak_allocated,
            "peak_reserved": simulation.peak_reserved,
            "total": max(simulation.peak_reserved + outside.total, between),
            "interval": (low, high),
            "at_limit": simulation is not unlimited,
            "cache_emptied": released.emptied,
            "segments_remapped": released.segments,
            "bytes_remapped": released.bytes,
            "pages_remapped": released.pages,
            "peak_phase": phase,
            "phases": simulation.phases(),
            "outside_torch": outside.total,
            "at_peak": peak_shares(alive, tape, sharded=case.zero.stage == 3),
        }
    )
    types = {module.type for module in tape.modules}
    rss = engine.host_rss(
        case.workload,
        case.zero,
        rotary=any("Rotary" in kind for kind in types),
        experts=any("Experts" in kind for kind in types),
    )
    cpu = host_memory(simulation, rss, ranks=local, workload=case.workload, techniques=technique_host(engine, case))
    unmodelled = left_out(engine, case, tape=tape)
    if simulation is not unlimited and at_its_limit(case, simulation, outside):
        unmodelled += unsure_at_limit(engine, case, phase)
    elif run.fragmented or run.waiting:
        unmodelled += unsure_of_fragments(config, waiting=run.waiting)
    fit = judged(case, unmodelled, gpu=(low, high), cpu=cpu.per_node, nvme=formula.nvme.per_node)
    plan = formula.model_copy(
        update={
            "depth": SIMULATED,
            "gpu": gpu,
            "cpu": cpu,
            **fit,
            "lines": (
                *_ledger_lines(formula, simulation),
                *_traced_lines(formula, timeline.alive_by_buffer(), phase),
                *_outside_lines(outside),
                *rollout_lines(case, share, asleep=asleep),
            ),
        }
    )
    return Simulated(plan, simulation, tape, outside)


def _ledger_lines(formula: MemoryPlan, simulation: Simulation) -> list[PlanLine]:
    """The ledger's lines; the checkpointed inputs that are offloaded have the bytes that the tape tells."""
    key = (Buffer.ACTIVATION_CHECKPOINT.value, Place.PINNED.value)
    told = [line for line in formula.lines if (line.buffer, line.place) == key]
    if sum(line.bytes for line in told) == sum(simulation.moved):
        return list(formula.lines)
    others = [line for line in formula.lines if line not in told]
    if not simulation.moved:
        return others
    how = f"traced: the inputs of {len(simulation.moved)} checkpointed blocks"
    phases = tuple(phase.value for phase in FROM_FIRST_STEP)
    return [*others, PlanLine(buffer=key[0], place=key[1], bytes=sum(simulation.moved), phases=phases, formula=how)]


def _traced_lines(formula: MemoryPlan, alive: Mapping[Buffer, int], phase: str) -> list[PlanLine]:
    """The buffers alive at the peak, in `phase`, that have no formula, such as activations and gathered parameters."""
    known = {line.buffer for line in formula.lines if line.place == "hbm"}
    return [
        PlanLine(
            buffer=buffer.value,
            place="hbm",
            bytes=count,
            phases=(phase,),
            formula="traced, at the peak" if buffer in _COMPUTATION else "simulated, at the peak",
        )
        for buffer, count in alive.items()
        if buffer.value not in known
    ]


def _outside_lines(outside: Outside) -> list[PlanLine]:
    always = ("init", "forward", "backward", "step")
    parts = (
        (Buffer.CONTEXT, outside.context, "measured: the CUDA context"),
        (Buffer.CONTEXT, outside.others, "measured: contexts of other ranks' processes"),
        (Buffer.CONTEXT, outside.kernels, "measured: kernels that CUDA loads as they are called"),
        (Buffer.CONTEXT, outside.page_tables, "pinned / 512: entries of 8 bytes for pages of 4 KiB"),
        (Buffer.NCCL, outside.nccl, "measured: NCCL's buffers and kernels"),
    )
    return [
        PlanLine(buffer=buffer.value, place="hbm", bytes=count, phases=always, formula=how)
        for buffer, count, how in parts
        if count
    ]


_EXPERTS = ".experts"
_ROUTED = frozenset({Buffer.ACTIVATION, Buffer.ACTIVATION_TEMP, Buffer.COMM_ACTIVATION})


def uneven(alive: Mapping[tuple[Buffer, Note], int], tape: ExpandedTape, *, outside: bool = False) -> int:
    """Return the bytes that a rank with twice the tokens has more: what its experts compute at the run's peak, or at their
    own peak in one micro batch where that is more. See Note [Uneven routing].

    Args:
        alive: bytes at the run's peak, by buffer and module.
        tape: the tape whose modules are meant.
        outside: the experts' parents exchange the tokens (AutoEP). Whatever these hold counts, of which some follows from the
            tokens that a rank sends.
    """
    experts = {index for index, module in enumerate(tape.modules) if module.name.endswith(_EXPERTS)}
    if outside:
        experts |= {tape.modules[index].parent for index in experts}
    at_peak = sum(count for (buffer, note), count in alive.items() if buffer in _ROUTED and note in experts)
    return max(at_peak, _peak(tape, experts))


def _peak(tape: ExpandedTape, experts: set[int]) -> int:
    """Return the most bytes that the experts' own tensors have at once in one micro batch."""
    sizes: dict[int, int] = {}
    now = peak = 0
    alloc, free, grad = int(Op.ALLOC), int(Op.FREE), int(Kind.GRAD)
    for op, arg, aux, kind, module in tape.events():
        if op == alloc and kind != grad and module in experts:
            sizes[arg] = aux
            now += aux
            peak = max(peak, now)
        elif op == free:
            now -= sizes.pop(arg, 0)
    return peak


def rollout_share(case: Case) -> tuple[int, bool]:
    """Return the bytes of a colocated vLLM on the case's card, and whether it sleeps while the model trains; 0 bytes where the
    card is not known.
    """
    asked, card = case.workload.technique(Colocated), case.cluster.usable_vram
    if asked is None or card is None:
        return 0, False
    return round(asked.share * card), asked.sleeps


def with_rollout(simulation: Simulation, outside: Outside, share: int) -> int:
    """Return the bytes of one GPU while vLLM generates, awake between two steps."""
    return (simulation.held_after(Phase.STEP) or 0) + outside.total + share


def rollout_lines(case: Case, share: int, *, asleep: bool) -> list[PlanLine]:
    """Return the line of vLLM's share; none without one."""
    asked = case.workload.technique(Colocated)
    if asked is None or not share:
        return []
    phases = (Phase.GENERATION.value,) if asleep else tuple(phase.value for phase in (*ALWAYS, Phase.GENERATION))
    how = f"{asked.share:.0%} of the card: vLLM's weights, its forward and its cache"
    return [PlanLine(buffer=Buffer.ROLLOUT.value, place="hbm", bytes=share, phases=phases, formula=how)]


_COMPUTED = frozenset({Buffer.ACTIVATION, Buffer.ACTIVATION_TEMP})


def peak_shares(alive: Mapping[tuple[Buffer, Note], int], tape: ExpandedTape, *, sharded: bool) -> tuple[PeakShare, ...]:
    """Bytes by family of the buffers that are alive, largest first; they add up to what is alive.

    Args:
        alive: bytes by buffer and note (:meth:`Timeline.alive_by_buffer_and_note`).
        tape: the model's tape that the run was laid over, whose modules the notes count.
        sharded: whether parameters are sharded (stage 3); whole parameters are then gathered ones.
    """
    found: dict[Family, int] = {}
    family = family_at_peak(tape, sharded=sharded)
    for (buffer, note), count in alive.items():
        name = family(buffer, note)
        found[name] = found.get(name, 0) + count
    return tuple(PeakShare(what=what.value, bytes=count) for what, count in sorted(found.items(), key=lambda one: -one[1]))


def family_at_peak(tape: ExpandedTape, *, sharded: bool) -> Callable[[Buffer, Note], Family]:
    """Return a function that tells the family of a buffer by its note; what the loss's own modules compute is the loss's."""
    loss = _loss_modules(tape)

    def family(buffer: Buffer, note: Note) -> Family:
        return Family.LOSS if buffer in _COMPUTED and note in loss else family_of(buffer, sharded=sharded)

    return family


def _loss_modules(tape: ExpandedTape) -> frozenset[int]:
    """Indices of the modules whose own tensors are the logits and the loss.

    They are the module that computes the loss (from the root down, the first that has several children: the root itself, or
    with adapters the model that they wrap), the modules around it, and its own linear layers without children.
    """
    children: dict[int, list[int]] = {}
    for index, module in enumerate(tape.modules):
        children.setdefault(module.parent, []).append(index)
    found, below = [], children.get(-1, [])
    while len(below) == 1:
        found += below
        below = children.get(below[0], [])
    heads = [index for index in below if tape.modules[index].type == "Linear" and index not in children]
    return frozenset([*found, *heads])


def beyond_last_rank(case: Case) -> int:
    """Return how many bytes more than planned the first ranks that share a sample may have. See Note [Ranks of a ring]."""
    layout, work, config = case.layout, case.workload, case.spec.config
    heads = int(config.get("num_attention_heads") or 0)
    if layout.cp == 1 or not heads:
        return 0
    channels = heads * int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    copy = (
        work.batch.micro_batch * ((work.batch.seq_len or 0) // layout.cp) * (channels // layout.tp) * work.numerics.dtype.bytes
    )
    if work.recomputation is not None:
        return copy
    blocks = case.spec.parameters.block_count
    if layout.pp == 1:
        return copy * blocks
    return copy * -(-blocks // layout.pp) * min(work.batch.grad_accum, layout.pp * layout.vpp)
