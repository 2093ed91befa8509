"""The cases: each a folder of files as a user has them, ``run.sh`` with the command that starts the run among them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent / "cases"
#: What the programs of the cases are called in a command line.
_PROGRAM = re.compile(r"(?<!\S)((?:train|orpo|cpo)\.py|-m trl\.scripts\.\w+)(?= )")
_TWO_GPUS = re.compile(r"--nproc_per_node 2")
_PROCESSES = re.compile(r"^num_processes: (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Case:
    """One run: what a user types, and the files that say what it does.

    Attributes:
        id: the folder's name.
        command: the text of ``run.sh``.
    """

    id: str
    command: str

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return ROOT / self.id

    @property
    def gpus(self) -> int:
        """Ranks, on one node."""
        launcher = self.folder / "accelerate.yaml"
        if launcher.exists():
            return int(_PROCESSES.findall(launcher.read_text())[0])
        return 2 if _TWO_GPUS.search(self.command) else 1

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that ``--from`` is given: the run's own arguments, and the launcher's file if there is one."""
        names = [name for name in ("args.json", "recipe.yaml", "accelerate.yaml") if (self.folder / name).exists()]
        return tuple(self.folder / name for name in names or ["run.sh"])

    def measured(self, worker: Path, result: Path) -> str:
        """Return the command with the worker before the program, which runs it unchanged.

        Raises:
            ValueError: when the command does not start exactly one program of the cases.
        """
        text, found = _PROGRAM.subn(lambda m: f"{worker} {result} {m[1]}", self.command)
        if found != 1:
            raise ValueError(f"{self.id}/run.sh starts {found} programs")
        return text


def all_cases() -> tuple[Case, ...]:
    """List every case, by name."""
    return tuple(Case(path.parent.name, path.read_text()) for path in sorted(ROOT.glob("*/run.sh")))
