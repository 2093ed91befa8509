"""The one library of compiled routines, ``libzeroplan_cpu``: found beside the package or where it was built, or None.

Its functions have a plain C interface and are called through ctypes, which releases the interpreter's lock. Whoever calls
one keeps a Python twin of equal results, so that nothing fails where the library cannot be had.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

_NAME = {"win32": "zeroplan_cpu.dll", "darwin": "libzeroplan_cpu.dylib"}.get(sys.platform, "libzeroplan_cpu.so")

#: Set to a path to use that library, or to nothing to use none.
ENVIRONMENT = "ZEROPLAN_CPU_LIBRARY"

#: Raised together with the same number in csrc/cpu whenever an exported function's meaning changes.
ABI_VERSION = 5


def candidates() -> list[Path]:
    """Return the paths at which the native library is looked for, in order."""
    given = os.environ.get(ENVIRONMENT)
    if given is not None:
        return [Path(given)] if given else []
    package = Path(__file__).resolve().parents[2]
    places = [package / "_native" / _NAME]
    build = package.parent / "build"  # a source checkout
    if (package.parent / "csrc" / "cpu").is_dir():
        places += sorted(build.glob(f"*/csrc/cpu/{_NAME}"), key=lambda path: path.stat().st_mtime, reverse=True)
    return places


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None where there is none that fits this version of the package."""
    for path in candidates():
        if not path.is_file():
            continue
        try:
            loaded = ctypes.CDLL(str(path))
            version = loaded.zeroplan_abi_version
        except (OSError, AttributeError):  # built for another machine, or not ours
            continue
        version.restype = ctypes.c_int
        if version() == ABI_VERSION:
            return loaded
    return None
