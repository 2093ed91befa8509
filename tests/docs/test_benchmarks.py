"""Every benchmark that can be run and every file of data has a line in benchmarks/README.md, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import cold_start

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TEXT = (FOLDER / "README.md").read_text()


def test_every_benchmark_has_a_line() -> None:
    rows = [line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| `")]
    named = [set(re.findall(r"`([\w.]+)`", row)) for row in rows]
    missing = []
    for path in sorted(FOLDER.rglob("*.py")):
        if path.name != "__main__.py" and '__name__ == "__main__"' not in path.read_text():
            continue
        *folders, name = path.relative_to(FOLDER).with_suffix("").parts
        alone = ".".join(folders) if name == "__main__" else ".".join((*folders, name))
        beside = {".".join(folders), name}  # a folder's row names what is in it
        if not any(alone in row or beside <= row for row in named) and alone != "doctor.capped":
            missing.append(alone)
    assert not missing


def test_every_file_of_data_has_a_line() -> None:
    table = TEXT.split("## What the files hold")[1]
    named = [one for one in re.findall(r"`([\w./*-]+)`", table) if "/" in one]
    assert [one for one in named if not list(FOLDER.glob(one))] == []
    known = {path for one in named for path in FOLDER.glob(one)}
    data = {path for path in FOLDER.rglob("*") if path.suffix in (".json", ".jsonl")}
    assert sorted(path for path in data - known if "cases" not in path.parts) == []


def test_links_and_results_are_there() -> None:
    readmes = {path: path.read_text() for path in FOLDER.rglob("README.md")}
    links = [
        path.parent / link.partition("#")[0]
        for path, text in readmes.items()
        for link in re.findall(r"\]\(([^)]+)\)", text)
        if not link.startswith("http")
    ]
    results = [FOLDER / name for name in re.findall(r"`(results/[\w./]+)`", TEXT)]
    assert links
    assert results
    assert [path for path in (*links, *results) if not path.exists()] == []


def test_the_answer_that_cold_start_times_is_looked_at() -> None:
    """``check`` runs the command, and raises where it answers otherwise."""
    cold_start.check()
