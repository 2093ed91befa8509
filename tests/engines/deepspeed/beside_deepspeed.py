"""Cases that a script of this folder traces twice, with our layers and with DeepSpeed's, in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engines.deepspeed.scripts import rows_of


def assert_same_events(script: str, cases: Sequence[dict[str, Any]], folder: Path, python: Path) -> None:
    """Run the script on the cases, and ask for the same events, storages and parameters in the same order.

    Args:
        script: a file of this folder, which prints a line ``RESULT {"id", "ours", "theirs"}`` for each case.
        cases: with their ids.
        folder: where the cases are written.
        python: the interpreter.
    """
    for row in rows_of(script, cases, folder, python):
        for what, ours, theirs in zip(("op", "arg", "aux", "bytes", "shapes"), row["ours"], row["theirs"], strict=True):
            assert ours == theirs, f"{row['id']}: {what}"
