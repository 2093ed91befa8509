"""Checkpoints in DeepSpeed's forms: fp32 state dicts and universal checkpoints, written without ranks and read by engines."""

from __future__ import annotations

import errno
import io
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput
from zeroplan_runtime.checkpoint.universal import load_universal_checkpoint, main, to_universal
from zeroplan_runtime.checkpoint.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zeroplan_runtime.checkpoint.zero_to_fp32 import main as zero_to_fp32
from zeroplan_runtime.parameter_states import ParameterStates

SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_min_lr": 1e-3}}}


def build(seed: int = 0) -> nn.Module:
    """A model with a tied head, a frozen layer, and a buffer that training changes."""
    model = models.make(seed, tied=True)
    for param in model.blocks[0].up.parameters():
        param.requires_grad_(False)
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    return model


def start(group: dist.ProcessGroup, stage: int, dtype: str, seed: int = 0) -> Any:
    config = ds_config(stage, dtype, **SCHEDULE)
    engine, *_ = zeroplan_runtime.initialize(model=build(seed), config=config, group=group, device="cpu")
    return engine


def go_on(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first, last):
        losses.append(engine.backward(engine(models.batch(number, 0, 0))).item())
        engine.step()
        engine.module.seen += 1
    return losses


def save(group: dist.ProcessGroup, folder: str, stage: int, dtype: str) -> dict[str, Any]:
    engine = start(group, stage, dtype)
    go_on(engine, 0, 4)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    for nowhere in ("", None):
        with pytest.raises(BadInput, match="is no folder"):
            engine.save_checkpoint(nowhere)
    engine.save_checkpoint(folder, "adapters", exclude_frozen_parameters=True, save_latest=False)
    states = ParameterStates(engine)
    masters = {name: states.whole(param) for name, param in engine.module.named_parameters() if states.trains(param)}
    return {"masters": masters, "losses": go_on(engine, 4, 7)}


def from_universal(group: dist.ProcessGroup, folder: str, stage: int, dtype: str) -> dict[str, Any]:
    engine = start(group, stage, dtype, seed=9)
    found = load_universal_checkpoint(engine, folder)
    at = (engine.global_steps, engine.get_lr()[0], int(engine.module.seen))
    return {"at": at, "client": found["client_state"], "losses": go_on(engine, 4, 7)}


def without_frozen(group: dist.ProcessGroup, folder: str, stage: int) -> list[float]:
    engine = start(group, stage, "fp32", seed=0)
    engine.load_checkpoint(folder, "adapters")
    return go_on(engine, 4, 7)


@pytest.mark.parametrize(("ranks", "stage", "dtype", "other"), [(2, 3, "fp32", (1, 1)), (2, 2, "bf16", (2, 3))])
def test_deepspeeds_forms(pool: RankPool, tmp_path: Path, ranks: int, stage: int, dtype: str, other: tuple[int, int]) -> None:
    folder = tmp_path / "checkpoints"
    saved = pool.run(ranks, save, str(folder), stage, dtype)[0]
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert set(state) == set(build().state_dict())
    for name, master in saved["masters"].items():
        assert torch.equal(state[name], master), name
        assert state[name].dtype == torch.float32
    assert state["head.weight"] is state["embed.weight"]
    assert int(state["seen"]) == 4
    frozen = build().blocks[0].up.weight.detach()
    expected = frozen if dtype == "fp32" else frozen.bfloat16().float()
    assert torch.equal(state["blocks.0.up.weight"], expected)
    model = load_state_dict_from_zero_checkpoint(build(seed=5), folder)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert "blocks.0.up.weight" not in get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)

    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "bin")
    written = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(written[name], value) for name, value in state.items())
    zero_to_fp32([str(folder), str(tmp_path / "safe"), "--safe_serialization", "--max_shard_size", "20KB"])
    parts = [load_file(path) for path in (tmp_path / "safe").glob("model-*.safetensors")]
    assert len(parts) > 1
    whole = {name: value for part in parts for name, value in part.items()}
    assert set(state) - set(whole) == {"head.weight"}
    assert all(torch.equal(whole[name], state[name]) for name in whole)

    main([str(folder), str(tmp_path / "made")])
    assert (tmp_path / "latest_universal").read_text() == "made"
    loaded = pool.run(other[0], from_universal, str(tmp_path / "made"), other[1], dtype)[0]
    assert loaded["at"] == (4, pytest.approx(1e-3 + (1e-2 - 1e-3) * torch.log(torch.tensor(4.0)).item() / 1.6094379), 4)
    assert loaded["client"] == {"epoch": 3}
    assert loaded["losses"] == pytest.approx(saved["losses"], rel=1e-5 if dtype == "fp32" else 2e-2)
    if dtype == "fp32":
        assert pool.run(1, without_frozen, str(folder), 0)[0] == pytest.approx(saved["losses"], rel=1e-5)
        with pytest.raises(BadInput, match="lacks the frozen parameters"):
            to_universal(folder, tmp_path / "partial", "adapters")


def refused(group: dist.ProcessGroup, folder: str) -> list[str]:
    engine = start(group, 2, "fp32")
    before = engine.module_state_dict()
    said = []
    place = Path(folder) / "zero" / "blocks.1.gain"
    whole = (place.with_name("embed.weight") / "exp_avg.pt").read_bytes()
    for damage in (
        lambda: (place.with_name("embed.weight") / "exp_avg.pt").write_bytes(flipped(whole)),
        lambda: (
            (place.with_name("embed.weight") / "exp_avg.pt").write_bytes(whole) and (place / "fp32.pt").write_bytes(b"nothing")
        ),
        lambda: torch.save({"param": torch.zeros(3)}, place / "fp32.pt"),
        lambda: torch.save({"param": print}, place / "fp32.pt"),
        lambda: place.rename(place.with_name("another")),
    ):
        damage()
        try:
            load_universal_checkpoint(engine, folder)
        except BadInput as fault:
            said.append(str(fault))
    after = engine.module_state_dict()
    assert before is None or all(torch.equal(before[name], value) for name, value in after.items())
    engine.backward(engine(models.batch(0, 0, 0)))
    engine.step()
    return said


def flipped(whole: bytes) -> bytes:
    """A file of torch.save with one bit of its tensor turned around."""
    values = torch.load(io.BytesIO(whole), weights_only=True)["param"].numpy().tobytes()
    at = whole.index(values) + len(values) // 2
    return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]


def test_a_damaged_universal_checkpoint_is_named(pool: RankPool, tmp_path: Path) -> None:
    pool.run(1, save, str(tmp_path / "checkpoints"), 1, "fp32")
    to_universal(tmp_path / "checkpoints", tmp_path / "made")
    damaged, *said = pool.run(1, refused, str(tmp_path / "made"))[0]
    assert "is damaged" in damaged
    assert "embed.weight/exp_avg.pt" in damaged
    for text, part in zip(said, ["cannot be read", "shape [3], not [1]", "names builtins.print", "no parameter"], strict=True):
        assert part in text
        assert "blocks.1.gain" in text
        assert "\n" not in text
    with pytest.raises(BadInput, match="checkpoint"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "none")


@pytest.mark.parametrize(
    "section",
    [
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        {"type": "AdamW", "params": {"amsgrad": True}},
        {"type": "ASGD", "params": {"lr": 0.1, "lambd": 0.1}},
        {"type": "NAdam", "params": {"betas": [0.8, 0.9]}},
    ],
    ids=lambda section: section["type"],
)
def test_states_that_options_add_are_in_a_universal_checkpoint(section: dict[str, Any], tmp_path: Path) -> None:
    config = ds_config(0, optimizer=section)
    engines = [zeroplan_runtime.initialize(model=build(seed), config=config, device="cpu")[0] for seed in (0, 1)]
    go_on(engines[0], 0, 4)
    engines[0].save_checkpoint(tmp_path / "own")
    to_universal(tmp_path / "own", tmp_path / "made")
    load_universal_checkpoint(engines[1], tmp_path / "made")
    assert go_on(engines[1], 4, 7) == pytest.approx(go_on(engines[0], 4, 7), rel=1e-5)


def test_a_universal_checkpoint_is_whole_or_not_there(tmp_path: Path) -> None:
    engine = zeroplan_runtime.initialize(model=build(), config=ds_config(0), device="cpu")[0]
    go_on(engine, 0, 1)
    engine.save_checkpoint(tmp_path / "own")
    to_universal(tmp_path / "own", tmp_path / "made")
    before = (tmp_path / "made" / "zero" / "norm.weight" / "fp32.pt").read_bytes()
    go_on(engine, 1, 2)
    engine.save_checkpoint(tmp_path / "own")
    writes = itertools.count()
    real = torch.save

    def fail(*args: Any, **kwargs: Any) -> None:
        if next(writes) == 20:
            raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))
        real(*args, **kwargs)

    with mock.patch("torch.save", fail), pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "own"), str(tmp_path / "made")])
    assert (tmp_path / "made" / "zero" / "norm.weight" / "fp32.pt").read_bytes() == before
    main([str(tmp_path / "own"), str(tmp_path / "made")])
    assert (tmp_path / "made" / "zero" / "norm.weight" / "fp32.pt").read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest_universal", "made", "own"]
