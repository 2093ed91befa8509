"""Checkpoints that are written while training goes on: what they hold, and kills and full disks at operations on files."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.arena.owned_buffers import runtime_buffers
from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan_runtime.checkpoint import atomic_files, checksums, manifest

pytestmark = [pytest.mark.torch]


def engine_of(group: Any = None, stage: int = 2, dtype: str = "bf16", *, background: bool = True) -> Any:
    config = ds_config(stage, dtype, zeroplan={"async_checkpoints": background})
    return zeroplan_runtime.initialize(model=models.make(depth=2), config=config, group=group, device="cpu")[0]


def go_on(engine: Any, first: int, steps: int, rank: int = 0) -> None:
    for number in range(first, first + steps):
        engine.backward(engine(models.batch(number, 0, rank)))
        engine.step()


def states(engine: Any) -> list[torch.Tensor]:
    return [
        t.clone() for unit in engine.model_states.units for t in (unit.master, *unit.optim_states.values()) if t is not None
    ]


def save_and_train(group: dist.ProcessGroup, folder: str, stage: int, dtype: str) -> dict[str, Any]:
    """Trains on while the checkpoint is written, as slowly as can be: the thread begins when training is over."""
    rank = dist.get_rank(group)
    engine = engine_of(group, stage, dtype)
    go_on(engine, 0, 2, rank)
    at_save = states(engine)
    gate = threading.Event()
    write = checksums.SummedStream.write

    def late(self: Any, data: Any) -> int:
        gate.wait()
        return write(self, data)

    with mock.patch.object(checksums.SummedStream, "write", late):
        path = engine.save_checkpoint(folder, client_state={"mine": 7})
        assert not path.exists()
        go_on(engine, 2, 3, rank)
        gate.set()
        engine.wait_for_checkpoint()
    after = states(engine)
    losses = [float(engine(models.batch(9, 0, rank)))]
    rows = {row["unit"]: row["peak"] for row in engine.arena.measurement() if row["buffer"] == "host.checkpoint"}
    planned = [row.bytes for row in runtime_buffers(engine.model_states.layout) if row.buffer is Buffer.HOST_CHECKPOINT]
    other = engine_of(group, stage, dtype, background=False)
    _, client = other.load_checkpoint(folder)
    loaded = states(other)
    go_on(other, 2, 3, rank)
    losses.append(float(other(models.batch(9, 0, rank))))
    return {
        "held": all(map(torch.equal, loaded, at_save)),
        "moved": not all(map(torch.equal, after, at_save)),
        "losses": losses,
        "client": client,
        "files": sorted(one.name for one in path.iterdir()),
        "memory": (rows, planned),
    }


@pytest.mark.parametrize(("ranks", "stage", "dtype"), [(1, 0, "fp32"), (1, 2, "bf16"), (2, 3, "bf16"), (2, 1, "fp32")])
def test_it_holds_the_states_of_the_call(pool: RankPool, tmp_path: Path, ranks: int, stage: int, dtype: str) -> None:
    for found in pool.run(ranks, save_and_train, str(tmp_path), stage, dtype):
        assert found["held"]
        assert found["moved"]
        assert found["losses"][0] == found["losses"][1]
        assert found["client"] == {"mine": 7}
        assert found["files"] == [".metadata", *(f"__{r}_0.distcp" for r in range(ranks)), "checksums.json", "state.json"]
        rows, planned = found["memory"]
        assert list(rows.values()) == planned


class Operations:
    """Calls `at` before the operation on files number `number`, and counts them."""

    def __init__(self, number: int, at: Callable[[], None]) -> None:
        self.number, self.at, self.count = number, at, 0
        self._lock = threading.Lock()

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                number, self.count = self.count, self.count + 1
            if number == self.number:
                self.at()
            return function(*args, **kwargs)

        return call

    @contextmanager
    def counted(self) -> Iterator[None]:
        """The context in which they are counted: folders, opened files, writes, flushes, renames and removals."""
        places: tuple[tuple[Any, str], ...] = (
            (Path, "mkdir"),
            (Path, "touch"),
            (Path, "unlink"),
            (os, "fsync"),
            (os, "rename"),
            (os, "replace"),
            (atomic_files, "write_durably"),
            (manifest, "write_durably"),
        )
        patches = [mock.patch.object(owner, name, self.before(getattr(owner, name))) for owner, name in places]
        made, operations = checksums.SummedStream.__init__, self

        def init(stream: Any, file: Any, moved: Any) -> None:
            made(stream, mock.Mock(wraps=file, write=operations.before(file.write)), moved)

        patches.append(mock.patch.object(checksums.SummedStream, "__init__", init))
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def count_operations(engine: Any, folder: Path) -> int:
    operations = Operations(-1, full)
    with operations.counted():
        engine.save_checkpoint(folder, tag="counted")
        engine.wait_for_checkpoint()
    return operations.count


def places(total: int) -> list[int]:
    """The operations that are tried: all at the beginning and the end, and some of torch.save's many small writes between."""
    return sorted({*range(min(12, total)), *range(0, total, 211), *range(max(total - 28, 0), total)})


@pytest.mark.long
def test_a_full_disk_at_any_operation_loses_no_checkpoint(tmp_path: Path) -> None:
    engine = engine_of()
    go_on(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="good")
    engine.wait_for_checkpoint()
    good = states(engine)
    total = count_operations(engine, tmp_path / "other")
    assert total > 20
    failed, there = 0, engine_of(background=False)
    for number in places(total):
        go_on(engine, 1, 1)
        operations = Operations(number, full)
        with operations.counted():
            try:
                engine.save_checkpoint(tmp_path, tag="next")
                engine.wait_for_checkpoint()
            except BadInput as fault:
                assert "No space left on device" in str(fault)
                assert "\n" not in str(fault)
                failed += 1
        tag = None if failed and (tmp_path / "latest").read_text() == "good" else "good"
        there.load_checkpoint(tmp_path, tag)
        assert all(map(torch.equal, states(there), good))
        if (tmp_path / "next").exists():  # complete, whatever failed after its name
            there.load_checkpoint(tmp_path, "next")
        assert not atomic_files.unfinished(tmp_path, "next").exists(), number
    assert failed >= len(places(total)) - 3
    engine.save_checkpoint(tmp_path, tag="next")
    engine.destroy()
    assert atomic_files.find(tmp_path, None) == tmp_path / "next"


@pytest.mark.long
def test_a_kill_at_any_operation_loses_no_checkpoint(tmp_path: Path) -> None:
    """The process ends at once, in whichever thread; the checkpoint of the same tag, too, stays until the new one is whole."""
    engine = engine_of()
    go_on(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="good")
    engine.wait_for_checkpoint()
    good = states(engine)
    total = count_operations(engine, tmp_path / "other")
    go_on(engine, 1, 1)
    new = states(engine)
    seen, there = set(), engine_of(background=False)
    for number in places(total):
        child = os.fork()
        if not child:
            try:
                own = engine_of()  # pinned memory is no child's
                own.load_checkpoint(tmp_path)
                go_on(own, 1, 1)
                with Operations(number, lambda: os._exit(9)).counted():
                    own.save_checkpoint(tmp_path, tag="good")
                    own.wait_for_checkpoint()
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        there.load_checkpoint(tmp_path)
        found = states(there)
        old = all(map(torch.equal, found, good))
        assert old or all(map(torch.equal, found, new)), number
        seen.add((os.waitstatus_to_exitcode(status), old))
        if not old:
            break  # from here on the new one is there
    assert (9, True) in seen
    engine.destroy()


def fill(group: dist.ProcessGroup, folder: str) -> list[str]:
    rank = dist.get_rank(group)
    engine = engine_of(group, 3)
    go_on(engine, 0, 1, rank)
    engine.save_checkpoint(folder, tag="good")
    begin, found = atomic_files.begin, []

    def on_full_disk(base: Path, tag: str) -> Path:
        path = begin(base, tag)
        (path / "__1_0.distcp").symlink_to("/dev/full")
        return path

    engine.wait_for_checkpoint()
    with mock.patch.object(atomic_files, "begin", on_full_disk):
        engine.save_checkpoint(folder, tag="next")
        go_on(engine, 1, 1, rank)
        try:
            engine.save_checkpoint(folder, tag="later")  # waits for the one before
        except BadInput as fault:
            found.append(str(fault))
    engine.save_checkpoint(folder, tag="later")
    engine.destroy()
    return [*found, *sorted(one.name for one in Path(folder).iterdir())]


def test_one_ranks_full_disk_is_told_on_all_and_the_next_save_works(pool: RankPool, tmp_path: Path) -> None:
    for found in pool.run(2, fill, str(tmp_path)):
        assert "__1_0.distcp: No space left on device (on rank 1); free space on that disk" in found[0]
        assert found[1:] == ["good", "later", "latest"]


def test_states_in_files_are_refused(tmp_path: Path) -> None:
    config = ds_config(3, "bf16", zeroplan={"async_checkpoints": True, "nvme_in_memory": True})
    config["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    with pytest.raises(BadInput, match="what is in swap files is not copied to memory for a checkpoint"):
        zeroplan_runtime.initialize(model=models.make(), config=config, device="cpu")


def test_a_byte_that_changed_in_any_file_is_refused_and_the_one_before_loads(tmp_path: Path) -> None:
    engine = engine_of()
    go_on(engine, 0, 1)
    for tag in ("before", "damaged"):
        path = engine.save_checkpoint(tmp_path, tag=tag)
        go_on(engine, 1, 1)
        engine.wait_for_checkpoint()
    at_start = states(engine)
    files = sorted(path.iterdir())
    assert len(files) == 4
    for file in files:
        whole = file.read_bytes()
        for place in {0, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x11]) + whole[place + 1 :])
            with pytest.raises(BadInput) as fault:
                engine.load_checkpoint(tmp_path, tag="damaged")
            assert "\n" not in str(fault.value)
            assert all(map(torch.equal, states(engine), at_start)), (file.name, place)
        file.write_bytes(whole)
    engine.load_checkpoint(tmp_path, tag="before")
    engine.load_checkpoint(tmp_path, tag="damaged")
