"""The runtime where ranks share experts: equal to plain torch, planned to the byte, resumed, and never silently wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import distance, ds_config, loss_distance
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import DType, Precision, Workload
from zeroplan.core.zero_config import OffloadDevice, OffloadOptimizer, OffloadParam, ZeroConfig
from zeroplan.ds_config.dialect import Dialect
from zeroplan.ds_config.reader import read_ds_config
from zeroplan.engines.base import Case
from zeroplan.engines.runtime.engine import Runtime
from zeroplan.models.live import spec_from_module
from zeroplan_runtime.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

pytestmark = pytest.mark.torch
pytest.importorskip("transformers")

from tests.runtime import expert_jobs  # noqa: E402  (needs transformers)

STEPS = 2
HOST: dict[str, Any] = {"device": "cpu"}
TWO = {"dp": 2, "ep": 2}
ALL = {"ep": 4}


def plan_rows(config: dict[str, Any], ep: int) -> dict[tuple[str, str, str], int]:
    """The planned bytes of the mixture's owned buffers on four ranks, by buffer, unit and place."""
    engine = Runtime().with_ds_config(read_ds_config(config, dialect=Dialect.RUNTIME))
    half, section = "bf16" in config, config["zero_optimization"]
    workload = Workload(
        micro_batch=models.BATCH,
        seq_len=models.LENGTH,
        grad_accum=config.get("gradient_accumulation_steps", 1),
        dtype=DType.BF16 if half else DType.FP32,
        precision=Precision.MIXED if half else Precision.FP32,
        optimizer=config["optimizer"]["type"].lower(),
    )
    optimizer, param = (
        OffloadDevice(section.get(key, {}).get("device", "none")) for key in ("offload_optimizer", "offload_param")
    )
    zero = ZeroConfig.of(section["stage"], OffloadOptimizer(optimizer), OffloadParam(param))
    layout = ParallelLayout(4, ep=ep)
    engine.require_layout(layout)
    return dict(
        engine.owned_buffers(Case(spec_from_module(expert_jobs.mixture()), workload, Cluster(gpus=4), zero, layout), None).rows
    )


def test_training_equals_plain_torch_and_the_plan_the_arena(pool: RankPool) -> None:
    """Clipping, so that each step depends on the norm over all ranks; accumulation; optimizer or parameters elsewhere."""
    config = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 2}
    away: dict[str, Any] = {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}
    sections = [{"stage": stage} for stage in range(4)] + [{"stage": 1, "offload_optimizer": HOST}, away]
    exact = [(ds_config(0, **config, zero_optimization=section), TWO, {}) for section in sections]
    exact += [(ds_config(stage, **config), ALL, {"remat": stage == 3}) for stage in (0, 2, 3)]
    rounded = [(ds_config(stage, "bf16", gradient_clipping=0.5), sizes, {}) for stage, sizes in ((2, TWO), (3, TWO), (3, ALL))]
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
        planned = plan_rows(case, sizes["ep"])
        for rank in mine:
            assert {(row["buffer"], row["unit"], row["place"]): row["peak"] for row in rank["rows"]} == planned, case
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


def test_what_would_train_wrong_is_refused(pool: RankPool) -> None:
    for said in pool.run(4, expert_jobs.refusals):
        for name, words in {
            "whole": "no experts are distributed over mesh['ep']",
            "no mesh": "is a DTensor",
            "tp": "ep and tp together are not supported",
            "lamb": "of which ranks of ep have parts",
            "one bit": "those of ep have other experts",
            "no experts": "no experts of grouped products",
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
