"""The runtime on meshes of four ranks: equal to plain torch, planned to the byte, and never silently wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.runtime import mesh_jobs, models
from tests.runtime.mesh_training import FOLDED, LOOPED, planned_rows, rows_of
from tests.runtime.ranks import RankPool
from tests.runtime.train import distance, ds_config, loss_distance
from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan_runtime.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

pytestmark = pytest.mark.torch

STEPS = 3
EVEN = {"odd": False}


def _adamw(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def plain_run(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[models.Plain, list[list[float]], list[float]]:
    """Plain torch on two data-parallel ranks: losses and norms by step."""
    plain = models.Plain(
        models.make(**EVEN), lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1), 2, dtype=dtype, **options
    )
    losses, norms = [], []
    for number in range(STEPS):
        losses.append(plain.step(number))
        norms.append(plain.norm)
    return plain, losses, norms


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["some", "every stage"])
def test_tensor_parallel_training_equals_plain_torch(pool: RankPool, every: bool) -> None:
    """Clipping, so that each step depends on the norm over all ranks; accumulation; and optimizer or parameters elsewhere."""
    config = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 2}
    host: dict[str, Any] = {"device": "cpu"}
    sections: list[dict[str, Any]] = [{"stage": stage} for stage in ((0, 1, 2, 3) if every else (1,))]
    sections += [{"stage": 1, "offload_optimizer": host}] if every else []
    sections += [{"stage": 3, "offload_optimizer": host, "offload_param": host}]
    cases = [(ds_config(0, **config, zero_optimization=section), EVEN) for section in sections]
    away = {"cpu_checkpointing": True}
    cases.append((ds_config(3, **config, activation_checkpointing=away), {**EVEN, "remat": "other"}))
    parts = {"partition_activations": True}
    cases.append((ds_config(3, **config, activation_checkpointing=parts), {**EVEN, "remat": "other"}))
    cases.append((ds_config(2, **config, activation_checkpointing=away | parts), {**EVEN, "remat": "reentrant"}))
    cases.append((ds_config(2, "fp16", gradient_clipping=0.5), EVEN))
    results = pool.run(4, mesh_jobs.train_split, cases, STEPS)
    plain, losses, norms = plain_run(accum=2, clip=0.5)
    for index, (case, _) in enumerate(cases[:-1]):
        mine = [rank[index] for rank in results]
        assert loss_distance([mine[0], mine[2]], losses) < 2e-5, case  # one of each data-parallel rank
        assert mine[0]["losses"] == mine[1]["losses"], case
        assert distance(mine[0], plain) < 1e-4, case
        assert mine[0]["norms"] == pytest.approx(norms, rel=1e-4), case
        assert mine[0]["samples"] == 2 * 2 * models.BATCH
    for place, kept in ((-4, 1), (-2, 2)):  # whole inputs on the host, and parts of them: of 5 blocks, the newest stays
        rows = [row for row in results[0][place]["rows"] if row["buffer"] == "activation.checkpoint"]
        assert [row["peak"] for row in rows] == [models.BATCH * models.LENGTH * models.WIDTH * 4 // kept] * 4
    half = [rank[-1] for rank in results]
    _, losses, norms = plain_run(torch.float16, clip=0.5, scale=1024.0)
    assert loss_distance([half[0], half[2]], losses) < 5e-3
    assert half[0]["norms"] == pytest.approx(norms, rel=2e-2)


def test_the_plan_equals_the_arena(pool: RankPool) -> None:
    """Every second case also splits the tokens between the matrices."""
    configs = [ds_config(stage) for stage in (1, 2, 3)]
    configs.append(ds_config(2, "bf16", gradient_accumulation_steps=2))
    results = pool.run(4, mesh_jobs.train_llama, configs)
    for index, config in enumerate(configs):
        planned = planned_rows(mesh_jobs.llama(), config, ParallelLayout(4, tp=2), length=6)
        for rank in results:
            assert rows_of(rank[index]) == planned, config
    whole = [rank[0]["losses"] for rank in results]
    for index in (1, 2):  # all stages, and split tokens, train the same
        assert [rank[index]["losses"] for rank in results] == [pytest.approx(one, abs=1e-5) for one in whole]


def test_the_plan_of_a_stage_equals_its_arena(pool: RankPool) -> None:
    configs = [ds_config(stage, "bf16", gradient_accumulation_steps=2) for stage in (1, 2, 3)]
    results = pool.run(4, mesh_jobs.train_stages, configs)
    for index, config in enumerate(configs):
        for rank, found in enumerate(results):
            planned = planned_rows(mesh_jobs.llama(), config, ParallelLayout(4, pp=2), pp_rank=rank // 2, length=6)
            assert rows_of(found[index]) == planned, (rank, config)
    halved = pool.run(4, mesh_jobs.train_stages, configs[:2], "", 1, "InterleavedZeroBubble")
    for whole, found in zip(results, halved, strict=True):
        assert list(map(rows_of, found)) == list(map(rows_of, whole[:2]))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["some", "every"])
def test_the_plan_of_chunks_equals_their_arena(pool: RankPool, every: bool) -> None:
    config = {"gradient_accumulation_steps": 4}
    cases = [("1f1b", ds_config(2, "bf16", **config)), ("zbv", ds_config(1, "bf16", **config))]
    if every:
        names = ("1f1b", "gpipe", "zero-bubble", "zbv", "dualpipev")
        stages = {name: (1, 2, 3) if name in ("1f1b", "gpipe") else (1, 2) for name in names}
        cases = [(name, ds_config(stage, "bf16", **config)) for name in names for stage in stages[name]]
    results = pool.run(4, mesh_jobs.train_chunks, cases)
    whole, layout = mesh_jobs.llama(6), ParallelLayout(4, pp=2, vpp=2)
    for index, (name, one) in enumerate(cases):
        for rank, found in enumerate(results):
            planned = planned_rows(whole, one, layout, pp_rank=rank // 2, length=6, schedule=name)
            assert rows_of(found[index]) == planned, (rank, name, one)


@pytest.mark.long
def test_compiled_stages_train_as_plain_ones(pool: RankPool) -> None:
    """Their blocks are compiled one by one, and what the engine owns is as without."""
    config = [ds_config(2, gradient_clipping=0.5, gradient_accumulation_steps=2)]
    plain, compiled = (pool.run(4, mesh_jobs.train_stages, config, backend, 2) for backend in ("", "eager"))
    for before, after in zip(plain, compiled, strict=True):
        assert after[0]["losses"] == pytest.approx(before[0]["losses"], rel=1e-5, nan_ok=True)
        assert after[0]["norms"] == pytest.approx(before[0]["norms"], rel=1e-5)
        assert rows_of(after[0]) == rows_of(before[0])


def test_what_would_train_wrong_is_refused(pool: RankPool) -> None:
    for said in pool.run(4, mesh_jobs.refusals):
        for name, words in {
            "no mesh": "is a DTensor",
            "another mesh": "is distributed over",
            "sharded": "is distributed over",
            "seeds": "has other values",
            "dropout": "would drop other elements",
            "inputs": "were given other inputs",
            "part of heads": "'scale' is not distributed, but its gradient differs",
            "lamb": "norms of whole tensors",
            "split tokens": "give their blocks other inputs",
            "compiled": "torch.compile: ranks have parts of 'embed.weight'",
            "names": "have no names",
            "unknown": "dimension 'rows' is unknown",
            "both": "give either group or mesh",
        }.items():
            assert words in said[name], (name, said[name])


def test_checkpoints_keep_the_parts(pool: RankPool, tmp_path: Path) -> None:
    """They go on at another number of data-parallel ranks and another stage, and not at another number of parts."""
    results = pool.run(4, mesh_jobs.resume, str(tmp_path))
    assert results[2:] == [None, None]
    for found in results[:2]:
        assert "it was saved on 2 ranks of tp, and the mesh has 1" in found["said"]
        assert found["state"] == {"at": 2}
        assert found["steps"] == 4
        assert found["far"] < 1e-4
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported["blocks.0.up.weight"].shape == (32, models.WIDTH)
    with pytest.raises(BadInput, match="parts of the model, by ranks of tp"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["some", "every stage"])
def test_pipeline_training_equals_plain_torch(pool: RankPool, every: bool) -> None:
    """Two stages of unequal depth, four micro batches a step."""
    config = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 4}
    cases = [("1F1B", ds_config(stage, **config)) for stage in (range(4) if every else (2,))]
    host = {"device": "cpu"}
    away = {"stage": 3, "offload_optimizer": host, "offload_param": host}
    cases.append(("GPipe", ds_config(0, **config, zero_optimization=away)))
    cases += [("InterleavedZeroBubble", ds_config(stage, **config)) for stage in (range(3) if every else (1,))]
    cases.append(("InterleavedZeroBubble", ds_config(0, **config, zero_optimization={"stage": 2, "offload_optimizer": host})))
    cases.append(
        (
            "GPipe",
            ds_config(
                1, "fp16", gradient_accumulation_steps=4, fp16={"enabled": True, "loss_scale": 0, "initial_scale_power": 30}
            ),
        )
    )
    cases.append(("split", ds_config(2, **config)))
    results = pool.run(4, mesh_jobs.train_pipeline, cases, STEPS)
    plain = models.Plain(models.make(), _adamw, 2, accum=4, clip=0.5)
    losses, norms = [], []
    for number in range(STEPS):
        losses.append(plain.step(number))
        norms.append(plain.norm)
    for index, (_, case) in enumerate(cases[:-2]):
        mine = [rank[index] for rank in results]
        assert loss_distance(mine[2:], losses) < 2e-5, case  # those of the last stage
        parts = {**mine[0]["params"], **mine[2]["params"]}
        assert distance({"params": parts}, plain) < 1e-4, case
        for rank in mine:
            assert rank["norms"] == pytest.approx(norms, rel=1e-4), case
            assert rank["micro_steps"] == 4 * STEPS
    split, one = [rank[-1] for rank in results], models.Plain(models.make(**EVEN), _adamw, accum=4, clip=0.5)
    losses = [one.step(number) for number in range(STEPS)]
    assert loss_distance([split[2]], losses) < 2e-5
    assert distance({"params": {**split[0]["params"], **split[2]["params"]}}, one) < 1e-4
    assert {rank["norms"][-1] for rank in split} == {split[0]["norms"][-1]}
    assert split[0]["norms"][-1] == pytest.approx(one.norm, rel=1e-4)
    overflowed = [rank[-2] for rank in results]  # a loss times 2³⁰ is beyond fp16
    assert all(rank["skipped"] == STEPS and rank["scale"] == overflowed[0]["scale"] for rank in overflowed)


def _chunked(folder: Path, *, every: bool) -> list[tuple[str, dict[str, Any]]]:
    """Schedules of two chunks a rank, each with a config."""
    config: dict[str, Any] = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 4}
    host = {"device": "cpu"}
    csv = {"enabled": True, "output_path": str(folder), "job_name": "run"}
    cases = [
        ("ZBVZeroBubble", ds_config(2, **config, csv_monitor=csv)),  # whose loss is on the first rank
        ("Interleaved1F1B", ds_config(3, **config)),
        ("DualPipeV", ds_config(1, **config)),
    ]
    if every:
        cases += [(kind, ds_config(stage, **config)) for kind in ("Interleaved1F1B", "LoopedBFS") for stage in range(4)]
        halved = ("InterleavedZeroBubble*2", "ZBVZeroBubble", "DualPipeV")
        cases += [(kind, ds_config(stage, **config)) for kind in halved for stage in range(3)]
        away = {"stage": 3, "offload_optimizer": host, "offload_param": host}
        cases.append(("LoopedBFS", ds_config(0, **config, zero_optimization=away)))
        cases.append(("DualPipeV", ds_config(0, **config, zero_optimization={"stage": 2, "offload_optimizer": host})))
    return cases


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["some", "every"])
def test_chunks_of_a_pipeline_train_as_plain_torch(pool: RankPool, tmp_path: Path, every: bool) -> None:
    """Four stages of unequal depth on two ranks, four micro batches a step."""
    cases, steps = _chunked(tmp_path, every=every), STEPS if every else 2
    results = pool.run(4, mesh_jobs.train_pipeline, cases, steps)
    plain = models.Plain(models.make(), _adamw, 2, accum=4, clip=0.5)
    losses, norms = [], []
    for number in range(steps):
        losses.append(plain.step(number))
        norms.append(plain.norm)
    for index, (kind, case) in enumerate(cases):
        mine = [rank[index] for rank in results]
        seen = mine[:2] if kind in FOLDED else mine[2:]
        assert loss_distance(seen, losses) < 2e-5, (kind, case)
        assert distance({"params": {**mine[0]["params"], **mine[2]["params"]}}, plain) < 1e-4, (kind, case)
        for rank in mine:
            assert rank["norms"] == pytest.approx(norms, rel=1e-4), (kind, case)
            assert rank["micro_steps"] == 4 * steps
    (written,) = tmp_path.rglob("*train_loss*")
    shown = [float(line.split(",")[1]) for line in written.read_text().splitlines()[1:]]
    assert shown == pytest.approx([step[0] for step in losses], abs=1e-4)


@pytest.mark.long
def test_eight_stages_on_four_ranks_train_as_plain_torch(pool: RankPool) -> None:
    """Each rank alone has its stages, so that nothing is sharded; the optimizer also on the host."""
    config = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 8}
    cases = [(kind, ds_config(2, **config)) for kind in (*FOLDED, *LOOPED)]
    away = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    cases.append(("DualPipeV", ds_config(0, **config, zero_optimization=away)))
    results = pool.run(4, mesh_jobs.train_eight_stages, cases, 2)
    plain = models.Plain(models.make(depth=9), _adamw, accum=8, clip=0.5)
    losses = [plain.step(number) for number in range(2)]
    for index, (kind, case) in enumerate(cases):
        mine = [rank[index] for rank in results]
        assert loss_distance([mine[0 if kind in FOLDED else 3]], losses) < 2e-5, (kind, case)
        params = {name: value for rank in mine for name, value in rank["params"].items()}
        assert distance({"params": params}, plain) < 1e-4, (kind, case)
        assert [rank["norms"][-1] for rank in mine] == pytest.approx([plain.norm] * 4, rel=1e-4), (kind, case)


def test_ranks_of_the_same_samples_share_the_shards(pool: RankPool) -> None:
    """What each sees of them is a part of the mean, as context parallelism has it; a batch is counted once."""
    results = pool.run(4, mesh_jobs.train_tokens, ds_config(3), STEPS)
    plain = models.Plain(models.make(), _adamw, 4)
    losses = [plain.step(number) for number in range(STEPS)]
    assert loss_distance(results, losses) < 2e-5
    assert distance(results[0], plain) < 1e-4
    assert {found["samples"] for found in results} == {2 * models.BATCH}


def test_own_reads_and_writes_of_split_parameters(pool: RankPool) -> None:
    """Between the steps they see the present values, or are refused; what is written is what is trained."""
    results = pool.run(4, mesh_jobs.hands_on)
    for found in results:
        assert found[2, "whole"] == found[2, "product"] == (36, models.WIDTH)
        assert found[2, "local"] == (18, models.WIDTH)
        for name in ("local", "whole", "product"):
            assert "is read while its unit 'blocks.1' is not gathered" in found[3, name]
        for stage in (2, 3):
            assert "grad is not there" in found[stage, "clip"]
            assert found[stage, "left"] == (36, models.WIDTH)
    for stage in (2, 3):
        assert results[0][stage, "written"]
        assert 0 < results[0][stage, "kept"] < 0.02


def test_checkpoints_keep_the_stages(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(4, mesh_jobs.resume_pipeline, str(tmp_path)) == [0.0] * 4


def test_batches_that_stages_would_take_for_others_are_refused(pool: RankPool) -> None:
    for rank, said in enumerate(pool.run(4, mesh_jobs.stage_refusals)):
        for name, words in {
            "uneven": "do not divide into 2 equal micro batches",
            "empty": "do not divide into 2 equal micro batches",
            "nothing": "the last stage was given no target" if rank > 1 else "the first stage was given no inputs",
            "changed": "and had (2, 7) in the first step",
            "few": "1 micro batches are fewer than the 2 stages of 1F1B",
            "rounds": "the 2 rounds of ScheduleInterleavedZeroBubble do not divide 5 micro batches",
            "gathered": "parameters of stage 3 are not there from a forward to the second half",
            "again": "compute a checkpointed block once for each of its weights",
            "compiled": "a graph of compiled blocks makes gradients of inputs and of weights at once",
            "folded": "ScheduleZBVZeroBubble gives each rank two stages, and chunks is 1",
            "looped": "ScheduleInterleaved1F1B is for several stages a rank, and chunks is 1",
            "one": "Schedule1F1B runs one stage a rank, and chunks is 2",
            "no chunks": "forward() of a Stage takes no chunk",
            "gathered halves": "parameters of stage 3 are not there from a forward to the second half",
            "turns": "the 2 rounds of ScheduleInterleaved1F1B do not divide 5 micro batches",
            "fewer": "3 micro batches are fewer than the 4 stages of DualPipeV",
            "unknown": "torch has no schedule 'Zigzag'",
            "no loss": "a str is no loss",
        }.items():
            assert words in said[name], (name, said[name])


def test_parts_that_were_cut_otherwise_are_not_loaded(pool: RankPool, tmp_path: Path) -> None:
    """As many elements in another order: rows for columns."""
    for said in pool.run(4, mesh_jobs.cut_otherwise, str(tmp_path)):
        assert "was saved as (16, 20) tp:S(0) and is (32, 10) tp:S(1) here" in said, said
