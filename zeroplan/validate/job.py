"""The job that ranks run: plain values, which cross to other processes as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zeroplan.core.errors import BadInput
from zeroplan.core.model_config import auto_class_of
from zeroplan.core.parallel import DEGREES, ParallelLayout
from zeroplan.core.workload import Workload
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.engines.registry import engine_path
from zeroplan.techniques.lengths import LengthsTechnique
from zeroplan.techniques.pair_loss import PairLossTechnique
from zeroplan.techniques.table import techniques_of

if TYPE_CHECKING:
    from zeroplan.validate.live import LiveModule


#: Names the class of a written value: ``module:class``.
_CLASS = "class"


def to_plain(value: Any) -> Any:
    """Return a dataclass, an enum's member, a tuple or a plain value as JSON writes it.

    Raises:
        TypeError: a value of another kind.
    """
    if isinstance(value, Enum):
        return {_CLASS: _path(type(value)), "value": value.value}
    if is_dataclass(value) and not isinstance(value, type):
        return {_CLASS: _path(type(value)), **{f.name: to_plain(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, tuple | list):
        return [to_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): to_plain(one) for name, one in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} is no plain value")


def from_plain(data: Any) -> Any:
    """Return what :func:`to_plain` wrote; lists become tuples. Raises ValueError: what is written is of no such class."""
    if isinstance(data, list):
        return tuple(from_plain(one) for one in data)
    if not isinstance(data, dict):
        return data
    values = {name: from_plain(one) for name, one in data.items() if name != _CLASS}
    if _CLASS not in data:
        return values
    kind = _class(data[_CLASS])
    return kind(values["value"]) if issubclass(kind, Enum) else kind(**values)


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(path: str) -> Any:
    module, _, name = path.partition(":")
    found = getattr(import_module(module), name, None)
    if not (isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum))):
        raise ValueError(f"{path} is no class of a run")
    return found


#: Optimizer steps that a run takes; peaks repeat from the second applied one on.
STEPS = 3


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """One configuration to run.

    Attributes:
        label: the configuration's name in messages.
        engine_path: the engine's class, as :func:`zeroplan.engines.registry.engine_path` gives it.
        model: a transformers config.
        ds_config: what the engine's :meth:`~zeroplan.engines.base.Engine.run_config` returned.
        workload: what was planned.
        steps: optimizer steps.
        timeout: seconds without progress after which a rank gives up.
        layout: how the ranks divide the work.
        schedule: the order of micro batches on pipeline stages (:class:`~zeroplan.core.pipeline_order.PipelineSchedule`).
        partition: how layers are divided over them (:class:`~zeroplan.engines.case.Case`).
        live: the user's own module in place of `model`. It is handed to other processes in a file.
    """

    label: str
    engine_path: str
    stage: int
    model: dict[str, Any]
    auto_class: str
    workload: Workload
    steps: int
    timeout: float
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    schedule: str = "1f1b"
    partition: str = ""
    ds_config: dict[str, Any] = field(default_factory=dict)
    live: LiveModule | None = None

    @property
    def swap_folders(self) -> tuple[str, ...]:
        """The folders of the engine's swap files: the optimizer's and the parameters'."""
        zero = self.ds_config.get("zero_optimization", {})
        sections = [zero.get(name) or {} for name in ("offload_optimizer", "offload_param")]
        paths = [section.get("nvme_path") for section in sections if section.get("device") == "nvme"]
        return tuple(str(path) for path in paths if path)

    def to_json(self) -> dict[str, Any]:
        """Return the job as plain values, without the module."""
        written = to_plain(replace(self, model={}, ds_config={}, live=None))
        return {**written, "model": self.model, "ds_config": self.ds_config}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> VerifyJob:
        """Read a job from the plain values of :meth:`to_json`."""
        read: VerifyJob = from_plain({**values, "model": {}, "ds_config": {}})
        return replace(read, model=values["model"], ds_config=values["ds_config"])


def job_of(
    case: Case,
    engine: Engine,
    *,
    raw: Mapping[str, Any] | None = None,
    steps: int = STEPS,
    timeout: float = 300.0,
    live: LiveModule | None = None,
) -> VerifyJob:
    """Return the job that runs a case.

    Args:
        case: the configuration.
        raw: the ds_config that the case came from; None where there was none.
        steps: optimizer steps.
        timeout: seconds without progress after which a rank gives up.
        live: the user's module and batch, in place of the case's model.

    Raises:
        BadInput: when the model has no config to build it from, or the engine cannot run the case.
    """
    engine.require_verifiable(case.zero)
    _require_loop(case.workload)
    _require_verified(engine, case.layout)
    spec = case.spec
    if live is None and not spec.config:
        remedy = "give a hub id, a folder or a config.json"
        if spec.source == "module":
            remedy = "give inputs=…, the arguments of one forward, to run the module itself"
        raise BadInput(f"{spec.name} has no config to build it from", where="MODEL", remedy=remedy)
    return VerifyJob(
        label=case.zero.label,
        engine_path=engine_path(engine.name),
        stage=case.zero.stage,
        model={} if live else json.loads(json.dumps(dict(spec.config), default=str)),
        auto_class="" if live else spec.auto_class or auto_class_of(spec.config),
        workload=case.workload,
        steps=steps,
        timeout=timeout,
        layout=case.layout,
        schedule=case.pipeline,
        partition=case.partition,
        ds_config=engine.run_config(case, raw, timeout),
        live=live,
    )


#: The way out of what the loop does not do.
_WATCH = "leave it out, or put zeroplan.callback.ZeroplanCallback into a run of your own"
#: Fields of a workload's parts that no technique holds and the loop has as a plain run does, with the flag or key that says
#: otherwise.
PLAIN = {
    **dict.fromkeys(
        ("detached_loss", "own_loop", "whole_embedding_states", "accelerate_units", "one_unit", "mixed_units", "moved"),
        "--from",
    ),
    "dynamic_padding": LengthsTechnique.where,
    "longest_first": LengthsTechnique.where,
    **dict.fromkeys(("pairs", "wide_logits"), PairLossTechnique.where),
}


def _require_loop(work: Workload) -> None:
    """Refuse what the loop would leave out, so that no run is held against the plan of another.

    Raises:
        BadInput: naming the flag of the first such field.
    """
    for technique, value in techniques_of(work):
        if what := technique.unlooped(value):
            raise BadInput(what, where=technique.where, remedy=_WATCH)
    usual = Workload()
    for name, where in PLAIN.items():
        if work.leaf(name) != usual.leaf(name):
            raise BadInput(f"verify's loop has no {name.replace('_', ' ')}", where=where, remedy=_WATCH)


def _require_verified(engine: Engine, layout: ParallelLayout) -> None:
    """Refuse layouts that the engine's trainer does not run."""
    for name in DEGREES:
        if getattr(layout, name) > 1 and name not in engine.verified_degrees:
            raise BadInput(
                f"verify does not run {engine.name} with {name}", where=f"--{name.replace('_', '-')}", remedy="leave it at 1"
            )


def ended_early(result: Mapping[str, Any]) -> bool:
    """Return whether a rank's result says that its run ended early, so that the other ranks wait for it in vain."""
    return any(key in result for key in ("out_of_memory", "error", "bad_input"))
