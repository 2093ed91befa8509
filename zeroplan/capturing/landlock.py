"""The kernel's own guard of the disk: a captured process can change no file outside its folder, whichever library tries.

Source: Linux, ``include/uapi/linux/landlock.h``, ``Documentation/userspace-api/landlock.rst``.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the calls' numbers, on every architecture
_VERSION, _BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38
_WRITE, _REMOVE_FOLDER, _REMOVE, _MAKE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 4, 1 << 5, 1 << 8, 1 << 13, 1 << 14
#: Folders, files, symbolic links, sockets, pipes and devices that are made.
_MAKE = sum(1 << bit for bit in range(6, 13))


def forbid_writes(*folders: str) -> bool:
    """Forbid this process and its children every change of files but in these folders; returns whether the kernel does so.

    Args:
        folders: there, and by their real paths. What is open already stays so, and devices can be written.
    """
    if not sys.platform.startswith("linux"):
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    version = call(_CREATE, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return False
    handled = _WRITE | _REMOVE_FOLDER | _REMOVE | _MAKE | (_REFER if version > 1 else 0) | (_TRUNCATE if version > 2 else 0)
    asked = struct.pack("Q", handled)
    rules = call(_CREATE, asked, ctypes.c_size_t(len(asked)), 0)
    if rules < 0:
        return False
    try:
        for folder, rights in (*((one, handled) for one in folders), ("/dev", _WRITE | _REMOVE | _MAKE_FILE | _TRUNCATE)):
            place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            call(_ADD, rules, _BENEATH, struct.pack("=Qi", rights & handled, place), 0)
            os.close(place)
        ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return bool(call(_RESTRICT, rules, 0) == 0)
    finally:
        os.close(rules)
