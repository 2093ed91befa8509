"""Optimizers that the included runtime alone makes from their names.

See :attr:`zeroplan.core.optimizer_row.Optimizer.runtime_only`.
"""

from __future__ import annotations

from zeroplan.core.errors import BadInput
from zeroplan.core.optimizer_row import Optimizer
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.workload import Workload
from zeroplan.techniques.base import Facts, Technique


class RuntimeOptimizersTechnique(Technique[Optimizer]):
    """An optimizer of the included runtime."""

    name = "optimizers of the runtime"
    kind = Optimizer
    where = "--optimizer"
    engines = ("zeroplan",)
    looped = in_forms = True

    def of(self, workload: Workload) -> Optimizer | None:
        """Return the optimizer's row, where nothing else makes it."""
        row = find_optimizer(workload.numerics.optimizer)
        return row if row.runtime_only else None

    def require(self, value: Optimizer, facts: Facts) -> None:
        """Refuse other engines."""
        if not self.taken_by(facts.engine):
            what = f"{value.name} is not modelled under {facts.engine.name}"
            raise BadInput(what, where=self.where, remedy="use --engine zeroplan, or adamw8bit")


class ConfiguredOptimizersTechnique(Technique[Optimizer]):
    """An optimizer that a ds_config alone makes."""

    name = "optimizers of a ds_config"
    kind = Optimizer
    where = "--optimizer"
    looped = in_forms = True

    def of(self, workload: Workload) -> Optimizer | None:
        """Return the optimizer's row."""
        row = find_optimizer(workload.numerics.optimizer)
        return row if row.until is not None else None

    def require(self, value: Optimizer, facts: Facts) -> None:
        """Refuse engines that read no ds_config."""
        if facts.engine.dialect is None:
            what = f"{value.name} is built from a ds_config alone, and {facts.engine.name} reads none"
            raise BadInput(what, where=self.where, remedy="use --engine zeroplan, or adamw")


RUNTIME_OPTIMIZERS = RuntimeOptimizersTechnique()
