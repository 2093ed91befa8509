"""A DeepSpeed case simulated: the ranks that can be the worst, with and without skipped steps, and the host beside them.

Note [Shapes of recordings]
    A schedule reads the rank and the order of the tape's events, never the bytes of its storages. So a recording serves every
    configuration that differs in its micro batch alone, as long as the tape has the same events: the sizes are put in,
    in a small part of the time that playing the tape takes. A search asks for the same few sharded layouts at many micro
    batches, and under two settings of the allocator.
    How far the device falls behind does depend on the sizes, and is put in as well
    (simulate/deferred_frees.py).

Note [Device lag]
    Freed parameters come back once the compute stream has passed their last use (coordinator.py, Note [Lag]). Two clocks say
    when that is: the host's, which each hook and each kernel issued takes on, and the device's, which starts a kernel no
    earlier than it is issued and takes what the module's products and its bytes take. Where a host's hooks take longer than
    the kernels, the device waits for them, except behind the head and the loss, whose logits keep it busy for tens of hooks.
    Where the kernels take longer it falls behind all through the forward: DeepSpeed's own bounds do not hold it. Its fetch
    events (__max_ongoing_fetch_events) are recorded on the gathers' stream, which waits for no computation.
    Measured with adapters on two H200s (benchmarks/results/adapters_stage3.json): the queue was full in the backward, while in
    the forward the host waited for gathers that took as long as the products. So memory grows step by step, from the close end
    in the first two steps to near the far one in the fourth.
    The clocks run at the rates of step times (core/rates.py), whose host is a fast one. One that is slowed down lets the
    device come closer, down to the few fetches that are always there: a run lies between the two.
    Under offload the host waits for nothing that computes, either, where its buffers are pinned: two of three runs on two H200
    reserved 4 and 6 % more than with a host that waits at every fetch, and 3 and 11 % less than with a fast one that never does
    (benchmarks/results/host_lead_measured.jsonl). The host's share of a step is larger there, so the plan is the close end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeroplan.core.buffers import Phase
from zeroplan.core.rates import Rates, rates_of
from zeroplan.core.workload import ChunkedHead, DType, Precision
from zeroplan.engines.case import Case
from zeroplan.engines.compute_traffic import PASSES
from zeroplan.engines.deepspeed.checkpoint import checkpoint_phases
from zeroplan.engines.deepspeed.coordinator import least_behind
from zeroplan.engines.deepspeed.job import rank_of
from zeroplan.engines.deepspeed.leaf_modules import inside_of, leaf_modules
from zeroplan.engines.deepspeed.outside_reads import passed_through
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.engines.deepspeed.schedule import distinct_ranks, record_deepspeed
from zeroplan.engines.deepspeed.schedule_host import record_host
from zeroplan.engines.simulation import HostRun, Simulation
from zeroplan.ledger.derive import pow2
from zeroplan.simulate.allocator.config import AllocatorConfig
from zeroplan.simulate.recorder import Recorder, simulate
from zeroplan.simulate.timeline import Timeline
from zeroplan.tape.chunked_head import chunked_head_of
from zeroplan.tape.expanded import ExpandedTape, Mark, Op

#: Kernels, copies and fills that a stream's queue takes before a launch waits for the device; events take no place in it.
QUEUE = 1024

_MICRO, _GIGA, _TERA = 1e-6, 1e9, 1e12


@dataclass(frozen=True, slots=True)
class DeviceLag:
    """After how many fetches each block that a micro batch frees can be used again.

    Attributes:
        back: for each fetch, the number of the fetch at which blocks freed right after it are in the pool again.
        device_bound: whether the device needs more time for a micro batch than the host.
    """

    back: tuple[int, ...]
    device_bound: bool

    @property
    def furthest(self) -> int:
        """The most fetches by which the device is behind the host."""
        return max((back - at for at, back in enumerate(self.back)), default=0)


def device_lag_of(
    tape: ExpandedTape, tokens: int, rates: Rates, *, fp32: bool, unhooked: Sequence[bool], uploads: Sequence[float] = ()
) -> DeviceLag:
    """Derive how far the device falls behind the host in one forward and backward of a tape.

    Args:
        tape: the expanded tape; each allocation is one kernel's output.
        tokens: rows of the products: micro batch times sequence.
        rates: of the machine.
        fp32: whether the products are.
        unhooked: the modules inside leaf modules, which fetch nothing of their own.
        uploads: seconds for which a fetch of each module waits for its parameters to come from the host; empty for none.
    """
    fetch, released = rates.gather_hook_us * _MICRO, rates.release_hook_us * _MICRO
    launch, engine = rates.launch_us * _MICRO, rates.autograd_us * _MICRO
    a_byte = PASSES / (rates.hbm_gbs * _GIGA)
    an_element = 2 * tokens / ((rates.fp32_tflops if fp32 else rates.matmul_tflops) * _TERA)
    forwards, backwards = ([one * an_element for one in found] for found in _multiplied(tape))
    alloc, enter, leave, arrive, passed, mark = Op.ALLOC, Op.ENTER, Op.EXIT, Op.BWD_ENTER, Op.BWD_EXIT, Op.MARK

    host = device = busy = 0.0
    backward = False
    depth = 0  # of modules that run, recomputed ones included
    issued: deque[float] = deque()  # when the device is done with each of the latest kernels
    begun: list[float] = []  # the host's clock at each fetch
    done: list[float] = []  # the device's when it has done all that was issued before a fetch
    for op, arg, aux in zip(tape.op, tape.arg, tape.aux, strict=True):
        work = 0.0
        if op == alloc:
            host += engine if backward and not depth else launch
            work = a_byte * aux
        elif op in (enter, arrive):
            if not unhooked[arg]:
                host += fetch + (uploads[arg] if uploads else 0.0)
                begun.append(host)
                done.append(device)
            if op == enter:
                depth += 1
                work = forwards[arg]
            else:
                depth = 0  # recomputation may stop inside its modules
                work = backwards[arg]
        elif op == leave:
            depth = max(0, depth - 1)
        elif op == passed:
            if not unhooked[arg]:
                host += released
        elif op == mark and arg == Mark.BACKWARD_BEGIN:
            backward = True
        if work:
            device = (device if device > host else host) + work
            busy += work
            issued.append(device)
            if len(issued) > QUEUE:
                host = max(host, issued.popleft())
    return DeviceLag(tuple(bisect_left(begun, time) for time in (*done[1:], device)), busy > host)


def _multiplied(tape: ExpandedTape) -> tuple[list[int], list[int]]:
    """Count, for each module, the elements of the matrices that its forward and its backward multiply with; trained ones count
    twice.

    An embedding looks rows up.
    """
    elements = [p.shape[0] * p.shape[1] if len(p.shape) == 2 else 0 for p in tape.params]
    owned = [() if module.type.endswith("Embedding") else module.params for module in tape.modules]
    forward = [sum(elements[p] for p in params) for params in owned]
    return forward, [sum(elements[p] * (1 + tape.params[p].trainable) for p in params) for params in owned]


#: With fp16, a dynamic loss scale mostly starts too high and the first steps are discarded. How many depends on the data; one
#: is enough to make the order of allocations that of a run whose states appear late. A scale that is given stays, and is one
#: with which no gradient overflows: a run with another would never step.
FP16_SKIPPED_STEPS = 1

#: Events of the tape that one plan's ranks may play together, a run each: eight ranks of a model of thirty blocks. In a
#: deeper model each rank's odd blocks are a smaller part of the whole, and fewer ranks stand for all.
EVENTS_OVER_RANKS = 80_000
FEWEST_RANKS, MOST_RANKS = 2, 8


def worth_simulating(rank: DeepSpeedRank, tape: ExpandedTape) -> tuple[int, ...]:
    """Return the ranks to simulate: fewer of a deeper model, whose ranks differ less."""
    return distinct_ranks(rank, max(FEWEST_RANKS, min(MOST_RANKS, EVENTS_OVER_RANKS // max(1, len(tape)))))


class Simulator:
    """Simulates one case after another, and keeps recordings for other micro batches and settings of the allocator."""

    def __init__(self) -> None:
        self._recordings = Recordings()
        self._lags: OrderedDict[tuple[object, ...], DeviceLag] = OrderedDict()

    def simulate(self, case: Case, tape: ExpandedTape, config: AllocatorConfig | None = None) -> Simulation:
        """Simulate the stage's schedule on each rank that may need the most memory.

        With fp16 data decide how many steps the loss scale discards, and with them the order of allocations: the worst rank
        is simulated with and without.
        """
        usual = _skipped(case)
        first = rank_of(case, tape.parameters)

        def run(rank: int, skipped: int) -> Timeline:
            if first.pipeline_stage is not None:
                from zeroplan.engines.deepspeed.pipeline import record_stage

                recorder = record_stage(first.at(rank), tape, skipped_steps=skipped)
            else:
                recorder = self._recordings.of(case, tape, first.at(rank), skipped)
            return simulate(recorder, config, device_memory=case.cluster.vram)

        runs = {(rank, usual): run(rank, usual) for rank in worth_simulating(first, tape)}
        ranks = {rank: timeline for (rank, _), timeline in runs.items()}
        rank = max(ranks, key=lambda r: (ranks[r].peak_allocated, ranks[r].peak_reserved))
        least = None
        if usual:
            fullest = max(ranks, key=lambda r: ranks[r].peak_reserved)
            runs[fullest, 0] = run(fullest, 0)
            least = min(ranks[fullest].peak_reserved, runs[fullest, 0].peak_reserved)
        timeline = runs.pop((rank, usual))
        found = Simulation(timeline, rank, others=tuple(runs.values()), least_reserved=least)
        if first.device_lags:
            found = self._with_its_lag(found, case, tape, first.at(rank), config)
        if first.stage == 3 and not first.fetches_wrapper and passed_through(tape):
            fetched = record_deepspeed(replace(first.at(rank), fetches_wrapper=True), tape, skipped_steps=usual)
            other = simulate(fetched, config, device_memory=case.cluster.vram)
            found = replace(found, other_lags=(*found.other_lags, other))
        return _with_host(first, found)

    def _with_its_lag(
        self, found: Simulation, case: Case, tape: ExpandedTape, rank: DeepSpeedRank, config: AllocatorConfig | None
    ) -> Simulation:
        """Add the run where the device falls behind as far as a fast host lets it, which counts where the device is slower.

        See Note [Device lag].
        """
        lag = self._lag(case, tape, rank)
        if lag.furthest <= least_behind(rank):
            return found
        recorder = self._recordings.of(case, tape, rank, _skipped(case)).with_lag(lag.back)
        behind = simulate(recorder, config, device_memory=case.cluster.vram)
        if lag.device_bound and least_behind(rank):
            return replace(found, timeline=behind, other_lags=(found.timeline,))
        return replace(found, other_lags=(behind,))

    def _lag(self, case: Case, tape: ExpandedTape, rank: DeepSpeedRank) -> DeviceLag:
        workload, gpu = case.workload, case.cluster.gpu
        unhooked = inside_of(tape.modules, leaf_modules(tape.modules, rank.numel, case.zero))
        if workload.has(ChunkedHead) and (head := chunked_head_of(tape.modules)) >= 0:
            unhooked[head] = True  # TRL never runs the module
        fp32 = workload.numerics.dtype is DType.FP32 and workload.numerics.precision is not Precision.AUTOCAST
        rates = rates_of(gpu)
        uploads = _uploads(tape, rank, rates)
        key = (tape, gpu, fp32, uploads, tuple(unhooked))
        known = self._lags.get(key)
        if known is None:
            tokens = workload.batch.micro_batch * (workload.batch.seq_len or 1) // case.layout.ulysses
            known = self._lags[key] = device_lag_of(tape, tokens, rates, fp32=fp32, unhooked=unhooked, uploads=uploads)
            if len(self._lags) > MOST_TAPES:
                self._lags.popitem(last=False)
        return known


def _uploads(tape: ExpandedTape, rank: DeepSpeedRank, rates: Rates) -> tuple[float, ...]:
    """Seconds for which a fetch of each module waits for this rank's part of its parameters; empty where all are on the GPU."""
    if not rank.zero.offloads_param:
        return ()
    rate = (rates.pinned_gbs if rank.pin_param else rates.pageable_gbs) * _GIGA
    one = [rates.upload_hook_us * _MICRO + rank.param_bytes * -(-count // rank.ranks) / rate for count in rank.numel]
    return tuple(sum(one[p] for p in module.params) for module in tape.modules)


def _with_host(rank: DeepSpeedRank, found: Simulation) -> Simulation:
    """The runs on the GPU with the host's phases, and with what saving and resuming would add to both."""
    run = host_of(rank, after_init=found.held_after(Phase.INIT) or 0, after_step=found.held_after(Phase.STEP) or 0)
    moved = (pow2(rank.checkpoint),) * rank.offloaded_inputs
    return replace(found, host=run.host, checkpoint=run.checkpoint, moved=moved)


def host_of(rank: DeepSpeedRank, *, after_init: int = 0, after_step: int = 0) -> HostRun:
    """Return the host's phases, given the bytes on the GPU after initialisation and between steps, where they are known."""
    marks = record_host(rank).marks
    step = marks[-1]
    repeated = (Phase.FORWARD, Phase.BACKWARD)
    host = tuple(mark.repeated(step) if mark.phase in repeated else mark.host_phase() for mark in marks)
    on_host = {mark.phase: mark.pageable + mark.pinned for mark in marks}
    checkpoint = checkpoint_phases(
        rank,
        after_init=after_init,
        after_step=after_step,
        host_init=on_host[Phase.INIT],
        host_step=on_host[Phase.STEP],
        host_load=on_host[Phase.LOAD],
    )
    return HostRun(host, checkpoint)


def _skipped(case: Case) -> int:
    dynamic = case.workload.numerics.dtype is DType.FP16 and not case.zero.step.loss_scale
    return FP16_SKIPPED_STEPS if dynamic else 0


#: Events that are kept, an event block counted as one: some 150 MB. And shapes of tapes, the first tape of each kept.
MOST_EVENTS, MOST_TAPES = 5_000_000, 32


class Recordings:
    """Recordings by layout, rank, skipped steps and the tape's shape, the latest of them kept."""

    def __init__(self) -> None:
        self._played: OrderedDict[int, ExpandedTape] = OrderedDict()  # by shape, the tape that is played
        self._kept: OrderedDict[tuple[object, ...], tuple[ExpandedTape, Recorder]] = OrderedDict()
        self._events = 0

    def of(self, case: Case, tape: ExpandedTape, rank: DeepSpeedRank, skipped_steps: int) -> Recorder:
        """Return the rank's recording: an earlier one of the same shape with this tape's sizes, else a new one."""
        workload = case.workload.but(micro_batch=1)
        layout = (case.zero, case.zero_init, workload, case.cluster, case.parallel, rank.rank, skipped_steps, tape.shape)
        found = self._kept.get(layout)
        if found is None:
            played = self._tape_to_play(tape)
            recorder = record_deepspeed(rank, played, skipped_steps=skipped_steps)
            self._kept[layout] = (played, recorder)
            self._events += recorder.stored
            while self._events > MOST_EVENTS and len(self._kept) > 1:
                self._events -= self._kept.popitem(last=False)[1][1].stored
        else:
            self._kept.move_to_end(layout)
            played, recorder = found
        return recorder if played is tape else recorder.resized(tape.storage_bytes)

    def _tape_to_play(self, tape: ExpandedTape) -> ExpandedTape:
        """The first tape of this one's shape, whose script is at hand."""
        found = self._played.get(tape.shape)
        if found is None:
            found = self._played[tape.shape] = tape
            if len(self._played) > MOST_TAPES:
                self._played.popitem(last=False)
        return found
