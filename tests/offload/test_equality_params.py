"""Parameters in files: the bits of training on the device, what is read ahead, checkpoints, and what a bad disk does."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroplan_runtime
from tests.offload.test_equality import assert_equal, pair, ranks_and_more
from tests.offload.test_host_checkpoint import HOST, RESIDENT, resume, save
from tests.offload.test_params import train_frozen, train_shared
from tests.patience import PATIENCE
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.test_checkpoint import go_on
from tests.runtime.test_options import freeze
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput
from zeroplan_runtime.offload import swap_file
from zeroplan_runtime.offload.io import DiskFault
from zeroplan_runtime.offload.param_swapper import ParamSwapper

MEMORY = {"nvme_in_memory": True}  # wherever the tests' folder may be


def section(folder: Path, optimizer: str = "nvme", **keys: Any) -> dict[str, Any]:
    """Parameters in files, the optimizer there or on the host; `keys` are offload_param's."""
    disk = {"device": "nvme", "nvme_path": str(folder)}
    states = disk if optimizer == "nvme" else {"device": optimizer}
    return {"stage": 3, "offload_optimizer": states, "offload_param": {**disk, "max_in_cpu": 0, **keys}}


def in_files(zero: dict[str, Any], dtype: str, **changes: Any) -> list[dict[str, Any]]:
    """The same training on the device and with parameters in files."""
    resident, offloaded = pair(3, dtype, param=True, **changes)
    return [resident, {**offloaded, "zero_optimization": zero, "zeroplan": {**offloaded["zeroplan"], **MEMORY}}]


def engine_on(zero: dict[str, Any], model: torch.nn.Module | None = None, **changes: Any) -> zeroplan_runtime.Engine:
    config = {**ds_config(0, "bf16"), "zero_optimization": zero, "zeroplan": {"wide_numel": 500, **MEMORY}, **changes}
    engine, *_ = zeroplan_runtime.initialize(model=model or models.make(), config=config, device="cpu")
    return engine


@ranks_and_more(1, 2, 3)
def test_equal_to_training_on_the_device(pool: RankPool, tmp_path: Path, ranks: int) -> None:
    several = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 2}
    wide = {**several, "data_types": {"grad_accum_dtype": "fp32"}}
    dtypes = ("bf16", "fp32", "fp16")[: 4 - ranks]
    cases = [in_files(section(tmp_path, optimizer), dtype) for optimizer in ("cpu", "nvme") for dtype in dtypes]
    cases += [in_files(section(tmp_path, optimizer), "bf16", **several) for optimizer in ("cpu", "nvme")]
    mixed = len(cases)
    cases.append(in_files(section(tmp_path, "cpu", max_in_cpu=4000 // ranks, buffer_count=1), "fp32", gradient_clipping=0.5))
    cases.append(in_files(section(tmp_path, max_in_cpu=4000 // ranks, buffer_size=2048, buffer_count=2), "bf16"))
    if ranks > 1:  # alone, a resident rank sums in fp32 from the first product on
        cases.append(in_files(section(tmp_path), "bf16", **wide))
    found = assert_equal(pool, ranks, cases)
    for number in range(len(cases)):
        places = [row["place"] for row in found[0][2 * number + 1]["rows"] if row["buffer"] == "param.shard"]
        assert places == sorted(places, key=["pinned", "nvme"].index)  # the forward's first units stay
        assert set(places) == ({"pinned", "nvme"} if number in (mixed, mixed + 1) else {"nvme"})


@pytest.mark.parametrize("model", [{"tied": True, "unused": True, "remat": "plain"}, {"remat": "reentrant"}], ids=str)
def test_other_models(pool: RankPool, tmp_path: Path, model: dict[str, Any]) -> None:
    sgd = {"type": "SGD", "params": {"lr": 1e-2}}
    cases = [in_files(section(tmp_path), "bf16"), in_files(section(tmp_path, "cpu", buffer_count=1), "bf16", optimizer=sgd)]
    assert_equal(pool, 2, cases, model)


def test_overflow_skips_the_same_steps(pool: RankPool, tmp_path: Path) -> None:
    dynamic = {"fp16": {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}}
    cases = [in_files(section(tmp_path, optimizer), "bf16", **dynamic) for optimizer in ("cpu", "nvme")]
    cases = [[{k: v for k, v in config.items() if k != "bf16"} for config in case] for case in cases]
    for rank in assert_equal(pool, 2, cases):
        assert all(found["skipped"] > 0 for found in rank)


@ranks_and_more(1, 2)
def test_frozen_parameters_and_evaluation(pool: RankPool, tmp_path: Path, ranks: int) -> None:
    resident = pool.run(ranks, train_frozen, {"stage": 3})[0]
    for zero in (section(tmp_path), section(tmp_path, "cpu", buffer_size=2048)):
        found = pool.run(ranks, train_frozen, zero)[0]
        assert found["losses"] == resident["losses"]
        assert all(torch.equal(p, found["params"][name]) for name, p in resident["params"].items())
        places = {row["place"] for row in found["rows"] if row["buffer"] in ("param.frozen", "param.shard")}
        assert places == {"nvme"}


def test_blocks_used_several_times(pool: RankPool, tmp_path: Path) -> None:
    resident = pool.run(2, train_shared, {"stage": 3}, True)[0]
    found = pool.run(2, train_shared, section(tmp_path), True)[0]
    assert all(torch.equal(resident[name], p) for name, p in found.items())


# --------------------------------------------------------------------- reading ahead


def watched(engine: zeroplan_runtime.Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[bool], list[str]]:
    """What is brought, whether its reads had been queued before it was asked for, and what was read in vain."""
    brought: list[str] = []
    early: list[bool] = []
    vain: list[str] = []
    params = engine.model_states.nvme.param_swapper
    prefetch, drop = ParamSwapper.prefetch, ParamSwapper._drop

    def fetch(self: ParamSwapper, coming: Any, targets: Any, stream: Any) -> None:
        wanted = list(coming)
        brought.append(wanted[0].unit)
        queue = list(self._queue)
        early.append(bool(queue) and queue[0].batch is self._batches[wanted[0]][0] and queue[0].transfers is not None)
        real(self, iter(wanted), targets, stream)

    def dropped(self: ParamSwapper, begin: int) -> None:
        vain.extend(one.batch.unit for one in list(self._queue)[begin:] if one.transfers is not None)
        drop(self, begin)

    real = ParamSwapper.fetch
    monkeypatch.setattr(ParamSwapper, "fetch", fetch)
    monkeypatch.setattr(ParamSwapper, "_drop", dropped)
    assert params is not None
    assert prefetch is ParamSwapper.prefetch
    return brought, early, vain


def test_units_are_read_once_in_order_and_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(section(tmp_path), gradient_accumulation_steps=2)
    brought, early, vain = watched(engine, monkeypatch)
    blocks = [f"blocks.{i}" for i in range(5)]
    for number in range(4):
        for micro in range(2):
            brought.clear()
            early.clear()
            engine.backward(engine(models.batch(number, micro, 0)))
            engine.step()
            if number:
                # Of the forward's end, the last two blocks and the head lie in their slots when the backward begins; of the
                # backward's end, the first two do when no update came between.
                first = [] if micro else ["root"]
                assert brought[: len(first)] == first
                assert brought[len(first) :] == ["embed", *(blocks[2:] if micro else blocks), "head", *blocks[2::-1]]
                if micro:
                    assert all(early)
    assert vain == []
    with torch.no_grad():  # then again from the front, as no step comes between
        for _ in range(2):
            brought.clear()
            early.clear()
            engine(models.batch(0, 0, 0))
        assert all(early)
    engine.destroy()


def test_a_wrong_guess_costs_reads_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(section(tmp_path, buffer_count=3))
    go_on(engine, 0, 2)
    _, _, vain = watched(engine, monkeypatch)
    engine.drain()
    names = [name for name, _ in engine.full_tensors()]
    loss = engine(models.batch(2, 0, 0))
    assert len(set(vain)) >= 1  # the forward's first units had been expected, then the last ones' backward
    with engine.gathered("blocks.1"):
        inside = engine.model_states.units[3].trainable.params[0].detach().clone()
    engine.backward(loss)
    engine.destroy()
    again = engine_on({"stage": 3})
    go_on(again, 0, 2)
    assert [name for name, _ in again.full_tensors()] == names
    with again.gathered("blocks.1"):
        assert torch.equal(inside, again.model_states.units[3].trainable.params[0])
    assert again(models.batch(2, 0, 0)).item() == loss.item()
    again.destroy()


def test_an_update_that_lingers_frees_nothing_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last writes may end when the next update has been ordered, whose units are then not to be read."""
    engine = engine_on(section(tmp_path, "cpu"))
    params, pipeline = engine.model_states.nvme.param_swapper, engine.model_states.nvme.optimizer_swapper.pipeline
    go_on(engine, 0, 1)
    engine.drain()
    ordered: list[int] = []
    held: list[int] = []
    hold, run = params.block_reads, pipeline.run

    def holding(units: Any) -> None:
        hold(units)
        ordered.append(len(params._blocked))

    def lingering(*groups: Any) -> None:
        held.append(len(params._blocked))
        run(*groups)
        deadline = time.monotonic() + PATIENCE
        while len(held) < 3 and len(ordered) == len(held) and time.monotonic() < deadline:
            time.sleep(0.001)

    monkeypatch.setattr(params, "block_reads", holding)
    monkeypatch.setattr(pipeline, "run", lingering)
    found = go_on(engine, 1, 4)
    engine.drain()
    assert ordered == held == [8] * 3  # all units, each time
    engine.destroy()
    resident = engine_on({"stage": 3})
    go_on(resident, 0, 1)
    assert go_on(resident, 1, 4) == found
    resident.destroy()


# --------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("saved", ["both", pytest.param("host", marks=pytest.mark.long)])
def test_checkpoints(pool: RankPool, tmp_path: Path, saved: str) -> None:
    """Saved from either place, resumed in every place: each place on one number of ranks."""
    both, host = section(tmp_path), section(tmp_path, "cpu", max_in_cpu=2000)
    resumed = {"both": ((1, both), (2, RESIDENT), (1, host)), "host": ((2, both), (1, HOST), (2, host))}
    folder = str(tmp_path / saved)
    expected = pool.run(2, save, folder, {"both": both, "host": host}[saved], "bf16", 0)[0]
    for ranks, another in resumed[saved]:
        assert pool.run(ranks, resume, folder, another, "bf16", 0)[0] == expected, (ranks, another)


def test_frozen_parameters_in_checkpoints(tmp_path: Path) -> None:
    zero = section(tmp_path)
    engine = engine_on(zero, freeze(models.make()))
    go_on(engine, 0, 2)
    engine.save_checkpoint(tmp_path / "saved")
    expected = go_on(engine, 2, 4)
    engine.destroy()
    for another in (zero, section(tmp_path, "cpu"), {"stage": 3}):
        engine = engine_on(another, freeze(models.make(9)))
        go_on(engine, 0, 1)
        engine.load_checkpoint(tmp_path / "saved")
        assert go_on(engine, 2, 4) == expected
        engine.destroy()


def test_export_holds_what_is_in_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    saved = []
    for name, zero in (("files", section(tmp_path)), ("device", {"stage": 3})):
        engine = engine_on(zero)
        go_on(engine, 0, 3)
        engine.save_16bit_model(tmp_path / name)
        engine.destroy()
        saved.append(load_file(tmp_path / name / "model.safetensors"))
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(tensor, saved[1][name]) for name, tensor in saved[0].items())


# --------------------------------------------------------------------- a bad disk


def flip(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(3 * 4096)
        file.write(bytes(255 - byte for byte in path.read_bytes()[3 * 4096 : 3 * 4096 + 64]))


@pytest.mark.parametrize("optimizer", ["cpu", "nvme"])
@pytest.mark.parametrize(
    ("damage", "said"), [(flip, "is corrupted: its checksum is"), (lambda path: os.truncate(path, 4096), "it was truncated")]
)
def test_a_damaged_file_ends_the_run_by_name(tmp_path: Path, optimizer: str, damage: Callable[[Path], None], said: str) -> None:
    engine = engine_on(section(tmp_path, optimizer))
    go_on(engine, 0, 2)
    engine.drain()
    engine.model_states.nvme.param_swapper.drop_prefetch()  # what had been read ahead is well
    damage(engine.model_states.nvme.param_swapper.file.path)
    with pytest.raises(DiskFault) as fault:
        engine(models.batch(2, 0, 0))
    assert said in str(fault.value)
    assert "params.swap" in str(fault.value)
    assert "param.shard'" in str(fault.value)
    assert "resume from the last checkpoint" in str(fault.value)
    engine.destroy()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_failing_write_of_the_update_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(section(tmp_path, "cpu"))
    go_on(engine, 0, 2)
    engine.drain()
    full = os.open("/dev/full", os.O_RDWR)
    file, writes = engine.model_states.nvme.param_swapper.file, threading.local()
    real_write, real_handle = file.write, file.file.handle

    def write(*where: Any, **after: Any) -> Any:
        writes.now = True
        try:
            return real_write(*where, **after)
        finally:
            writes.now = False

    monkeypatch.setattr(file, "write", write)
    monkeypatch.setattr(file.file, "handle", lambda *where: full if getattr(writes, "now", False) else real_handle(*where))
    with pytest.raises((RuntimeError, DiskFault), match=r"writing .*params.swap failed.*No space left"):
        go_on(engine, 2, 4)
    os.close(full)


def test_a_full_disk_is_found_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(handle: int, *_: object) -> None:
        if "states" in os.readlink(f"/proc/self/fd/{handle}"):  # the second of the two
            raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(swap_file.os, "posix_fallocate", fill_up)
    with pytest.raises(BadInput, match=r"states.swap needs [\d,]+ bytes, .*No space left on device"):
        engine_on(section(tmp_path))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_two_folders(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    zero = section(one)
    zero["offload_param"]["nvme_path"] = str(other)
    engine = engine_on(zero)
    go_on(engine, 0, 1)
    found = [[path.name for path in sorted(folder.glob("*/*.swap"))] for folder in (one, other)]
    assert found == [["states.swap"], ["params.swap"]]
    engine.destroy()
    assert list(tmp_path.glob("*/zeroplan_swap*")) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"offload_param": {"device": "nvme"}}, 'add "nvme_path"'),
        ({"offload_param": {"device": "nvme", "nvme_path": ".", "buffer_size": 100}}, "use 2,048 elements or more"),
        ({"offload_param": {"device": "nvme", "nvme_path": ".", "buffer_count": 0}}, "buffer_count 0 is not above 0"),
        ({"offload_param": {"device": "nvme", "nvme_path": "/nowhere", "max_in_cpu": 0}}, "/nowhere is not a folder"),
        ({"offload_optimizer": {"device": "none"}}, "add offload_optimizer with ratio 1"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "parameter offload needs stage 3"),
    ],
)
def test_what_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as fault:
        engine_on({**section(tmp_path), **change})
    assert said in str(fault.value)
    assert "\n" not in str(fault.value)
