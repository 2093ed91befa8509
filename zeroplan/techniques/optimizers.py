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
    looped = True
    searched = True

    def of(self, workload: Workload) -> Optimizer | None:
        """Return the optimizer's row, where nothing else makes it."""
        row = find_optimizer(workload.numerics.optimizer)
        return row if row.runtime_only else None

    def require(self, value: Optimizer, facts: Facts) -> None:
        """Refuse other engines.

        Raises:
            BadInput: naming the optimizer.
        """
        if not self.taken_by(facts.engine):
            what = f"{value.name} is not modelled under {facts.engine.name}"
            raise BadInput(what, where=self.where, remedy="use --engine zeroplan, or adamw8bit")


RUNTIME_OPTIMIZERS = RuntimeOptimizersTechnique()
