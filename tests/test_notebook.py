"""The example's notebook, run cell by cell as a kernel would, and what its cells show."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import zeroplan

NOTEBOOK = Path(__file__).parents[1] / "examples" / "plan_a_run.ipynb"


def run_cells(path: Path) -> list[Any]:
    """Return the value of the last expression of each code cell; None where a cell ends with a statement."""
    space: dict[str, Any] = {}
    values = []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(path), "exec"), space)
        values.append(None if last is None else eval(compile(ast.Expression(last.value), str(path), "eval"), space))
    return values


def test_every_cell_runs_and_shows_its_answer(capsys: Any) -> None:
    values = run_cells(NOTEBOOK)
    plans, label, shares, found, *_, last, _ = values
    assert isinstance(plans, zeroplan.Plans)
    assert isinstance(found, zeroplan.Recommendations)
    assert label[0] == plans.best.label
    assert shares[0][1] > 0
    assert len(last) == 1
    for shown in (plans, found, last):
        html = shown._repr_html_()
        assert html.startswith("<div class='zeroplan'><style>")
        assert "prefers-color-scheme: dark" in html
        assert html.count("<tr>") == 1 + len(shown)
        assert "<b class='yes'>" in html or "<b class='no'>" in html
    out = capsys.readouterr().out
    assert "train_micro_batch_size_per_gpu" in out
    assert "estimate() takes no argument 'batch_size'; write micro_batch" in out


def test_cells_hold_no_outputs() -> None:
    """What a reader sees is what this version answers, once the cells have run."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")


def test_text_in_a_fragment_is_escaped() -> None:
    report = zeroplan.estimate("openai-community/gpt2", stage=2, depth="formula").report
    name = report.model_copy(update={"warnings": ("<b>a model's own words</b>",)})
    assert "<b>a model" not in zeroplan.Plans(name)._repr_html_()
