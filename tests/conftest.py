"""Shared fixtures: the measured rows, the command line as a function, and a pool of gloo ranks."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.patience import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.runtime.ranks import RankPool

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = Path("/usr/bin/chromium")
ROWS = ROOT / "benchmarks" / "ground_truth" / "measured.jsonl"

# Sums in several threads round otherwise than the ranks, which have one thread each; torch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests start interpreters by the hundred: each would compile every module anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test of ours asks a hub that is not on this machine


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """A worker counts its reruns itself. By default it asks the first process over a socket before each test, which takes
    40 ms of waiting: a third of the suite's time.
    """
    if hasattr(config, "workerinput") and hasattr(config, "failures_db"):
        from pytest_rerunfailures import StatusDB

        config.failures_db = StatusDB()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that the worker that ends last has not just begun one."""
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection() -> None:
    """Thousands of tests and their modules are no garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What is imported by now stays; else each collection of garbage would go through all of it. Collections are also rarer:
    a plan makes some million objects, none of them in cycles.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that are marked `gpu` need a CUDA device."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


# How long an example takes depends on what else the machine does. Each run draws the same examples: what fails, fails again.
settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws does not depend on the tests before it."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def surroundings_of_a_file() -> Iterator[None]:
    """A file leaves the environment and torch.distributed as they were: Lightning sets LOCAL_RANK, by which the Trainer of
    another file would start a process group, beside which no mesh can be traced. What it leaves in memory stays: plans and
    ranks collect garbage, and would go through all of it.
    """
    before = dict(os.environ)
    yield
    gc.collect()
    gc.freeze()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All workers' folder of this session."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def folders_of_our_own(shared_folder: Path) -> Iterator[None]:
    """Neither tapes that were traced before nor a calibration's profile count; all workers share what they trace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared_folder / "cache"))
        patch.setenv("XDG_CONFIG_HOME", str(shared_folder / "config"))
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_built_once() -> Iterator[None]:
    """The command line is made from its functions once, and not for each of a thousand calls, as a process makes it once.

    Only where it is called: who asks for its commands gets new ones, since each remembers the options of its first call.
    """
    import typer

    build, called, built = typer.main.get_command, typer.Typer.__call__, dict[tuple[int, int], Any]()
    calling: list[typer.Typer] = []

    def get_command(app: typer.Typer) -> Any:
        if not calling:
            return build(app)
        key = id(calling.pop()), len(app.registered_commands)
        if key not in built:
            built[key] = build(app)
        return built[key]

    def call(app: typer.Typer, *words: Any, **options: Any) -> Any:
        calling[:] = [app]
        return called(app, *words, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", get_command)
        patch.setattr(typer.Typer, "__call__", call)
        yield


@pytest.fixture(scope="session")
def warm_python(shared_folder: Path) -> Path:
    """An interpreter for scripts and launchers that has imported torch and transformers. ``torchrun`` lies beside it."""
    from tests.warm.server import start

    return start(shared_folder / "warm", os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid())


@pytest.fixture
def warm_ranks(warm_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that this process launches are such interpreters."""
    monkeypatch.setattr(sys, "executable", str(warm_python))


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


@pytest.fixture(scope="session")
def pair() -> Iterator[RankPool]:
    """Two gloo ranks whose default process group is theirs alone, for tools that train on all ranks there are."""
    from tests.runtime.ranks import RankPool

    made = RankPool(2)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium."""
    api = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        pytest.skip(f"needs {CHROMIUM}")
    with api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield started
        started.close()


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
            timeout=PATIENCE,
            check=False,
        )

    return call
