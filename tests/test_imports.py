"""What planning may load: neither torch, transformers nor numpy. No submodule hides a function, no classes share a name."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec, resolve_name
from pathlib import Path

import pytest

import zeroplan

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("zeroplan", "zeroplan_runtime")
Run = Callable[..., subprocess.CompletedProcess[str]]
HEAVY = """
heavy = [m for m in ("torch", "transformers", "numpy", "pandas", "deepspeed") if m in sys.modules]
assert not heavy, heavy
"""


def test_planning_stays_light(fresh_python: Run) -> None:
    """The import, plans from Python of a model with a tape and of one without, and the command."""
    steps = (
        "import zeroplan",
        "zeroplan.estimate('meta-llama/Llama-3.2-1B', gpus=8, vram='24G')",
        "zeroplan.estimate('meta-llama/Llama-3.1-405B', gpus=8, nodes=4, lora_rank=8)",
        "sys.argv = ['zeroplan', 'estimate', 'meta-llama/Llama-3.2-1B', '--json']\n"
        "from zeroplan.cli.main import run\n"
        "try:\n    run()\nexcept SystemExit as stop:\n    assert not stop.code",
    )
    done = fresh_python("import sys\n" + "".join(f"{step}\n{HEAVY}\n" for step in steps))
    assert done.returncode == 0, done.stderr


def test_formula_depth_loads_no_schedule(fresh_python: Run) -> None:
    code = (
        "import sys, zeroplan\nfor engine in ('deepspeed', 'fsdp2', 'ddp', 'zeroplan'):\n"
        "    zeroplan.estimate('meta-llama/Llama-3.2-1B', engine=engine, depth='formula')\n"
        "    told = ('zeroplan.simulate.', 'zeroplan.engines.player', 'zeroplan.tapes')\n"
        "    assert not [m for m in sys.modules if m.startswith(told)], engine"
    )
    done = fresh_python(code)
    assert done.returncode == 0, done.stderr


#: What `zeroplan estimate MODEL --depth formula` has no use for: other verbs, readers of files, libraries that they need, and
#: whatever only some runs ask about. A module that needs one of them imports it in the function that does.
UNUSED_AT_FORMULA_DEPTH = (
    "zeroplan.api",
    "zeroplan.core.plumbing.documents",
    "zeroplan.core.plumbing.files",
    "zeroplan.tape.expanded",
    "zeroplan.tape.options",
    "zeroplan.core.tensor_parallel",
    "zeroplan.core.unmodelled_optimizers",
    "zeroplan.ds_config.reader",
    "zeroplan.ds_config.schema",
    "zeroplan.engines.deepspeed.muon",
    "zeroplan.engines.deepspeed.traffic",
    "zeroplan.interop",
    "zeroplan.logs",
    "zeroplan.models.files",
    "zeroplan.models.hub",
    "zeroplan.models.lora",
    "zeroplan.planner.relief",
    "zeroplan.report.plans_html",
    "zeroplan.search",
    "zeroplan.simulate",
    "zeroplan.tapes",
    "zeroplan.trace",
    "zeroplan.validate",
    "html",
    "huggingface_hub",
    "rich",
    "tabulate",
    "yaml",
)
RUN_VERB = """
import contextlib, io, sys
sys.argv = ["zeroplan", *{words!r}]
from zeroplan.cli.main import run
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    run()
print("\\n".join(sys.modules))
"""


def _loaded_by(fresh_python: Run, *words: str) -> set[str]:
    done = fresh_python(RUN_VERB.format(words=list(words)))
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def _within(loaded: Collection[str], packages: Collection[str]) -> list[str]:
    return sorted(name for name in loaded if any(name == one or name.startswith(f"{one}.") for one in packages))


def test_a_cold_start_loads_what_its_answer_needs(fresh_python: Run) -> None:
    loaded = _loaded_by(fresh_python, "estimate", "meta-llama/Llama-3.2-1B", "--gpus", "8", "--depth", "formula")
    assert "zeroplan.engines.deepspeed.lines" in loaded
    assert _within(loaded, UNUSED_AT_FORMULA_DEPTH) == []


def test_a_search_loads_no_reader_of_files(fresh_python: Run) -> None:
    loaded = _loaded_by(fresh_python, "recommend", "openai-community/gpt2", "--gpus", "2", "--vram", "24G")
    assert "zeroplan.search.recommend" in loaded
    readers = ("zeroplan.ds_config.reader", "zeroplan.interop.programs", "zeroplan.interop.readers", "yaml", "huggingface_hub")
    assert _within(loaded, readers) == []


def test_importing_the_package_loads_next_to_nothing(fresh_python: Run) -> None:
    done = fresh_python(
        "import sys, zeroplan\nprint(len([m for m in sys.modules if m.startswith('zeroplan')]), 'pydantic' in sys.modules)"
    )
    assert done.stdout.split() == ["1", "False"]


def test_no_submodule_shares_a_public_functions_name() -> None:
    for name in zeroplan.__all__:
        assert getattr(zeroplan, name) is not None
        assert find_spec(f"zeroplan.{name}") is None, name


def test_unknown_attributes_fail_as_usual() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = zeroplan.nonsense


def _modules(root: Path) -> dict[str, Path]:
    """By dotted name, every file of the packages under `root`."""
    files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


@cache
def _tree(file: Path) -> ast.AST:
    return ast.parse(file.read_text())


def _imported(tree: ast.AST, package: str, modules: Collection[str]) -> Iterator[str]:
    """Every one of the modules that a file names: on top, in a function, for type checkers only, or as a string.

    ``from package import module`` names the module. Its package is loaded before any of its modules, whoever names them.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            full = [f"{base}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else base for name in full)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value)


def _circle(root: Path) -> list[str]:
    """The modules of one circle of imports, or none."""
    modules = _modules(root)
    graph = {}
    for name, file in modules.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        graph[name] = {other for other in _imported(_tree(file), package, modules) if other in modules} - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as found:
        return list(found.args[1])
    return []


def test_no_two_files_import_each_other() -> None:
    assert _circle(ROOT) == []


@pytest.mark.parametrize(
    "line",
    [
        "from zeroplan.low import thing",
        "from zeroplan import low",
        "from . import low",
        "import zeroplan.low",
        "def f():\n    from .low import thing",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from zeroplan.low import Thing",
        "from importlib import import_module\nlow = import_module('zeroplan.low')",
    ],
)
def test_a_circle_is_found_however_it_is_written(line: str, tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "zeroplan" / "low.py").write_text("from zeroplan import high")
    (tmp_path / "zeroplan" / "high.py").write_text(line)
    assert set(_circle(tmp_path)) == {"zeroplan.low", "zeroplan.high"}


def test_no_import_is_excused() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    excused = [key for part in (contracts, *contracts["contracts"]) for key in part if "ignore" in key]
    assert excused == []


def test_no_two_classes_have_one_name() -> None:
    """Those that a capture puts in the place of a package's have the names that a script imports."""
    own = [file for name, file in _modules(ROOT).items() if not name.startswith("zeroplan.capturing.kernels.")]
    names = Counter(node.name for file in own for node in ast.walk(_tree(file)) if isinstance(node, ast.ClassDef))
    # What zeroplan plans for is an engine, and so is what the runtime's `initialize` returns, as DeepSpeed's does.
    assert [name for name, count in names.items() if count > 1] == ["Engine"]
