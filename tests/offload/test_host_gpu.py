"""The same on a GPU: copies on streams of their own, pinned memory of exactly the planned size, the bits of the device."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.train import ds_config
from zeroplan_runtime.offload import pinned

CPU = {"device": "cpu"}
CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {}, {}),
    (2, {}, {"gradient_clipping": 0.5}),
    (2, {"ratio": 0.5}, {"gradient_clipping": 0.5}),
    (3, {}, {"zeroplan": {"direct_linear": False}, "gradient_accumulation_steps": 3}),
]


def losses(config: dict[str, Any], remat: str = "") -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Twelve steps' losses, the parameters, and the bytes that were pinned."""
    device = torch.device("cuda", 0)
    engine, *_ = zeroplan_runtime.initialize(model=models.make(remat=remat), config=config, device=device)
    booked = sum(row["bytes"] for row in engine.arena.measurement() if row["place"] == "pinned")
    blocks = len({row["buffer"] for row in engine.arena.measurement() if row["place"] == "pinned"})
    registered = sum(block.size for block in pinned._blocks.values() if block.registered)
    assert booked <= registered < booked + (blocks + 1) * (pinned.PAGE + 8192)
    found = []
    for number in range(12):
        for micro in range(engine.gradient_accumulation_steps()):
            found.append(engine.backward(engine(models.batch(number, micro, 0).to(device))).item())
            engine.step()
    state = engine.module_state_dict()
    assert state is not None
    engine.destroy()
    del engine
    gc.collect()
    return found, state, booked


@pytest.mark.gpu
@pytest.mark.parametrize(("stage", "optimizer", "changes"), CASES)
@pytest.mark.parametrize("param", [False, True])
def test_bits_of_the_device(stage: int, optimizer: dict[str, Any], changes: dict[str, Any], param: bool) -> None:
    if param and (stage < 3 or optimizer):
        pytest.skip("parameters leave the device at stage 3 with their whole optimizer")
    resident = ds_config(stage, "bf16", **changes)
    section = {"stage": stage, "offload_optimizer": {**CPU, **optimizer}, **({"offload_param": CPU} if param else {})}
    expected, state, nothing = losses(resident)
    found, offloaded, booked = losses({**resident, "zero_optimization": section})
    assert found == expected
    assert all(torch.equal(state[name], offloaded[name]) for name in state)
    assert nothing == 0 < booked


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["cpu", "nvme"])
@pytest.mark.parametrize("keys", [{}, {"buffer_count": 1, "buffer_size": 2048}, {"max_in_cpu": 4000}], ids=str)
def test_parameters_in_files(tmp_path: Path, optimizer: str, keys: dict[str, int]) -> None:
    several = {"gradient_accumulation_steps": 2, "zeroplan": {"direct_linear": False, "nvme_in_memory": True}}
    resident = ds_config(3, "bf16", gradient_clipping=0.5, **several)
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    states = disk if optimizer == "nvme" else CPU
    section = {"stage": 3, "offload_optimizer": states, "offload_param": {**disk, "max_in_cpu": 0, **keys}}
    for remat in ("", "plain"):
        expected, state, _ = losses(resident, remat)
        found, offloaded, _ = losses({**resident, "zero_optimization": section}, remat)
        assert found == expected
        assert all(torch.equal(state[name], offloaded[name]) for name in state)


@pytest.mark.gpu
def test_updates_in_the_backward_and_checkpoints_on_the_host() -> None:
    plain = {"bf16": {"enabled": True, "check_grad_overflow": False}, "gradient_clipping": 0.0}
    resident = {**ds_config(2, "bf16"), **plain}
    section = {"stage": 2, "offload_optimizer": CPU}
    expected, state, _ = losses(resident, "plain")
    early = {**resident, "zero_optimization": section, "activation_checkpointing": {"cpu_checkpointing": True}}
    found, offloaded, _ = losses(early, "plain")
    assert found == expected
    assert all(torch.equal(state[name], offloaded[name]) for name in state)
