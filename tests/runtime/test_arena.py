"""What the Arena holds is what the layout says, to the byte, at every stage and precision on 1 to 4 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config, train_all
from zeroplan.core.arena.layout import plan_layout
from zeroplan.core.arena.layout_setup import RuntimeSetup
from zeroplan.core.arena.owned_buffers import OwnedBuffer, runtime_buffers
from zeroplan.core.buffers import ALWAYS, Buffer, Phase, Place
from zeroplan.core.workload import DType
from zeroplan_runtime.arena import Arena
from zeroplan_runtime.units import find_units

VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fp32", {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}}),
    ("bf16", {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}),
    ("bf16", {"communication_data_type": "fp32"}),
    ("bf16", {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}, "data_types": {"grad_accum_dtype": "fp32"}}),
    ("fp16", {}),
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equal_to_the_byte(pool: RankPool, ranks: int) -> None:
    """Each variant at one stage; over the numbers of ranks the stages change, so that each variant meets every stage."""
    cases = [
        (ds_config(stage, dtype, **changes), {})
        for stage in range(4)
        for number, (dtype, changes) in enumerate(VARIANTS)
        if (number + ranks) % 4 == stage
    ]
    for rank in pool.run(ranks, train_all, cases, 1):
        for (config, _), result in zip(cases, rank, strict=True):
            assert rows_of(result["rows"]) == predicted(config, ranks)


def rows_of(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, int]]:
    """The most bytes in each phase, by buffer, unit and place; nothing but what stands is left between two steps."""
    for row in rows:
        assert set(row["phases"]) == {str(phase) for phase in ALWAYS}
        assert row["peak"] == max(row["phases"].values())
        assert row["bytes"] == row["phases"]["init"]
    return {(row["buffer"], row["unit"], row["place"]): row["phases"] for row in rows}


def predicted(config: dict[str, Any], ranks: int) -> dict[tuple[str, str, str], dict[str, int]]:
    """As a planner would, from the config and the shapes alone."""
    dtype = DType.BF16 if "bf16" in config else DType.FP16 if "fp16" in config else DType.FP32
    reduce_dtype = DType(config.get("communication_data_type", dtype))
    kind = str(config["optimizer"]["type"]).lower()
    setup = RuntimeSetup(
        ranks=ranks,
        stage=config["zero_optimization"]["stage"],
        param_dtype=dtype,
        reduce_dtype=reduce_dtype,
        accum_dtype=DType(config.get("data_types", {}).get("grad_accum_dtype", reduce_dtype)),
        optimizer="sgd_momentum" if kind == "sgd" else kind,
        grad_accum=config.get("gradient_accumulation_steps", 1),
    )
    shapes = [unit.shape for unit in find_units(models.make(), wide_numel=500)]
    rows = runtime_buffers(plan_layout(shapes, setup))
    found = {
        (str(row.buffer), row.unit, str(row.place)): {str(p): row.bytes if p in row.phases else 0 for p in ALWAYS}
        for row in rows
    }
    assert len(found) == len(rows)
    return found


def test_peaks_belong_to_their_phase() -> None:
    arena = Arena(torch.device("cpu"))
    keep = arena.empty(Buffer.PARAM_FULL, 10, torch.float32, unit="a")
    arena.phase = Phase.FORWARD
    first = arena.empty(Buffer.OPTIM_TEMP, 100, torch.bfloat16, unit="a")
    second = arena.empty(Buffer.OPTIM_TEMP, 50, torch.bfloat16, unit="a")
    arena.free(first)
    arena.phase = Phase.STEP
    arena.free(second)
    pinned = arena.empty(Buffer.STAGE_D2H, 8, torch.float32, place=Place.PINNED)
    rows = {(row["buffer"], row["place"]): row for row in arena.measurement()}
    assert rows["optim.temp", "hbm"]["phases"] == {"forward": 300, "step": 100}
    assert rows["optim.temp", "hbm"]["bytes"] == 0
    assert rows["param.full", "hbm"]["phases"] == {"init": 40, "forward": 40, "step": 40}
    assert rows["stage.d2h", "pinned"]["peak"] == 32 == pinned.numel() * 4
    assert (arena.live(), arena.peak(), arena.live(Place.PINNED)) == (40, 340, 32)
    with pytest.raises(KeyError):
        arena.free(first)
    assert keep.numel() == 10


def test_buffers_of_one_kind_share_one_block() -> None:
    units = find_units(models.make(), wide_numel=500)
    arena = Arena(torch.device("cpu"))
    made = arena.allocate(runtime_buffers(plan_layout([u.shape for u in units], RuntimeSetup(3, 3))))
    blocks = {(buffer, tensor.dtype): set() for (buffer, _), tensor in made.items()}
    for (buffer, _), tensor in made.items():
        blocks[buffer, tensor.dtype].add(tensor.untyped_storage().data_ptr())
        assert tensor.data_ptr() % 64 == 0
    assert all(len(pointers) == 1 for pointers in blocks.values())


def test_room_is_one_segment_unless_large_blocks_are_never_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    arena = Arena(torch.device("cpu"))
    rows = [OwnedBuffer(Buffer.GRAD_SHARD, unit, 100, DType.BF16, phases=(Phase.BACKWARD,)) for unit in "ab"]
    buffers = arena.resizable(rows).values()
    arena.device = torch.device("cuda")  # only looked at, since nothing is allocated here
    monkeypatch.setattr(torch, "empty", lambda size, **_: asked.append(size))
    arena.reserve_segment(buffers)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    arena.reserve_segment(buffers)
    assert asked == [400]
