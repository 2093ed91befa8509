"""Shared fixtures: the measured rows, the command line as a function, and a pool of gloo ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.runtime.ranks import RankPool

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "ground_truth" / "measured.jsonl"

# Sums in several threads round otherwise than the ranks, which have one thread each; torch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test of ours asks a hub that is not on this machine


@pytest.fixture(scope="session")
def measured_rows() -> list[dict[str, Any]]:
    """Every measured run."""
    return [json.loads(line) for line in ROWS.read_text().splitlines() if line.strip()]


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Up to four gloo ranks, started once."""
    from tests.runtime.ranks import RankPool

    made = RankPool()
    yield made
    made.stop()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: (exit code, stdout, stderr)."""
    from zeroplan.cli.main import run

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["zeroplan", *words])
        code = 0
        try:
            run()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


@pytest.fixture
def fresh_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a snippet in a new interpreter."""

    def call(code: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, **env},
            cwd=ROOT,
            timeout=120,
            check=False,
        )

    return call
