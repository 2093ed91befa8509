"""Collects what a step shows and writes it when it is there, one step late or more, so that the host never waits for it.

On a GPU the loss is copied into pinned memory and an event is recorded behind the copy; a step is written once its event has
come to pass. The time of a step is that between two such events, so it is the device's and not the host's.

(monitor/).
"""

from __future__ import annotations

import csv
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from zeroplan.core.errors import BadInput
from zeroplan_runtime.config import RuntimeConfig
from zeroplan_runtime.pytree import tensors_of

_JOB = "DeepSpeedJobName"


class Writer(Protocol):
    """Takes the values of one step."""

    def write(self, values: Mapping[str, float], samples: int) -> None:
        """Writes each value under its tag, at the number of samples seen."""

    def close(self) -> None:
        """Writes what is still held back."""


class CsvWriter:
    """One file a tag, with lines of samples and value.

    Args:
        section: ``output_path`` and ``job_name``.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        self._folder = _folder(section, "csv_monitor")
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, values: Mapping[str, float], samples: int) -> None:
        """Appends a line to each tag's file."""
        for tag, value in values.items():
            path = self._folder / f"{tag.replace('/', '_')}.csv"
            begins = not path.exists()
            with open(path, "a", newline="") as stream:
                lines = csv.writer(stream)
                if begins:
                    lines.writerow(["step", tag])
                lines.writerow([samples, value])

    def close(self) -> None:
        """Does nothing: every line is written at once."""


class TensorBoardWriter:
    """``torch.utils.tensorboard``'s writer.

    Args:
        section: ``output_path`` and ``job_name``.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        module = _package("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(log_dir=str(_folder(section, "tensorboard")))

    def write(self, values: Mapping[str, float], samples: int) -> None:
        """Adds a scalar to each tag."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, samples)

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases; ``WANDB_MODE=offline`` in the environment keeps it on this machine.

    Args:
        section: ``project``, ``group`` and ``team``.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        names = {"project": section.get("project", "deepspeed"), "group": section.get("group"), "entity": section.get("team")}
        self._run = _package("wandb", "wandb").init(**names)

    def write(self, values: Mapping[str, float], samples: int) -> None:
        """Logs the values as one step."""
        self._run.log(dict(values), step=samples)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


#: The writer of each section.
WRITERS: Mapping[str, Callable[[Mapping[str, Any]], Writer]] = {
    "tensorboard": TensorBoardWriter,
    "wandb": WandbWriter,
    "csv_monitor": CsvWriter,
}


def _folder(section: Mapping[str, Any], name: str) -> Path:
    base = Path(section["output_path"]) if section.get("output_path") else Path.home() / name
    return base / str(section.get("job_name", _JOB))


def _package(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise BadInput("is enabled, but its package is not installed", where=package, remedy=f"pip install {package}") from None


_TAG = "Train/Samples/"  # of DeepSpeed's events (runtime/engine.py)


@dataclass
class _PendingStep:
    """One step whose loss is on its way.

    Attributes:
        samples: samples of all ranks until its end.
        values: what the host knows, by tag.
        tokens: tokens of this rank.
        loss: one element, in host memory.
        event: behind the copy of the loss; None on a CPU.
        ended: the host's clock, in seconds.
    """

    samples: int
    values: dict[str, float]
    tokens: int
    loss: torch.Tensor
    event: torch.cuda.Event | None
    ended: float

    def seconds_since(self, before: _PendingStep) -> float:
        """Returns the seconds between the ends of two steps that have ended."""
        if self.event is not None and before.event is not None:
            found: float = before.event.elapsed_time(self.event) / 1000
            return found
        return self.ended - before.ended


class Monitor:
    """Writes loss, learning rate, loss scale, seconds a batch, tokens a second and memory of each step, on the first rank.

    Args:
        writers: where values go.
        device: this rank's device.
        ranks: the number of ranks, each of which is taken to see as many tokens as this one.

    Attributes:
        planned_bytes: the peak of allocated memory that a plan says, shown beside the measured one; None shows no plan.
    """

    def __init__(self, writers: Iterable[Writer], device: torch.device, ranks: int) -> None:
        self.planned_bytes: int | None = None
        self._writers, self._device, self._ranks = list(writers), device, ranks
        self._loss: torch.Tensor | None = None
        self._tokens = 0
        self._waiting: deque[_PendingStep] = deque()
        self._before: _PendingStep | None = None

    def saw_inputs(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Counts the tokens of a micro batch: the elements of ``input_ids``, or else of the first [batch, length] integers."""
        ids = kwargs.get("input_ids")
        found = [ids] if isinstance(ids, torch.Tensor) else tensors_of((args, dict(kwargs)))
        first = next((t for t in found if t.ndim == 2 and t.dtype in (torch.int64, torch.int32)), None)
        self._tokens += first.numel() if first is not None else 0

    def saw_loss(self, loss: torch.Tensor) -> None:
        """Adds a micro batch's loss, which is divided by the accumulation steps."""
        loss = loss.detach().float().reshape(1)
        self._loss = loss.clone() if self._loss is None else self._loss + loss

    def stepped(self, samples: int, rates: list[float], scale: float) -> None:
        """Ends a step, and writes the steps that the device has finished.

        Args:
            samples: samples of all ranks so far.
            rates: the learning rate of each group.
            scale: the loss scale; 1 for none.
        """
        if self._loss is None:
            return
        values = {f"{_TAG}lr": rates[0]} if rates else {}
        if scale != 1.0:
            values[f"{_TAG}loss_scale"] = scale
        event = None
        loss = self._loss
        if self._device.type == "cuda":
            loss = torch.empty(1, device="cpu", pin_memory=True)
            loss.copy_(self._loss, non_blocking=True)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            values[f"{_TAG}memory_allocated_peak"] = float(torch.cuda.max_memory_allocated(self._device))
            if self.planned_bytes is not None:
                values[f"{_TAG}memory_planned"] = float(self.planned_bytes)
        self._waiting.append(_PendingStep(samples, values, self._tokens, loss, event, time.perf_counter()))
        self._loss, self._tokens = None, 0
        while len(self._waiting) > 1 and (self._waiting[0].event is None or self._waiting[0].event.query()):
            self._write(self._waiting.popleft())

    def _write(self, step: _PendingStep) -> None:
        values = {f"{_TAG}train_loss": float(step.loss), **step.values}
        if self._before is not None:
            seconds = step.seconds_since(self._before)
            values[f"{_TAG}seconds_per_batch"] = seconds
            if step.tokens:
                values[f"{_TAG}tokens_per_second"] = step.tokens * self._ranks / seconds
        self._before = step
        for writer in self._writers:
            writer.write(values, step.samples)

    def close(self) -> None:
        """Waits for the steps that are on their way, writes them and closes the writers. A second call does nothing."""
        while self._waiting:
            step = self._waiting.popleft()
            if step.event is not None:
                step.event.synchronize()
            self._write(step)
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.close()


def make_monitor(settings: RuntimeConfig, device: torch.device, *, rank: int, ranks: int) -> Monitor | None:
    """Returns the monitor that the config asks for, on the first rank; else None.

    Raises:
        BadInput: when a writer's package is not installed.
    """
    if rank != 0 or not settings.monitors:
        return None
    return Monitor([WRITERS[name](section) for name, section in settings.monitors.items()], device, ranks)
