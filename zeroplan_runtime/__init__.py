"""The included training runtime: ZeRO stages 0 to 3 over units of parameters.

``engine, optimizer, dataloader, scheduler = zeroplan_runtime.initialize(model=model, config=ds_config)``

Where Lightning is used, importing this registers its strategies, such as ``Trainer(strategy="zeroplan_stage_2")``.
"""

from zeroplan_runtime.api import initialize
from zeroplan_runtime.engine import Engine
from zeroplan_runtime.expert_parallel import share_experts
from zeroplan_runtime.integrations.lightning.registration import register_strategies
from zeroplan_runtime.regional_compilation import compile_blocks

__all__ = ["Engine", "compile_blocks", "initialize", "share_experts"]

register_strategies()
