"""The host's phases by hand: two units of a few parameters on two ranks, in memory and in files."""

from __future__ import annotations

import pytest

from zeroplan.core.arena.layout import PAGE_NUMEL, SWAP_SLOTS, ParamShape, UnitKind, UnitShape, plan_layout
from zeroplan.core.arena.layout_setup import RuntimeSetup
from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.engines.runtime.host import checkpoint_phases, host_phases

#: Flats of 64 + 192 = 256 and of 640 elements: shards of 128 and 320 on two ranks.
SHAPES = [
    UnitShape("a", UnitKind.BLOCK, (ParamShape("a.0", 60), ParamShape("a.1", 190))),
    UnitShape("b", UnitKind.BLOCK, (ParamShape("b.0", 640),)),
]
MODEL = 2 * (60 + 190 + 640)


def phases(where: OffloadDevice, moved: dict[str, int] | None = None) -> dict[Phase, int]:
    layout = plan_layout(SHAPES, RuntimeSetup(ranks=2, stage=3, offload_optimizer=where))
    host = host_phases(layout, MODEL, moved)
    assert all(one.peak == sum(one.alive.values()) for one in host)
    late = checkpoint_phases(layout, host, after_init=11, after_step=22)
    assert [one.gpu for one in late] == [22, 11]
    return {one.phase: one.peak for one in host} | {one.phase: one.host for one in late}


def test_states_in_memory() -> None:
    """Masters and two moments of 448 elements in fp32, and their gradients in bf16, stand.

    The first rank owns 60 and 64 elements of a's, the second 126 of the last; both own 320 of b. Pieces follow each other
    kind by kind, so that two of b's are there at once.
    """
    kept = (4 + 4 + 4 + 2) * (128 + 320)
    assert phases(OffloadDevice.CPU, {"checkpoint.0": 1000, "checkpoint.1": 24}) == {
        Phase.LOAD: MODEL,
        Phase.INIT: MODEL + kept,
        Phase.FORWARD: kept + 1024,
        Phase.BACKWARD: kept + 1024,
        Phase.STEP: kept + 1024,
        Phase.SAVE: kept + 1024 + 4 * 320,
        Phase.RESUME: kept + 2 * 4 * 320,
    }


def test_states_in_files() -> None:
    """Gradients and the ring stand: its slots have one page for each of three tensors.

    b's masters are put together in memory while it is the last unit of the model that is left; all three of its tensors when
    a checkpoint is read.
    """
    kept = 2 * (128 + 320) + SWAP_SLOTS * 3 * PAGE_NUMEL * 4
    found = phases(OffloadDevice.NVME)
    assert found[Phase.INIT] == kept + max(MODEL + 4 * 128, MODEL - 2 * 250 + 4 * 320)
    assert found[Phase.STEP] == kept
    assert found[Phase.SAVE] == kept + 4 * 320
    assert found[Phase.RESUME] == kept + 3 * 4 * 320 + 2 * 4 * 320


@pytest.mark.parametrize("where", [OffloadDevice.CPU, OffloadDevice.NVME])
def test_what_is_pinned_stands_in_pinned_memory(where: OffloadDevice) -> None:
    layout = plan_layout(SHAPES, RuntimeSetup(ranks=2, stage=3, offload_optimizer=where))
    step = host_phases(layout, MODEL, {"checkpoint.0": 512})[-1]
    assert step.pinned == sum(count for (_, place), count in step.kept.items() if place is Place.PINNED)
    assert step.kept[Buffer.ACTIVATION_CHECKPOINT, Place.PINNED] == 512
