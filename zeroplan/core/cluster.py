"""The machines that train: nodes × GPUs, their memory, host RAM and disk."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.gpus import DEFAULT_GPU, DRIVER_RESERVE, NODE_GPUS, WIDEST_NODE, Gpu, find_gpu
from zeroplan.core.local_cards import LOCAL, LocalCard, require_local
from zeroplan.core.network import Network, parse_network, usual_network
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.plumbing.host_memory import physical_memory
from zeroplan.core.sizes import GIB, parse_size

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


#: GiB of host memory for each GPU of a usual node, by the GPU's name, and where that is written. Other cards stand in desktops
#: and workstations.
_USUAL_HOSTS: dict[str, tuple[int, str]] = {
    **dict.fromkeys(("H100", "H200", "H20", "B200"), (256, "DGX H100, H200 and B200 data sheets: 2 TiB for eight")),
    **dict.fromkeys(("A100-40G", "A100-80G", "A800-80G"), (144, "AWS P4 page: 1,152 GiB for eight")),
    **dict.fromkeys(("V100-16G", "V100-32G"), (61, "AWS P3 page: 488 GiB for eight")),
    **dict.fromkeys(("T4", "L4", "A10G"), (48, "AWS G4, G5 and G6 pages: 192 GiB for four")),
    **dict.fromkeys(("MI300X", "MI325X"), (231, "Azure ND MI300X v5 page: 1,850 GiB for eight")),
    "L40S": (96, "AWS G6e page: 384 GiB for four"),
    "GH200": (447, "NVIDIA GH200 data sheet: 480 GB of LPDDR5X"),
}
_DESKTOP_HOST = (64, "a usual desktop or workstation: 64 GiB a card")


def usual_host(gpu: Gpu | None) -> tuple[int, str]:
    """Return the bytes of host memory for each GPU of a usual node, and the source; a desktop's where no card is named."""
    gib, source = _DESKTOP_HOST if gpu is None else _USUAL_HOSTS.get(gpu.name, _DESKTOP_HOST)
    return gib * GIB, source


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` × `gpus` of one kind. Sizes are bytes; None means that no limit was given.

    `vram` is the card's memory, `free_vram` what others leave of it where that was measured, and `held` says who holds the
    rest. `cpu_ram` and `nvme` are those of one node; `host` says what its system keeps of `cpu_ram`,
    and `assumes_host` that `cpu_ram` is a usual node's (:func:`usual_host`), since none was given. `network` is what lies
    between the nodes, where it was named.
    """

    gpus: int = 1
    nodes: int = 1
    gpu: Gpu = DEFAULT_GPU
    vram: int | None = None
    cpu_ram: int | None = None
    nvme: int | None = None
    host: Host = HOSTS["server"]
    network: Network | None = None
    assumes_host: bool = False
    free_vram: int | None = None
    held: str = ""

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
        """Bytes of a card that a process can have: what is free, where that was measured, else its memory without what the
        driver keeps for itself.
        """
        if self.vram is None or self.free_vram is not None:
            return self.free_vram
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
        A card without `cpu_ram` stands in a usual host. More GPUs than a node of the card holds, and no count of nodes, are
        whole usual nodes: 64 H100s are 8 nodes of 8.

        Sizes are bytes, or text that :func:`parse_size` reads. `gpu` may hold the count: ``"4xA100"`` is four in a node.
        ``"local"`` is this machine's GPU, in this machine's host (:mod:`zeroplan.core.local_cards`).

        Raises:
            BadInput: counts out of range or in contradiction, unknown GPU or host, malformed size or network.
        """
        gpus, gpu = _counted(gpus, gpu)
        for where, count in (("--gpus", gpus), ("--nodes", nodes)):
            if not 1 <= count <= MOST_RANKS:
                raise BadInput(f"{count} is out of range", where=where, remedy=f"use 1 to {MOST_RANKS:,}")
        cards: tuple[LocalCard, ...] = ()
        if gpu is not None and gpu.strip().lower() == LOCAL:
            cards, cpu_ram = require_local(gpus), physical_memory() or None if cpu_ram is None else cpu_ram
        preset = cards[0].gpu if cards else find_gpu(gpu) if gpu is not None else None
        size = _size(vram, "--vram")
        if size is None and preset is not None:
            size = preset.memory
        card = preset or DEFAULT_GPU
        gpus, nodes = _whole_nodes(gpus, nodes, preset)
        memory = _size(cpu_ram, "--cpu-ram")
        assumed = memory is None and size is not None
        if assumed:
            memory = usual_host(preset)[0] * gpus
        link = None if network is None else parse_network(network)
        found = cls(gpus, nodes, card, size, memory, _size(nvme, "--nvme"), find_host(host, card), link, assumed)
        if not cards or vram is not None:
            return found
        fullest = min(cards, key=lambda one: one.free)
        return replace(found, free_vram=fullest.free, held=fullest.held)

    def resized(self, gpus: int) -> Cluster:
        """Return the cluster with `gpus` a node, and host memory for as many."""
        memory = None if self.cpu_ram is None else self.cpu_ram * gpus // self.gpus
        return replace(self, gpus=gpus, cpu_ram=memory)


@lru_cache(maxsize=256)  # a search asks for the layout of one cluster some thousand times
def _layout(gpus: int, nodes: int) -> ParallelLayout:
    return ParallelLayout(gpus, nodes)


def _whole_nodes(gpus: int, nodes: int, preset: Gpu | None) -> tuple[int, int]:
    """The count as GPUs a node, and nodes. Raises BadInput: more a node than any has, which are not whole nodes."""
    usual, most = (NODE_GPUS, WIDEST_NODE) if preset is None else (preset.node, preset.widest_node)
    if gpus <= most:
        return gpus, nodes
    if nodes > 1 or gpus % usual:
        remedy = f"--gpus counts those of a node: use --gpus {usual} --nodes {-(-gpus // usual) if nodes == 1 else nodes}"
        raise no_node_of(gpus, preset, where="--gpus", remedy=remedy)
    return usual, gpus // usual


def no_node_of(gpus: int, card: Gpu | None, *, where: str, remedy: str) -> BadInput:
    """Return the refusal of more GPUs a node than any has."""
    what = "GPUs" if card is None else f"{card.name} GPUs"
    return BadInput(f"no node holds {gpus} {what}", where=where, remedy=remedy)


def _size(value: str | int | None, where: str) -> int | None:
    return None if value is None else parse_size(value, where=where)


def without_count(gpu: str | None) -> str | None:
    """Return the name of a card, where ``4xA100`` or ``A100 x4`` gives a count, too."""
    return _counted(1, gpu)[1]


def _counted(gpus: int, gpu: str | None) -> tuple[int, str | None]:
    """The count and the name, where ``4xA100`` or ``A100 x4`` gives both. Raises BadInput: when `gpus` is another count."""
    match = re.fullmatch(r"\s*(?:(\d+)\s*[x×*]\s*(.*\D.*?)|(.*\D.*?)\s+[x×*]\s*(\d+))\s*", gpu or "", re.IGNORECASE)
    if match is None:
        return gpus, gpu
    count, name = int(match[1] or match[4]), match[2] or match[3]
    if not 1 <= count <= MOST_RANKS:
        raise BadInput(f"{count} GPUs are out of range", where="--gpu", remedy=f"use 1 to {MOST_RANKS:,}")
    if gpus not in (1, count):
        raise BadInput(
            f"{(gpu or '')[:60]!r} is {count} GPUs, and --gpus says {gpus}", where="--gpu", remedy=f"use --gpu {name}"
        )
    return count, name
