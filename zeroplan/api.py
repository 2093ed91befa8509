"""The Python API of planning: `estimate`, the `Plans` that it returns, and its short forms by stage."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Unpack, overload

from zeroplan.core.plan import MemoryPlan, Report
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.options import EstimateOptions, StageOptions, require_known
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
        """Return a row for each plan, sizes in GiB.

        Args:
            style: plain, github, html or csv.

        Raises:
            BadInput: an unknown style.
        """
        from zeroplan.report.plans import plans_table

        return plans_table(self.report.plans, style)

    def to_json(self) -> str:
        """Return the JSON text that ``zeroplan estimate --json`` prints."""
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


def estimate(model: Any = None, **options: Unpack[EstimateOptions]) -> Plans:
    """Predict the memory of training `model`, for every stage and offload left open.

    Args:
        model: a catalog or hub id, a path, a config as a dict, or a live ``nn.Module`` on any device. Or none, with
            ``params=`` a count.
        options: :class:`zeroplan.planner.options.EstimateOptions`, which are the command line's flags with underscores:
            ``gpus=8``, ``stage=2``, ``offload_optimizer="cpu"``, ``vram="24G"``, ``ds_config=…``.

    Returns:
        One plan for each stage and offload left open, as a sequence; bytes throughout.

    Raises:
        BadInput: a value that cannot be used, with the remedy.
        TypeError: an argument that does not exist, with the nearest name.
    """
    require_known(options, EstimateOptions.__annotations__, "estimate")
    return Plans(estimate_report(Request(model=model, **options)))


def estimate_zero1_mem(model: Any = None, **options: Unpack[StageOptions]) -> MemoryPlan:
    """Plan the run at ZeRO stage 1. Arguments as for :func:`estimate`; without offload unless given."""
    return _one(1, model, options)


def estimate_zero2_mem(model: Any = None, **options: Unpack[StageOptions]) -> MemoryPlan:
    """Plan the run at ZeRO stage 2. Arguments as for :func:`estimate`; without offload unless given."""
    return _one(2, model, options)


def estimate_zero3_mem(model: Any = None, **options: Unpack[StageOptions]) -> MemoryPlan:
    """Plan the run at ZeRO stage 3. Arguments as for :func:`estimate`; without offload unless given."""
    return _one(3, model, options)


def _one(stage: int, model: Any, options: StageOptions) -> MemoryPlan:
    require_known(options, StageOptions.__annotations__, f"estimate_zero{stage}_mem")
    options.setdefault("offload_optimizer", "none")
    options.setdefault("offload_param", "none")
    return estimate(model, stage=stage, **options)[0]
