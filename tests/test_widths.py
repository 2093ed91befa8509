"""No class that a run passes through has more than 20 annotated fields."""

from __future__ import annotations

import ast

from tests.conftest import ROOT

MOST = 20
#: Lists of keyword arguments, which grow with the options and carry nothing.
ARGUMENTS = {"RecommendOptions", "MachineOptions", "StageOptions", "RunOptions"}
#: Tables of numbers that belong together, with their fields: none of them may grow.
WIDER = {
    "MegatronModel": 64,
    "Rates": 32,
    "Measurement": 22,
    "DeepSpeedTransformerConfig": 24,
}


def test_classes_are_narrow() -> None:
    found: dict[str, int] = {}
    for package in ("zeroplan", "zeroplan_runtime"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and node.name not in ARGUMENTS:
                    fields = sum(isinstance(one, ast.AnnAssign) for one in node.body)
                    found[node.name] = max(fields, found.get(node.name, 0))
    wide = {name: fields for name, fields in found.items() if fields > WIDER.get(name, MOST)}
    assert not wide
    assert {name for name in WIDER if found.get(name, 0) > MOST} == set(WIDER), "a class that is narrow now has no row here"
