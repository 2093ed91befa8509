"""A tape cut into pipeline stages, and FSDP2's run on each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engines.test_contract import ledger_and_schedule_differ
from tests.workloads import with_flat
from zeroplan.core.buffers import Buffer
from zeroplan.core.cluster import Cluster
from zeroplan.core.gpus import DEFAULT_GPU, Gpu
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.pipeline import stages_of
from zeroplan.core.pipeline_order import PipelineSchedule
from zeroplan.core.workload import Compilation, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.pipeline_cut import cut
from zeroplan.engines.registry import find_engine
from zeroplan.models.load import load_model
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
from zeroplan.tape.expanded import ExpandedTape, Kind, Op
from zeroplan.tapes import find_tape

MODEL = "meta-llama/Llama-3.1-8B"
WHOLE = (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.GPIPE)  # test_zero_bubble.py has the one that halves backwards
WORK = Workload.of(micro_batch=1, seq_len=512, grad_accum=8)


@pytest.fixture(scope="module")
def tape() -> ExpandedTape:
    found = find_tape(load_model(MODEL), WORK)
    assert found is not None
    return found.expand(WORK.batch.micro_batch, WORK.batch.seq_len or 1)


def _allocated(tape: ExpandedTape) -> dict[int, int]:
    alloc = int(Op.ALLOC)
    made = zip(tape.op, tape.arg, tape.aux, tape.kind, strict=True)
    return {arg: aux for op, arg, aux, kind in made if op == alloc and kind != Kind.INPUT}


def test_stages_allocate_what_the_model_does(tape: ExpandedTape) -> None:
    """Every storage is some stage's; those of several are what the model makes before its first block, for every stage. The
    gradient of the hidden states is a new tensor on every stage but the last.
    """
    whole = _allocated(tape)
    parts = [_allocated(cut(tape, stage).tape) for stage in stages_of(32, 4)]
    new = [set(part) - set(whole) for part in parts]
    assert [len(more) for more in new] == [1, 1, 1, 0]
    assert set().union(*parts) - set().union(*new) == set(whole)
    parts = [{storage: size for storage, size in part.items() if storage in whole} for part in parts]
    shared = set(parts[0]) & set(parts[1])
    assert shared
    assert all(set(a) & set(b) == shared for i, a in enumerate(parts) for b in parts[i + 1 :])
    assert sum(whole[storage] for storage in shared) < 0.01 * sum(whole.values())


@pytest.mark.parametrize("number", range(4))
def test_a_stage_frees_what_it_allocates(tape: ExpandedTape, number: int) -> None:
    part = cut(tape, stages_of(32, 4)[number])
    alive: set[int] = set()
    graded = {aux for op, aux in zip(part.tape.op, part.tape.aux, strict=True) if op == Op.GRAD}
    for op, arg in zip(part.tape.op, part.tape.arg, strict=True):
        if op == Op.ALLOC:
            alive.add(arg)
        elif op == Op.FREE:
            alive.remove(arg)
    assert alive == graded | ({part.sent} if number else set())
    assert (part.sent >= 0) == (number > 0)
    assert part.hidden == 2 * 512 * 4096
    assert len(graded) == len(part.tape.params)


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("schedule", WHOLE)
def test_what_the_ledger_keeps_the_schedule_leaves_alive(tape: ExpandedTape, schedule: PipelineSchedule, number: int) -> None:
    layout = ParallelLayout(gpus=8, pp=4)
    case = Case(load_model(MODEL), WORK, Cluster(gpus=8), ZeroConfig.of(2), parallel=layout, pipeline=schedule, pp_rank=number)
    assert not ledger_and_schedule_differ(case, find_engine("fsdp2"), tape)


@pytest.mark.parametrize(
    ("stage", "number", "chunks", "schedule"),
    [(0, 0, 1, "1f1b"), (1, 3, 1, "1f1b"), (2, 1, 1, "1f1b"), (3, 0, 1, "1f1b"), (1, 3, 2, "1f1b"), (2, 0, 2, "gpipe")],
)
def test_what_the_runtime_keeps_of_a_stage_its_schedule_leaves_alive(
    tape: ExpandedTape, stage: int, number: int, chunks: int, schedule: str
) -> None:
    layout = ParallelLayout(gpus=8, pp=4, vpp=chunks)
    case = Case(
        load_model(MODEL), WORK, Cluster(gpus=8), ZeroConfig.of(stage), parallel=layout, pp_rank=number, pipeline=schedule
    )
    engine = find_engine("zeroplan")
    assert engine.simulates(case)
    assert not ledger_and_schedule_differ(case, engine, tape)
    assert not engine.simulates(replace(case, workload=with_flat(WORK, compile=Compilation.BLOCKS)))


@pytest.mark.parametrize("more", [{}, {"schedule": "zbv"}, {"schedule": "dualpipev"}], ids=str)
def test_the_runtimes_chunks_are_planned_and_promised_to_nobody(more: dict[str, str]) -> None:
    """No GPU has measured them."""
    asked = Ask(
        model=MODEL, engine="zeroplan", stage=2, gpus=4, pp=2, vpp=2, grad_accum=4, depth="formula", vram="400G", **more
    )
    (plan,) = estimate_report(asked).plans
    assert plan.fits is None
    assert "--pp" in {one.key for one in plan.unmodelled}
    assert {stage.stage for stage in plan.stages} == {0, 1}


def test_gpipe_holds_every_micro_batch_and_1f1b_those_in_flight(tape: ExpandedTape) -> None:
    layout, engine = ParallelLayout(gpus=8, pp=4), find_engine("fsdp2")
    case = Case(load_model(MODEL), WORK, Cluster(gpus=8), ZeroConfig.of(2), parallel=layout)
    peaks = {
        (schedule, number): engine.simulate(replace(case, pipeline=schedule, pp_rank=number), tape).peak_allocated
        for schedule in WHOLE
        for number in (0, 2)
    }
    assert peaks[PipelineSchedule.ONE_F_ONE_B, 2] < peaks[PipelineSchedule.ONE_F_ONE_B, 0]
    for number in (0, 2):
        assert peaks[PipelineSchedule.GPIPE, number] > peaks[PipelineSchedule.ONE_F_ONE_B, number]


@pytest.mark.parametrize("schedule", WHOLE)
def test_what_the_ledger_keeps_of_two_chunks_the_schedule_leaves_alive(tape: ExpandedTape, schedule: PipelineSchedule) -> None:
    layout = ParallelLayout(gpus=8, pp=4, vpp=2)
    case = Case(load_model(MODEL), WORK, Cluster(gpus=8), ZeroConfig.of(2), parallel=layout, pipeline=schedule, pp_rank=1)
    assert not ledger_and_schedule_differ(case, find_engine("fsdp2"), tape)


@pytest.mark.parametrize("name", ["fsdp2", "zeroplan"])
def test_sends_over_gloo_hold_what_they_send(tape: ExpandedTape, name: str) -> None:
    """Hidden states and their gradients, until the step's end; `verify` measures so on a CPU."""
    engine = find_engine(name)
    card = {field: getattr(DEFAULT_GPU, field) for field in Gpu.__dataclass_fields__}
    peaks = []
    for gpu in (Gpu(**card), _Holds(**card)):
        case = Case(load_model(MODEL), WORK, Cluster(gpus=8, gpu=gpu), ZeroConfig.of(2), ParallelLayout(gpus=8, pp=4, vpp=2))
        peaks.append(engine.simulate(case, tape).peak_allocated)
    assert peaks[1] - peaks[0] >= 4 * 2 * 512 * 4096


class _Holds(Gpu):
    __slots__ = ()

    @property
    def holds_sent(self) -> bool:
        return True


def test_interleaving_holds_more_than_1f1b_and_gathers_ahead(tape: ExpandedTape) -> None:
    """Narayanan et al. 2021, section 2.2: 1 + (p − 1) / (p · v) times the activations of 1F1B's first stage."""
    spec, engine = load_model(MODEL), find_engine("fsdp2")
    cases = [
        Case(spec, WORK, Cluster(gpus=8), ZeroConfig.of(2), parallel=ParallelLayout(gpus=8, pp=4, vpp=chunks))
        for chunks in (1, 2)
    ]
    whole, looped = (engine.simulate(case, tape) for case in cases)
    held = [run.timeline.alive_by_buffer().get(Buffer.ACTIVATION, 0) for run in (whole, looped)]
    assert held[1] / held[0] == pytest.approx(1 + 3 / (4 * 2), rel=0.1)
    assert looped.peak_allocated > whole.peak_allocated


def test_the_latest_output_stays_until_the_next_forward_has_returned(tape: ExpandedTape) -> None:
    """A variable of torch's Schedule1F1B names it; with several chunks a function returns, and with it the name goes."""
    stage = stages_of(32, 4)[3]
    held, freed = (cut(tape, stage, holds_output=yes) for yes in (True, False))
    (logits,) = held.held
    frees = [(op, arg) for op, arg in zip(freed.tape.op, freed.tape.arg, strict=True) if op == Op.FREE]
    assert frees.count((Op.FREE, logits)) == 1
    assert (Op.FREE, logits) not in set(zip(held.tape.op, held.tape.arg, strict=True))
    assert not freed.held
    assert 0 < held.returned < held.split


@pytest.mark.parametrize("number", [1, 3])
def test_gradients_of_a_group_are_cast_in_the_order_of_its_parameters(tape: ExpandedTape, number: int) -> None:
    """FSDPParamGroup.post_backward walks its parameters, in whatever order their gradients came."""
    layout = ParallelLayout(gpus=8, pp=4)
    case = Case(load_model(MODEL), WORK, Cluster(gpus=8), ZeroConfig.of(2), parallel=layout, pp_rank=number)
    timeline = find_engine("fsdp2").simulate(case, tape).timeline
    numel = cut(tape, stages_of(32, 4)[number]).tape.parameters.numel
    codes, values, names = timeline.recorded
    alloc = int(AllocatorOp.ALLOC)
    sizes = [value for code, value in zip(codes, values, strict=True) if code & ((1 << OP_BITS) - 1) == alloc]
    labels = names.labels_of(range(len(sizes)))
    casts = [
        note
        for (buffer, note), nbytes in zip(labels, sizes, strict=True)
        if buffer is Buffer.GRAD_FULL and isinstance(note, int) and note < len(numel) and nbytes == 4 * numel[note]
    ]
    block = casts[:9]
    assert len(block) == 9
    assert block == sorted(block)
