"""What a checkpoint of DeepSpeed's engine may not be: files that run code, lack a rank, or are of another model or optimizer.

The files are made by hand in DeepSpeed's layout. ``test_deepspeed_checkpoints`` has those that DeepSpeed itself writes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import zeroplan_runtime
from zeroplan.core.errors import BadInput
from zeroplan_runtime.parameter_states import ParameterStates

pytestmark = pytest.mark.torch

WEIGHT, BIAS = torch.arange(6.0).view(2, 3), torch.tensor([7.0, 8.0])


class _Address:
    def __init__(self, start: int, numel: int) -> None:
        self.start, self.numel = start, numel


class _Runs:
    """Its pickle calls a function when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Any]:
    """DeepSpeed's class of that name, without DeepSpeed."""
    module: Any = ModuleType("deepspeed.utils.tensor_fragment")
    module.fragment_address = type("fragment_address", (_Address,), {"__module__": module.__name__})
    for name, one in {
        "deepspeed": ModuleType("deepspeed"),
        "deepspeed.utils": ModuleType("utils"),
        module.__name__: module,
    }.items():
        monkeypatch.setitem(sys.modules, name, one)
    made: Callable[[int, int], Any] = module.fragment_address
    return made


def write(folder: Path, address: Callable[[int, int], Any], stage: int, **more: Any) -> None:
    """Writes a linear layer's checkpoint of two ranks; `more` goes into the file of the model."""
    folder.mkdir(parents=True)
    shapes = {"weight": WEIGHT.shape, "bias": BIAS.shape}
    model = {"module": {}, "buffer_names": [], "param_shapes": [shapes], "global_steps": 5, "skipped_steps": 1}
    model |= {"mp_world_size": 1, "ds_version": "0.19.8"} | more
    flat = torch.cat([WEIGHT.reshape(-1), BIAS])
    rows = [[(0, 4, "weight")], [(0, 2, "weight"), (2, 2, "bias")]]
    for rank in range(2):
        if stage == 3:
            master = torch.cat([WEIGHT.reshape(-1)[3 * rank : 3 * rank + 3], BIAS[rank : rank + 1]])
        else:
            master = flat[4 * rank : 4 * rank + 4]
        base = {
            "state": {0: {"step": torch.tensor(4.0), "exp_avg": master + 10, "exp_avg_sq": master + 20}},
            "param_groups": [{"lr": 0.5, "betas": (0.8, 0.9), "params": [0]}],
        }
        if stage == 3:
            sharded = {"fp32_flat_groups": [master], "optimizer_state_dict": base, "partition_count": 2}
        else:
            places = {name: address(start, numel) for start, numel, name in rows[rank]}
            sharded = {"single_partition_of_fp32_groups": [master], "base_optimizer_state": base, "partition_count": [2]}
            sharded["param_slice_mappings"] = [places]
        torch.save({"optimizer_state_dict": sharded}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3:
            torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    if stage < 3:
        torch.save(model, folder / "mp_rank_00_model_states.pt")


def load(folder: Path, *, optimizer: str = "AdamW", module: nn.Module | None = None, **options: bool) -> Any:
    """Loads it on one rank; returns the engine."""
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": optimizer, "params": {"lr": 1e-3}}}
    model = nn.Linear(3, 2) if module is None else module
    engine = zeroplan_runtime.initialize(model=model, config=config, device="cpu")[0]
    try:
        _, client = engine.load_checkpoint(folder, **options)
        states = {(name, key): ParameterStates(engine).whole(param, key) for name, param in model.named_parameters()
                  for key in ("master", "exp_avg", "exp_avg_sq")}  # fmt: skip
        return client, states, dict(engine.optimizer.param_groups[0]), engine.progress.state_dict()
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
def test_states_hyperparameters_and_counts(stage: int, tmp_path: Path, address: Any) -> None:
    write(tmp_path / "saved", address, stage, epoch=3)
    (tmp_path / "latest").write_text("saved")
    client, states, group, counts = load(tmp_path)
    assert client == {"epoch": 3}
    for name, value in (("weight", WEIGHT), ("bias", BIAS)):
        assert torch.equal(states[name, "master"], value)
        assert torch.equal(states[name, "exp_avg"], value + 10)
        assert torch.equal(states[name, "exp_avg_sq"], value + 20)
    assert (group["lr"], tuple(group["betas"])) == (0.5, (0.8, 0.9))
    assert (counts["applied"], counts["global_steps"], counts["skipped"]) == (4, 5, 1)
    _, states, group, counts = load(tmp_path, load_module_only=True)
    assert torch.equal(states["weight", "master"], WEIGHT)
    assert not states["weight", "exp_avg"].any()
    assert (group["lr"], counts["global_steps"]) == (1e-3, 0)


@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_a_file_that_names_what_runs_code_is_refused(file: str, tmp_path: Path, address: Any) -> None:
    write(tmp_path / "saved", address, 2)
    torch.save({"optimizer_state_dict": _Runs(tmp_path / "ran")}, tmp_path / "saved" / file)
    (tmp_path / "latest").write_text("saved")
    with pytest.raises(BadInput, match=rf"{file}: names posix\.mkdir, which could run code"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "saved" / file).write_bytes(b"cposix\nsystem\n(Vmkdir " + str(tmp_path / "ran").encode() + b"\ntR.")
    with pytest.raises(BadInput, match=r"is not what torch\.save writes"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        (lambda f: (f / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(), {}, "holds the shards of 1 ranks of 2"),
        (lambda f: [one.unlink() for one in f.glob("*optim*")], {}, "saved by DeepSpeed at stage 0"),
        (lambda f: (f / "mp_rank_00_model_states.pt").rename(f / "mp_rank_01_model_states.pt"), {}, "held parts of the model"),
        (lambda f: None, {"optimizer": "Lion"}, "keeps exp_avg, exp_avg_sq, this one exp_avg; use the optimizer"),
        (lambda f: None, {"module": nn.Linear(2, 3)}, r"'weight' was saved as \(2, 3\) and is \(3, 2\) here"),
        (lambda f: None, {"module": nn.Linear(3, 2, bias=False)}, "holds 'bias', which this model does not train"),
        (lambda f: None, {"module": nn.Sequential(nn.Linear(3, 2))}, "holds no trained parameter '0.weight'"),
    ],
)
def test_other_files_and_models_are_refused(
    change: Callable[[Path], Any], options: dict[str, Any], says: str, tmp_path: Path, address: Any
) -> None:
    write(tmp_path / "saved", address, 2)
    (tmp_path / "latest").write_text("saved")
    change(tmp_path / "saved")
    with pytest.raises(BadInput, match=says):
        load(tmp_path, **options)


def test_a_changed_byte_is_refused(tmp_path: Path, address: Any) -> None:
    write(tmp_path / "saved", address, 2)
    (tmp_path / "latest").write_text("saved")
    file = tmp_path / "saved" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    data = bytearray(file.read_bytes())
    place = data.index((WEIGHT.reshape(-1)[:4] + 10).numpy().tobytes())
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(BadInput, match="is damaged"):
        load(tmp_path)
