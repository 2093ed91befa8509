"""Every benchmark that can be run has a line in benchmarks/README.md, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_links_and_results_are_there() -> None:
    links = [FOLDER / link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", TEXT)]
    results = [FOLDER / name for name in re.findall(r"`(results/[\w./]+)`", TEXT)]
    assert links
    assert results
    assert [path for path in (*links, *results) if not path.exists()] == []
