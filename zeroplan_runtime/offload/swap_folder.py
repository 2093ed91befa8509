"""The folder of one rank's swap files: locked while the rank lives and removed when it ends, or by the next job if it died.

Note [Stale folders]
    A rank holds an exclusive ``flock`` on its folder's file ``lock`` as long as it lives; the kernel releases it however the
    process ends. So a folder whose lock is free is stale if the disk is local, or if its owner ran under the same boot of this
    kernel (the boot id, which containers share). On a network file system another machine's lock may be invisible, so a
    folder that was made under another boot id is not touched there.
    A lock in the parent folder serialises creating and cleaning, so that a new folder is never taken for a stale one.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.documents import parse_json, text_of
from zeroplan.core.plumbing.files import read_bytes
from zeroplan_runtime.offload.disk_probe import DiskProbe, probe_folder
from zeroplan_runtime.offload.io import IoEngine
from zeroplan_runtime.offload.swap_file import SwapFile

logger = logging.getLogger("zeroplan_runtime")

_PREFIX = "zeroplan_swap_"
_LOCK = "lock"
_LOCK_BYTES = 4096
_PARENT_LOCK = ".zeroplan_swap.lock"


class SwapFolder:
    """The folder ``<nvme_path>/zeroplan_swap_<job>_rank<r>/``. Use it as a context manager, or :meth:`close` it.

    The constructor also removes the folders that dead jobs have left in `nvme_path`. The folder is removed, too, when this
    object is garbage collected, so keep it as long as one of its files is in use.

    Args:
        nvme_path: an existing folder on a local disk.
        job: a name that the ranks of one job share and no other running job has.
        rank: this rank.
        engine: reads and writes the files.
        allow_memory: accept a file system in host memory.

    Raises:
        BadInput: when the path is not usable, or another process holds this job's folder.
    """

    def __init__(self, nvme_path: str | Path, job: str, rank: int, engine: IoEngine, *, allow_memory: bool = False) -> None:
        parent = Path(nvme_path)
        self.probe: DiskProbe = probe_folder(parent, allow_memory=allow_memory)
        for line in self.probe.warnings():
            warnings.warn(line, stacklevel=2)
        self.path = parent / f"{_PREFIX}{re.sub(r'[^A-Za-z0-9_.-]', '-', job)[:100]}_rank{rank}"
        self.engine = engine
        self._files: dict[str, SwapFile] = {}
        with _parent_lock(parent):
            _remove_stale(parent, self.probe.kind)
            self.path.mkdir(exist_ok=True)
            lock = _try_lock(self.path)
            if lock is None:
                raise BadInput(
                    f"{self.path} is in use by {_describe(_owner(self.path))}",
                    where="nvme_path",
                    remedy="end that job, give this one another name, or use another folder",
                )
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps({"pid": os.getpid(), "boot": _boot_id(), "job": job, "rank": rank}).encode(), 0)
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def file(self, name: str, blocks: Mapping[str, int]) -> SwapFile:
        """Creates a file of these blocks (bytes by name), with its space reserved on the disk.

        Raises:
            BadInput: when the disk has too little free space.
            ValueError: when the folder has a file of this name.
        """
        if name in self._files:
            raise ValueError(f"{self.path} has a file {name!r} already")
        made = SwapFile.create(self.path / f"{name}.swap", blocks, self.engine, direct=self.probe.direct)
        self._files[name] = made
        return made

    def close(self) -> None:
        """Waits for transfers and removes the folder with its files."""
        if self._end.alive:
            self.engine.drain()
            for file in self._files.values():
                file.close()
            self._end()

    def __enter__(self) -> SwapFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


@contextmanager
def _parent_lock(parent: Path) -> Iterator[None]:
    handle = os.open(parent / _PARENT_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _try_lock(folder: Path) -> int | None:
    """Locks the folder; returns the file descriptor that holds the lock, None if another process holds it."""
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def _remove_stale(parent: Path, kind: str) -> None:
    """Removes the folders that dead jobs have left: see Note [Stale folders]."""
    for folder in parent.glob(f"{_PREFIX}*_rank*"):
        owner = _owner(folder)
        if kind == "network" and owner.get("boot") != _boot_id():
            continue
        try:
            lock = _try_lock(folder)
        except OSError:  # another user's
            continue
        if lock is not None:
            logger.info("removing %s, which a dead job has left", folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _owner(folder: Path) -> dict[str, object]:
    path = str(folder / _LOCK)
    try:
        found = parse_json(text_of(read_bytes(path, _LOCK_BYTES), path), path)
    except BadInput:  # not there, or not what this class writes
        return {}
    return found if isinstance(found, dict) else {}


def _describe(owner: Mapping[str, object]) -> str:
    return f"process {owner['pid']} (job {owner.get('job')!r})" if "pid" in owner else "another process"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
