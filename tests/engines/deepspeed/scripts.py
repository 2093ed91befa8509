"""Runs a script of this folder on cases, in a process of its own: DeepSpeed, once imported, changes what torch does."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE


def rows_of(script: str, cases: Sequence[Any], folder: Path, python: Path) -> list[dict[str, Any]]:
    """Give the cases to `script`, in a file in `folder`; returns what it prints behind ``RESULT`` of each, in their order.

    Cases that are mappings have an ``id``, and so have their rows.
    """
    path = folder / "cases.json"
    path.write_text(json.dumps(cases))
    command = [python, str(Path(__file__).with_name(script)), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    rows = [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(rows) == len(cases), done.stderr[-2000:]
    assert [row["id"] for row in rows if "id" in row] == [case["id"] for case in cases if isinstance(case, dict)]
    return rows
