"""Pipelines: each rank is held against the plan of its own stages, and every schedule trains as one process does."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest

from tests.validate.pipeline_ranks import MODEL, batch, losses_of, model_of, prepared, trained_by_one
from tests.validate.small import CONFIG, compared_on_ranks
from tests.validate.test_compare import result
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import EXIT_BAD_INPUT, BadInput
from zeroplan.core.gpus import GPUS
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.pipeline import stages_of
from zeroplan.core.plan import ModelInfo
from zeroplan.core.sizes import GIB, MIB
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.engines.torch_stages import LazyStep, StageModel
from zeroplan.models.load import load_model
from zeroplan.planner.describe import describe_workload
from zeroplan.planner.tapes import ExpandedTapes, NoTapeError
from zeroplan.report.drift import drift_text
from zeroplan.run.ask import Ask
from zeroplan.validate.measured import compare_ranks
from zeroplan.validate.planned import Planned, predict
from zeroplan.validate.results import Comparison, Drift

pytestmark = [pytest.mark.torch]

#: Six blocks, which four stages can have.
STAGED = Ask(model=MODEL, engine="fsdp2", stage=2, pp=2, micro_batch=1, seq_len=64, grad_accum=4)
LOOPED = STAGED.replace(vpp=2)


def require_as_planned(found: Comparison, ranks: int) -> None:
    assert found.within, found.verdict
    assert [one.pp_rank for one in found.stages] == list(range(ranks))
    for one in found.stages:
        assert one.plan.depth == "simulated"
        assert {row.name for row in one.totals if row.judged} == {"live after a step", "peak of tensors"}, one.totals
        live = next(row for row in one.totals if row.name == "live after a step")
        assert live.difference is not None
        assert abs(live.difference) < 1024  # counters and scalars


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_each_stage_is_as_planned() -> None:
    owned = STAGED.replace(engine="zeroplan", stage=1)
    torchs, runtime = compared_on_ranks(2, STAGED, owned)
    for found in (torchs, runtime):
        require_as_planned(found, 2)
    assert torchs.stages[0].plan.gpu.model_states != torchs.stages[1].plan.gpu.model_states
    for one in runtime.stages:
        assert one.measurement.owned
        assert sum(row.judged == "exact" for row in one.rows) >= 6
        assert not one.mismatches
    units = {row.unit for row in runtime.stages[1].measurement.rows}
    assert "model.layers.5" in units, "a stage's blocks have the whole model's names"


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_every_schedule_is_as_planned() -> None:
    looped = [LOOPED.replace(schedule=name) for name in ("1f1b", "gpipe", "zero-bubble", "zbv", "dualpipev")]
    plain = [STAGED.replace(schedule=name) for name in ("gpipe", "zero-bubble")]
    recomputed = STAGED.replace(gradient_checkpointing=True)
    for found in compared_on_ranks(2, *looped, *plain, recomputed):
        require_as_planned(found, 2)


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_every_schedule_of_the_runtime_owns_what_is_planned() -> None:
    own = LOOPED.replace(engine="zeroplan")
    looped = [own.replace(schedule=name, stage=0) for name in ("1f1b", "gpipe", "zero-bubble", "zbv", "dualpipev")]
    plain = [own.replace(vpp=1, stage=stage, schedule="gpipe") for stage in (0, 2, 3)]
    halved = own.replace(vpp=1, schedule="zero-bubble")
    for found in compared_on_ranks(2, *looped, *plain, halved):
        require_as_planned(found, 2)
        assert all(one.measurement.owned for one in found.stages)
        assert all(sum(row.judged == "exact" for row in one.rows) >= 5 for one in found.stages)


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_stages_of_several_ranks_are_as_planned() -> None:
    """Two ranks shard each stage, and a stage with a single block is a group of its own."""
    runtime = STAGED.replace(engine="zeroplan", micro_batch=2)
    for found in compared_on_ranks(4, STAGED.replace(micro_batch=2), runtime):
        require_as_planned(found, 2)
        assert [one.measurement.ranks for one in found.stages] == [2, 2]
    for found in compared_on_ranks(4, STAGED.replace(pp=4), runtime.replace(pp=4)):
        require_as_planned(found, 4)


@pytest.mark.long
@pytest.mark.usefixtures("warm_ranks")
def test_stages_whose_ranks_share_more_are_as_planned() -> None:
    """On 4 ranks tp 2 × pp 2 (with --sp, too) and cp 2 × pp 2, on 8 also two that shard, and replicas of the shards."""
    split, ring = STAGED.replace(tp=2), STAGED.replace(cp=2)
    parts = split.replace(sp=True)
    four = [ring, parts, split.replace(engine="zeroplan", stage=1), ring.replace(engine="zeroplan", stage=1)]
    eight = [STAGED.replace(dp_replicate=2), parts.replace(engine="zeroplan")]
    for ranks, asked in ((4, four), (8, eight)):
        for found in compared_on_ranks(ranks, *asked):
            require_as_planned(found, 2)
            assert [one.measurement.ranks for one in found.stages] == [ranks // 2] * 2


@pytest.mark.slow
def test_a_pipeline_trains_as_one_process_does(pair: Any) -> None:
    """The losses of some steps: weights, micro batches, the clipped norm of all stages and the optimizer are the same."""
    runs = [("fsdp2", "1f1b", {}), ("fsdp2", "zbv", {"vpp": 2}), ("zeroplan", "gpipe", {}), ("zeroplan", "1f1b", {"vpp": 2})]
    found = pair.run(2, losses_of, runs)
    for number, run in enumerate(runs):
        (told,) = [rank[number] for rank in found if rank[number][0] is not None]
        assert told == pytest.approx(trained_by_one(), rel=2e-5), run


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["some", "every"])
def test_a_pipeline_of_shared_matrices_or_samples_trains_as_one_process_does(pool: Any, every: bool) -> None:
    runs: list[Any] = [("zeroplan", "gpipe", {"cp": 2}), ("zeroplan", "1f1b", {"tp": 2, "sp": True})]
    if every:
        runs = [("zeroplan", "1f1b", {"tp": 2}), ("zeroplan", "1f1b", {})]
    found = pool.run(4, losses_of, runs)
    for number, run in enumerate(runs):
        first, second = [rank[number] for rank in found if rank[number][0] is not None]
        mean = [(one + other) / 2 for one, other in zip(first, second, strict=True)]
        near = 2e-3 if "cp" in run[2] else 2e-5  # one of the two has a token less to predict
        assert mean == pytest.approx(trained_by_one(), rel=near), run


def test_stages_compute_what_the_whole_model_does() -> None:
    """Of a model whose blocks differ by kind of attention, with capped logits."""
    import torch

    kinds = {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 16, "initializer_range": 0.5}
    config = {**MODEL, **kinds, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
    ids = batch()["input_ids"]
    given = ids
    with torch.no_grad():
        whole = prepared(model_of(config=config))(ids).logits
        for stage in stages_of(6, 3):  # the last begins with a block of full attention
            given = StageModel(prepared(model_of(config=config)), stage)(given)
    assert whole.abs().max() > 1, "the cap matters"
    assert torch.equal(given, whole)


def test_a_batch_with_more_than_tokens_is_refused() -> None:
    step = LazyStep(Mock(grad_accum=2), Mock(), nullcontext)
    with pytest.raises(BadInput, match="input_ids and labels, and no attention_mask"):
        step({**batch(), "attention_mask": batch()["input_ids"]})


# ---------------------------------------------------------------------- the comparison


def staged() -> Planned:
    """A pipeline of two ranks on GPUs, planned without a tape."""
    engine = find_engine("zeroplan")
    layout = ParallelLayout(gpus=2, pp=2)
    case = Case(
        load_model(MODEL), Workload.of(seq_len=16), Cluster(gpus=2, gpu=GPUS["h100"]), ZeroConfig.of(2), parallel=layout
    )
    return predict(engine, case, _NoTapes(engine))


class _NoTapes(ExpandedTapes):
    def of(self, case: Case) -> Any:
        raise NoTapeError("none here")


def results(planned: Planned, **changes: Any) -> list[dict[str, Any]]:
    return [result(one, rank=rank, **changes) for rank, one in enumerate(planned.stages)]


def compared(planned: Planned, given: list[dict[str, Any]], **told: Any) -> Comparison:
    return compare_ranks(planned, given, 0.02, device="cuda", ranks=2, **told)


def test_each_rank_is_held_against_its_own_stage() -> None:
    planned = staged()
    found = compared(planned, results(planned))
    assert found.within
    assert [one.mismatches for one in found.stages] == [(), ()]
    swapped = [{**one, "rank": 1 - one["rank"]} for one in results(planned)]
    other = compared(planned, swapped)
    assert not other.within
    assert all(one.mismatches for one in other.stages)
    assert other.verdict.startswith("pipeline rank 0 of 2: ")


def test_the_stage_that_is_outside_is_shown_first() -> None:
    planned = staged()
    given = results(planned)
    given[1]["rows"][0][3] += 1
    found = compared(planned, given)
    assert (found.within, found.pp_rank) == (False, 1)
    assert found.stages[0].within
    assert found.plan.stages == planned.plan.stages
    given = results(planned)
    given[0]["total"] = 9 * GIB
    assert compared(planned, given).pp_rank == 0, "else the one that used the most"


def test_a_stages_host_memory_is_its_ranks_share_of_the_node() -> None:
    planned = staged()
    found = compared(planned, results(planned, pinned=MIB))
    row = next(row for row in found.stages[0].totals if row.name == "resident memory")
    assert (row.measured, row.note) == (5 * GIB, "this stage's ranks of a node")


def test_ranks_that_end_early_are_one_comparison() -> None:
    planned = staged()
    lost = compared(planned, results(planned)[:1], failure="rank 1 ended with signal SIGKILL")
    assert (lost.within, lost.verdict, lost.stages) == (False, "rank 1 ended with signal SIGKILL", ())
    out = {"phase": "backward", "buffer": "activation", "requested": MIB, "allocated": GIB, "message": "out of memory"}
    given = results(planned)
    given[1]["out_of_memory"] = out
    full = compared(planned, given)
    assert full.pp_rank == 1
    assert full.verdict.startswith("out of memory in backward on rank 1")


def test_text_and_json_name_each_rank_of_a_pipeline() -> None:
    planned = staged()
    found = compared(planned, results(planned))
    drift = Drift(
        schema=1,
        model=ModelInfo(name="small", params=1, trainable=1, source="config"),
        workload=describe_workload(planned.case.workload),
        machine={"device": "cuda", "name": "H100", "memory": None, "count": 2, "backend": "nccl", "ranks": 2},
        tolerance=0.02,
        within=found.within,
        comparisons=(found,),
    )
    text = drift_text(drift)
    assert "1 of 1 as planned: owned buffers equal" in text
    assert "pipeline rank 0 of 2: blocks 0 to 2, on 1 rank\n" in text
    assert "pipeline rank 1 of 2: blocks 3 to 5, on 1 rank\n" in text
    assert "Bytes of each stage's worst rank" in text
    (told,) = json.loads(drift.to_json())["comparisons"]
    assert [one["pp_rank"] for one in told["stages"]] == [0, 1]
    assert told["plan"]["stages"]


@pytest.mark.parametrize(
    ("model", "words", "what"),
    [
        (CONFIG, (), "the head is tied to the embedding, which is on another pipeline stage"),
        (MODEL, ("--grad-accum", "1"), "1f1b over 2 stages takes 2 micro batches or more"),
        (MODEL, ("--vpp", "5"), "leave one without any"),
        (MODEL, ("--vpp", "2", "--grad-accum", "5"), "rounds of the interleaved schedule do not divide 5"),
        (MODEL, ("--schedule", "zbv"), "zbv runs exactly 2 chunks a rank"),
        (MODEL, ("--schedule", "sideways"), "unknown schedule 'sideways'"),
        (MODEL, ("--lora-rank", "4"), "pipeline stages with LoRA are not modelled"),
        (MODEL, ("--engine", "ddp"), "no pp"),
        (MODEL, ("--stage", "3"), "keeps parameters gathered for all micro batches"),
        (MODEL, ("--gpus", "3"), "does not divide"),
    ],
)
def test_what_no_pipeline_runs_is_one_line(
    model: dict[str, Any], words: tuple[str, ...], what: str, cli: Callable[..., Any], tmp_path: Any
) -> None:
    import re

    file = tmp_path / "config.json"
    file.write_text(json.dumps(model))
    code, out, err = cli("verify", str(file), "--engine", "fsdp2", "--pp", "2", "--seq-len", "16", "--grad-accum", "4", *words)
    assert code == EXIT_BAD_INPUT, out
    assert re.search(what, err), err
    assert err.count("\n") == 1
