"""Lightning: the config for ``DeepSpeedStrategy(config=…)`` and the Trainer's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.ds_config.framework_forms import lightning_form


def lightning_trainer(config: Mapping[str, Any], *, gpus: int, nodes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """An explicit ds_config as Lightning takes it, and what its Trainer is given beside the strategy.

    Lightning clips by ``gradient_clip_val`` and refuses a ds_config that is at odds with it.
    """
    form, arguments = lightning_form(config)
    clipping = form.get("gradient_clipping")
    if clipping:
        arguments["gradient_clip_val"] = clipping
    return form, arguments | {"devices": gpus, "num_nodes": nodes, "accelerator": "gpu"}
