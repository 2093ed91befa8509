"""Engines that shard: what they are told is noted where they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroplan.capturing.recorder import StoppedError
from zeroplan.capturing.source import user_line

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture


def install_deepspeed(capture: Capture, module: Any) -> None:
    """Stop where DeepSpeed would take the model over."""

    def initialize(*_: Any, **__: Any) -> None:
        says = "deepspeed.initialize shards the model: plan it by zeroplan estimate --engine deepspeed --ds-config FILE"
        raise StoppedError(says, user_line())

    module.initialize = initialize
