"""Makes a folder of the page that any static host serves: Python runs in the browser, and no server is needed.

``python docs/make_page.py FOLDER``. Pyodide comes from npm and the wheels of pydantic from PyPI, at the versions below; neither
is kept in the repository, and ``build/parts`` keeps them for the next time. The simulated allocator is compiled for the browser
where there is a compiler: ziglang's, of requirements-dev.txt. Without one the page simulates in Python, eight times slower, and
its footer says so.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
#: What was fetched, a folder for each command that fetched it.
PARTS = ROOT / "build" / "parts"
PYODIDE = "pyodide@314.0.7"
PACKAGES = ("pydantic==2.14.3", "tabulate==0.10.0")
#: What Pyodide's Python takes.
TARGET = ("--platform", "pyemscripten_2026_0_wasm32", "--python-version", "3.14", "--implementation", "cp", "--abi", "cp314")
_PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
#: Parts of the package that planning in a browser has no use for, or that lie beside it.
_LEFT_OUT = ("zeroplan/tapes/data", "zeroplan/ui/static", "zeroplan/trace", "zeroplan/validate")
#: Of the package's folder for libraries, the name that zeroplan/core/plumbing/native.py looks for in a browser.
_LIBRARY = "zeroplan/_native/libzeroplan_cpu.so"
#: Position-independent code without exceptions; Pyodide brings malloc and free.
_COMPILE = (
    *("-target", "wasm32-wasi", "-std=c++17", "-O2", "-fPIC", "-fno-exceptions", "-fno-rtti"),
    *("-fvisibility=hidden", "-fvisibility-global-new-delete=force-hidden"),
)
_LINK = ("-shared", "--experimental-pic", "--gc-sections", "--strip-all", "--unresolved-symbols=import-dynamic")
#: What a static Space of the Hugging Face hub reads, and the licences of what is not ours.
_README = """---
title: zeroplan
emoji: 📏
colorFrom: blue
colorTo: green
sdk: static
app_file: index.html
license: apache-2.0
short_description: Will it fit? The memory of ZeRO and FSDP training
---

The memory of a ZeRO or FSDP training run, before the GPUs are rented. It runs in your browser: nothing leaves your machine.

Python in the browser is [Pyodide](https://pyodide.org) (MPL-2.0); `packages.zip` holds pydantic, tabulate and PyYAML (MIT) with
their licences.
"""
_SERVER = '<meta name="zeroplan-backend" content="server">'
_POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; script-src 'self' 'wasm-unsafe-eval'; "
    "object-src 'none'; base-uri 'none'; form-action 'none'"
)
_WORKER = f'''<meta name="zeroplan-backend" content="worker">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'''


def make(folder: Path) -> None:
    """Make the folder anew."""
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(ROOT / "zeroplan" / "ui" / "static", folder)
    assets = ROOT / "zeroplan" / "report" / "assets"
    (folder / "look.css").write_text("".join((assets / name).read_text() for name in ("palette.css", "parts.css")))
    shutil.copy(assets / "plot.js", folder)
    page = folder / "index.html"
    text = page.read_text()
    if _SERVER not in text:
        raise SystemExit(f"{page} names no back end")
    page.write_text(text.replace(_SERVER, _WORKER))
    (folder / "README.md").write_text(_README)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor() as pool:
        pyodide, wheels = pool.submit(_pyodide, folder / "pyodide"), pool.submit(_wheels)
        library = _library(Path(temporary))
        (folder / "packages.zip").write_bytes(_packages(wheels.result(), library))
        pyodide.result()
    tapes = folder / "tapes"
    shutil.copytree(ROOT / "zeroplan" / "tapes" / "data", tapes, ignore=shutil.ignore_patterns(".*"))
    (folder / "tapes.json").write_text(json.dumps(sorted(path.name for path in tapes.iterdir())))


def _fetched(command: Sequence[str]) -> Path:
    """Return the folder in which a command was run, now or an earlier time, with what it fetched."""
    place = PARTS / hashlib.sha256("\n".join(command).encode()).hexdigest()[:16]
    if not place.exists():
        PARTS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=PARTS) as temporary:
            work = Path(temporary) / "work"
            work.mkdir()
            subprocess.run(command, cwd=work, check=True, stdout=subprocess.DEVNULL)
            work.rename(place)
    return place


def _pyodide(folder: Path) -> None:
    """Unpack what runs of npm's package, with its licence's notice in package.json."""
    (packed,) = _fetched(("npm", "pack", "--silent", PYODIDE)).glob("*.tgz")
    folder.mkdir()
    with tarfile.open(packed) as archive:
        for name in (*_PYODIDE_FILES, "package.json"):
            held = archive.extractfile(f"package/{name}")
            assert held is not None
            (folder / name).write_bytes(held.read())


def _wheels() -> list[Path]:
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:")
    return sorted(_fetched((*pip, *TARGET, *PACKAGES)).glob("*.whl"))


def _library(work: Path) -> Path | None:
    """Return the compiled allocator as a library that Pyodide's ctypes loads; None without a compiler."""
    if importlib.util.find_spec("ziglang") is None:
        print("make_page: no compiler for WebAssembly (pip install ziglang), so the page simulates in Python", file=sys.stderr)
        return None
    zig = [sys.executable, "-m", "ziglang"]
    made, library = work / "library.o", work / "library.so"
    source = ROOT / "csrc" / "wasm" / "library.cpp"
    subprocess.run([*zig, "c++", *_COMPILE, "-c", str(source), "-o", str(made)], check=True)
    subprocess.run([*zig, "wasm-ld", *_LINK, str(made), "-o", str(library)], check=True)
    return library


def _packages(wheels: Sequence[Path], library: Path | None) -> bytes:
    """Return one archive of all packages: pydantic's wheels, PyYAML's Python part, and this project with its library."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    packed.writestr(name, archive.read(name))
        for path in sorted((ROOT / "zeroplan").rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and "__pycache__" not in name and not name.startswith((*_LEFT_OUT, "zeroplan/_native")):
                packed.write(path, name)
        packed.write(ROOT / "LICENSE", "zeroplan/LICENSE")
        for path in sorted(Path(yaml.__file__).parent.glob("*.py")):
            packed.write(path, f"yaml/{path.name}")
        packed.writestr("yaml/LICENSE", importlib.metadata.distribution("PyYAML").read_text("licenses/LICENSE") or "")
        if library is not None:
            packed.write(library, _LIBRARY)
    return buffer.getvalue()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
