"""Public files of thirteen programs, each read as its program reads it: by what ``collect.py`` derived from their sources."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.plumbing.documents import dump_yaml
from zeroplan.core.unmodelled import may_add
from zeroplan.interop.programs.registry import PROGRAMS
from zeroplan.interop.readers import read_setup
from zeroplan.interop.setups import Setup
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.merge import with_files
from zeroplan.run.ask import OPTIONS, Ask

MODEL = "meta-llama/Llama-3.1-8B"
FOLDER = Path(__file__).parent
Row = dict[str, Any]


def rows(program: str) -> list[Row]:
    """The corpus's files of one program; none of the one whose files are Python, which tests of its reader run."""
    if program == "torch":
        return []
    return [json.loads(line) for line in (FOLDER / f"{program}.jsonl").read_text(encoding="utf-8").splitlines()]


def every_row() -> list[Row]:
    """The whole corpus."""
    return [row for program in PROGRAMS for row in rows(program)]


def name_of(row: Row) -> str:
    return f"{row['repo'].rpartition('/')[2]}/{row['path']}"


@pytest.fixture
def laid_out(tmp_path: Path) -> Callable[[Row], Path]:
    """Write a row's files as they lie in their repository; returns the path of the row's own."""

    def write(row: Row) -> Path:
        path = tmp_path / row["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        for name, content in row.get("beside", {}).items():
            beside = path.parent / name
            beside.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(content))
        if "script" in row:
            path.write_text(row["script"])
        elif path.suffix == ".json":
            path.write_text(json.dumps(row["keys"]))
        else:
            path.write_text(dump_yaml(row["keys"]))
        return path

    return write


def test_the_corpus_is_as_large_as_it_claims() -> None:
    found = every_row()
    assert len(found) >= 150
    assert len(PROGRAMS) >= 10
    assert all(len(rows(program)) >= 10 for program in PROGRAMS if program != "torch")
    assert len({(row["repo"], row["path"]) for row in found}) == len(found)
    assert all(len(row["commit"]) == 40 for row in found)


@pytest.mark.parametrize("row", every_row(), ids=name_of)
def test_a_public_file_is_read_as_its_program_reads_it(row: Row, laid_out: Callable[[Row], Path]) -> None:
    expected = row["expected"]
    path = laid_out(row)
    if "refused" in expected:
        with pytest.raises(BadInput, match=expected["refused"]):
            read_setup(str(path))
        return
    setup = read_setup(str(path))
    assert setup.program == row["program"]
    assert differences(setup, expected) == {}


#: What of the corpus cannot be planned on a text model: adapters of vision models, 1-bit optimizers, other devices.
RIGHTLY_REFUSED = (
    "language_model",
    "1-bit optimizers",
    "XPU",
    "unknown key in compile",
    "Megatron",
    "no key decides",
    "nothing says how many",
    "use divisors of",
    "offload without shards is not modelled",
    "do not divide the global batch",
    "is left to train",
)


def test_every_public_file_is_planned_or_says_why_not(laid_out: Callable[[Row], Path]) -> None:
    """Planned for one model at formula depth: refused for a reason, or a promise that no key left out can break."""
    outcomes: Counter[str] = Counter()
    for row in every_row():
        path = laid_out(row)
        try:
            request, setup = with_files(Ask(model=MODEL, files=(str(path),), vram="80G", depth="formula"))
            report = estimate_report(request)
        except BadInput as error:
            assert any(reason in str(error) for reason in RIGHTLY_REFUSED), f"{name_of(row)}: {error}"
            outcomes["refused"] += 1
            continue
        assert report.plans
        adds = may_add(setup.unmodelled)
        assert not (adds and any(plan.fits for plan in report.plans)), name_of(row)
        outcomes["unknown" if all(plan.fits is None for plan in report.plans) else "judged"] += 1
    assert outcomes.total() == len(every_row())
    assert outcomes["refused"] <= 31  # one of them names blocks that the model has not


def differences(setup: Setup, expected: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What was read and what was expected, where they differ."""
    # A quantised base is planned under engines that can, and else left out when the run is planned.
    left_out = {one.key for one in setup.unmodelled} | ({setup.key("quantize")} if setup.ask.value("quantize") else set())
    read: dict[str, Any] = {key: setup.value(key) for key in expected if key in (*OPTIONS, "method", "degrees")}
    read["left_out"] = [key for key in expected.get("left_out", ()) if key in left_out]
    zero = (setup.ds_config or {}).get("zero_optimization")
    if "zero_stage" in expected:
        read["zero_stage"] = zero.get("stage", 0) if isinstance(zero, dict) else int(bool(zero))
    if "offload" in expected:
        read["offload"] = ((zero.get("offload_optimizer") or {}) if isinstance(zero, dict) else {}).get("device", "none")
    if "optimizer" in expected:
        read["optimizer"] = (
            expected["optimizer"] if _same_optimizer(setup, expected["optimizer"], left_out) else setup.ask.optimizer
        )
    if setup.method == "" and "method" not in expected:
        read.pop("method", None)
    return {key: (read.get(key), value) for key, value in expected.items() if read.get(key) != value}


def _same_optimizer(setup: Setup, name: str, left_out: set[str]) -> bool:
    """The row of that name; or, for one without a row, whichever stands in for it, which the Setup has to say."""
    try:
        return find_optimizer(name).name == setup.ask.optimizer
    except BadInput:
        return bool(left_out & {"optim", "optimizer"})
