"""Each row of the accuracy table that is far off has its cause, and each cause a row."""

from __future__ import annotations

import json

from benchmarks.accuracy import RESULT
from benchmarks.causes import CAUSES, beyond


def test_every_row_that_is_far_off_has_one_cause() -> None:
    rows = [row["id"] for row in json.loads(RESULT.read_text())["rows"] if beyond(row)]
    assert sorted(rows) == sorted(row for rows in CAUSES.values() for row in rows)
