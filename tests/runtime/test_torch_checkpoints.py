"""Checkpoints of plain torch: FSDP2 goes on from the runtime's, and the runtime from FSDP2's, with equal losses."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.test_other_checkpoints import build, go_on
from zeroplan.core.errors import BadInput
from zeroplan_runtime.checkpoint.dcp import load_dcp_checkpoint, main, to_dcp

ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """What is trained, in two groups: matrices decay."""
    trained = [one for one in model.parameters() if one.requires_grad]
    matrices, others = ([one for one in trained if (one.dim() > 1) is wanted] for wanted in (True, False))
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def engine_of(group: dist.ProcessGroup | None, stage: int, seed: int, **zero: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": models.BATCH,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage, **zero},
    }
    model = build(seed)
    given: dict[str, Any] = {"model_parameters": groups_of(model), "group": group, "device": "cpu"}
    return zeroplan_runtime.initialize(model=model, config=config, **given)[0]


class Sharded:
    """FSDP2 with AdamW, by torch's own calls."""

    def __init__(self, seed: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.model, mesh = build(seed), init_device_mesh("cpu", (2,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(groups_of(self.model), **ADAM)

    def go_on(self, first: int, last: int) -> list[float]:
        losses = []
        for number in range(first, last):
            loss = self.model(models.batch(number, 0, 0))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.model.seen += 1
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load(self, folder: str) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def from_fsdp2(group: dist.ProcessGroup, folder: str) -> dict[str, Any]:
    theirs = Sharded(seed=0)
    theirs.go_on(0, 3)
    state = theirs.state()
    dcp.save({"app": state}, checkpoint_id=f"{folder}/one")  # as torch's tutorial nests it
    dcp.save({"model": state["model"]}, checkpoint_id=f"{folder}/model")  # as accelerate does
    dcp.save({"optimizer": state["optim"]}, checkpoint_id=f"{folder}/optimizer")
    found: dict[str, Any] = {"theirs": theirs.go_on(3, 6)}
    for stage, parts in ((3, ["one"]), (1, ["model", "optimizer"])):
        engine = engine_of(group, stage, seed=7)
        steps = load_dcp_checkpoint(engine, *(f"{folder}/{part}" for part in parts))
        found[f"stage {stage}"] = (steps, engine.global_steps, int(engine.module.seen), go_on(engine, 3, 6))
    return found


def test_the_runtime_goes_on_from_fsdp2(pair: RankPool, tmp_path: Path) -> None:
    for rank in pair.run(2, from_fsdp2, str(tmp_path)):
        for stage in (1, 3):
            *at, losses = rank[f"stage {stage}"]
            assert at == [3, 3, 3]
            assert losses == pytest.approx(rank["theirs"], rel=1e-5)


def to_fsdp2(group: dist.ProcessGroup, stage: int, zero: dict[str, Any], folder: str) -> tuple[list[float], list[float]]:
    engine = engine_of(group, stage, seed=0, **zero)
    go_on(engine, 0, 3)
    engine.save_checkpoint(f"{folder}/own")
    if dist.get_rank() == 0:
        main([f"{folder}/own", f"{folder}/made"])
    dist.barrier()
    theirs = Sharded(seed=5)
    theirs.load(f"{folder}/made")
    assert int(theirs.model.seen) == 3
    return go_on(engine, 3, 6), theirs.go_on(3, 6)


@pytest.mark.parametrize(("stage", "zero"), [(0, {}), (2, {"offload_optimizer": {"device": "cpu"}}), (3, {})])
def test_fsdp2_goes_on_from_the_runtime(pair: RankPool, stage: int, zero: dict[str, Any], tmp_path: Path) -> None:
    for mine, theirs in pair.run(2, to_fsdp2, stage, zero, str(tmp_path)):
        assert theirs == pytest.approx(mine, rel=1e-5)


def test_what_is_missing_or_of_another_model_is_one_line_and_changes_nothing(tmp_path: Path) -> None:
    engine = engine_of(None, 0, seed=0)
    go_on(engine, 0, 1)
    engine.save_checkpoint(tmp_path / "own")
    to_dcp(tmp_path / "own", tmp_path / "made")
    other = zeroplan_runtime.initialize(model=nn.Linear(3, 3), config={"train_batch_size": 1}, device="cpu")[0]
    before = {name: value.clone() for name, value in other.module.state_dict().items()}
    (tmp_path / "hostile").mkdir()
    (tmp_path / "hostile" / ".metadata").write_bytes(pickle.dumps(print))
    whole = {"model": {"weight": torch.zeros(3, 3), "bias": torch.zeros(4)}}
    dcp.save(whole, checkpoint_id=tmp_path / "shape", no_dist=True)
    fitting = {"weight": torch.zeros(3, 3), "bias": torch.zeros(3)}
    dcp.save({"a": fitting, "b": fitting, "c": whole["model"]}, checkpoint_id=tmp_path / "two", no_dist=True)
    for folder, said in (
        ("own", "is no checkpoint of torch"),
        ("made", "holds no model whose 'weight' has the shape [3, 3]"),
        ("hostile", "names builtins.print"),
        ("shape", "'model.bias' has the shape [4], not [3]"),
        ("two", "holds parameters under 'a.' and 'b.'"),
    ):
        with pytest.raises(BadInput) as fault:
            load_dcp_checkpoint(other, tmp_path / folder, load_optimizer_states=False)
        assert said in str(fault.value)
        assert "\n" not in str(fault.value)
    with pytest.raises(BadInput, match="holds no optimizer state"):
        load_dcp_checkpoint(engine, save_model_alone(engine, tmp_path / "alone"))
    assert all(torch.equal(before[name], value) for name, value in other.module.state_dict().items())


def save_model_alone(engine: Any, folder: Path) -> Path:
    dcp.save({"model": engine.module.state_dict()}, checkpoint_id=folder, no_dist=True)
    return folder
