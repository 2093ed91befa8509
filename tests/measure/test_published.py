"""The figures that papers print: each is planned again, and holds or is a miss with its reason."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.published.rows import FIGURES, Row, load_rows, plan

ROWS = {row.id: row for row in load_rows()}


#: Plans of a second and more; each has a smaller one of its kind beside it.
SLOW = {"slides-pp", "slides-pp-dp", "korthikanti-530B-plain", "korthikanti-530B-saving", "korthikanti-1T-plain"}
SLOW |= {"korthikanti-1T-saving", "sc21-1008.0-trains"}
#: And every second row: a table's neighbours ask for the same of another size.
SLOW |= set(list(ROWS)[1::2])


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.long) if row.id in SLOW else row for row in ROWS.values()], ids=ROWS
)
def test_a_published_figure_is_planned_as_kept_and_holds_or_says_why_not(row: Row) -> None:
    planned = plan(row)
    assert planned == row.planned, "python -m benchmarks.published --write keeps what is planned now"
    assert row.agrees(planned) == (not row.miss)


def test_rows_stand_once_and_ask_for_known_figures() -> None:
    assert len(load_rows()) == len(ROWS) >= 160
    assert {row.figure for row in ROWS.values()} == set(FIGURES)
    assert {row.holds for row in ROWS.values()} == {"equal", "at most", "at least"}


@pytest.mark.parametrize(
    ("published", "holds", "planned", "agrees"),
    [
        ("41.3", "equal", 41.25, True),
        ("4187", "equal", 4187.5, True),  # cut off
        ("4187", "equal", 4188.0, False),
        ("30.4", "equal", 30.57, False),
        ("80", "at most", 80.1, False),
        ("80", "at least", 80.1, True),
    ],
)
def test_a_printed_figure_is_met_within_its_last_digit(published: str, holds: str, planned: float, agrees: bool) -> None:
    row = dataclasses.replace(next(iter(ROWS.values())), published=published, holds=holds)
    assert row.agrees(planned) == agrees
