"""The gathers of the next forward wait for their own unit's update alone, so that they run beside the updates behind it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan_runtime.streams import Event, Stream

pytestmark = [pytest.mark.torch]


def waited(group: dist.ProcessGroup) -> tuple[int, list[tuple[int, int]]]:
    """One step at stage 3; returns the number of updates, and for each gather how many had been issued when its unit
    was updated, and how many its stream has waited for.
    """
    rank = dist.get_rank(group)
    engine: Any = zeroplan_runtime.initialize(model=models.make(depth=4), config=ds_config(3), group=group, device="cpu")[0]
    for number in range(2):
        engine.backward(engine(models.batch(number, 0, rank)))
        engine.step()
    engine.backward(engine(models.batch(2, 0, rank)))
    schedule, stepper = engine.schedule, engine.optimizer_step
    updates: list[str] = []
    captured: dict[int, int] = {}
    known: dict[int, int] = {}
    own: dict[str, int] = {}
    gathers: list[tuple[int, int]] = []

    def record(event: Event, stream: Stream) -> None:
        captured[id(event)] = len(updates) if stream is schedule.compute_stream else known.get(id(stream), 0)

    def wait(event: Event, stream: Stream) -> None:
        known[id(stream)] = max(known.get(id(stream), 0), captured.get(id(event), 0))

    update, unshard = stepper.update, schedule.unshard

    def counted(part: Any, *args: Any) -> None:
        update(part, *args)
        updates.append(part.unit.name)
        own[part.unit.name] = len(updates)

    def seen(unit: Any, **options: Any) -> None:
        unshard(unit, **options)
        gathers.append((own[unit.name], known[id(schedule.all_gather_stream)]))

    with (
        mock.patch.object(Event, "record", record),
        mock.patch.object(Event, "wait", wait),
        mock.patch.object(stepper, "update", counted),
        mock.patch.object(schedule, "unshard", seen),
    ):
        engine.step()
    engine.destroy()
    return len(updates), gathers


def test_a_gather_waits_for_no_later_update(pool: RankPool) -> None:
    for count, gathers in pool.run(2, waited):
        assert len(set(gathers)) > 1
        assert all(knows == issued for issued, knows in gathers)
        assert gathers[0][1] < count
