"""Edits of a tape, against lists that are edited by hand."""

from __future__ import annotations

import random

import pytest

from zeroplan.tape.edit import TapeEdit, fresh_storages, renumbered
from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op, TapeEvent

ROWS: list[TapeEvent] = [
    (Op.ALLOC, 0, 8, Kind.INPUT, -1),
    (Op.MARK, Mark.FORWARD_BEGIN, 0, 0, -1),
    (Op.ENTER, 0, 0, 0, -1),
    (Op.ALLOC, 3, 64, Kind.SAVED, 0),
    (Op.ALLOC, 4, 32, Kind.TEMP, 0),
    (Op.FREE, 4, 0, 0, -1),
    (Op.EXIT, 0, 0, 0, -1),
    (Op.MARK, Mark.FORWARD_END, 0, 0, -1),
    (Op.MARK, Mark.BACKWARD_BEGIN, 0, 0, -1),
    (Op.ENTER, 0, 0, 0, -1),
    (Op.ALLOC, 7, 16, Kind.GRAD, 0),
    (Op.GRAD, 0, 7, 0, -1),
    (Op.FREE, 3, 0, 0, -1),
    (Op.FREE, 0, 0, 0, -1),
    (Op.MARK, Mark.BACKWARD_END, 0, 0, -1),
]


@pytest.fixture
def tape() -> ExpandedTape:
    return ExpandedTape((), (), buffers=(5,)).with_events(ROWS)


def test_an_edit_without_changes_is_the_tape(tape: ExpandedTape) -> None:
    assert list(TapeEdit(tape).result().events()) == ROWS


def test_places_are_those_of_the_tape_as_it_was(tape: ExpandedTape) -> None:
    edit = TapeEdit(tape)
    last = edit.before(len(ROWS))
    new = edit.before(3, module=2).alloc(11)
    edit.drop_storages((4,))
    edit.before(3).free(new)  # behind what stands there already
    edit.replace(11, (Op.GRAD, 1, 7, 0, -1), (Op.GRAD, 2, 7, 0, -1))
    last.add(Op.MARK, Mark.OUTPUT)
    written = [(Op.ALLOC, 8, 11, Kind.TEMP, 2), (Op.FREE, 8, 0, 0, -1)]
    grads = [(Op.GRAD, 1, 7, 0, -1), (Op.GRAD, 2, 7, 0, -1)]
    expected = [*ROWS[:3], *written, ROWS[3], *ROWS[6:11], *grads, *ROWS[12:], (Op.MARK, Mark.OUTPUT, 0, 0, -1)]
    edited = edit.result()
    assert list(edited.events()) == expected
    assert edited.buffers == (5,)
    assert list(tape.events()) == ROWS  # which nobody changes


@pytest.mark.parametrize("seed", range(20))
def test_random_edits_are_those_of_a_list(tape: ExpandedTape, seed: int) -> None:
    draw = random.Random(seed)
    edit, rows = TapeEdit(tape), [[row] for row in ROWS]
    inserted: list[list[TapeEvent]] = [[] for _ in range(len(ROWS) + 1)]
    for number in range(12):
        at = draw.randrange(len(ROWS))
        event = (int(Op.ENTER), number, 0, 0, -1)
        match draw.choice(("before", "behind", "drop", "replace")):
            case "before":
                edit.before(at).add(Op.ENTER, number)
                inserted[at].append(event)
            case "behind":
                edit.behind(at).add(Op.ENTER, number)
                inserted[at + 1].append(event)
            case "drop":
                edit.drop((at,))
                rows[at] = []
            case _:
                edit.replace(at, event, event)
                rows[at] = [event, event]
    expected = [one for new, row in zip(inserted, [*rows, []], strict=True) for one in (*new, *row)]
    assert list(edit.result().events()) == expected


def test_what_a_pattern_looks_for(tape: ExpandedTape) -> None:
    edit = TapeEdit(tape)
    assert (edit.made[3], edit.freed[3], edit.gradients) == (3, 12, [11])
    assert edit.hooks[(Op.ENTER, 0)] == 9  # the last
    assert (edit.first(Op.ENTER, 0), edit.first(Op.ENTER, 0, 3), edit.first(Op.BWD_EXIT, 0)) == (2, 9, None)
    assert edit.storages_of(edit.allocations(range(2, 7), range(10, 11))) == [3, 4, 7]
    assert edit.left_by(range(2, 7)) == {3: 64}
    assert tape.backward == 8
    assert ExpandedTape((), ()).backward == 0


def test_new_storages_and_higher_numbers_meet_no_other(tape: ExpandedTape) -> None:
    assert next(fresh_storages(tape)) == 8
    moved = renumbered(tape, 10)
    assert renumbered(tape, 0) is tape
    assert {arg for op, arg in zip(moved.op, moved.arg, strict=True) if op == Op.ALLOC} == {10, 13, 14, 17}
    assert (moved.arg[11], moved.aux[11]) == (0, 17)  # the parameter as it was, its gradient's storage moved
    assert moved.aux[:11] == tape.aux[:11]
