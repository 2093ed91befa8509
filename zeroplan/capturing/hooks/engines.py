"""Engines that shard, and kernels without a rule: noted where they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroplan.capturing.recorder import StoppedError
from zeroplan.capturing.source import user_line

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture


def install_trl_kernels(capture: Capture, module: Any) -> None:
    """Note that TRL's log-probabilities take torch's path, where a GPU runs Triton kernels that hold less."""

    def without_triton(*_: Any, **__: Any) -> bool:
        says = "TRL's log-probabilities run by Triton on a GPU, for which there is no rule yet; torch's own path takes more"
        capture.leave_out("triton", "less", says)
        return False

    if hasattr(module, "_use_triton"):
        module._use_triton = without_triton


def install_deepspeed(capture: Capture, module: Any) -> None:
    """Stop where DeepSpeed would take the model over."""

    def initialize(*_: Any, **__: Any) -> None:
        says = "deepspeed.initialize shards the model: plan it by zeroplan estimate --engine deepspeed --ds-config FILE"
        raise StoppedError(says, user_line())

    module.initialize = initialize
