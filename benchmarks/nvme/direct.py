"""Plain direct I/O, to hold the streamer against: a loop of our own in the manner of fio, and fio where it is installed.

The loop keeps `depth` blocks in flight, one a thread, by preadv and pwritev on an O_DIRECT handle, nothing else: no checksums,
no order, no buffers to wait for. It shares no code with the runtime's I/O.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

_HUGE = 2 << 20

MODES = ("read", "write", "read and write")


def loop(path: Path, size: int, mode: str, *, block: int, depth: int, span: int) -> float:
    """Seconds for reading the file's `size` bytes, writing them, or both, each block being written after it is read.

    The blocks go through `span` bytes of memory, on huge pages, as the streamer's go through its ring: a few that stay in
    the processor's caches would flatter the disk of a virtual machine.
    """
    each = max(1, -(-span // (depth * block))) * block
    handle = os.open(path, os.O_RDWR | os.O_DIRECT)
    turns = itertools.count()
    faults: list[BaseException] = []

    def move() -> None:
        memory = mmap.mmap(-1, max(each, _HUGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        noise = os.urandom(block)
        for _ in range(each // block):
            memory.write(noise)
        view, at = memoryview(memory), 0
        ready.wait()
        try:
            while (begin := next(turns) * block) < size:
                part, at = view[at : at + min(block, size - begin)], (at + block) % each
                if mode != "write":
                    assert os.preadv(handle, [part], begin) == len(part)
                if mode != "read":
                    assert os.pwritev(handle, [part], begin) == len(part)
        except BaseException as fault:
            faults.append(fault)

    ready = threading.Barrier(depth + 1)
    threads = [threading.Thread(target=move) for _ in range(depth)]
    for thread in threads:
        thread.start()
    ready.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    os.close(handle)
    if faults:
        raise faults[0]
    return seconds


def fio(path: Path, size: int, mode: str, *, block: int, depth: int) -> float | None:
    """Measure as :func:`loop` does, by fio (libaio); None where it is not installed or does not run here."""
    if shutil.which("fio") is None:
        return None
    kind = {"read": "read", "write": "write", "read and write": "rw"}[mode]
    total = size * (2 if kind == "rw" else 1)
    command = [
        "fio",
        "--name=direct",
        f"--filename={path}",
        f"--rw={kind}",
        f"--size={size}",
        f"--io_size={total}",
        "--direct=1",
    ]
    command += ["--ioengine=libaio", f"--bs={block}", f"--iodepth={depth}", "--refill_buffers=0", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode != 0:
        return None
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    rate = float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])
    return total / rate if rate else None
