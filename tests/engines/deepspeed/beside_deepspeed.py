"""Cases that a script of this folder traces twice, with our layers and with DeepSpeed's, in a process of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE


def assert_same_events(script: str, cases: Sequence[dict[str, Any]], folder: Path, python: Path) -> None:
    """Run the script on the cases, and ask for the same events, storages and parameters in the same order.

    Args:
        script: a file of this folder, which prints a line ``RESULT {"id", "ours", "theirs"}`` for each case.
        cases: with their ids.
        folder: where the cases are written.
        python: the interpreter.
    """
    path = folder / "cases.json"
    path.write_text(json.dumps(cases))
    command = [python, str(Path(__file__).parent / script), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    rows = [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert [row["id"] for row in rows] == [case["id"] for case in cases], done.stderr[-2000:]
    for row in rows:
        for what, ours, theirs in zip(("op", "arg", "aux", "bytes", "shapes"), row["ours"], row["theirs"], strict=True):
            assert ours == theirs, f"{row['id']}: {what}"
