"""Keys that plans leave out: which of them make a figure a lower bound, and which an upper one."""

from __future__ import annotations

import pytest

from zeroplan.core.unmodelled import Effect, Unmodelled, may_add, may_save


@pytest.mark.parametrize(
    ("effects", "adds", "saves"),
    [
        ([], False, False),
        ([Effect.NONE], False, False),
        ([Effect.MORE, Effect.NONE], True, False),
        ([Effect.LESS], False, True),
        ([Effect.UNKNOWN], True, True),
    ],
)
def test_unknown_may_do_either(effects: list[Effect], adds: bool, saves: bool) -> None:
    left_out = [Unmodelled("key", effect, "does something") for effect in effects]
    assert (may_add(left_out), may_save(left_out)) == (adds, saves)
