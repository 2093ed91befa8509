"""The Python API: `estimate` and its short forms by stage."""

from __future__ import annotations

from typing import Any

from zeroplan.core.plan import MemoryPlan
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.request import Request


def estimate(model: Any = None, **options: Any) -> list[MemoryPlan]:
    """Predict the memory of training `model`, for every stage and offload left open.

    Args:
        model: a catalog or hub id, a path, a config as a dict, or a live ``nn.Module`` on any device. Or none, with
            ``params=`` a count.
        options: the fields of :class:`zeroplan.planner.request.Request`: the command line's flags with underscores,
            such as ``gpus=8``, ``stage=2``, ``offload_optimizer="cpu"``, ``vram="24G"``, ``ds_config=…``.

    Returns:
        One plan for each stage and offload left open; bytes throughout.

    Raises:
        BadInput: a value that cannot be used, with the remedy.
        TypeError: an option that does not exist.
    """
    return list(estimate_report(Request(model=model, **options)).plans)


def _one(stage: int, model: Any, options: dict[str, Any]) -> MemoryPlan:
    for name in ("offload_optimizer", "offload_param"):
        options.setdefault(name, "none")
    return estimate(model, stage=stage, **options)[0]


def estimate_zero1_mem(
    model: Any = None,
    *,
    params: int | None = None,
    gpus: int = 1,
    nodes: int = 1,
    offload_optimizer: str = "none",
    **workload: Any,
) -> MemoryPlan:
    """The plan at ZeRO stage 1. Arguments as for :func:`estimate`."""
    return _one(1, model, {"params": params, "gpus": gpus, "nodes": nodes, "offload_optimizer": offload_optimizer, **workload})


def estimate_zero2_mem(
    model: Any = None,
    *,
    params: int | None = None,
    gpus: int = 1,
    nodes: int = 1,
    offload_optimizer: str = "none",
    **workload: Any,
) -> MemoryPlan:
    """The plan at ZeRO stage 2. Arguments as for :func:`estimate`."""
    return _one(2, model, {"params": params, "gpus": gpus, "nodes": nodes, "offload_optimizer": offload_optimizer, **workload})


def estimate_zero3_mem(
    model: Any = None,
    *,
    params: int | None = None,
    largest_layer_params: int | None = None,
    gpus: int = 1,
    nodes: int = 1,
    offload_optimizer: str = "none",
    offload_param: str = "none",
    **workload: Any,
) -> MemoryPlan:
    """The plan at ZeRO stage 3. Arguments as for :func:`estimate`."""
    sizes = {"params": params, "largest_layer_params": largest_layer_params, "gpus": gpus, "nodes": nodes}
    return _one(3, model, {**sizes, "offload_optimizer": offload_optimizer, "offload_param": offload_param, **workload})
