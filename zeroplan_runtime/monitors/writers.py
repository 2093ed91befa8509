"""Writers of monitored values: each is the vendor's own, with the options and the folders that DeepSpeed gives it
(monitor/).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from zeroplan.core.errors import BadInput

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
