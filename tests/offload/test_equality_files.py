"""Masters and states in files: the same bits, checkpoints, and what happens when the disk does not do its part."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroplan_runtime
from tests.offload.test_equality import assert_equal, pair, ranks_and_more
from tests.offload.test_host_checkpoint import RESIDENT, resume, save
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.arena import layout

MEMORY = {"nvme_in_memory": True}  # wherever the tests' folder may be


def files(folder: Path, *, param: bool = False, **more: Any) -> dict[str, Any]:
    section: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder), **more}}
    return {**section, **({"offload_param": {"device": "cpu"}} if param else {})}


def in_files(folder: Path, dtype: str, *, param: bool = False, **changes: Any) -> list[dict[str, Any]]:
    resident, offloaded = pair(3, dtype, param=param, **changes)
    own = {**offloaded["zeroplan"], **MEMORY}
    return [resident, {**offloaded, "zero_optimization": files(folder, param=param), "zeroplan": own}]


@ranks_and_more(1, 2)
def test_equal_to_training_on_the_device(pool: RankPool, tmp_path: Path, ranks: int) -> None:
    clipped = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 2}
    cases = [in_files(tmp_path, dtype, param=param) for dtype in ("bf16", "fp32") for param in (False, True)]
    cases += [in_files(tmp_path, "bf16", **clipped), in_files(tmp_path, "fp16")]
    cases.append(in_files(tmp_path, "bf16", optimizer={"type": "SGD", "params": {"lr": 1e-2}}))
    found = assert_equal(pool, ranks, cases)
    states = {row["buffer"] for row in found[0][1]["rows"] if row["place"] == "nvme"}
    assert states == {"param.master", "optim.exp_avg", "optim.exp_avg_sq"}


def test_units_longer_than_a_lane_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for most in (layout.SWAP_NUMEL, 2048):
        monkeypatch.setattr(layout, "SWAP_NUMEL", most)
        config = {**ds_config(0, "bf16"), "zero_optimization": files(tmp_path), "zeroplan": {"wide_numel": 500, **MEMORY}}
        engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=config, device="cpu")
        runs = [len(found) for found in engine.model_states.nvme.optimizer_swapper._chunks.values()]
        losses.append([])
        for number in range(4):
            losses[-1].append(engine.backward(engine(models.batch(number, 0, 0))).item())
            engine.step()
        engine.destroy()
    assert max(runs) > 1
    assert losses[0] == losses[1]
    assert [name for name in os.listdir(tmp_path) if "swap_" in name and not name.startswith(".")] == []  # nothing is left


@pytest.mark.parametrize("param", [pytest.param(False, marks=pytest.mark.long), True])
def test_checkpoints(pool: RankPool, tmp_path: Path, param: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    zero = files(tmp_path, param=param)
    folder = str(tmp_path / "saved")
    expected = pool.run(2, save, folder, zero, "bf16", 0)[0]
    assert pool.run(2, resume, folder, zero, "bf16", 0)[0] == expected
    assert pool.run(1, resume, folder, zero, "bf16", 0)[0] == expected
    assert pool.run(2, resume, folder, RESIDENT, "bf16", 0)[0] == expected


def damaged(group: dist.ProcessGroup, zero: dict[str, Any]) -> str:
    """What a step says whose swap file was damaged between two steps."""
    config = {**ds_config(0, "bf16"), "zero_optimization": zero, "zeroplan": {"wide_numel": 500, **MEMORY}}
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=config, group=group, device="cpu")
    for number in range(2):
        engine.backward(engine(models.batch(number, 0, 0)))
        engine.step()
    engine.drain()
    with open(engine.model_states.nvme.optimizer_swapper.states.path, "r+b") as file:
        file.seek(128)
        file.write(b"\xff" * 64)
    try:
        engine.backward(engine(models.batch(2, 0, 0)))
        engine.step()
        engine.drain()
    except RuntimeError as fault:
        return str(fault)
    return ""


def test_a_damaged_file_ends_the_run_by_name(pool: RankPool, tmp_path: Path) -> None:
    (said,) = pool.run(1, damaged, files(tmp_path))
    assert "the update on the host failed" in said
    assert "is corrupted" in said
    assert "resume from the last checkpoint" in said


def test_torch_sees_the_same_masters(tmp_path: Path) -> None:
    """The file's content, read back, is the model's own values at first."""
    config = {**ds_config(0, "bf16"), "zero_optimization": files(tmp_path), "zeroplan": {"wide_numel": 500, **MEMORY}}
    model = models.make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine, *_ = zeroplan_runtime.initialize(model=model, config=config, device="cpu")
    for unit in engine.model_states.units:
        flat = unit.trainable.layout
        for i, offset, numel in zip(flat.params, flat.offsets, flat.numels, strict=True):
            name = unit.layout.shape.params[i].name
            found = engine.model_states.nvme.optimizer_swapper.read(
                unit.name, layout.Buffer.PARAM_MASTER, offset, offset + numel
            )
            assert torch.equal(found, before[name].reshape(-1))
    engine.destroy()
