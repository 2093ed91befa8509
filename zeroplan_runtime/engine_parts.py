"""The parts that an engine consists of, for the files that use them: the engine's own and those of checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zeroplan_runtime.activity import Activity
from zeroplan_runtime.arena import Arena
from zeroplan_runtime.checks import EngineChecks
from zeroplan_runtime.comm import Communicator
from zeroplan_runtime.config import RuntimeConfig
from zeroplan_runtime.mesh import MeshRanks
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.monitors.flops import FlopsProfiler
from zeroplan_runtime.monitors.monitor import Monitor
from zeroplan_runtime.offload.host_optimizer import HostOptimizer
from zeroplan_runtime.optim.step import OptimizerStep, StepResult
from zeroplan_runtime.optim.zero_optimizer import ZeroOptimizer
from zeroplan_runtime.parameter_writes import ParameterWrites
from zeroplan_runtime.progress import TrainingProgress
from zeroplan_runtime.schedule import Schedule
from zeroplan_runtime.techniques.attached import Techniques


class EngineParts(nn.Module):
    """The parts of an :class:`zeroplan_runtime.engine.Engine`.

    Attributes:
        module: the user's model.
        settings: what the config asks for.
        device: this rank's device.
        ranks: the ranks of the run.
        comm: those of them that hold the same part of the model.
        optimizer: the optimizer; None where nothing is trained.
        lr_scheduler: an object whose ``step()`` sets the learning rate, or None.
        progress: counts of steps, and the loss scale.
        arena: the device memory.
        model_states: the units with their parameters, gradients and optimizer states.
        schedule: what runs when.
        checks: whether the engine can be used.
        activity: what this rank is doing, for the watchdog.
        writes: finds what the user writes into parameters.
        optimizer_step: updates the parameters; None without an optimizer.
        host: updates on the host; None where the device updates.
        monitor: writes what a step shows; None where the config asks for none, and on all ranks but the first.
        flops_profiler: counts a step's FLOPs; None where the config asks for none, and on all ranks but the first.
        techniques: what the config asks for beside ZeRO.
        last_step: the result of the last step; None before it.
    """

    module: nn.Module
    settings: RuntimeConfig
    device: torch.device
    ranks: MeshRanks
    comm: Communicator
    optimizer: ZeroOptimizer | None
    lr_scheduler: Any = None
    progress: TrainingProgress
    arena: Arena
    model_states: ModelStates
    schedule: Schedule
    checks: EngineChecks
    activity: Activity
    writes: ParameterWrites
    optimizer_step: OptimizerStep | None
    host: HostOptimizer | None
    monitor: Monitor | None = None
    flops_profiler: FlopsProfiler | None = None
    techniques: Techniques
    last_step: StepResult | None = None

    def finish_step(self) -> None:
        """Updates loss scale, step count and learning rate from the last step's result."""
        raise NotImplementedError

    def wait_for_checkpoint(self) -> None:
        """Blocks until the checkpoint that is being written is complete."""
        raise NotImplementedError

    def drain(self) -> None:
        """Blocks until every update has been applied to the masters and its parameters are sent."""
        raise NotImplementedError
