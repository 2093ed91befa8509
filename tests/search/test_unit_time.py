"""A step of FSDP2's units, played by hand: what hides, what waits, and what a collective takes from the kernels beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeroplan.search.unit_time import ShardedUnit, UnitPass, UnitStep, _play

BLOCK = ShardedUnit(UnitPass(1.0, 0.2), UnitPass(2.0, 0.2), gather=0.5, reduce=1.0)
STEP = UnitStep(ShardedUnit(gather=0.75, reduce=1.5), BLOCK, 4, (UnitPass(0.25), UnitPass(0.5)), (0.0, 0.0), resharded=True)


def test_first_gathers_and_last_reductions_have_nothing_beside_them() -> None:
    """The root's gather and the first block's, then computation alone, then the last block's reduction and the root's."""
    computed = 4 * (1.0 + 2.0) + 0.25 + 0.5
    assert STEP.seconds(reduces=False) == pytest.approx(0.75 + 0.5 + computed)
    assert STEP.seconds(reduces=True) == pytest.approx(0.75 + 0.5 + computed + 1.0 + 1.5)


def test_one_unit_is_gathered_ahead() -> None:
    """A gather longer than a block sets the pace, each once the one before it has been copied out."""
    slow = replace(STEP, block=replace(BLOCK, gather=1.5, copied=0.25, reduce=0.0), root=ShardedUnit(), resharded=False)
    assert slow.seconds(reduces=False) == pytest.approx(4 * (1.5 + 0.25) + 1.0 + 0.25 + 4 * 2.0 + 0.5)


def test_a_reduction_is_packed_when_the_one_before_it_has_ended() -> None:
    long = replace(STEP, root=ShardedUnit(), block=replace(BLOCK, gather=0.0, reduce=3.0, packed=0.5))
    assert long.seconds(reduces=True) == pytest.approx(4 * 1.0 + 0.25 + 0.5 + 2.0 + 4 * (0.5 + 3.0))


def test_a_slow_host_sets_the_pace_and_hides_collectives() -> None:
    slow = replace(STEP, block=replace(BLOCK, forward=UnitPass(1.0, 4.0), backward=UnitPass(2.0, 4.0)), root=ShardedUnit())
    assert slow.seconds(reduces=False) == pytest.approx(8 * 4.0)
    ahead = replace(slow, block=replace(BLOCK, forward=UnitPass(1.0, 0.0), backward=UnitPass(2.0, 3.0)))
    computed = 4 * (1.0 + 2.0) + 0.25 + 0.5
    assert ahead.seconds(reduces=False) == pytest.approx(0.5 + computed)  # it issued the backward while the forward ran


def test_where_the_host_waits_its_lead_is_lost() -> None:
    quick = replace(STEP, root=ShardedUnit(), block=ShardedUnit(UnitPass(1.0, 0.9), UnitPass(2.0)))
    waiting = replace(quick, block=ShardedUnit(UnitPass(1.0, 0.9, waits=1), UnitPass(2.0)))
    assert quick.seconds(reduces=False) == pytest.approx(4 * 3.0 + 0.75)
    assert waiting.seconds(reduces=False) == pytest.approx(4 * 3.0 + 0.75)  # half a block each, and the GPU is slower
    slower = replace(quick, block=ShardedUnit(UnitPass(1.0, 1.1, waits=1), UnitPass(2.0)))
    assert slower.seconds(reduces=False) > waiting.seconds(reduces=False)


def test_collectives_take_processors_and_grouped_products_wait_for_them() -> None:
    plain = replace(STEP, taken=(0.2, 0.1))
    beside = 3 * 0.5 * 0.2 + 3 * (0.5 * 0.2 + 1.0 * 0.1) + 0.5 * 0.1  # of the last block only its own gather is left
    assert plain.seconds(reduces=True) == pytest.approx(STEP.seconds(reduces=True) + beside, abs=0.15)
    grouped = replace(plain, block=replace(BLOCK, forward=UnitPass(1.0, 0.2, persistent=1.0)))
    assert grouped.seconds(reduces=True) == pytest.approx(plain.seconds(reduces=True) + 3 * 0.5 * (1.0 - 0.2))


@pytest.mark.parametrize("reduces", [True, False])
@pytest.mark.parametrize("gather", [0.1, 0.9, 2.5])
def test_further_blocks_take_as_long_as_the_last_that_is_played(gather: float, reduces: bool) -> None:
    many = replace(STEP, blocks=40, block=replace(BLOCK, gather=gather, copied=0.1, packed=0.2), taken=(0.2, 0.1))
    assert many.seconds(reduces=reduces) == pytest.approx(_play(many, reduces))
