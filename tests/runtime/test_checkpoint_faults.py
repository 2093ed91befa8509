"""Whatever happens to a checkpoint's files ends in one line on every rank, changes nothing, and leaves the last good one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput
from zeroplan_runtime.checkpoint import atomic_files

_RANKS = 3


def engine_of(group: dist.ProcessGroup, seed: int = 0, **changes: Any) -> zeroplan_runtime.Engine:
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
    config = ds_config(2, "bf16", **{**schedule, **changes})
    return zeroplan_runtime.initialize(model=models.make(seed), config=config, group=group, device="cpu")[0]


def go_on(engine: zeroplan_runtime.Engine, steps: int) -> None:
    for number in range(steps):
        engine.backward(engine(models.batch(number, 0, engine.global_rank)))
        engine.step()


def digest(engine: zeroplan_runtime.Engine) -> str:
    """Of all that a checkpoint holds of this rank."""
    units = engine.model_states.units
    tensors = [one for unit in units for one in (unit.master, unit.param_16bit, *unit.optim_states.values()) if one is not None]
    sums = hashlib.sha256()
    for one in tensors:
        sums.update(one.contiguous().view(torch.uint8).numpy().tobytes())
    sums.update(json.dumps(engine.progress.state_dict()).encode())
    return sums.hexdigest()


def flip(path: Path, at: float) -> None:
    """Flips one bit."""
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 4
    path.write_bytes(data)


def cut(path: Path, keep: int) -> None:
    os.truncate(path, keep)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def edit(path: Path, key: str, value: Any) -> None:
    state = json.loads(path.read_text())
    state[key] = value
    if value is None:
        del state[key]
    path.write_text(json.dumps(state, indent=1))


DAMAGED = r"is damaged"
#: What is done to the checkpoint of step 4 (its folder, then that of step 2, then another run's of step 4), and what is said.
FAULTS: dict[str, tuple[Callable[[Path, Path, Path], object], str]] = {
    "bit in a piece": (lambda c, *_: flip(c / "__1_0.distcp", 0.5), r"__1_0.distcp: is damaged: bytes .* rank 1 wrote"),
    "bit in the last piece": (lambda c, *_: flip(c / "__2_0.distcp", 0.999), r"__2_0.distcp: is damaged: bytes"),
    "bit in the first line": (lambda c, *_: flip(c / "__0_0.distcp", 5e-5), r"__0_0.distcp: is not what rank 0 wrote.*damaged"),
    "bit in the state": (lambda c, *_: flip(c / "state.json", 0.6), r"state.json: is damaged"),
    "bit in the checksums": (lambda c, *_: flip(c / "checksums.json", 0.3), r"checksums.json: is damaged"),
    "bit in the metadata": (lambda c, *_: flip(c / ".metadata", 0.4), r"\.metadata: is damaged"),
    "cut piece": (
        lambda c, *_: cut(c / "__1_0.distcp", 1000),
        r"cut off: it has 1,000 bytes, rank 1 wrote [\d,]+ \(on rank 1\)",
    ),
    "empty piece": (lambda c, *_: cut(c / "__1_0.distcp", 0), r"cut off: it has 0 bytes, rank 1 wrote"),
    "cut state": (lambda c, *_: cut(c / "state.json", 200), r"state.json: is damaged: is not JSON"),
    "empty state": (lambda c, *_: cut(c / "state.json", 0), r"state.json: is damaged"),
    "cut metadata": (lambda c, *_: cut(c / ".metadata", 100), r"\.metadata: is damaged"),
    "missing piece": (lambda c, *_: (c / "__2_0.distcp").unlink(), r"__2_0.distcp: no such file; rank 2 wrote it"),
    "missing metadata": (lambda c, *_: (c / ".metadata").unlink(), r"\.metadata: no such file"),
    "missing checksums": (lambda c, *_: (c / "checksums.json").unlink(), r"checksums.json: no such file"),
    "missing state": (lambda c, *_: (c / "state.json").unlink(), r"'global_step4' is not whole: it has no state.json"),
    "piece of another step": (
        lambda c, before, _: shutil.copy(before / "__1_0.distcp", c),
        r"__1_0.distcp: is not what rank 1 wrote at step 4: it is of rank 1 at step 2 of another checkpoint",
    ),
    "piece of another run": (
        lambda c, _, run: shutil.copy(run / "__1_0.distcp", c),
        r"__1_0.distcp: is not what rank 1 wrote at step 4: it is of rank 1 at step 4 of another checkpoint",
    ),
    "piece of another rank": (lambda c, *_: shutil.copy(c / "__0_0.distcp", c / "__1_0.distcp"), r"it is of rank 0 at step 4"),
    "state of another step": (lambda c, before, _: shutil.copy(before / "state.json", c), r"of another checkpoint than state"),
    "metadata of another run": (lambda c, _, run: shutil.copy(run / ".metadata", c), r"\.metadata: is damaged, or of another"),
    "edited state": (lambda c, *_: edit(c / "state.json", "stage", 3), r"state.json: is damaged, or was changed after"),
    "key taken out": (lambda c, *_: edit(c / "state.json", "progress", None), r"state.json: is damaged, or was changed after"),
    "other format": (lambda c, *_: edit(c / "state.json", "format", 1), r"state.json: has format 1, not 2"),
    "no state at all": (lambda c, *_: (c / "state.json").write_text("[1]"), r"is not the state of a checkpoint"),
    "folder as piece": (lambda c, *_: folder_instead(c / "__1_0.distcp"), r"is a folder, not a file; rank 1 wrote it"),
    "folder as state": (lambda c, *_: folder_instead(c / "state.json"), r"state.json: is a folder, not a file"),
    "link as piece": (lambda c, *_: link_to_nothing(c / "__1_0.distcp"), r"__1_0.distcp: no such file; rank 1 wrote it"),
    "link as state": (lambda c, *_: link_to_nothing(c / "state.json"), r"state.json: no such file"),
    "pipe as piece": (lambda c, *_: pipe_instead(c / "__1_0.distcp"), r"is a pipe, not a file"),
    "folder as latest": (lambda c, *_: folder_instead(c.parent / "latest"), r"latest: is a folder, not a file"),
    "link as latest": (lambda c, *_: link_to_nothing(c.parent / "latest"), r"latest: no such file"),
    "nonsense in latest": (lambda c, *_: (c.parent / "latest").write_bytes(b"\xff../x"), r"latest: .* is not a name"),
    "latest names none": (lambda c, *_: (c.parent / "latest").write_text("step99"), r"there is no checkpoint 'step99'"),
    "no folder": (lambda c, *_: (shutil.rmtree(c.parent), c.parent.write_text("")), r"checkpoints: is no folder"),
    "folder is a link": (lambda c, *_: (shutil.rmtree(c.parent), c.parent.symlink_to("nowhere")), r"is a link to nothing"),
}


def load_each(group: dist.ProcessGroup, base: str) -> dict[str, Any]:
    """What this rank is told of each fault, and whether it is as before; then the last good checkpoint is loaded."""
    kept, run, folder = (Path(base) / name for name in ("kept", "run", "checkpoints"))
    other = engine_of(group, seed=5)
    go_on(other, 4)
    other.save_checkpoint(run)
    other.destroy()
    engine = engine_of(group)
    go_on(engine, 2)
    engine.save_checkpoint(kept)
    saved = digest(engine)
    go_on(engine, 2)
    engine.save_checkpoint(kept, client_state={"epoch": 1})
    go_on(engine, 1)
    before, found = digest(engine), {}
    for name, (fault, _) in FAULTS.items():
        if dist.get_rank(group) == 0:
            shutil.copytree(kept, folder)
            fault(folder / "global_step4", kept / "global_step2", run / "global_step4")
        dist.barrier(group)
        try:
            engine.load_checkpoint(folder)
            said = "loaded"
        except BadInput as error:
            said = str(error)
        found[name] = (said, digest(engine) == before)
        dist.barrier(group)
        if dist.get_rank(group) == 0:
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    engine.load_checkpoint(kept, tag="global_step2")
    found["last good"] = ("", digest(engine) == saved)
    go_on(engine, 1)
    return found


def test_every_fault_of_a_checkpoint_is_one_line_on_every_rank_and_changes_nothing(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_RANKS, load_each, str(tmp_path))
    for name, (_, said) in FAULTS.items():
        told = [result[name][0] for result in results]
        assert all(re.search(said, one) for one in told), (name, told)
        assert all("\n" not in one and "on " in one for one in told), (name, told)
        assert len(set(told)) == 1, (name, told)  # every rank says the same
        assert all(result[name][1] for result in results), name
    assert "load another checkpoint, such as tag='global_step2'" in results[0]["cut piece"][0]
    assert [result["last good"][1] for result in results] == [True] * _RANKS


def save_each(group: dist.ProcessGroup, base: str) -> dict[str, Any]:
    """What this rank is told when a save cannot be; the engine trains on, and saves where it can."""
    rank, folder = dist.get_rank(group), Path(base) / "checkpoints"
    engine = engine_of(group)
    go_on(engine, 1)
    engine.save_checkpoint(folder, tag="good")
    go_on(engine, 1)
    found: dict[str, str] = {}
    begin = atomic_files.begin

    def attempt(name: str, where: Path | str = folder, **options: Any) -> None:
        dist.barrier(group)
        try:
            engine.save_checkpoint(where, **options)
            found[name] = "saved"
        except BadInput as error:
            found[name] = str(error)

    def on_full_disk(folder: Path, tag: str) -> Path:
        path = begin(folder, tag)
        (path / "__1_0.distcp").symlink_to("/dev/full")
        return path

    if rank == 0:
        (folder / "a_file").write_text("mine")
        (folder / "a_link").symlink_to("nowhere")
        (Path(base) / "no_folder").write_text("mine")
    attempt("long tag", tag="x" * 300)
    attempt("path as tag", tag="a/b")
    attempt("no text", tag=4)
    attempt("other tags", tag=f"of_rank_{rank}")
    attempt("file as checkpoint", tag="a_file")
    attempt("link as checkpoint", tag="a_link")
    attempt("file as folder", Path(base) / "no_folder")
    attempt("folders of their own", Path(base) / f"of_rank_{rank}")
    attempt("one rank's state", client_state={"x": object()} if rank == 2 else None)
    attempt("too deep", client_state={"x": json.loads("[" * 80 + "]" * 80)})
    atomic_files.begin = on_full_disk
    attempt("full disk", tag="full")
    atomic_files.begin = begin
    found["left"] = " ".join(sorted(path.name for path in folder.iterdir()))
    found["mine"] = (folder / "a_file").read_text() + (Path(base) / "no_folder").read_text()
    step, _ = engine.load_checkpoint(folder)
    found["loaded"] = str(step)
    attempt("again", tag="full")
    return found


def test_every_fault_of_a_save_is_one_line_on_every_rank_and_loses_nothing(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_RANKS, save_each, str(tmp_path))
    expected = {
        "long tag": "a tag of 300 bytes is too long for a folder's name (on all ranks); use at most 200",
        "path as tag": "'a/b' is not a name (on all ranks)",
        "no text": "a int is no tag (on all ranks)",
        "other tags": "rank 1 saves 'of_rank_1', rank 0 saves 'of_rank_0'",
        "file as checkpoint": "a_file: is no folder, so a checkpoint cannot replace it (on rank 0); use another tag",
        "link as checkpoint": "a_link: is no folder, so a checkpoint cannot replace it (on rank 0); use another tag",
        "file as folder": "no_folder: is no folder (on rank 0)",
        "folders of their own": "does not see the folder that rank 0 has made (on rank 1); give a folder on a file system",
        "one rank's state": "which would not come back as it is (on rank 2)",
        "too deep": "is nested deeper than 64 levels (on rank 0)",
        "full disk": "__1_0.distcp: No space left on device (on rank 1); free space on that disk, or save to another",
        "left": "a_file a_link good latest",
        "mine": "minemine",
        "loaded": str(tmp_path / "checkpoints" / "good"),
        "again": "saved",
    }
    for name, said in expected.items():
        assert all(said in result[name] and "\n" not in result[name] for result in results), (name, [r[name] for r in results])


def test_a_schedule_that_does_not_take_the_state_is_one_line(pool: RankPool, tmp_path: Path) -> None:
    said, after, loaded = pool.run(1, other_schedule, str(tmp_path))[0]
    assert "Other does not take the checkpoint's state (KeyError: 'mine'); give the schedule that was saved" in said
    assert "engine: the last load failed half-way" in after
    assert loaded


class Other:
    """A schedule of the user's own."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"mine": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["mine"] == 1


def other_schedule(group: dist.ProcessGroup, folder: str) -> tuple[str, str, bool]:
    engine = engine_of(group)
    go_on(engine, 1)
    engine.save_checkpoint(folder)
    engine.lr_scheduler = Other()
    with pytest.raises(BadInput) as said:
        engine.load_checkpoint(folder)
    with pytest.raises(BadInput) as after:
        engine(models.batch(0, 0, 0))
    path, _ = engine.load_checkpoint(folder, load_lr_scheduler_states=False)
    go_on(engine, 1)
    return str(said.value), str(after.value), path is not None


def test_a_deeper_models_checkpoint_is_refused(pool: RankPool, tmp_path: Path) -> None:
    """A shallower one would be loaded in part, without a word."""
    assert "the checkpoint has 'master/blocks.5." in pool.run(1, deeper, str(tmp_path))[0]


def deeper(group: dist.ProcessGroup, folder: str) -> str:
    zeroplan_runtime.initialize(model=models.make(depth=6), config=ds_config(1), group=group, device="cpu")[0].save_checkpoint(
        folder
    )
    engine = zeroplan_runtime.initialize(model=models.make(), config=ds_config(1), group=group, device="cpu")[0]
    with pytest.raises(BadInput) as said:
        engine.load_checkpoint(folder)
    return str(said.value)
