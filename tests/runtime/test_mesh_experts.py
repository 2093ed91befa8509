"""The runtime where ranks share experts: equal to plain torch, planned to the byte, resumed, and never silently wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.runtime import models
from tests.runtime.mesh_training import planned_rows, rows_of
from tests.runtime.ranks import RankPool
from tests.runtime.train import distance, ds_config, loss_distance
from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan_runtime.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

pytestmark = pytest.mark.torch
pytest.importorskip("transformers")

from tests.runtime import expert_jobs  # noqa: E402  (needs transformers)

STEPS = 2
EVEN = 6  # tokens that two ranks divide
HOST: dict[str, Any] = {"device": "cpu"}
TWO = {"dp": 2, "ep": 2}
ALL = {"ep": 4}
CONFIG = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 2}
Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def test_training_equals_plain_torch_and_the_plan_the_arena(pool: RankPool) -> None:
    """Clipping, so that each step depends on the norm over all ranks; accumulation; optimizer and parameters elsewhere."""
    away: dict[str, Any] = {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}
    exact: list[Case] = [(ds_config(0, **CONFIG, zero_optimization=away), TWO, {}), (ds_config(0, **CONFIG), ALL, {})]
    hold_shared(pool, exact, [(ds_config(3, "bf16", gradient_clipping=0.5), ALL, {})])


@pytest.mark.long
def test_training_equals_plain_torch_at_every_stage(pool: RankPool) -> None:
    sections: list[dict[str, Any]] = [*({"stage": stage} for stage in range(4)), {"stage": 1, "offload_optimizer": HOST}]
    exact: list[Case] = [(ds_config(0, **CONFIG, zero_optimization=section), TWO, {}) for section in sections]
    exact += [(ds_config(stage, **CONFIG), ALL, {"remat": stage == 3}) for stage in (2, 3)]
    hold_shared(pool, exact, [(ds_config(stage, "bf16", gradient_clipping=0.5), TWO, {}) for stage in (2, 3)])


def hold_shared(pool: RankPool, exact: list[Case], rounded: list[Case]) -> None:
    """Trains where ranks share experts alone; losses, norms and weights against plain torch, and the Arena against the plan."""
    cases = exact + rounded
    results = pool.run(4, expert_jobs.train_shared, cases, STEPS)
    plain = models.Plain(expert_jobs.mixture(), lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1), 4, accum=2, clip=0.5)
    losses, norms = [], []
    for number in range(STEPS):
        losses.append(plain.step(number))
        norms.append(plain.norm)
    for index, (case, sizes, _) in enumerate(cases):
        mine = [rank[index] for rank in results]
        assert mine[0]["samples"] == 4 * models.BATCH * case.get("gradient_accumulation_steps", 1)
        planned = planned_rows(expert_jobs.mixture(), case, ParallelLayout(4, ep=sizes["ep"]))
        for rank in mine:
            assert rows_of(rank) == planned, case
        if index < len(exact):
            assert loss_distance(mine, losses) < 2e-5, (case, sizes)
            assert distance(mine[0], plain) < 1e-4, (case, sizes)
            assert mine[0]["norms"] == pytest.approx(norms, rel=1e-4), (case, sizes)
    coarse = models.Plain(
        expert_jobs.mixture(), lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1), 4, dtype=torch.bfloat16, clip=0.5
    )
    losses = [coarse.step(number) for number in range(STEPS)]
    for index in range(len(exact), len(cases)):
        assert loss_distance([rank[index] for rank in results], losses) < 5e-2, cases[index]


#: Meshes beside ``dp`` and ``ep`` alone, and the layouts that plan them: experts' matrices are shared where ``tp`` is, or ranks
#: of ``tp`` have different experts.
MESHES: tuple[tuple[dict[str, Any], ParallelLayout], ...] = (
    ({"dp": 2, "tp": 2}, ParallelLayout(4, tp=2)),
    ({"ep": 2, "tp": 2}, ParallelLayout(4, tp=2, ep=2, etp=2)),
    (expert_jobs.WIDE, ParallelLayout(4, cp=2, ep=4)),
    ({"pp": 2, "ep": 2}, ParallelLayout(4, pp=2, ep=2)),
    ({"ep": 2, "cp": 2}, ParallelLayout(4, cp=2, ep=2)),
    ({"pp": 2, "tp": 2}, ParallelLayout(4, pp=2, tp=2)),
    ({"dp": 2, "tp": 2, "over": ("tp",)}, ParallelLayout(4, tp=2, ep=2)),
    ({"dp": 2, "tp": 2, "over": ("dp", "tp")}, ParallelLayout(4, tp=2, ep=4)),
    ({"pp": 2, "tp": 2, "over": ("tp",)}, ParallelLayout(4, pp=2, tp=2, ep=2)),
)


@pytest.mark.long
def test_experts_beside_other_dimensions_at_every_stage(pool: RankPool) -> None:
    """Losses, norms and weights against plain torch, and the Arena against the plan.

    At stage 3 ranks of ``tp`` also split the tokens between the matrices.
    """
    chosen = [(index, stage) for index in range(len(MESHES)) for stage in range(4)]
    cases: list[Case] = []
    for index, stage in chosen:
        sizes = MESHES[index][0]
        cases.append(
            (
                ds_config(stage, **CONFIG),
                sizes,
                {"sequence": True} if stage == 3 and "tp" in sizes and "pp" not in sizes else {},
            )
        )
    results = pool.run(4, expert_jobs.train_shared, cases, STEPS, EVEN)
    plain = {ranks: plain_run(ranks) for ranks in {_samples(MESHES[index][0]) for index, _ in chosen}}
    for number, (index, stage) in enumerate(chosen):
        mine, (sizes, layout), config = [rank[number] for rank in results], MESHES[index], cases[number][0]
        stages = 2 if "pp" in sizes else 1
        planned = [planned_rows(expert_jobs.mixture(), config, layout, pp_rank=at, length=EVEN) for at in range(stages)]
        model, losses, norms = plain[_samples(sizes)]
        for rank, found in enumerate(mine):
            assert rows_of(found) == planned[rank // 2 if stages > 1 else 0], (sizes, stage)
            assert found["norms"] == pytest.approx(norms, rel=1e-4), (sizes, stage)
        seen = mine[2:] if stages > 1 else mine[::2] if "tp" in sizes else mine
        assert loss_distance(seen, losses) < 2e-5, (sizes, stage)
        params = {**mine[0]["params"], **(mine[2]["params"] if stages > 1 else {})}
        far = 2e-4 if "over" in sizes else 1e-4  # one element of a query's matrix, whose gradient is nearly zero
        assert distance({"params": params}, model) < far, (sizes, stage)


def _samples(sizes: dict[str, Any]) -> int:
    """The ranks that read samples, or tokens, of their own."""
    return math.prod(size for name, size in sizes.items() if name not in ("tp", "pp", "over"))


def plain_run(ranks: int) -> tuple[models.Plain, list[list[float]], list[float]]:
    """The mixture in plain torch: the model, losses and norms by step."""
    plain = models.Plain(
        expert_jobs.mixture(), lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1), ranks, accum=2, clip=0.5, length=EVEN
    )
    steps = [(plain.step(number), plain.norm) for number in range(STEPS)]
    return plain, [losses for losses, _ in steps], [norm for _, norm in steps]


def test_what_would_train_wrong_is_refused(pool: RankPool) -> None:
    for said in pool.run(4, expert_jobs.refusals):
        for name, words in {
            "whole": "no experts are distributed over mesh['ep']",
            "no mesh": "is a DTensor",
            "width": "2 ranks of tp do not divide the 25 channels of an expert",
            "dimensions": "it has the dimensions dp, ep",
            "lamb": "of which ranks of ep have parts",
            "one bit": "those of ep have other experts",
            "no experts": "no experts of grouped products",
            "twice": "these experts are distributed already",
            "no tp": "the ranks of ep_tp have different experts on those of tp",
            "not across": "the ranks of ep do not have different experts on those of tp",
            "ranks": "the ranks of ep_tp are not those of dimensions with tp among them",
            "group": "are no model and no mesh",
            "not divided": "4 ranks do not divide 6 experts",
        }.items():
            assert said[name] != "nothing", name
            assert words in said[name], name


def test_checkpoints_keep_the_experts(pool: RankPool, tmp_path: Path) -> None:
    """They go on at another number of data-parallel ranks and another stage, and not on other numbers of experts."""
    results = pool.run(4, expert_jobs.resume, str(tmp_path))
    assert all("it was saved on 2 ranks of ep, and the mesh has 4" in found["said"] for found in results)
    for found in results[:2]:
        assert found["state"] == {"at": 2}
        assert found["steps"] == 4
        assert found["far"] < 1e-4
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported["model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 48, 32)
    with pytest.raises(BadInput, match="parts of the model, by ranks of ep"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"ep": 2, "tp": 2}, pytest.param({"pp": 2, "ep": 2}, marks=pytest.mark.long)], ids=str)
def test_checkpoints_keep_the_parts_of_experts(pool: RankPool, tmp_path: Path, sizes: dict[str, int]) -> None:
    """Each place in ep and tp, or in ep and pp, goes on with what it had."""
    found = pool.run(4, expert_jobs.resume_beside, str(tmp_path), [sizes])
    assert max(max(rank) for rank in found) < 1e-5
