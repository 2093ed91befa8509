"""Faults that a training of the runtime is given, to see whether the comparison finds them: ``--fault NAME``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zeroplan_runtime.engine import Engine


def _rate(engine: Engine) -> None:
    """Updates are a tenth too short."""
    assert engine.optimizer_step is not None
    read = engine.optimizer_step._read
    vars(engine.optimizer_step)["_read"] = lambda: [{**group, "lr": 0.9 * group["lr"]} for group in read()]


def _clip(engine: Engine) -> None:
    """Gradients are clipped to half the norm."""
    assert engine.optimizer_step is not None
    engine.optimizer_step.clip *= 0.5


def _mean(engine: Engine) -> None:
    """Each rank keeps the gradients of its own."""

    def keep(shard: torch.Tensor, whole: torch.Tensor) -> None:
        shard.copy_(whole.chunk(engine.comm.world_size)[engine.comm.rank].clone())

    vars(engine.comm).update(reduce_scatter=keep, all_reduce_mean=lambda whole: None)


def _element(engine: Engine) -> None:
    """The second element of each shard or gradient is lost."""
    scatter, reduce = engine.comm.reduce_scatter, engine.comm.all_reduce_mean

    def lose(tensor: torch.Tensor) -> None:
        tensor.view(-1)[1:2].zero_()

    def scatter_and_lose(shard: torch.Tensor, whole: torch.Tensor) -> None:
        scatter(shard, whole)
        lose(shard)

    def reduce_and_lose(whole: torch.Tensor) -> None:
        reduce(whole)
        lose(whole)

    vars(engine.comm).update(reduce_scatter=scatter_and_lose, all_reduce_mean=reduce_and_lose)


def _micro(engine: Engine) -> None:
    """What later micro batches or uses add to a gradient is lost."""
    accumulate = engine.schedule.grads.accumulate

    def first_alone(unit, position, grad, **how):  # type: ignore[no-untyped-def]
        if not unit.grads.received[position]:
            accumulate(unit, position, grad, **how)

    vars(engine.schedule.grads)["accumulate"] = first_alone


FAULTS: dict[str, Callable[[Engine], None]] = {
    "rate": _rate,
    "clip": _clip,
    "mean": _mean,
    "element": _element,
    "micro": _micro,
}
