"""What DeepSpeed allocates on one rank of many, and what our plan does, phase by phase.

The rank is on the CPU, with a process group that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeroplan.simulate.allocator.events import OP_BITS, AllocatorOp
from zeroplan.simulate.recorder import Recorder


def begin(case: dict[str, Any]) -> None:
    """Be rank ``case["rank"]`` of ``case["ranks"]``."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=case["rank"], world_size=case["ranks"])
    deepspeed.init_distributed("gloo", verbose=False)


def of_deepspeed(
    case: dict[str, Any], initialize: Callable[[], Any], loss_of: Callable[[Any], torch.Tensor], steps: int
) -> list[Any]:
    """Bytes of each allocation of at least ``case["least"]``, at initialisation and in each step of a window. The rank ends.

    Args:
        case: with its ``config``, whose micro batches make a step.
        initialize: calls ``deepspeed.initialize``.
        loss_of: a micro batch's loss under the engine.
        steps: how many.
    """
    phases: list[Any] = []

    def allocated(name: str, action: Callable[[], Any]) -> Any:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            result = action()
        events = found.profiler.kineto_results.events()
        phases.append([name, [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() >= case["least"]]])
        return result

    engine, *_ = allocated("init", initialize)

    def step() -> None:
        for _ in range(case["config"]["gradient_accumulation_steps"]):
            engine.backward(loss_of(engine))
            engine.step()

    for number in range(steps):
        allocated(f"step{number}", step)
    engine.destroy()
    torch.distributed.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    for known in (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP):
        known.clear()
    groups._WORLD_GROUP = None
    return phases


def of_plan(recorder: Recorder, least: int) -> list[Any]:
    """The same of a recorded schedule."""
    phases: list[Any] = []
    sizes: list[int] = []
    for code, value in zip(recorder.code, recorder.value, strict=True):
        op = code & ((1 << OP_BITS) - 1)
        if op == AllocatorOp.ALLOC and value >= least:
            sizes.append(value)
        elif op == AllocatorOp.MARK and (name := recorder.marks[value]) not in ("fwd", "bwd"):
            phases.append([name, sizes])
            sizes = []
    return phases[1:]
