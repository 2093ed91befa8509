"""Compiles CUDA sources by NVRTC through ``cuda.core`` and caches the cubins on disk, for all ranks.

A cubin's name is a hash of everything that decides its content: the sources, the options, the architecture, NVRTC's version. It
is written under another name and renamed, so no reader sees part of one; ranks that need the same cubin wait for the first to
finish. Without a writable folder each process compiles for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from zeroplan.core.plumbing.files import replace_file

#: The environment variable that names the folder of compiled kernels; an empty value keeps none on disk.
ENVIRONMENT = "ZEROPLAN_KERNEL_CACHE"


@cache
def core() -> ModuleType:
    """Returns the module ``cuda.core``, under the name that the installed version uses.

    Raises:
        ImportError: when it is not installed or its libraries cannot be loaded.
    """
    for name in ("cuda.core", "cuda.core.experimental"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as fault:
            if fault.name is None or not (name + ".").startswith(fault.name + "."):
                raise
            continue
        if hasattr(module, "Program"):
            return module
    raise ImportError("cuda.core is not installed (pip install 'zeroplan[cuda]')")


@cache
def nvrtc_version() -> tuple[int, int]:
    """Returns NVRTC's major and minor version.

    Raises:
        ImportError, RuntimeError: when NVRTC cannot be loaded.
    """
    _fault, major, minor = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
    return int(major), int(minor)


@cache
def sources() -> Path:
    """Returns the folder of the CUDA sources: beside this file in an installed package, ``csrc/cuda`` in a checkout.

    Raises:
        FileNotFoundError: when neither folder exists.
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "cuda", here.parent.parent / "csrc" / "cuda"):
        if (folder / "common.cuh").is_file():
            return folder
    raise FileNotFoundError(f"no CUDA sources in {here / 'cuda'}")


def cache_folder() -> Path | None:
    """Returns the folder of cubins: that of the environment variable, else ``zeroplan/kernels`` in the user's cache; None for
    none.
    """
    given = os.environ.get(ENVIRONMENT)
    if given is not None:
        return Path(given) if given else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "zeroplan" / "kernels"
    except RuntimeError:  # no home folder
        return None


def kernel(file: str, name: str, macros: tuple[tuple[str, str], ...], arch: str) -> Any:
    """Loads a kernel on the current device, from the cache or compiled.

    Args:
        file: the source file's name in :func:`sources`.
        name: the kernel's name in it.
        macros: names and values that the compiler defines.
        arch: the architecture, such as ``"sm_90"``.

    Raises:
        ImportError: when NVRTC or cuda.core is missing.
        Exception: of cuda.core, with NVRTC's log, when the source does not compile.
    """
    path = _place(file, macros, arch)
    code = cubin(path, file, macros, arch)
    try:
        return _load(code, name)
    except Exception:
        if path is None or not path.exists():
            raise
        path.unlink()  # a damaged file
        return _load(cubin(path, file, macros, arch), name)


def cubin(path: Path | None, file: str, macros: tuple[tuple[str, str], ...], arch: str) -> bytes:
    """Returns the machine code of one source file: read from `path`, else compiled and, if possible, written there."""
    if path is None:
        return compile_source(file, macros, arch)
    with contextlib.suppress(OSError):
        return path.read_bytes()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            with contextlib.suppress(OSError):
                return path.read_bytes()  # another rank has compiled it meanwhile
            code = compile_source(file, macros, arch)
            replace_file(path, code)
            return code
    except OSError:  # the folder is not writable
        return compile_source(file, macros, arch)


def compile_source(file: str, macros: tuple[tuple[str, str], ...], arch: str) -> bytes:
    """Compiles one source file without the cache; the arguments are those of :func:`kernel`."""
    cuda = core()
    # No fused multiply-add: Note [Arithmetic] of zeroplan_runtime.kernels.update.
    options = cuda.ProgramOptions(
        name=file, std="c++17", arch=arch, fma=False, include_path=str(sources()), define_macro=list(macros)
    )
    code = cuda.Program((sources() / file).read_text(encoding="utf-8"), "c++", options).compile("cubin").code
    return bytes(code)


def _load(code: bytes, name: str) -> Any:
    return core().ObjectCode.from_cubin(code).get_kernel(name)


def _place(file: str, macros: tuple[tuple[str, str], ...], arch: str) -> Path | None:
    folder = cache_folder()
    return folder and folder / f"{Path(file).stem}-{arch}-{_key(file, macros, arch)[:32]}.cubin"


def _key(file: str, macros: tuple[tuple[str, str], ...], arch: str) -> str:
    digest = hashlib.sha256(repr((file, macros, arch, nvrtc_version(), getattr(core(), "__version__", ""))).encode())
    for path in [*sorted(sources().glob("*.cuh")), sources() / file]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file, where the system has locks; without one, ranks only compile the same twice."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("ab") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
