"""The Arena is the only allocator: what else an engine allocates is gone after the step, and small within it."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan_runtime.arena import Arena
from zeroplan_runtime.kernels import native_backend
from zeroplan_runtime.schedule import tensors_of

#: The step's scalars as the host reads them (optim/step.py, Outcome): they stay until the next step.
OUTCOME = 64
#: One fp64 number: what torch's own operations return on the way from the sum of squares to the clip factor.
SCALAR = 8


class Strays(TorchDispatchMode):
    """Within it, storages that operations make, but for the Arena's, with their sizes and who asked for them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, weakref.ref[Any], str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tensors_of((args, dict(kwargs or {})))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            fresh = storage.data_ptr() not in given or func is torch.ops.aten.lift_fresh.default
            if fresh and storage.nbytes() and not _within(Arena._allocate):
                self.made.append((storage.nbytes(), weakref.ref(storage), f"{func} for {_caller()}"))
        return result

    def alive(self) -> list[tuple[int, str]]:
        """Size and origin of those that something still holds."""
        gc.collect()
        return [(size, who) for size, reference, who in self.made if reference() is not None]


def _within(function: Any) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is function.__code__:
            return True
        frame = frame.f_back
    return False


def _caller() -> str:
    frame = sys._getframe(2)
    while "/torch/" in frame.f_code.co_filename and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}, {frame.f_code.co_name}"


def strays(group: dist.ProcessGroup, config: dict[str, Any]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Of an engine that is made and takes two steps: what outlives them, and what was made within the second ``step()``."""
    model, whole, step = models.make(), Strays(), Strays()
    with whole:
        engine, *_ = zeroplan_runtime.initialize(model=model, config=config, group=group, device="cpu")
    for number in range(2):
        for micro in range(engine.gradient_accumulation_steps()):
            with whole:
                engine.backward(engine(models.batch(number, micro, 0)))
            with step if number else whole:
                engine.step()
    engine.drain()
    left = whole.alive() + step.alive()
    engine.destroy()
    return left, [(size, who) for size, _, who in step.made]


OPTIMIZERS = {
    "AdamW": {},
    "Adam": {"adam_w_mode": False},
    "Lamb": {},
    "Lion": {},
    "SGD": {"momentum": 0.9},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {},
}
CONFIGS = [
    *(ds_config(2, "bf16", optimizer={"type": k, "params": v}, gradient_clipping=1.0) for k, v in OPTIMIZERS.items()),
    ds_config(0, "fp32", optimizer={"type": "Lamb", "params": {}}, gradient_accumulation_steps=2),
    ds_config(1, "fp16", gradient_accumulation_steps=2),
    ds_config(3, "bf16", communication_data_type="fp32", gradient_clipping=1.0),
    ds_config(3, "bf16", zero_optimization={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_outlives_a_step_but_the_arenas(pool: RankPool, ranks: int) -> None:
    for config in CONFIGS[1::2] if ranks > 1 else CONFIGS[::2]:
        left, within = pool.run(ranks, strays, config)[0]
        assert [size for size, _ in left] in ([], [OUTCOME]), (config, left)
        if native_backend.library() is not None:  # torch's own operations, where they stand in, need temporaries
            assert [made for made in within if made[0] > SCALAR and made[0] != OUTCOME] == [], config


def test_a_stray_is_seen() -> None:
    with Strays() as seen:
        kept = [torch.zeros(3), torch.tensor([1.0])]
        torch.empty(5).add_(1)
        Arena(torch.device("cpu"))._allocate(7, torch.float32, zeroplan_runtime.arena.Place.HBM)
    assert [size for size, _ in seen.alive()] == [4 * t.numel() for t in kept]
    assert sorted(size for size, _, _ in seen.made) == [4, 12, 20]
