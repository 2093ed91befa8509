"""What saving, loading and exporting need of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from zeroplan_runtime.arena import Arena
from zeroplan_runtime.comm import Communicator
from zeroplan_runtime.config import RuntimeConfig
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.optim.zero_optimizer import ZeroOptimizer
from zeroplan_runtime.schedule import Schedule


class TrainingState(Protocol):
    """The part of :class:`zeroplan_runtime.engine.Engine` that a checkpoint saves, loads or waits for."""

    module: nn.Module
    config: RuntimeConfig
    device: torch.device
    comm: Communicator
    arena: Arena
    model_states: ModelStates
    schedule: Schedule
    optimizer: ZeroOptimizer | None
    lr_scheduler: Any
    global_steps: int

    def drain(self) -> None:
        """Blocks until every requested update is in the masters."""

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter and persistent buffer, by name, unsharded; each is valid until the next is asked for."""

    def progress(self) -> dict[str, Any]:
        """Step counts and loss scale."""

    def load_progress(self, progress: dict[str, Any]) -> None:
        """Continues from :meth:`progress`."""
