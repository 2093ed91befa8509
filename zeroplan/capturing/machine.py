"""The machine that a captured command believes to run on; plain data, passed between two processes."""

from __future__ import annotations

from dataclasses import dataclass

#: The driver that NVML and ``nvidia-smi`` name.
DRIVER_VERSION = "580.65.06"


@dataclass(frozen=True, slots=True)
class PlannedCard:
    """A GPU: its name, bytes, compute capability, multiprocessors, and bytes of cuBLAS's workspace."""

    name: str
    memory: int
    capability: tuple[int, int]
    multiprocessors: int
    workspace: int


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a run, one of which is captured: its rank, of how many, on how many nodes."""

    rank: int = 0
    size: int = 1
    local_size: int = 1
    nodes: int = 1

    @property
    def local_rank(self) -> int:
        """The rank within its node."""
        return self.rank % self.local_size


@dataclass(frozen=True, slots=True)
class Job:
    """What the captured process does.

    Attributes:
        target, module, arguments: the script.
        launched: whether a launcher starts it, which sets the variables of a process group.
        environment: variables that the command sets.
        card, gpus, world: where.
        steps: optimizer steps.
        seconds: the longest that the script may take.
        folder: for everything that is written.
        answer: the file for what was captured, within the folder.
        launcher: its name; empty for plain python.
        launch_words: what stands behind its name.
        samples: rows and their length in tokens, which stand for data that is missing.
    """

    target: str
    module: bool
    arguments: tuple[str, ...]
    launched: bool
    environment: dict[str, str]
    card: PlannedCard
    gpus: int
    world: World
    steps: int
    seconds: float
    folder: str
    answer: str
    launcher: str = ""
    launch_words: tuple[str, ...] = ()
    samples: tuple[int, int] | None = None

    @property
    def fault(self) -> str:
        """The file in which Python notes where it is as the process dies."""
        return f"{self.folder}/fault"
