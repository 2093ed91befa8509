"""A step of FSDP2's units, played by hand: what hides, what waits, and what a collective takes from the kernels beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeroplan.search.unit_time import ShardedUnit, UnitPass, UnitStep

#: Collectives beside kernels take half as long again, so these are short.
BLOCK = ShardedUnit(UnitPass(1.0, 0.2), UnitPass(2.0, 0.2), gather=0.25, reduce=0.5)
STEP = UnitStep(ShardedUnit(gather=0.75, reduce=1.5), BLOCK, 4, (UnitPass(0.25), UnitPass(0.5)), (0.0, 0.0), resharded=True)


def test_first_gathers_and_last_reductions_have_nothing_beside_them() -> None:
    """The root's gather and the first block's, then computation alone, then the last block's reduction and the root's."""
    computed = 4 * (1.0 + 2.0) + 0.25 + 0.5
    assert STEP.seconds(reduces=False) == pytest.approx(0.75 + 0.25 + computed)
    assert STEP.seconds(reduces=True) == pytest.approx(0.75 + 0.25 + computed + 0.5 + 1.5)


def test_one_unit_is_gathered_ahead() -> None:
    """A gather longer than a block sets the pace, each once the one before it has been copied out."""
    slow = replace(STEP, block=replace(BLOCK, gather=1.5, copied=0.25, reduce=0.0), root=ShardedUnit(), resharded=False)
    slower = 3 * 1.0 / 3  # beside each of three blocks, which keep a third of its speed
    assert slow.seconds(reduces=False) == pytest.approx(4 * (1.5 + 0.25) + slower + 1.0 + 0.25 + 4 * 2.0 + 0.5)


def test_a_reduction_is_packed_when_the_one_before_it_has_ended() -> None:
    long = replace(STEP, root=ShardedUnit(), block=replace(BLOCK, gather=0.0, reduce=3.0, packed=0.5))
    slower = 3 * 2.0 / 3
    assert long.seconds(reduces=True) == pytest.approx(4 * 1.0 + 0.25 + 0.5 + 2.0 + 4 * (0.5 + 3.0) + slower)


def test_a_slow_host_sets_the_pace_and_hides_collectives() -> None:
    slow = replace(STEP, block=replace(BLOCK, forward=UnitPass(1.0, 4.0), backward=UnitPass(2.0, 4.0)), root=ShardedUnit())
    assert slow.seconds(reduces=False) == pytest.approx(8 * 4.0)
    ahead = replace(slow, block=replace(BLOCK, forward=UnitPass(1.0, 0.0), backward=UnitPass(2.0, 3.0)))
    computed = 4 * (1.0 + 2.0) + 0.25 + 0.5
    assert ahead.seconds(reduces=False) == pytest.approx(0.25 + computed)  # it issued the backward while the forward ran


def test_where_the_host_waits_its_lead_is_lost() -> None:
    quick = replace(STEP, root=ShardedUnit(), block=ShardedUnit(UnitPass(1.0, 0.9), UnitPass(2.0)))
    waiting = replace(quick, block=ShardedUnit(UnitPass(1.0, 0.9, waits=1), UnitPass(2.0)))
    assert quick.seconds(reduces=False) == pytest.approx(4 * 3.0 + 0.75)
    assert waiting.seconds(reduces=False) == pytest.approx(4 * 3.0 + 0.75)  # half a block each, and the GPU is slower
    slower = replace(quick, block=ShardedUnit(UnitPass(1.0, 1.1, waits=1), UnitPass(2.0)))
    assert slower.seconds(reduces=False) > waiting.seconds(reduces=False)


def test_collectives_take_processors_and_grouped_products_wait_for_them() -> None:
    plain = replace(STEP, taken=(0.2, 0.1))
    gathers = (3 + 1 + 3) * 0.25 * 0.2  # beside three blocks, the head's backward and three blocks again
    reductions = 3 * 0.5 * 0.1
    assert plain.seconds(reduces=True) == pytest.approx(STEP.seconds(reduces=True) + gathers + reductions)
    grouped = replace(plain, block=replace(BLOCK, forward=UnitPass(1.0, 0.2, persistent=1.0)))
    assert grouped.seconds(reduces=True) == pytest.approx(plain.seconds(reduces=True) + 3 * 0.25 * (1.0 - 0.2))


def test_the_update_waits_for_the_last_reduction_and_for_the_host() -> None:
    update = UnitPass(0.5, 0.1)
    assert STEP.seconds(reduces=True, update=update) == pytest.approx(STEP.seconds(reduces=True) + 0.5)
    late = replace(update, issued=100.0)
    assert STEP.seconds(reduces=True, update=late) == pytest.approx(8 * 0.2 + 100.0)
