"""Runs a script that holds our tiles beside DeepSpeed's own class, in a process of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE


def rows_of(script: str, cases: list[list[int]], folder: Path, python: Path) -> list[dict[str, Any]]:
    """Give the cases to `script` of this folder, in a file in `folder`; returns its row of each."""
    path = folder / "cases.json"
    path.write_text(json.dumps(cases))
    command = [python, str(Path(__file__).parent / script), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    rows = [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(rows) == len(cases), done.stderr[-2000:]
    return rows
