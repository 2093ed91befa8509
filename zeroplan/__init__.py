"""zeroplan: the memory of a ZeRO training run, before the GPUs are rented.

``estimate`` predicts, ``estimate_zero1_mem`` to ``estimate_zero3_mem`` are its short forms by stage, ``verify`` runs what was
predicted and measures it. Everything is loaded
on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from zeroplan.api import Plans as Plans
    from zeroplan.api import Recommendations as Recommendations
    from zeroplan.api import estimate as estimate
    from zeroplan.api import estimate_zero1_mem as estimate_zero1_mem
    from zeroplan.api import estimate_zero2_mem as estimate_zero2_mem
    from zeroplan.api import estimate_zero3_mem as estimate_zero3_mem
    from zeroplan.api import recommend as recommend
    from zeroplan.api import scale as scale
    from zeroplan.callback import ZeroplanCallback as ZeroplanCallback
    from zeroplan.capture_block import capture as capture
    from zeroplan.core.errors import BadInput as BadInput
    from zeroplan.core.plan import MemoryPlan as MemoryPlan
    from zeroplan.core.plumbing.display import Printable
    from zeroplan.search.results import Recommendation as Recommendation
    from zeroplan.search.scaling import Scaling as Scaling
    from zeroplan.tuning.api import tune as tune
    from zeroplan.validate.api import verify as verify
    from zeroplan.validate.results import Drift as Drift
    from zeroplan.validate.results import Measurement as Measurement

_HOMES = {
    "capture": "zeroplan.capture_block",
    "estimate": "zeroplan.api",
    "recommend": "zeroplan.api",
    "scale": "zeroplan.api",
    "tune": "zeroplan.tuning.api",
    "verify": "zeroplan.validate.api",
    "estimate_zero1_mem": "zeroplan.api",
    "estimate_zero2_mem": "zeroplan.api",
    "estimate_zero3_mem": "zeroplan.api",
    "MemoryPlan": "zeroplan.core.plan",
    "Plans": "zeroplan.api",
    "Recommendations": "zeroplan.api",
    "Recommendation": "zeroplan.search.results",
    "Scaling": "zeroplan.search.scaling",
    "Drift": "zeroplan.validate.results",
    "Measurement": "zeroplan.validate.results",
    "BadInput": "zeroplan.core.errors",
    "ZeroplanCallback": "zeroplan.callback",
}

__all__ = [
    "BadInput",
    "Drift",
    "Measurement",
    "MemoryPlan",
    "Plans",
    "Recommendation",
    "Recommendations",
    "Scaling",
    "ZeroplanCallback",
    "capture",
    "estimate",
    "estimate_zero1_mem",
    "estimate_zero2_mem",
    "estimate_zero3_mem",
    "recommend",
    "scale",
    "tune",
    "verify",
]


class _Report:
    """Draws answers with :mod:`zeroplan.report`, which is loaded when the first of them is shown."""

    @staticmethod
    def text(answer: Printable) -> str:
        from zeroplan.report.display import answer_text

        return answer_text(answer)

    @staticmethod
    def html(answer: Printable) -> str:
        from zeroplan.report.display import answer_html

        return answer_html(answer)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'zeroplan' has no attribute {name!r}")
    from importlib import import_module

    from zeroplan.core.plumbing.display import install_renderer

    install_renderer(_Report)
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
