"""What streams do to the same memory is ordered by events: scripts at stages 2 and 3 on two ranks, by clocks."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

import zeroplan_runtime
from tests.runtime import rare_scripts, strange_scripts  # noqa: F401  (they add scripts)
from tests.runtime.odd_scripts import SCRIPTS, config_of
from tests.runtime.ranks import RankPool
from tests.runtime.stream_order import watched
from zeroplan.core.errors import BadInput

#: A gather that nobody has waited for may still read a shard as its update writes it: its unit was left out of the step, and
#: the update makes what was gathered stale, so it is gathered again before any use.
STALE = ("a gather reads the shard", "an update writes the master")
NAMES = (
    "gradients_of_chosen_inputs",
    "a_jacobian",
    "a_checkpoint_within_a_forward",
    "a_reentrant_checkpoint_within_a_forward",
    "two_batches_at_a_time",
    "layers_left_out_at_random",
    "a_layer_left_out_is_read_in_the_backward",
    "momenta_reset",
    "evaluated_within_an_accumulation",
    "backwards_within_the_backward",
    "blocks_frozen_one_after_another",
    "the_same_loss_twice",
)


def races(group: dist.ProcessGroup, stage: int, names: tuple[str, ...], deaf: bool) -> dict[str, set[tuple[str, str]]]:
    found = {}
    for name in names:
        build, use, _ = SCRIPTS[name]
        config = config_of(stage)
        torch.manual_seed(0)
        with watched(deaf=deaf) as seen:
            engine, *_ = zeroplan_runtime.initialize(model=build(), config=config, group=group, device="cpu")
            with suppress(BadInput):  # up to where stage 3 refuses
                use(engine)
            engine.destroy()
        found[name] = seen.races - {STALE}
    return found


def races_of_an_engine_that_is_dropped(group: dist.ProcessGroup, stage: int, deaf: bool) -> set[tuple[str, str]]:
    build, use, _ = SCRIPTS["momenta_reset"]
    with watched(deaf=deaf) as clocks:
        engine = zeroplan_runtime.initialize(model=build(), config=config_of(stage), group=group, device="cpu")[0]
        use(engine)
        memory = [flat.full for unit in engine.model_states.units for flat in unit.flats()]
        del engine
        gc.collect()
        for one in memory:
            clocks.use(one, "memory is freed", writes=True)
    return clocks.races - {STALE}


@pytest.mark.parametrize("stage", [2, 3])
def test_uses_of_the_same_memory_are_in_order(pool: RankPool, stage: int) -> None:
    for found in pool.run(2, races, stage, NAMES, False):
        assert found == {name: set() for name in NAMES}


@pytest.mark.parametrize("stage", [2, 3])
def test_gathers_have_ended_when_the_garbage_collector_frees_their_memory(pool: RankPool, stage: int) -> None:
    for found in pool.run(2, races_of_an_engine_that_is_dropped, stage, False):
        assert not found
    for found in pool.run(2, races_of_an_engine_that_is_dropped, stage, True):
        assert ("a gather writes the parameters", "memory is freed") in found


def test_waits_that_are_missing_are_found(pool: RankPool) -> None:
    for found in pool.run(2, races, 3, ("momenta_reset",), True):
        assert ("a gather writes the parameters", "a unit computes") in found["momenta_reset"]
        assert ("a unit computes", "a gather writes the parameters") in found["momenta_reset"]
        assert ("an update writes the master", "a gather reads the shard") in found["momenta_reset"]
