"""The I/O engine against plain files: every backend, odd sizes, chains, faults at the system calls, short transfers."""

from __future__ import annotations

import errno
import gc
import random
import resource
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.offload import crc32c
from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing import native
from zeroplan.core.zero_config import Aio
from zeroplan_runtime.offload import io, pinned
from zeroplan_runtime.offload.io import DiskFault, DiskFile, IoEngine

BLOCK = 8192


def works(backend: io.Backend) -> bool:
    try:
        IoEngine(backend=backend).close()
    except BadInput:
        return False
    return True


AVAILABLE = [backend for backend in ("io_uring", "threads", "python") if works(backend)]


@pytest.fixture(params=AVAILABLE)
def engine(request: pytest.FixtureRequest) -> Iterator[IoEngine]:
    with IoEngine(Aio(block_size=BLOCK, queue_depth=3, intra_op_parallelism=2), request.param) as made:
        yield made


def aligned(size: int) -> torch.Tensor:
    return pinned.allocate(size, torch.uint8, register=False, threads=1)


def noise(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_the_library_is_in_use() -> None:
    """So that the native backends are not passed over unseen where they are built."""
    if native.library() is None:
        pytest.skip("the native library is not built")
    with IoEngine() as made:
        assert made.backend == AVAILABLE[0] != "python"


@pytest.mark.parametrize("backend", AVAILABLE)
def test_an_engine_that_is_dropped_ends_its_transfers_and_closes_its_files(backend: io.Backend, tmp_path: Path) -> None:
    """Else they would write into memory, or to a descriptor, that belongs to others by then."""
    engine = IoEngine(Aio(block_size=4096, queue_depth=1), backend)
    file = engine.keep(DiskFile(tmp_path / "data", create=True))
    source, back = noise(8 << 20, 1), torch.zeros(8 << 20, dtype=torch.uint8)
    engine.read(file, 0, back, after=engine.write(file, 0, source))
    del engine
    gc.collect()
    assert torch.equal(source, back)
    assert file.buffered == -1


@pytest.mark.parametrize("size", [1, 511, 4096, BLOCK, BLOCK + 1, 5 * BLOCK, 7 * BLOCK - 4096, 100_003])
@pytest.mark.parametrize("offset", [0, 4096, 12345])
def test_round_trip(engine: IoEngine, tmp_path: Path, size: int, offset: int) -> None:
    file = DiskFile(tmp_path / "data", create=True)
    source, back = aligned(size), aligned(size)
    source.copy_(noise(size, size))
    written = engine.write(file, offset, source, checksum=True)
    total = engine.wait(written)
    assert engine.wait(engine.read(file, offset, back, checksum=True)) == total
    assert torch.equal(source, back)
    assert file.path.read_bytes() == bytes(offset) + source.numpy().tobytes()
    assert total == (zlib.crc32(source.numpy()) if engine.backend == "python" else crc32c.native(source, plain=True))
    file.close()


def test_random_program(engine: IoEngine, tmp_path: Path) -> None:
    """Reads and writes in flight together, ordered by `after` where they meet, against one bytearray."""
    rng = random.Random(5)
    file, model = DiskFile(tmp_path / "data", create=True), bytearray(1 << 18)
    file.path.write_bytes(model)
    for _ in range(12):
        pieces, checks, writes = list(range(0, 1 << 18, 1 << 15)), [], []
        rng.shuffle(pieces)
        for begin in pieces[:5]:
            size = rng.choice([1 << 15, 4096, 12288, 1, 777])
            data, back = aligned(size), aligned(size)
            data.copy_(noise(size, rng.randrange(1 << 30)))
            write = engine.write(file, begin, data)
            model[begin : begin + size] = data.numpy().tobytes()
            writes.append(write)
            checks.append((engine.read(file, begin, back, after=write), back, data))
        for read, back, data in checks:
            engine.wait(read)
            assert torch.equal(back, data)
        for write in writes:
            engine.wait(write)
        assert file.path.read_bytes() == bytes(model)
    file.close()


@pytest.mark.parametrize("knobs", [{"single_submit": True}, {"overlap_events": False}, {"queue_depth": 1}])
def test_knobs(tmp_path: Path, knobs: dict[str, bool]) -> None:
    with IoEngine(Aio(block_size=4096, **knobs), AVAILABLE[0]) as engine:
        file, source, back = DiskFile(tmp_path / "data", create=True), aligned(100 * 4096), aligned(100 * 4096)
        source.copy_(noise(100 * 4096, 0))
        engine.wait(engine.read(file, 0, back, after=engine.write(file, 0, source)))
        assert torch.equal(source, back)
        file.close()


def test_failures_at_the_system_call(engine: IoEngine) -> None:
    """ENOSPC from /dev/full; EIO from reading unmapped memory of one's own; both name the file and the remedy."""
    full = DiskFile(Path("/dev/full"), direct=False)
    with pytest.raises(DiskFault, match=r"writing .* of /dev/full failed at 0: No space left on device; free space") as caught:
        engine.wait(engine.write(full, 0, aligned(3 * BLOCK)))
    assert caught.value.errno == errno.ENOSPC
    memory = DiskFile(Path("/proc/self/mem"), direct=False)
    failed = engine.read(memory, 4096, aligned(4096))
    follower = engine.read(full, 0, aligned(4096), after=failed)
    with pytest.raises(DiskFault, match=r"reading .* of /proc/self/mem failed at 4,096: Input/output error; check the disk"):
        engine.wait(failed)
    with pytest.raises(DiskFault, match="because the transfer before it failed"):
        engine.wait(follower)
    full.close()
    memory.close()


def test_reading_past_the_end(engine: IoEngine, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(3 * 4096 + 100))
    for direct in (True, False):
        file = DiskFile(tmp_path / "data", direct=direct)
        with pytest.raises(DiskFault, match="truncated"):
            engine.wait(engine.read(file, 0, aligned(8 * 4096)))
        file.close()


def test_short_transfers_go_on(engine: IoEngine, tmp_path: Path) -> None:
    """Files of /proc give a page or so a call; a limit on the file's size cuts a write short, and then refuses the rest."""
    kernel = DiskFile.__new__(DiskFile)
    kernel.path, kernel.direct = Path("/proc/kallsyms"), None
    with open(kernel.path, "rb") as stream:
        expected = stream.read(50_000)
        kernel.buffered = stream.fileno()
        back = aligned(len(expected))
        with IoEngine(Aio(block_size=1 << 20), engine.backend) as large:  # one block: seq files are read in order
            large.wait(large.read(kernel, 0, back))
    assert back.numpy().tobytes() == expected
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = DiskFile(tmp_path / "data", create=True, direct=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK + 100, hard))
    try:
        with pytest.raises(DiskFault, match=r"failed at 8,292: File too large; raise `ulimit -f`"):
            engine.wait(engine.write(file, 0, aligned(3 * BLOCK)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.close()


def test_bad_knobs() -> None:
    for knobs, where in (
        ({"use_gds": True}, "use_gds"),
        ({"block_size": 5000}, "block_size"),
        ({"queue_depth": 0}, "queue_depth"),
    ):
        with pytest.raises(BadInput, match=f"aio.{where}"):
            IoEngine(Aio(**knobs))


def test_falls_back_where_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that forbids io_uring, and then as without the library."""
    if native.library() is None:
        pytest.skip("the native library is not built")
    real = io._Native

    def forbidden(aio: Aio, backend: str) -> object:
        if backend == "io_uring":
            raise OSError(errno.EPERM, "Operation not permitted")
        return real(aio, backend)

    monkeypatch.setattr(io, "_Native", forbidden)
    with IoEngine() as engine:
        assert (engine.backend, engine.why) == ("threads", "io_uring: EPERM, Operation not permitted")
    with pytest.raises(BadInput, match=r"file I/O: io_uring: EPERM.*use the backend \"auto\""):
        IoEngine(backend="io_uring")
    monkeypatch.undo()
    monkeypatch.setattr(io, "_library", lambda: None)
    with IoEngine() as engine:
        assert engine.backend == "python"
        assert "threads: ENOSYS, the native library is not built" in engine.why


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 12287, 12288, 12289, 3 * 12288 + 5, (1 << 20) + 13, (2 << 20) + 1])
def test_crc32c(size: int) -> None:
    if native.library() is None:
        pytest.skip("the native library is not built")
    data = noise(size + 3, size)[3:]  # unaligned
    reference = crc32c.native(data, plain=True)
    assert crc32c.native(data) == crc32c.native(data, threads=2) == reference
    if size < 10_000:
        assert reference == crc32c.bitwise(data.numpy().tobytes())


def test_crc32c_known_values() -> None:
    """RFC 3720, appendix B.4."""
    if native.library() is None:
        pytest.skip("the native library is not built")
    for data, expected in (
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ):
        assert crc32c.native(torch.frombuffer(bytearray(data), dtype=torch.uint8)) == expected
