"""The machines that train: nodes × GPUs, their memory, host RAM and disk."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.gpus import DEFAULT_GPU, DRIVER_RESERVE, Gpu, find_gpu
from zeroplan.core.network import Network, parse_network, usual_network
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.units import GIB, parse_size

#: More ranks than any cluster has; it keeps arithmetic and loops sane.
MOST_RANKS = 1 << 20


#: Linux keeps a ``struct page`` of 64 bytes for every page of 4 KiB, from the start on (Documentation/mm/memory-model.rst).
_BYTES_PER_PAGE_RECORD = 4096 // 64


@dataclass(frozen=True, slots=True)
class Host:
    """A kind of host, by the memory in bytes that its system needs beside the training: services, sessions, file cache."""

    name: str
    services: int
    source: str

    def share(self, memory: int) -> int:
        """Bytes of a host's memory that a training process cannot have."""
        return min(memory // _BYTES_PER_PAGE_RECORD + self.services, memory // 2)


HOSTS = {
    host.name: host
    for host in (
        Host("server", 2 * GIB, "systemd, drivers, monitoring and a container engine, without a graphical session"),
        Host("desktop", 4 * GIB, "what Ubuntu Desktop 24.04 asks for: a graphical session with a browser"),
    )
}


def find_host(name: str | None, gpu: Gpu) -> Host:
    """Return the host preset called `name`; without a name, a desktop for a GeForce card and a server for any other.

    Raises:
        BadInput: an unknown name.
    """
    key = ("desktop" if gpu.name.startswith(("RTX3", "RTX4", "RTX5")) else "server") if name is None else name.strip().lower()
    if key not in HOSTS:
        remedy = did_you_mean(key, HOSTS) or f"use {' or '.join(HOSTS)}"
        raise BadInput(f"unknown kind of host {key[:40]!r}", where="--host", remedy=remedy)
    return HOSTS[key]


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` × `gpus` of one kind. Sizes are bytes; None means that no limit was given.

    `vram` is the card's memory. `cpu_ram` and `nvme` are those of one node; `host` says what its system keeps of `cpu_ram`.
    `network` is what lies between the nodes, where it was named.
    """

    gpus: int = 1
    nodes: int = 1
    gpu: Gpu = DEFAULT_GPU
    vram: int | None = None
    cpu_ram: int | None = None
    nvme: int | None = None
    host: Host = HOSTS["server"]
    network: Network | None = None

    @property
    def links(self) -> Network:
        """The network between the nodes: the one that was named, else the usual one of such GPUs."""
        return self.network or usual_network(self.gpu, self.gpus)

    @property
    def domain(self) -> int:
        """GPUs that reach each other over NVLink or PCIe: those of a node, or of an NVLink domain of several."""
        return max(self.gpus, self.links.domain or self.gpu.domain)

    @property
    def layout(self) -> ParallelLayout:
        """Data parallelism over every GPU of the cluster."""
        return _layout(self.gpus, self.nodes)

    @property
    def usable_vram(self) -> int | None:
        """Bytes of a card that a process can have: its memory without what the driver keeps for itself."""
        if self.vram is None:
            return None
        kept = self.gpu.reserve if self.vram == self.gpu.memory else DRIVER_RESERVE
        return max(0, self.vram - min(kept, self.vram // 16))

    @property
    def usable_cpu_ram(self) -> int | None:
        """Bytes of a node's host memory that its ranks can have: all but the system's share."""
        return None if self.cpu_ram is None else self.cpu_ram - self.host.share(self.cpu_ram)

    @classmethod
    def of(
        cls,
        *,
        gpus: int = 1,
        nodes: int = 1,
        gpu: str | None = None,
        vram: str | int | None = None,
        cpu_ram: str | int | None = None,
        nvme: str | int | None = None,
        host: str | None = None,
        network: str | None = None,
    ) -> Cluster:
        """A cluster from what a user writes. `vram` overrides the preset's memory; alone, it takes the default's rates.

        Sizes are bytes, or text that :func:`parse_size` reads. `gpu` may hold the count: ``"4xA100"`` is four in a node.

        Raises:
            BadInput: counts out of range or in contradiction, unknown GPU or host, malformed size or network.
        """
        gpus, gpu = _counted(gpus, gpu)
        for where, count in (("--gpus", gpus), ("--nodes", nodes)):
            if not 1 <= count <= MOST_RANKS:
                raise BadInput(f"{count} is out of range", where=where, remedy=f"use 1 to {MOST_RANKS:,}")
        preset = find_gpu(gpu) if gpu is not None else None
        size = _size(vram, "--vram")
        if size is None and preset is not None:
            size = preset.memory
        card = preset or DEFAULT_GPU
        kind = find_host(host, card)
        link = None if network is None else parse_network(network)
        return cls(gpus, nodes, card, size, _size(cpu_ram, "--cpu-ram"), _size(nvme, "--nvme"), kind, link)


@lru_cache(maxsize=256)  # a search asks for the layout of one cluster some thousand times
def _layout(gpus: int, nodes: int) -> ParallelLayout:
    return ParallelLayout(gpus, nodes)


def _size(value: str | int | None, where: str) -> int | None:
    return None if value is None else parse_size(value, where=where)


def _counted(gpus: int, gpu: str | None) -> tuple[int, str | None]:
    """The count and the name, where ``4xA100`` or ``A100 x4`` gives both.

    Raises:
        BadInput: when `gpus` is another count.
    """
    match = re.fullmatch(r"\s*(?:(\d+)\s*[x×*]\s*(.*\D.*?)|(.*\D.*?)\s+[x×*]\s*(\d+))\s*", gpu or "", re.IGNORECASE)
    if match is None:
        return gpus, gpu
    count, name = int(match[1] or match[4]), match[2] or match[3]
    if gpus not in (1, count):
        raise BadInput(
            f"{(gpu or '')[:60]!r} is {count} GPUs, and --gpus says {gpus}", where="--gpu", remedy=f"use --gpu {name}"
        )
    return count, name
