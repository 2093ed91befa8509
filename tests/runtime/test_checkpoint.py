"""Checkpoints resume on another number of ranks and another stage, and are either whole or not there."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import time
import weakref
import zlib
from dataclasses import replace
from enum import Enum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import CONTEXT, RankPool
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput
from zeroplan_runtime.checkpoint.atomic_files import find
from zeroplan_runtime.checkpoint.manifest import read_manifest, read_state, write_manifest

SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_min_lr": 1e-3}}}


def start(group: dist.ProcessGroup, stage: int, dtype: str, seed: int = 0, **changes: Any) -> zeroplan_runtime.Engine:
    config = ds_config(stage, dtype, **SCHEDULE, **changes)
    engine, *_ = zeroplan_runtime.initialize(model=models.make(seed), config=config, group=group, device="cpu")
    return engine


def go_on(engine: zeroplan_runtime.Engine, first: int, last: int) -> list[float]:
    """Every rank sees the same tokens, so that the mean over any number of ranks is the same up to rounding."""
    losses = []
    for number in range(first, last):
        losses.append(engine.backward(engine(models.batch(number, 0, 0))).item())
        engine.step()
    return losses


def save(group: dist.ProcessGroup, folder: str, stage: int, dtype: str) -> list[float]:
    engine = start(group, stage, dtype)
    go_on(engine, 0, 4)
    engine.save_checkpoint(folder, client_state={"epoch": 3, "names": ["a", "b"]})
    return go_on(engine, 4, 8)


def resume(group: dist.ProcessGroup, folder: str, stage: int, dtype: str) -> dict[str, Any]:
    engine = start(group, stage, dtype, seed=9)
    path, client = engine.load_checkpoint(folder)
    at = (engine.global_steps, engine.get_lr()[0], engine.loss_scale)
    return {"losses": go_on(engine, 4, 8), "path": path, "client": client, "at": at}


@pytest.mark.parametrize(
    ("ranks", "stage", "dtype"),
    [
        (2, 3, "fp32"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 0, "fp16"), (3, 2, "bf16"), (2, 1, "fp32"))),
    ],
)
def test_resume_on_other_ranks_and_stages(pool: RankPool, tmp_path: Path, ranks: int, stage: int, dtype: str) -> None:
    expected = pool.run(ranks, save, str(tmp_path), stage, dtype)[0]
    assert (tmp_path / "latest").read_text() == "global_step4"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step4", "latest"]
    for others, another in ((1, 3), (3, 3), (2, 0), (4, 1), (2, 2), (ranks, stage)):
        result = pool.run(others, resume, str(tmp_path), another, dtype)[0]
        # Equal where the ranks add alike; three or four add bf16 in another order than two.
        bound = (
            0.0
            if {ranks, others} <= {1, 2} or (others, another) == (ranks, stage)
            else {"fp32": 2e-6, "bf16": 1e-2, "fp16": 1e-3}[dtype]
        )
        assert result["losses"] == pytest.approx(expected, abs=bound), (others, another)
        assert result["client"] == {"epoch": 3, "names": ["a", "b"]}
        assert result["at"][0] == 4
        assert result["at"][1] > 1e-3
        assert result["at"][2] == (1024 if dtype == "fp16" else 1)


def resume_with_other_optimizer(group: dist.ProcessGroup, folder: str) -> tuple[str, int, bool]:
    engine = start(group, 2, "fp32", seed=9, optimizer={"type": "Lion", "params": {"lr": 1e-3}})
    try:
        engine.load_checkpoint(folder)
    except BadInput as fault:
        said = str(fault)
    engine.load_checkpoint(folder, load_module_only=True)
    return said, engine.global_steps, bool((engine.model_states.units[1].optim_states["optim.exp_avg"] == 0).all())


def test_parameters_alone_for_another_optimizer(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, save, str(tmp_path), 3, "fp32")
    said, steps, fresh = pool.run(2, resume_with_other_optimizer, str(tmp_path))[0]
    assert "the checkpoint's optimizer is adamw, not lion" in said
    assert (steps, fresh) == (0, True)


def single(folder: Path, **model: Any) -> zeroplan_runtime.Engine:
    engine, *_ = zeroplan_runtime.initialize(model=models.make(**model), config=ds_config(2), device="cpu")
    return engine


def test_nothing_to_load(tmp_path: Path) -> None:
    engine = single(tmp_path)
    assert engine.load_checkpoint(tmp_path) == (None, {})
    with pytest.raises(BadInput, match="there is no checkpoint 'step9'"):
        engine.load_checkpoint(tmp_path, tag="step9")
    with pytest.raises(BadInput, match="is not a name"):
        engine.save_checkpoint(tmp_path, tag="../up")
    with pytest.raises(BadInput, match="would not come back as it is"):
        engine.save_checkpoint(tmp_path, client_state={"x": object()})
    assert not (tmp_path / "latest").exists()


def test_another_model_is_refused_by_the_parameters_name(tmp_path: Path) -> None:
    single(tmp_path).save_checkpoint(tmp_path)
    with pytest.raises(BadInput, match=r"the checkpoint has no 'master/blocks\.5"):
        single(tmp_path, depth=6).load_checkpoint(tmp_path)


class Trap:
    def __init__(self, call: Any, *given: Any) -> None:
        self.made = (call, given)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.made


@pytest.mark.parametrize(
    ("trap", "said"),
    [(Trap(os.system, "touch sprung"), r"posix\.system"), (Trap(getattr, Metadata, "__init__"), r"builtins\.getattr")],
    ids=["call", "attribute"],
)
def test_a_foreign_pickle_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: Trap, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    single(tmp_path).save_checkpoint(tmp_path)
    folder, data = tmp_path / "global_step0", pickle.dumps(trap)
    state = read_state(folder)
    manifest = replace(read_manifest(folder, state), metadata=(len(data), zlib.crc32(data)))  # as an attacker would
    write_manifest(folder, manifest, state)
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(BadInput, match=f"it names {said}"):
        single(tmp_path).load_checkpoint(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_an_older_python_names_members_of_enums_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.0 to 3.11.3, Debian 12's among them, pickle a member as an attribute of its enum."""
    monkeypatch.setattr(Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    engine = single(tmp_path)
    engine.save_checkpoint(tmp_path, client_state={"n": 1})
    assert b"getattr" in (tmp_path / "global_step0" / ".metadata").read_bytes()
    assert engine.load_checkpoint(tmp_path)[1] == {"n": 1}


def test_saving_again_under_the_same_name(tmp_path: Path) -> None:
    engine = single(tmp_path)
    engine.save_checkpoint(tmp_path, tag="best", client_state={"n": 1})
    engine.save_checkpoint(tmp_path, tag="best", client_state={"n": 2})
    assert engine.load_checkpoint(tmp_path)[1] == {"n": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "latest"]
    # Killed between the two renames: the older one is found.
    os.rename(tmp_path / "best", tmp_path / ".best.replaced")
    assert find(tmp_path, "best") == tmp_path / ".best.replaced"


def save_for_ever(folder: Path, tag: str | None, told: Connection) -> None:
    """Tells the number of each step once its checkpoint is there."""
    engine = single(folder, depth=24)
    for number in range(10_000):
        engine.backward(engine(models.batch(number, 0, 0)))
        engine.step()
        engine.save_checkpoint(folder, tag=tag, client_state={"number": number})
        told.send(number)


@pytest.mark.long
@pytest.mark.parametrize("tag", [None, "same"], ids=["new_names", "same_name"])
def test_a_kill_at_any_moment_leaves_the_last_good_one(tmp_path: Path, tag: str | None) -> None:
    draw = random.Random(7)
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        listen, tell = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=save_for_ever, args=(folder, tag, tell))
        process.start()
        tell.close()
        told = [listen.recv()]
        time.sleep(draw.uniform(0.02, 0.5))
        process.kill()
        with contextlib.suppress(EOFError, OSError):
            while True:
                told.append(listen.recv())
        process.join()
        engine = single(folder, depth=24)
        path, client = engine.load_checkpoint(folder)
        # The last that was reported, or the next if the kill came between its end and its report.
        assert client["number"] in (told[-1], told[-1] + 1)
        assert engine.global_steps == client["number"] + 1
        assert path is not None
        plain = models.Plain(models.make(depth=24), lambda p: models.RoundedAdamW(p, lr=1e-2, weight_decay=0.1))
        for number in range(engine.global_steps):
            plain.step(number)
        state = engine.module_state_dict()
        assert state is not None
        assert all((state[name] == p).all() for name, p in plain.model.state_dict().items())
        assert json.loads((Path(path) / "state.json").read_text())["progress"]["global_steps"] == engine.global_steps


def test_buffers_are_kept(tmp_path: Path) -> None:
    def build() -> zeroplan_runtime.Engine:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        return zeroplan_runtime.initialize(model=model, config=ds_config(1), device="cpu")[0]

    engine = build()
    engine.backward(engine(torch.randn(8, 4)).square().mean())
    engine.step()
    engine.save_checkpoint(tmp_path)
    again = build()
    again.load_checkpoint(tmp_path)
    assert (again.module[1].running_mean == engine.module[1].running_mean).all()
    assert int(again.module[1].num_batches_tracked) == 1


def test_saving_holds_one_piece_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own writer would hold all of them until the file is whole."""
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=ds_config(2, "bf16"), device="cpu")
    go_on(engine, 0, 1)
    held: list[Any] = []
    most: list[int] = []
    plain = torch.save

    def note(tensor: torch.Tensor, stream: Any) -> None:
        held.append(weakref.ref(tensor.untyped_storage()))
        most.append(sum(one() is not None for one in held))
        plain(tensor, stream)

    monkeypatch.setattr(torch, "save", note)
    engine.save_checkpoint(tmp_path)
    trained = sum(1 for _ in engine.module.parameters())
    assert len(held) == 3 * trained  # masters and two moments
    assert max(most) == 1


def test_loading_holds_one_piece_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank needs the memory of the largest piece beside its states, not that of the states once more."""
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=ds_config(2, "bf16"), device="cpu")
    go_on(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    held: list[Any] = []
    most: list[int] = []
    plain = torch.load

    def note(*args: Any, **kwargs: Any) -> Any:
        piece = plain(*args, **kwargs)
        held.append(weakref.ref(piece.untyped_storage()))
        most.append(sum(one() is not None for one in held))
        return piece

    monkeypatch.setattr(torch, "load", note)
    engine.load_checkpoint(tmp_path)
    assert len(held) == 3 * sum(1 for _ in engine.module.parameters())
    assert max(most) == 1
