"""The devices of this machine that verify runs on: its GPUs, else its CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.gpus import DEFAULT_GPU, Gpu, by_drivers_name

#: Ranks on a CPU unless told otherwise.
CPU_RANKS = 2


class _CpuAsGpu(Gpu):
    """A CPU described as a GPU: it has no cuBLAS and so no workspace, and its ranks send by gloo."""

    __slots__ = ()

    @property
    def workspace(self) -> int:
        return 0

    @property
    def holds_sent(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class VerifyMachine:
    """The devices that verify runs on.

    Attributes:
        device: ``cuda`` or ``cpu``.
        count: GPUs of this node, or ranks to start on a CPU.
        name: the GPU's name by the driver.
        memory: bytes of one GPU.
        capability: the GPU's compute capability.
        launched: whether a torchrun has started this process; `rank` and `ranks` are then its rank and world size.
    """

    device: str
    count: int
    name: str
    memory: int | None
    capability: tuple[int, int]
    launched: bool = False
    rank: int = 0
    ranks: int = 0

    def cluster(self, ranks: int) -> Cluster:
        """Return the cluster of `ranks` ranks of this machine, to plan for."""
        if self.device == "cpu":
            host = {name: getattr(DEFAULT_GPU, name) for name in Gpu.__dataclass_fields__}
            return Cluster(gpus=ranks, gpu=_CpuAsGpu(**{**host, "name": "cpu", "capability": (0, 0)}))
        gpu = replace(
            by_drivers_name(self.name) or replace(DEFAULT_GPU, name=self.name),
            memory=self.memory or 0,
            capability=self.capability,
        )
        nodes = max(1, ranks // self.count) if self.launched else 1
        return Cluster(gpus=ranks // nodes, nodes=nodes, gpu=gpu, vram=self.memory)

    def describe(self) -> dict[str, Any]:
        """Return the machine as the report's JSON shows it."""
        backend = "nccl" if self.device == "cuda" else "gloo"
        return {"device": self.device, "name": self.name, "memory": self.memory, "count": self.count, "backend": backend}


def find_machine() -> VerifyMachine:
    """Look for this machine's devices. Raises BadInput: when torch is not installed."""
    if find_spec("torch") is None:
        raise BadInput("torch is not installed", where="verify", remedy="pip install 'zeroplan[torch]'")
    import torch

    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    rank, ranks = (int(os.environ[key]) if launched else 0 for key in ("RANK", "WORLD_SIZE"))
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return VerifyMachine(
            device="cuda",
            count=torch.cuda.device_count(),
            name=str(properties.name),
            memory=int(properties.total_memory),
            capability=(int(properties.major), int(properties.minor)),
            launched=launched,
            rank=rank,
            ranks=ranks,
        )
    return VerifyMachine("cpu", CPU_RANKS, "cpu", None, (0, 0), launched, rank, ranks)


def ranks_to_use(machine: VerifyMachine, asked: int | None, least: int = 1) -> int:
    """Return the number of ranks to run: unless told otherwise all GPUs, or on a CPU two, and as many as a layout needs.

    Args:
        asked: the user's number.
        least: the smallest number that the degrees of parallelism divide.

    Raises:
        BadInput: more than there are GPUs, or another number than the torchrun that started this process.
    """
    if machine.launched:
        if asked is not None and asked != machine.ranks:
            raise BadInput(f"torchrun started {machine.ranks} ranks, not {asked}", where="--gpus", remedy="leave it out")
        return machine.ranks
    if asked is None and machine.device == "cpu":
        return max(machine.count, least)
    if least > (asked or machine.count):
        here = (
            f"{machine.count} {'GPU is' if machine.count == 1 else 'GPUs are'} here"
            if asked is None
            else f"{asked} are asked for"
        )
        remedy = "use smaller degrees, or a torchrun over more nodes" if asked is None else f"ask for {least}, or leave it out"
        raise BadInput(f"these degrees need {least} ranks, and {here}", where="--gpus", remedy=remedy)
    if asked is None:
        return machine.count
    if asked < 1 or (machine.device == "cuda" and asked > machine.count):
        here = f"1 to {machine.count}" if machine.device == "cuda" else "1 or more"
        raise BadInput(f"{asked} cannot be had here", where="--gpus", remedy=f"ask for {here}")
    return asked
