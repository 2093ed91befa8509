"""Nothing outside ``zeroplan/engines`` and ``zeroplan/techniques``, which tells who takes each technique, knows an engine: no
branch, table or import by an engine's name or folder.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from zeroplan.engines.registry import engine_names

FOLDERS = sorted(path.name for path in (ROOT / "zeroplan" / "engines").iterdir() if (path / "engine.py").exists())
NAMES = frozenset(engine_names())
#: Files of other programs and of ds_configs hold these words as launchers' names, keys and sections; so do their arguments,
#: and commands that are captured.
FORMATS = ("capturing", "interop", "ds_config", "planner/options.py")


def sources() -> list[Path]:
    # zeroplan_runtime/compat/deepspeed stands in for the package of that name, which is no engine of a plan.
    inside = {ROOT / "zeroplan" / "engines", ROOT / "zeroplan" / "techniques", ROOT / "zeroplan_runtime" / "compat"}
    files = [*(ROOT / "zeroplan").rglob("*.py"), *(ROOT / "zeroplan_runtime").rglob("*.py")]
    return sorted(path for path in files if inside.isdisjoint(path.parents))


def named(node: ast.AST) -> bool:
    """Whether a literal, or a display of literals, holds an engine's name."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(named(element) for element in node.elts)
    return isinstance(node, ast.Constant) and node.value in NAMES


def about_an_engine(node: ast.AST) -> bool:
    """``engine``, ``x.engine``, ``engine.name``, ``x["engine"]`` or ``x.get("engine")``."""
    if isinstance(node, ast.Call) and node.args:
        node = node.args[0]
    elif isinstance(node, ast.Subscript):
        node = node.slice
    if isinstance(node, ast.Constant):
        return node.value == "engine"
    if isinstance(node, ast.Attribute):
        return node.attr == "engine" or (node.attr == "name" and about_an_engine(node.value))
    return isinstance(node, ast.Name) and node.id == "engine"


def dispatches(tree: ast.AST, *, of_formats: bool) -> Iterator[tuple[int, str]]:
    """Lines with a comparison, a table's keys, a case or a collection of engines' names, or an import of an engine's folder."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            parts = node.module.split(".")
            if parts[:2] == ["zeroplan", "engines"] and (set(parts[2:3]) | {alias.name for alias in node.names}) & set(FOLDERS):
                yield node.lineno, "imports an engine's folder"
        elif isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            if any(map(named, operands)) and (not of_formats or any(map(about_an_engine, operands))):
                yield node.lineno, "compares with an engine's name"
        elif of_formats:
            continue
        elif isinstance(node, ast.Dict):
            engines = sum(key is not None and named(key) for key in node.keys)
            if engines and 2 * engines >= len(node.keys):  # a longer table of other words may hold one, as an argument's name
                yield node.lineno, "has a table by engine"
        elif isinstance(node, ast.match_case):
            if any(isinstance(part, ast.MatchValue) and named(part.value) for part in ast.walk(node.pattern)):
                yield node.pattern.lineno, "has a case for an engine"
        elif isinstance(node, ast.Set | ast.Tuple | ast.List) and sum(map(named, node.elts)) and all(map(named, node.elts)):
            yield node.lineno, "collects engines' names"


def test_no_file_outside_branches_on_an_engine() -> None:
    files = sources()
    assert len(files) > 150
    found = []
    for path in files:
        of_formats = str(path.relative_to(ROOT / path.relative_to(ROOT).parts[0])).startswith(FORMATS)
        lines = dispatches(ast.parse(path.read_text()), of_formats=of_formats)
        found += [f"{path.relative_to(ROOT)}:{number} {what}" for number, what in lines]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "of_formats", "caught"),
    [
        ("if engine.name == 'ddp': pass", False, True),
        ("x = zero if setup.engine in ('fsdp2',) else 0", True, True),
        ("if run.fields.get('engine') != 'deepspeed': pass", True, True),
        ("if row['engine'] == 'ddp': pass", True, True),
        ("x = {'deepspeed': 1}[name]", False, True),
        ("x = {'ddp': 1, None: 0}[name]", False, True),
        ("ARGUMENTS = {'deepspeed': 'ds_config', 'ram': 'cpu_ram', 'nnodes': 'nodes'}", False, False),
        ("ENGINES = ('zeroplan', 'ddp')", False, True),
        ("match name:\n    case 'ddp': pass", False, True),
        ("from zeroplan.engines.runtime.engine import Runtime", False, True),
        ("from zeroplan.engines import deepspeed", False, True),
        ("from zeroplan.engines.base import Engine", False, False),
        ("if launcher == 'deepspeed': pass", True, False),
        ("if launcher == 'deepspeed': pass", False, True),
        ("print('use --engine deepspeed')", False, False),
        ("Setup(engine='ddp')", True, False),
        ("PACKAGES = ('torch', 'deepspeed')", False, False),
    ],
)
def test_what_counts_as_a_branch(code: str, of_formats: bool, caught: bool) -> None:
    assert bool(list(dispatches(ast.parse(code), of_formats=of_formats))) is caught
