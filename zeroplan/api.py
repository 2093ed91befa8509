"""The Python API of planning: `estimate`, the `Plans` that it returns, and its short forms by stage."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, overload

from zeroplan.core.plan import MemoryPlan, Report
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.request import Request


class Plans(Sequence[MemoryPlan]):
    """The plans of one model, from the fewest savings to the most, and what they were asked for (`report`).

    A sequence: it is indexed, iterated and compared like a list of plans. Printed, it is what ``zeroplan estimate`` prints.
    """

    __slots__ = ("report",)
    __hash__ = None  # type: ignore[assignment]  # compared like a list, and so no more hashable than one

    def __init__(self, report: Report) -> None:
        self.report = report

    @property
    def best(self) -> MemoryPlan | None:
        """The first plan that fits, which saves the least; None if none is known to fit."""
        return next((plan for plan in self if plan.fits), None)

    @property
    def fits(self) -> bool | None:
        """Whether any plan fits. None where no plan is known to fit and not all are known not to."""
        if self.best is not None:
            return True
        return None if any(plan.fits is None for plan in self) else False

    def table(self, style: str = "plain") -> str:
        """One row a plan, sizes in GiB.

        Args:
            style: plain, github, html or csv.

        Raises:
            BadInput: an unknown style.
        """
        from zeroplan.report.plans import plans_table

        return plans_table(self.report.plans, style)

    def to_json(self) -> str:
        """What ``zeroplan estimate --json`` prints."""
        return self.report.to_json()

    def __len__(self) -> int:
        return len(self.report.plans)

    @overload
    def __getitem__(self, index: int) -> MemoryPlan: ...
    @overload
    def __getitem__(self, index: slice) -> Plans: ...
    def __getitem__(self, index: int | slice) -> MemoryPlan | Plans:
        if isinstance(index, slice):
            return Plans(self.report.model_copy(update={"plans": self.report.plans[index]}))
        return self.report.plans[index]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Plans | list | tuple) else NotImplemented

    def __repr__(self) -> str:
        return f"<Plans of {self.report.model.name}: {', '.join(map(repr, self))}>"

    def __str__(self) -> str:
        from zeroplan.report.plans import report_text

        return report_text(self.report)

    def _repr_html_(self) -> str:
        from zeroplan.report.plans import report_text

        heading = report_text(self.report).partition("\n")[0]
        return f"<p><b>{escape(heading)}</b></p>{self.table('html')}"


def estimate(model: Any = None, **options: Any) -> Plans:
    """Predict the memory of training `model`, for every stage and offload left open.

    Args:
        model: a catalog or hub id, a path, a config as a dict, or a live ``nn.Module`` on any device. Or none, with
            ``params=`` a count.
        options: the fields of :class:`zeroplan.planner.request.Request`: the command line's flags with underscores,
            such as ``gpus=8``, ``stage=2``, ``offload_optimizer="cpu"``, ``vram="24G"``, ``ds_config=…``.

    Returns:
        One plan for each stage and offload left open, as a sequence; bytes throughout.

    Raises:
        BadInput: a value that cannot be used, with the remedy.
        TypeError: an option that does not exist.
    """
    return Plans(estimate_report(Request(model=model, **options)))


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
