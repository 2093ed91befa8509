"""The Python API of planning: `estimate` and `recommend`, the sequences that they return, and short forms by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Unpack, overload

from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan, Report
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.options import EstimateOptions, StageOptions, require_known
from zeroplan.run.ask import Ask

if TYPE_CHECKING:
    import pandas

    from zeroplan.search.catalog import Overview
    from zeroplan.search.layout_answer import LaidOut, LayoutAnswer
    from zeroplan.search.results import Recommendation, SearchResult
    from zeroplan.search.scaling import ScaleOptions, Scaling
    from zeroplan.search.search_options import RecommendOptions, SearchOptions
    from zeroplan.search.whole_training import Budget, WholeTraining


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
        from zeroplan.report.notebook import plans_html

        return plans_html(self.report)

    def to_frame(self) -> pandas.DataFrame:
        """Return one row a plan, with the fields of :func:`zeroplan.report.plans.plan_record`; sizes are bytes.

        Raises:
            BadInput: without pandas.
        """
        from zeroplan.report.plans import plan_record

        return _frame([plan_record(plan) for plan in self])


class Recommendations(Sequence["Recommendation | LaidOut"]):
    """The configurations that ``recommend`` found, best first, with all that the answer holds (`answer`).

    Of a search over layouts the sequence is the one layout, and `layouts` what the search found. Of a request without a model
    `overview` says what the machine can train, and the sequence are the configurations for the largest model that it can train
    in full. `training` is what a budget of tokens takes by the best. Printed, it is what ``zeroplan recommend`` prints.
    """

    __slots__ = ("_budget", "answer", "layouts", "overview", "training")

    def __init__(
        self,
        answer: SearchResult | None = None,
        overview: Overview | None = None,
        layouts: LayoutAnswer | None = None,
        budget: Budget | None = None,
        training: WholeTraining | None = None,
    ) -> None:
        self.answer, self.overview, self.layouts = answer, overview, layouts
        self._budget, self.training = budget, training

    @property
    def best(self) -> Recommendation | LaidOut | None:
        """The first that fits, else the first that may; None if none does."""
        if self.layouts is not None:
            return self.layouts.chosen
        return None if self.answer is None else self.answer.best

    @property
    def fits(self) -> bool | None:
        """Whether the best fits; False where nothing does."""
        return False if self.best is None else self.best.fits

    def table(self, style: str = "plain") -> str:
        """Return one row a configuration, sizes in GiB; without a model one row for each method and model; of a search over
        layouts one for each that was simulated.

        Args:
            style: plain, github, html or csv.

        Raises:
            BadInput: an unknown style.
        """
        from zeroplan.report.overview import overview_table
        from zeroplan.report.recommendation import ranking_table

        if self.layouts is not None:
            from zeroplan.report.layouts import layouts_table

            return layouts_table(self.layouts, style)
        return ranking_table(self._ranking, style) if self.overview is None else overview_table(self.overview, style)

    def to_frame(self) -> pandas.DataFrame:
        """Return one row a configuration, with the fields of :func:`zeroplan.report.recommendation.record`; sizes are bytes. Of
        a search over layouts one row a layout, with the fields of its JSON.

        Raises:
            BadInput: without pandas.
        """
        from zeroplan.report.recommendation import record

        if self.layouts is not None:
            return _frame([one.to_dict() for one in self.layouts.listed])
        return _frame([record(one) for one in self._ranking])

    @property
    def _ranking(self) -> tuple[Recommendation, ...]:
        return self.answer.ranking if self.answer is not None else ()

    def __len__(self) -> int:
        return len(self[:])

    @overload
    def __getitem__(self, index: int) -> Recommendation | LaidOut: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Recommendation | LaidOut, ...]: ...
    def __getitem__(self, index: int | slice) -> Recommendation | LaidOut | tuple[Recommendation | LaidOut, ...]:
        if self.layouts is not None:
            chosen = self.layouts.chosen
            return (() if chosen is None else (chosen,))[index]
        return self._ranking[index]

    def __repr__(self) -> str:
        return f"<Recommendations: {', '.join(map(repr, self)) or 'nothing fits'}>"

    def __str__(self) -> str:
        from zeroplan.report.layouts import layouts_text
        from zeroplan.report.overview import overview_text
        from zeroplan.report.recommendation import answer_text
        from zeroplan.report.scaling import training_text
        from zeroplan.report.terminal import Terminal

        if self.overview is not None:
            return overview_text(self.overview)
        if self.layouts is not None:
            text = layouts_text(self.layouts, terminal=Terminal())
        else:
            text = "Nothing fits." if self.answer is None else answer_text(self.answer)
        if self._budget is None or self.training is None:
            return text
        return f"{text}\n{training_text(self._budget.tokens, self.training)}"

    def _repr_html_(self) -> str:
        from zeroplan.report.notebook import answer_html, text_html

        return text_html(str(self)) if self.answer is None or self.overview is not None else answer_html(self.answer)


def _frame(records: list[dict[str, Any]]) -> pandas.DataFrame:
    try:
        import pandas
    except ImportError:
        raise BadInput("needs pandas", where="to_frame()", remedy="pip install pandas") from None
    return pandas.DataFrame(records)


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
    return Plans(estimate_report(Ask(**options, model=model)))


def recommend(model: Any = None, **options: Unpack[RecommendOptions]) -> Recommendations:
    """Find the fastest configurations that fit, best first.

    Args:
        model: as for :func:`estimate`. Without one (and without ``params`` and ``source``): what the machine can train.
        options: :class:`~zeroplan.search.search_options.RecommendOptions`, which are the command line's flags with
            underscores: ``vram="24G"``, ``gpus=4``, ``global_batch=128``, … Degrees (``tp=4``) are kept, and like
            ``layouts=True`` and ``smallest=True`` ask for a search over layouts. ``tokens="15T"`` and ``price=2.5`` of a GPU
            hour ask what a whole training takes (`training` of what is returned).

    Returns:
        One recommendation a stage, offload and checkpointing that fits, as a sequence; empty when nothing does. Of a search
        over layouts the one layout.

    Raises:
        BadInput: a value that cannot be used, with the remedy.
        TypeError: an argument that does not exist, with the nearest name.
    """
    from zeroplan.search.api import run_search
    from zeroplan.search.layout_orders import FIXED
    from zeroplan.search.search_options import RecommendOptions, SearchOptions
    from zeroplan.search.whole_training import budget_of_model, training_of_search

    require_known(options, RecommendOptions.__annotations__, "recommend")
    names = {f.name for f in fields(SearchOptions)}
    given: dict[str, Any] = dict(options)
    asked = given.pop("tokens", None), given.pop("price", None)
    of_search = SearchOptions(**{name: value for name, value in given.items() if name in names})
    request = Ask(**{name: value for name, value in given.items() if name not in names}, model=model)
    fixed = [name for name in FIXED if name in given]
    budget = budget_of_model(*asked, request, sourced=of_search.source is not None)
    if fixed or of_search.layouts or of_search.smallest:
        return _laid_out(request, of_search, given, fixed, budget)
    if model is None and request.params is None and of_search.source is None:
        from zeroplan.search.catalog import overview

        found = overview(request, of_search)
        return Recommendations(found.best, found)
    answer = run_search(request, of_search)
    return Recommendations(answer, budget=budget, training=training_of_search(budget, answer))


def _laid_out(
    request: Ask, options: SearchOptions, given: dict[str, Any], fixed: list[str], budget: Budget | None
) -> Recommendations:
    """Answer a search over layouts.

    Raises:
        BadInput: an option of the other search.
    """
    from zeroplan.search.layouts import search_layouts, smallest_cluster
    from zeroplan.search.whole_training import training_of_layout

    if options.smallest and "nodes" in given:
        raise BadInput("is what smallest finds", where="nodes", remedy="leave one of the two out")
    for name in ("candidates", "source", "program", "nvme_path", "goal", "notes"):
        if name in given and given[name] not in (None, ()) and (name, given[name]) != ("goal", "throughput"):
            asked = fixed[0] if fixed else "smallest" if options.smallest else "layouts"
            raise BadInput(f"cannot stand beside {asked}", where=name, remedy="leave one of the two out")
    search = smallest_cluster if options.smallest else search_layouts
    found = search(request, options.gradient_checkpointing, options.global_batch, options.profile)
    return Recommendations(layouts=found, budget=budget, training=training_of_layout(budget, found, options.profile))


def scale(model: Any = None, gpus: str | int | Sequence[int] = "8..1024", **options: Unpack[ScaleOptions]) -> Scaling:
    """Find the best configuration on more and more GPUs: memory, micro batch and speed of one of them.

    Args:
        model: as for :func:`estimate`; or none, with ``params=`` a count.
        gpus: all GPUs: ``"8..1024"`` doubles from 8 on, ``[8, 24]`` and ``"8,24"`` are these.
        options: :class:`~zeroplan.search.scaling.ScaleOptions`, which are the command line's flags with underscores:
            ``gpu="H100"``, ``stage=3``, ``gpus_per_node=4``, …

    Returns:
        One point for each number of GPUs; bytes and seconds throughout.

    Raises:
        BadInput: a value that cannot be used, with the remedy.
        TypeError: an argument that does not exist, with the nearest name.
    """
    from zeroplan.search.scaling import ScaleOptions, parse_ranks, run_scaling
    from zeroplan.search.search_options import SearchOptions
    from zeroplan.search.whole_training import budget_of

    require_known(options, ScaleOptions.__annotations__, "scale")
    given: dict[str, Any] = dict(options)
    node = given.pop("gpus_per_node", None)
    names = {f.name for f in fields(SearchOptions)}
    of_search = SearchOptions(**{name: given.pop(name) for name in list(given) if name in names})
    budget = budget_of(given.pop("tokens", None), given.pop("price", None), given.get("gpu"))
    found = run_scaling(Ask(model=model, **given), parse_ranks(gpus), of_search, gpus_per_node=node)
    return replace(found, budget=budget)


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
