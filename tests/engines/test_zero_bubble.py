"""Zero-bubble pipelines: what each rank allocates, against torch's own stages and schedule on the meta device."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest

from tests.engines.test_contract import ledger_and_schedule_differ
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.pipeline import Stage, chunks_of
from zeroplan.core.pipeline_order import PipelineOrder, PipelineSchedule
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.pipeline import ModelChunk, PipelineEngineSchedule, PipelineRun, play_pipeline
from zeroplan.engines.pipeline_cut import cut, passing_on
from zeroplan.engines.registry import find_engine
from zeroplan.models.load import load_model
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask
from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.expanded import ExpandedTape, Op
from zeroplan.tape.options import TraceOptions
from zeroplan.tape.sizes import FUNCTIONS, KernelDevice

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import distributed as dist  # noqa: E402  torch may be missing
from torch.distributed.pipelining import PipelineStage, schedules  # noqa: E402
from torch.distributed.pipelining import stage as stages_of_torch  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from zeroplan.engines.torch_stages import StageModel, StepShape, loss_of, metadata_of  # noqa: E402
from zeroplan.trace.api import trace_at  # noqa: E402
from zeroplan.trace.build import build_model, full_config  # noqa: E402
from zeroplan.trace.fit import TracePoint  # noqa: E402
from zeroplan.trace.functions import CudaFunctions  # noqa: E402
from zeroplan.trace.recorder import StorageRecorder  # noqa: E402
from zeroplan.trace.run import copied_gradients  # noqa: E402

pytestmark = pytest.mark.torch

BATCH, SEQ, BLOCKS, STEPS = 2, 256, 7, 2
CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
CLASS = "AutoModelForCausalLM"
ZERO_BUBBLE, ZBV, DUALPIPE_V = PipelineSchedule.ZERO_BUBBLE, PipelineSchedule.ZBV, PipelineSchedule.DUALPIPE_V
CLASSES = {
    ZERO_BUBBLE: "ScheduleInterleavedZeroBubble",
    ZBV: "ScheduleZBVZeroBubble",
    DUALPIPE_V: "ScheduleDualPipeV",
}


@pytest.fixture(scope="module")
def tapes() -> tuple[ExpandedTape, ExpandedTape]:
    """The model's tape, and the one with its backward in two halves."""
    point = TracePoint(BATCH, SEQ)
    whole, halves = (trace_at(CONFIG, CLASS, TraceOptions(halves=halves), point) for halves in (False, True))
    return whole.expand(BATCH, SEQ), halves.expand(BATCH, SEQ)


class _PlainTorch(PipelineEngineSchedule):
    """No sharding: a parameter's first gradient stays, later ones are added to it."""

    follows_modules = True

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.kept: dict[int, int] = {}
        self.hooked = False

    def backward_begin(self, boundary: bool) -> None:
        self.hooked = True

    def backward_end(self, boundary: bool) -> None:
        self.hooked = False

    def backward_exit(self, module: int) -> None:
        assert self.hooked, "no hook runs while gradients of weights are made apart"

    def grad(self, param: int, handle: int) -> None:
        if param in self.kept:
            self.recorder.free(handle)
        else:
            self.kept[param] = handle

    def zero_grad(self) -> None:
        for handle in self.kept.values():
            self.recorder.free(handle)
        self.kept.clear()


def _played(order: PipelineOrder, tapes: tuple[ExpandedTape, ExpandedTape]) -> Iterator[int]:
    """The bytes alive after each event of the plan's run."""
    recorder = Recorder()
    chunks = [
        _chunk(stage, stages, order.schedule, tapes, recorder)
        for stages in (chunks_of(BLOCKS, order.ranks, order.chunks, order.rank, order.schedule),)
        for stage in stages
    ]
    play_pipeline(PipelineRun(order, STEPS), chunks, recorder, lambda: None)
    sizes: list[int] = []
    alive = 0
    for code, value in zip(*recorder.columns(), strict=True):
        op = AllocatorOp(code & ((1 << OP_BITS) - 1))
        if op is AllocatorOp.ALLOC:
            sizes.append(value)
            alive += value
        elif op is AllocatorOp.FREE:
            alive -= sizes[value]
        yield alive


def _chunk(
    stage: Stage,
    stages: Sequence[Stage],
    schedule: PipelineSchedule,
    tapes: tuple[ExpandedTape, ExpandedTape],
    recorder: Recorder,
) -> ModelChunk:
    indices = {one.index for one in stages}
    given = {"output": stage.index + 1 in indices, "gradient": stage.index - 1 in indices}
    whole, halved = (passing_on(cut(tape, stage), **given) for tape in tapes)
    part = whole if stage.is_first else halved
    return ModelChunk(stage, part, _PlainTorch(recorder), whole if schedule.mixed and not stage.is_first else None)


def _run_by_torch(order: PipelineOrder) -> Iterator[int]:
    """The bytes alive after each event of torch's own schedule, whose other ranks answer nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=order.rank, world_size=order.ranks)
    config = full_config(CONFIG)
    models = [
        StageModel(build_model(config, CLASS, TraceOptions(), 0), stage)
        for stage in chunks_of(BLOCKS, order.ranks, order.chunks, order.rank, order.schedule)
    ]
    shape = StepShape(BATCH, SEQ)
    stages = [
        PipelineStage(model, model.index, model.stages, torch.device("meta"), **metadata_of(model, shape)) for model in models
    ]

    def agree(_: Any, every: Any, *__: Any) -> None:
        for stage in every:
            stage._inference_mode = schedules.InferenceMode.STATIC

    def send_nothing(*_: Any, **__: Any) -> list[Any]:  # a Mock would remember, and so hold, what is sent
        return []

    schedule = getattr(schedules, CLASSES[order.schedule])(
        stages, n_microbatches=order.micro_batches, loss_fn=partial(loss_of, models[-1]), scale_grads=False
    )
    recorder = StorageRecorder([tensor for model in models for tensor in (*model.parameters(), *model.buffers())])
    gc.collect()
    gc.disable()
    try:
        with (
            mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", agree),
            mock.patch.object(schedules, "_batch_p2p", send_nothing),
            recorder,
            CudaFunctions(),
            mock.patch.object(
                stages_of_torch, "stage_backward_weight", copied_gradients()(stages_of_torch.stage_backward_weight)
            ),
        ):
            for _ in range(STEPS):
                recorder.phase = 2
                ids = torch.empty(BATCH * order.micro_batches, SEQ, dtype=torch.int64, device="meta")
                given = (ids,) if models[0].first else ()
                schedule.step(*given, target=ids if models[-1].last else None, return_outputs=False)
                del given
                for model in models:
                    model.zero_grad()
                del ids
    finally:
        gc.enable()
        dist.destroy_process_group()
    alive = 0
    for op, arg in zip(recorder.out.op, recorder.out.arg, strict=True):
        size = recorder.out.allocs[arg].size if op in (Op.ALLOC, Op.FREE) else 0
        if not isinstance(size, int):
            function, *values = size
            size = FUNCTIONS[function](KernelDevice(), *values)
        alive += size if op == Op.ALLOC else -size
        yield alive


@pytest.mark.parametrize(
    ("schedule", "rank", "ranks", "chunks", "count"),
    [
        (ZERO_BUBBLE, 1, 3, 1, 4),
        pytest.param(ZERO_BUBBLE, 2, 3, 1, 4, marks=pytest.mark.long),
        pytest.param(ZERO_BUBBLE, 1, 2, 2, 2, marks=pytest.mark.long),
        (ZBV, 0, 2, 2, 4),
        pytest.param(ZBV, 1, 2, 2, 4, marks=pytest.mark.long),
        (DUALPIPE_V, 0, 2, 2, 5),
        (DUALPIPE_V, 1, 2, 2, 5),
    ],
)
def test_a_rank_allocates_what_torchs_own_does(
    tapes: tuple[ExpandedTape, ExpandedTape], schedule: PipelineSchedule, rank: int, ranks: int, chunks: int, count: int
) -> None:
    """The peak agrees but for masks and positions, of which every chunk keeps some."""
    order = PipelineOrder(schedule, rank, ranks, chunks, count)
    ours, theirs = list(_played(order, tapes)), list(_run_by_torch(order))
    assert max(ours) == pytest.approx(max(theirs), rel=2e-3)
    assert ours[-1] == pytest.approx(theirs[-1], rel=2e-3)


@pytest.mark.parametrize("name", ["fsdp2", "zeroplan"])
def test_what_the_ledger_keeps_the_schedule_leaves_alive(tapes: tuple[ExpandedTape, ExpandedTape], name: str) -> None:
    work, layout = Workload.of(micro_batch=BATCH, seq_len=SEQ, grad_accum=6), ParallelLayout(gpus=6, pp=3)
    tape = replace(tapes[0], halves=tapes[1])
    for number in range(3):
        case = Case(load_model(CONFIG), work, Cluster(gpus=6), ZeroConfig.of(2), parallel=layout, pp_rank=number)
        case = replace(case, pipeline=PipelineSchedule.ZERO_BUBBLE)
        assert not ledger_and_schedule_differ(case, find_engine(name), tape)
        with pytest.raises(ValueError, match="needs the tape of one"):
            find_engine(name).simulate(case, tapes[0])


@pytest.mark.parametrize("name", ["fsdp2", "zeroplan"])
@pytest.mark.parametrize("schedule", [ZBV, DUALPIPE_V])
def test_what_the_ledger_keeps_of_a_folded_pipeline_the_schedule_leaves_alive(
    tapes: tuple[ExpandedTape, ExpandedTape], schedule: PipelineSchedule, name: str
) -> None:
    work, layout = Workload.of(micro_batch=BATCH, seq_len=SEQ, grad_accum=5), ParallelLayout(gpus=4, pp=2, vpp=2)
    for number in range(2):
        case = Case(load_model(CONFIG), work, Cluster(gpus=4), ZeroConfig.of(2), parallel=layout, pp_rank=number)
        case = replace(case, pipeline=schedule)
        assert not ledger_and_schedule_differ(case, find_engine(name), replace(tapes[0], halves=tapes[1]))


def test_halves_make_what_the_whole_backward_makes(tapes: tuple[ExpandedTape, ExpandedTape]) -> None:
    """Every parameter but the embedding, which is the first stage's, gets its gradient in the second half."""
    whole, halves = tapes
    grads = [{arg for op, arg in zip(tape.op, tape.arg, strict=True) if op == Op.GRAD} for tape in tapes]
    assert grads[0] - grads[1] == {[param.name for param in whole.params].index("model.embed_tokens.weight")}
    part = cut(halves, chunks_of(BLOCKS, 3, 1, 1)[0])
    assert part.weights > part.split > 0
    assert all(at >= part.weights for at, op in enumerate(part.tape.op) if op == Op.GRAD)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gradient_checkpointing": True}, "recomputes a block once for each of its weights"),
        ({"tp": 2}, "a backward in two halves is not modelled with --tp"),
        ({"engine": "zeroplan", "stage": 3}, "parameters of stage 3 are not there from a forward to the second half"),
        ({"engine": "deepspeed", "stage": 1}, "DeepSpeed's PipelineModule runs 1f1b"),
        ({"grad_accum": 5}, "the 2 rounds of the zero-bubble schedule do not divide 5 micro batches"),
    ],
)
def test_what_is_refused_is_one_line(asked: dict[str, Any], said: str) -> None:
    request = {"engine": "fsdp2", "stage": 2, "grad_accum": 8, "depth": "formula"} | asked
    with pytest.raises(BadInput, match=said):
        estimate_report(Ask(model=CONFIG, gpus=8, pp=2, schedule="zero-bubble", **request))
