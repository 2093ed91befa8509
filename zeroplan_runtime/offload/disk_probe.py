"""Finds out whether a folder is fit for swap files: its file system, and whether direct I/O works there."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroplan.core.arena.layout import PAGE
from zeroplan.core.errors import BadInput
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
    """The file system of a folder.

    Attributes:
        file_system: its name, such as "ext4".
        kind: "disk", "memory", "network" or "unknown".
        why_buffered: why direct I/O does not work; empty if it does.
    """

    path: Path
    file_system: str
    kind: str
    why_buffered: str

    @property
    def direct(self) -> bool:
        """Whether direct I/O, past the page cache, works."""
        return not self.why_buffered

    def warnings(self) -> list[str]:
        """Returns warnings for the user, one line each."""
        found = []
        if self.kind == "network":
            found.append(
                f"nvme_path {self.path} is on {self.file_system}, reached over a network or through a user process: training "
                "will run at its speed; use a local disk"
            )
        if self.kind == "memory":
            found.append(f"nvme_path {self.path} is on {self.file_system}: its files take host memory")
        if self.why_buffered:
            found.append(
                f"nvme_path {self.path} ({self.file_system}) refuses direct I/O ({self.why_buffered}): reads and writes go "
                "through the page cache, which competes with training for host memory"
            )
        return found


def probe_folder(path: Path, *, allow_memory: bool = False) -> DiskProbe:
    """Probes the existing folder `path`; writes and removes a file of one page.

    Args:
        path: the folder.
        allow_memory: accept a file system in host memory.

    Raises:
        BadInput: when it is not a folder, cannot be written to, or is in host memory without `allow_memory`.
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
    except OSError as fault:
        raise BadInput(
            f"{path} cannot be written to: {os.strerror(fault.errno or 0)}",
            where="nvme_path",
            remedy="give a folder of your own",
        ) from fault
    return DiskProbe(path, name, kind, why)


def _file_system(path: Path) -> tuple[str, str]:
    """Returns the file system's name and kind."""
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
    """Returns why direct I/O of a page does not work here; empty if it does."""
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
