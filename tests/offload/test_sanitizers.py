"""The I/O engine under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE

CPU = Path(__file__).resolve().parents[2] / "csrc" / "cpu"
SOURCES = ("io_engine.cpp", "io_threads.cpp", "io_uring.cpp", "io_checksum.cpp", "pool.cpp")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_clean(sanitizer: str, tmp_path: Path) -> None:
    """And compiled without a warning."""
    program = tmp_path / "stress"
    command = ["g++", "-std=c++17", "-g", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-fsanitize={sanitizer}"]
    command += ["-fno-sanitize-recover=all", f"-I{CPU}", str(Path(__file__).with_name("io_stress.cpp"))]
    built = subprocess.run(
        [*command, *(str(CPU / name) for name in SOURCES), "-o", str(program), "-pthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip("the sanitizers' libraries are not installed")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program), str(tmp_path / "data")], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("0 faults\n")
