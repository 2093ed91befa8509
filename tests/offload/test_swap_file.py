"""Swap files and their folder: what is lost on the disk is found, named, and never taken for data."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.offload.test_io import aligned, noise
from zeroplan.core.errors import BadInput
from zeroplan_runtime.offload import disk_probe, swap_file
from zeroplan_runtime.offload.disk_probe import probe_folder
from zeroplan_runtime.offload.io import DiskFault, IoEngine
from zeroplan_runtime.offload.swap_file import SwapFile
from zeroplan_runtime.offload.swap_folder import SwapFolder

BLOCKS = {"embed/exp_avg": 10_000, "block.0/exp_avg": 8192, "head/exp_avg": 1}


@pytest.fixture(scope="module")
def engine() -> Iterator[IoEngine]:
    with IoEngine() as made:
        yield made


@pytest.fixture
def swap(engine: IoEngine, tmp_path: Path) -> SwapFile:
    """A file with all blocks written."""
    made = SwapFile.create(tmp_path / "states.swap", BLOCKS, engine)
    for seed, (name, size) in enumerate(BLOCKS.items()):
        made.finish(made.write(name, noise(size, seed)))
    return made


def read(swap: SwapFile, name: str) -> torch.Tensor:
    into = aligned(swap.stored_bytes(name))
    swap.finish(swap.read(name, into))
    return into


def test_every_byte_is_reserved(swap: SwapFile) -> None:
    """Blocks begin on pages; the disk holds the whole file before the first write."""
    assert swap.bytes == 3 * 4096 + 2 * 4096 + 4096
    stat = swap.path.stat()
    assert stat.st_size == swap.bytes
    assert stat.st_blocks * 512 >= swap.bytes


def test_round_trip(swap: SwapFile) -> None:
    for seed, (name, size) in enumerate(BLOCKS.items()):
        assert torch.equal(read(swap, name), noise(size, seed))


def test_corruption_is_named(swap: SwapFile) -> None:
    with open(swap.path, "r+b") as stream:
        stream.seek(3 * 4096 + 100)
        byte = stream.read(1)[0]
        stream.seek(3 * 4096 + 100)
        stream.write(bytes([byte ^ 1]))
    assert torch.equal(read(swap, "embed/exp_avg"), noise(10_000, 0))  # the others are well
    with pytest.raises(DiskFault, match=r"block 'block.0/exp_avg' of .*states.swap \(bytes 12,288 to 20,480\) is corrupted"):
        read(swap, "block.0/exp_avg")


def test_truncation_is_named(swap: SwapFile) -> None:
    os.truncate(swap.path, 4 * 4096)
    with pytest.raises(DiskFault, match=r"block 'block.0/exp_avg': reading .*the file ends there: it was truncated"):
        read(swap, "block.0/exp_avg")


def test_blocks_not_whole(swap: SwapFile, engine: IoEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = SwapFile.create(tmp_path / "fresh.swap", {"a": 4096}, engine)
    with pytest.raises(DiskFault, match="never written whole"):
        fresh.read("a", aligned(0))
    monkeypatch.setattr(swap.file, "handle", lambda *_: os.open("/dev/full", os.O_RDWR))
    failed = swap.write("block.0/exp_avg", noise(8192, 9))
    with pytest.raises(DiskFault, match=r"block 'block.0/exp_avg': writing .*No space left"):
        swap.finish(failed)
    monkeypatch.undo()
    with pytest.raises(DiskFault, match="never written whole"):  # neither the old bytes nor the new
        swap.read("block.0/exp_avg", aligned(8192))


def test_a_full_disk_is_found_at_the_start(engine: IoEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        BadInput, match=r"big.swap needs 1,125,899,906,842,624 bytes, [\d,]+ are free .*No space left .*larger disk"
    ):
        SwapFile.create(tmp_path / "big.swap", {"a": 1 << 50}, engine)

    def fill_up(*_: object) -> None:
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(swap_file.os, "posix_fallocate", fill_up)
    with pytest.raises(BadInput, match=r"needs 4,096 bytes, .*No space left on device"):
        SwapFile.create(tmp_path / "late.swap", {"a": 1}, engine)
    assert list(tmp_path.iterdir()) == []


def test_folder_lives_and_goes(engine: IoEngine, tmp_path: Path) -> None:
    with SwapFolder(tmp_path, "job/1", 3, engine) as folder:
        assert folder.path == tmp_path / "zeroplan_swap_job-1_rank3"
        file = folder.file("exp_avg", {"a": 5000})
        file.finish(file.write("a", noise(5000, 1)))
        assert file.bytes == 8192 == file.path.stat().st_size
        with pytest.raises(BadInput, match=rf"in use by process {os.getpid()} \(job 'job/1'\); end that job"):
            SwapFolder(tmp_path, "job/1", 3, engine)
        with SwapFolder(tmp_path, "job/1", 4, engine):
            assert file.path.exists()
    assert [path.name for path in tmp_path.iterdir()] == [".zeroplan_swap.lock"]


def write_for_ever(parent: Path, ready: int) -> None:
    """A job that overwrites its blocks over and over and says each time that writes are under way."""
    with IoEngine() as engine, SwapFolder(parent, "killed", 0, engine) as folder:
        file = folder.file("states", {str(i): 1 << 20 for i in range(32)})
        data = torch.zeros(1 << 20, dtype=torch.uint8)
        while True:
            data += 1
            under_way = [file.write(str(i), data) for i in range(32)]
            os.write(ready, b"!")  # fails, and so ends the job, when nobody is left to kill it
            for write in under_way:
                file.finish(write)


def test_killed_in_the_middle_of_writes(engine: IoEngine, tmp_path: Path) -> None:
    """The next job removes the folder of a killed one."""
    reader, ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            write_for_ever(tmp_path, ready)
        finally:
            os._exit(1)
    os.close(ready)
    assert os.read(reader, 1) == b"!"
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.close(reader)
    left = tmp_path / "zeroplan_swap_killed_rank0"
    assert (left / "states.swap").exists()
    with SwapFolder(tmp_path, "next", 0, engine):
        assert not left.exists()


def test_on_a_network_another_boots_folder_is_left_alone(
    engine: IoEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "zeroplan_swap_theirs_rank0"
    theirs.mkdir()
    (theirs / "lock").write_text('{"pid": 1, "boot": "another"}')
    monkeypatch.setattr(disk_probe, "_file_system", lambda _: ("nfs", "network"))
    with pytest.warns(UserWarning, match="is on nfs, reached over a network"):
        folder = SwapFolder(tmp_path, "a", 0, engine)
    folder.close()
    assert theirs.exists()
    monkeypatch.undo()
    with SwapFolder(tmp_path, "a", 0, engine):
        assert not theirs.exists()


def test_paths_that_are_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"nvme_path: .*missing is not a folder"):
        probe_folder(tmp_path / "missing")
    memory = Path("/dev/shm")
    if memory.is_dir():
        with pytest.raises(BadInput, match=r'/dev/shm is on tmpfs, which keeps files in host memory.*"nvme_in_memory": true'):
            probe_folder(memory)
        found = probe_folder(memory, allow_memory=True)
        assert any("its files take host memory" in line for line in found.warnings())
    with pytest.raises(BadInput, match="cannot be written to"):
        probe_folder(Path("/proc"))
    monkeypatch.setattr(disk_probe, "_try_direct", lambda _: "EINVAL")
    assert any("refuses direct I/O (EINVAL)" in line for line in probe_folder(tmp_path).warnings())


def test_the_probe_of_a_disk(tmp_path: Path) -> None:
    found = probe_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []
    if found.kind == "disk" and found.file_system in ("ext4", "xfs"):
        assert found.direct
        assert found.warnings() == []
