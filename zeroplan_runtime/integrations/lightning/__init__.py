"""Lightning drives the runtime: ``Trainer(strategy="zeroplan_stage_2")`` after ``import zeroplan_runtime``.

``ZeroplanStrategy`` is the strategy's class for ``lightning``; ``strategy_class("pytorch_lightning")`` gives the one for the
package of the older name, whose classes are others.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ZeroplanStrategy", "strategy_class"]


def strategy_class(namespace: str = "lightning.pytorch") -> type[Any]:
    """Returns the strategy's class for ``lightning.pytorch`` or ``pytorch_lightning``, and imports that package."""
    from zeroplan_runtime.integrations.lightning import strategy  # imports what no run without Lightning needs

    return strategy.strategy_class(namespace)


def __getattr__(name: str) -> Any:
    if name == "ZeroplanStrategy":
        return strategy_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
