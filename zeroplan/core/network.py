"""What lies between the GPUs of a cluster: NVLink domains, network adapters, and their rates.

Note [Network]
    A cluster has two kinds of links. GPUs of one *domain* reach each other over NVLink or PCIe: those of a node, or of a rack
    on systems such as GB200 NVL72. Any others send through their nodes' *adapters*. Where a node has as many adapters as GPUs,
    each GPU has its own, on a rail of its own: rank i of a node talks to rank i of any other without crossing the node's other
    adapters. Where it has fewer, GPUs share them.

    A ring through all GPUs of the nodes uses every adapter at once, so its bus bandwidth is that of all of them, up to what the
    links inside the node carry. An all-to-all and a message from one rank to another leave by the sender's own adapter.
    Source: NCCL's maintainers in NVIDIA/nccl-tests issues 267 ("alltoall cannot aggregate the bandwidth of multiple NICs") and
    290 (46 to 48 GB/s for an adapter of 400 Gb/s).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.gpus import NODE_GPUS, Gpu

#: GB/s that NCCL takes 1 Gb/s of an adapter to carry: 12 of 100 (NVIDIA/nccl, src/graph/topo.h, NET_BW; 48 of 400 in
#: src/graph/search.cc, sm90SpeedArrayInter).
GBS_PER_GIGABIT = 0.12
#: The fabrics by name, with the latency in µs that NCCL's transport reports of each: none of InfiniBand and RoCE verbs and of
#: sockets; of EFA as aws/aws-ofi-nccl has it (src/platform-aws.cpp: 75 on P4, P5 and G5, 35 since P5en).
FABRICS = {"infiniband": 0.0, "roce": 0.0, "efa": 75.0, "efa-v3": 35.0, "ethernet": 0.0}
_LARGEST_RATE = 100_000


@dataclass(frozen=True, slots=True)
class Network:
    """The network of a cluster. See Note [Network].

    Attributes:
        adapters: network adapters of a node.
        gigabits: 10^9 bits a second of one adapter, one way.
        fabric: one of :data:`FABRICS`.
        domain: GPUs in one NVLink domain, of several nodes; 0 where a domain is a node, or what the card's preset says.
        source: who says so.
    """

    adapters: int
    gigabits: float
    fabric: str = "infiniband"
    domain: int = 0
    source: str = "--network"

    @property
    def node_gbs(self) -> float:
        """10^9 bytes a second that all adapters of a node carry, one way."""
        return self.adapters * self.gigabits * GBS_PER_GIGABIT

    @property
    def latency_us(self) -> float:
        """The latency that NCCL adds for each step between nodes."""
        return FABRICS[self.fabric]

    def adapter_gbs(self, gpus: int) -> float:
        """10^9 bytes a second that each of a node's GPUs sends to another node while the others do so, too, one way."""
        return self.node_gbs / gpus

    @property
    def text(self) -> str:
        """The network as ``--network`` takes it: ``8x400G:infiniband``, ``4x400G:infiniband/72``."""
        return f"{self.adapters}x{self.gigabits:g}G:{self.fabric}" + (f"/{self.domain}" if self.domain else "")


def _named(adapters: int, gigabits: float, fabric: str, source: str) -> Network:
    return Network(adapters, gigabits, fabric, source=source)


#: Machines that clouds rent, by the network of a node.
NETWORKS: dict[str, Network] = {
    "aws-p4d": _named(4, 100, "efa", "Amazon EC2 P4 page: 400 Gb/s EFA, four adapters"),
    "aws-p5": _named(32, 100, "efa", "Amazon EC2 P5 page: 3,200 Gb/s EFA, 32 adapters"),
    "aws-p5en": _named(16, 200, "efa-v3", "Amazon EC2 P5 page: 3,200 Gb/s EFA v3, 16 adapters"),
    "aws-p6-b200": _named(8, 400, "efa-v3", "Amazon EC2 P6 page: 3,200 Gb/s EFA v4, eight adapters"),
    "aws-g5": _named(1, 100, "ethernet", "Amazon EC2 G5 page, g5.48xlarge: 100 Gb/s"),
    "aws-g6e": _named(4, 100, "efa", "Amazon EC2 G6e page, g6e.48xlarge: 400 Gb/s"),
    "azure-nd-a100": _named(8, 200, "infiniband", "Azure NDm A100 v4 page: an HDR adapter a GPU"),
    "azure-nd-h100": _named(8, 400, "infiniband", "Azure ND H100 v5 page: an NDR adapter a GPU"),
    "gcp-a2": _named(1, 100, "ethernet", "Google Cloud A2 page: 100 Gb/s"),
    "gcp-a3-high": _named(4, 200, "ethernet", "Google Cloud A3 High page: four adapters of 200 Gb/s beside the host's"),
    "gcp-a3-mega": _named(8, 200, "ethernet", "Google Cloud A3 Mega page: eight adapters of 200 Gb/s beside the host's"),
    "gcp-a3-ultra": _named(8, 400, "roce", "Google Cloud A3 Ultra page: eight adapters of 400 Gb/s"),
    "oci-a100": _named(16, 100, "roce", "Oracle Cloud BM.GPU4.8 page: 1,600 Gb/s RoCE"),
    "oci-h100": _named(16, 200, "roce", "Oracle Cloud BM.GPU.H100.8 page: 3,200 Gb/s RoCE"),
}

_IB, _SERVER, _HOME = "infiniband", "ethernet", "ethernet"
#: The usual network of a card's node of eight, by the card's name.
_USUAL: dict[str, Network] = {
    **dict.fromkeys(("V100-16G", "V100-32G"), _named(4, 100, _IB, "NVIDIA DGX-1 data sheet: four EDR adapters")),
    **dict.fromkeys(
        ("A100-40G", "A100-80G", "A800-80G"), _named(8, 200, _IB, "NVIDIA DGX A100 data sheet: eight HDR adapters")
    ),
    **dict.fromkeys(
        ("H100", "H200", "H20", "H800", "GH200"), _named(8, 400, _IB, "NVIDIA DGX H100 data sheet: eight NDR adapters")
    ),
    "B200": _named(8, 400, _IB, "NVIDIA DGX B200 data sheet: eight NDR adapters"),
    "B300": _named(8, 800, _IB, "NVIDIA DGX B300 data sheet: eight XDR adapters"),
    "GB200": _named(8, 400, _IB, "NVIDIA GB200 NVL72 page: an NDR adapter a GPU"),
    "GB300": _named(8, 800, _IB, "NVIDIA GB300 NVL72 page: an XDR adapter a GPU"),
    **dict.fromkeys(
        ("MI300X", "MI325X", "MI355X"), _named(8, 400, "roce", "AMD Instinct platform reference design: an adapter a GPU")
    ),
}
_DESKTOP = _named(1, 10, _HOME, "10 Gb/s Ethernet, of desktops")
_PCIE = _named(1, 100, _SERVER, "one adapter of 100 Gb/s, as of rented servers with PCIe cards (g5.48xlarge, g6.48xlarge)")


def usual_network(gpu: Gpu, gpus: int) -> Network:
    """Return the network of a card's usual node, with the adapters' share of a node of `gpus`: what is taken without a flag."""
    if gpu.name.startswith(("RTX3", "RTX4", "RTX5", "Titan")):
        return _DESKTOP
    found = _USUAL.get(gpu.name, _PCIE)
    adapters = max(1, -(-found.adapters * gpus // NODE_GPUS))
    return Network(adapters, found.gigabits, found.fabric, source=found.source)


def parse_network(text: str, *, where: str = "--network") -> Network:
    """Read a network: ``8x400G``, ``25G``, ``4x100G:efa``, or the name of a cloud's machine such as ``aws-p5``.

    The rate is of one adapter in Gb/s (``1.6T`` is 1,600); without a number of adapters a node has one. Ethernet is taken for
    what lies below 100 Gb/s, InfiniBand for the rest, unless the text says otherwise. ``/72`` says that 72 GPUs are in one
    NVLink domain.

    Raises:
        BadInput: text of another form, an unknown name or fabric, or a rate out of range.
    """
    name = text.strip().lower()
    if name in NETWORKS:
        return NETWORKS[name]
    match = re.fullmatch(
        r"(?:(\d{1,4})\s*[x×*]\s*)?(\d{1,6}(?:\.\d{1,3})?)\s*([gt])(?:b(?:it)?/?p?s)?(?::([a-z0-9-]+))?(?:/(\d{1,4}))?", name
    )
    if match is None:
        near = did_you_mean(name, NETWORKS)
        remedy = near or f"write 8x400G, 25G or 4x100G:efa, or name one of {', '.join(NETWORKS)}"
        raise BadInput(f"{text[:40]!r} is no network", where=where, remedy=remedy)
    adapters, gigabits = int(match[1] or 1), float(match[2]) * (1000 if match[3] == "t" else 1)
    fabric = match[4] or ("ethernet" if gigabits < 100 else "infiniband")
    if fabric not in FABRICS:
        raise BadInput(
            f"unknown fabric {fabric[:40]!r}", where=where, remedy=did_you_mean(fabric, FABRICS) or f"use {', '.join(FABRICS)}"
        )
    if not adapters or not 0 < gigabits <= _LARGEST_RATE:
        raise BadInput(
            f"{text[:40]!r} carries nothing that exists", where=where, remedy="write 8x400G: adapters and Gb/s of one"
        )
    return Network(adapters, gigabits, fabric, int(match[5] or 0))
