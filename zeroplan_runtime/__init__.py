"""The included training runtime: ZeRO stages 0 to 3 over units of parameters.

``engine, optimizer, dataloader, scheduler = zeroplan_runtime.initialize(model=model, config=ds_config)``
"""

from zeroplan_runtime.api import initialize
from zeroplan_runtime.engine import Engine

__all__ = ["Engine", "initialize"]
