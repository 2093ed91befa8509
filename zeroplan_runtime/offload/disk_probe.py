"""What a folder for swap files stands on: the kind of file system, whether direct I/O works there, how much is free."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroplan.core.errors import BadInput
from zeroplan.core.layout import PAGE
from zeroplan_runtime.offload import pinned

# Linux, include/uapi/linux/magic.h and the file systems' own headers.
_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}
_NETWORK = {
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x517B: "smb",
    0x65735546: "fuse",
    0x0BD00BD0: "lustre",
    0x00C36400: "ceph",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x01021997: "9p",
    0x5346414F: "afs",
    0x6B414653: "kafs",
}
_DISK = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
    0x794C7630: "overlayfs",
}


@dataclass(frozen=True, slots=True)
class DiskProbe:
    """A folder's ground. `kind` is "disk", "memory", "network" or "unknown"; `why_buffered` is empty where direct I/O works."""

    path: Path
    file_system: str
    kind: str
    free: int
    why_buffered: str

    @property
    def direct(self) -> bool:
        """Whether files here can be read and written past the page cache."""
        return not self.why_buffered

    def warnings(self) -> list[str]:
        """What the user should know before training on it, a line each."""
        found = []
        if self.kind == "network":
            found.append(
                f"nvme_path {self.path} is on {self.file_system}, reached over a network or through a user process: states "
                "will stream at its speed; a local disk is meant"
            )
        if self.kind == "memory":
            found.append(f"nvme_path {self.path} is on {self.file_system}: what is swapped out stays in host memory")
        if self.why_buffered:
            found.append(
                f"nvme_path {self.path} ({self.file_system}) refuses direct I/O ({self.why_buffered}): reads and writes go "
                "through the page cache, which competes with training for host memory"
            )
        return found


def probe_folder(path: Path, *, allow_memory: bool = False) -> DiskProbe:
    """Finds out what the existing folder `path` stands on; writes and removes a file of one page.

    Raises:
        BadInput: when it is no folder that can be written to, or is in memory and `allow_memory` is not set.
    """
    if not path.is_dir():
        raise BadInput(f"{path} is not a folder", where="nvme_path", remedy="give the mount point of a local disk")
    name, kind = _file_system(path)
    if kind == "memory" and not allow_memory:
        raise BadInput(
            f"{path} is on {name}, which keeps files in host memory: nothing would be saved",
            where="nvme_path",
            remedy='give a folder on a disk, offload to "cpu", or set "zeroplan": {"nvme_in_memory": true}',
        )
    try:
        why = _try_direct(path)
        room = os.statvfs(path)
    except OSError as fault:
        raise BadInput(
            f"{path} cannot be written to: {os.strerror(fault.errno or 0)}",
            where="nvme_path",
            remedy="give a folder of your own",
        ) from fault
    return DiskProbe(path, name, kind, room.f_bavail * room.f_frsize, why)


def _file_system(path: Path) -> tuple[str, str]:
    """Its name, and memory, network, disk or unknown."""
    if not sys.platform.startswith("linux"):
        return "unknown", "unknown"
    buffer = (ctypes.c_long * 64)()  # struct statfs begins with the type, a long
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), ctypes.byref(buffer)) != 0:
        raise BadInput(f"{path}: {os.strerror(ctypes.get_errno())}", where="nvme_path", remedy="give a folder on a local disk")
    magic = buffer[0] & 0xFFFFFFFF
    for kind, names in (("memory", _MEMORY), ("network", _NETWORK), ("disk", _DISK)):
        if magic in names:
            return names[magic], kind
    return f"a file system of type {magic:#x}", "unknown"


def _try_direct(folder: Path) -> str:
    """Why a page cannot be written and read directly here, or an empty string."""
    handle, name = tempfile.mkstemp(prefix=".zeroplan_probe_", dir=folder)
    try:
        os.ftruncate(handle, PAGE)
        if not hasattr(os, "O_DIRECT"):
            return "this system has no O_DIRECT"
        page = pinned.allocate(PAGE, torch.uint8, register=False, threads=1)
        view = memoryview((ctypes.c_char * PAGE).from_address(page.data_ptr()))
        try:
            direct = os.open(name, os.O_RDWR | os.O_DIRECT)
            try:
                os.pwritev(direct, [view], 0)
                os.preadv(direct, [view], 0)
            finally:
                os.close(direct)
        except OSError as fault:
            if fault.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            return errno.errorcode[fault.errno]
        return ""
    finally:
        os.close(handle)
        os.unlink(name)
