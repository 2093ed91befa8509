"""How long collectives take, by NCCL's own model of its algorithms and protocols.

Note [NCCL's model]
    For each collective NCCL has a latency and a bandwidth of every algorithm (ring, tree, CollNet, NVLS, NVLSTree, PAT) and
    protocol (LL, LL128, Simple), from which it picks the fastest at a message's size. The figures here are those of
    src/graph/tuning.cc (ncclTopoTuneModel, ncclTopoGetAlgoTime) and src/graph/search.cc (the speeds of channels) in NVIDIA/nccl
    at version 2.30; what the model is given there by a search of the machine's topology is here given by the group's shape:

    * A ring between nodes has a channel an adapter, at the highest of NCCL's speeds that an adapter and the links inside a node
      carry. Inside a node with NVLink it has as many channels as fill the links. So its bus bandwidth between nodes is that of
      the adapters of all the group's GPUs, and no more than the links inside the node.
    * NVLS and NVLSTree need NVLink SHARP: NVSwitches and a Hopper or later. CollNet needs SHARP in the network's switches and
      its plug-in, which NCCL uses only where it is switched on; it is left out. PAT is for one GPU a node.
    * Groups of which each has one of a node's GPUs use an adapter each, at the same time.

    Messages from rank to rank and all-to-alls are not in NCCL's model: each rank sends all it has through its own link or
    adapter, the two beside each other, after the latency of the Simple protocol.

    Sizes are those of nccl-tests: of the whole buffer, before the scatter or behind the gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import log2

from zeroplan.core.gpus import Gpu
from zeroplan.core.rates import Rates


class Collective(StrEnum):
    """The collectives that training uses."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"


class Algorithm(StrEnum):
    """NCCL's algorithms that need no plug-in."""

    RING = "ring"
    TREE = "tree"
    NVLS = "nvls"
    NVLS_TREE = "nvls_tree"
    PAT = "pat"


class Protocol(StrEnum):
    """NCCL's protocols."""

    LL = "ll"
    LL128 = "ll128"
    SIMPLE = "simple"


_PROTOCOLS = tuple(Protocol)
#: µs, by algorithm, of the three protocols (ncclTunerConstantsDefaults, baseLatencies).
_BASE = {
    Algorithm.TREE: (6.8, 14.0, 8.4),
    Algorithm.RING: (6.6, 14.0, 8.4),
    Algorithm.NVLS: (0.0, 0.0, 0.0),
    Algorithm.NVLS_TREE: (0.0, 0.0, 0.0),
    Algorithm.PAT: (8.0, 8.0, 8.0),
}
#: µs a step over NVLink, over PCIe and over the network (hwLatencies).
_NVLINK = {Algorithm.TREE: (0.6, 1.25, 4.0), Algorithm.RING: (0.6, 1.9, 3.4), Algorithm.NVLS: (0, 0, 25.0)}
_PCIE = {Algorithm.TREE: (1.0, 1.9, 4.0), Algorithm.RING: (1.0, 2.5, 5.7), Algorithm.NVLS: (0, 0, 0)}
_NET = {Algorithm.TREE: (5.0, 8.5, 14.0), Algorithm.RING: (2.7, 4.0, 14.0), Algorithm.NVLS_TREE: (0, 0, 20.9)}
_NET[Algorithm.PAT] = (0, 0, 14.0)
#: µs that a message costs the processor which posts it (getNetOverhead, of an Intel processor; three for Simple).
_POST = (1.0, 1.0, 3.0)
#: By generation (Volta, Ampere, Hopper, Blackwell): GB/s of all channels with LL on one node (llMaxBws), and of a channel on
#: one, two and more nodes with a ring of LL128, a tree of LL128, a tree, and an NVLS tree.
_LL_ONE_NODE = (39.0, 87.7, 141.0, 282.0)
_LL_INTEL = (39.0, 39.0, 20.4)
_RING_LL128 = ((20.0,) * 3, (20.0,) * 3, (36.7,) * 3, (40.0,) * 3)
_TREE_LL128 = ((20.0,) * 3, (20.0,) * 3, (36.7, 36.7, 29.0), (55.6, 31.67, 20.0))
_TREE = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0))
_NVLS_TREE = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (0.0, 57.7, 45.5), (0.0, 96.0, 80.0))
#: Of what NVLink carries, what NVLS does (nvlsEfficiency).
_NVLS_EFFICIENCY = (0.0, 0.0, 0.85, 0.74)
#: Corrections of a tree's bandwidth at 64 bytes, 128 and so on (treeCorrectionFactor).
_TREE_CORRECTION = {
    Protocol.LL: (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    Protocol.LL128: (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    Protocol.SIMPLE: (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9),
        0.9,
    ),
}
#: GB/s of a channel that NCCL tries inside a node, by generation (speedArrayIntra of search.cc).
_OLD_INSIDE = (40.0, 30.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0)
_INSIDE = (
    _OLD_INSIDE,
    _OLD_INSIDE,
    (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0),
    (90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0),
)
#: GB/s that thread blocks of Hopper's 24 channels move inside a node: a gather writes a rank's own part, too, and a
#: reduce-scatter reads it, so that of two ranks each moves twice what it sends. Two H200s gathered 1 GiB at 272 GB/s, reduced
#: it at 271 to 278, sent at 347 (benchmarks.layouts.contention); eight GPUs reach what their links carry.
_MOVED = 545.0
#: Multiprocessors of a GPU by generation: V100, A100, H100, B200; and the most channels that NCCL has.
_MULTIPROCESSORS, _MOST_CHANNELS = (80, 108, 132, 148), 32
#: The plateau of a ring of Simple between nodes (ncclTopoGetAlgoTime).
_PLATEAU = 1.4


def _generation(capability: tuple[int, int]) -> int:
    return 3 if capability >= (10, 0) else 2 if capability >= (9, 0) else 1 if capability >= (8, 0) else 0


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that take part in a collective, as many on each node.

    Attributes:
        ranks: all of them.
        local: those in one NVLink domain (or node).
    """

    ranks: int
    local: int

    @property
    def nodes(self) -> int:
        """NVLink domains (or nodes) that the group spans."""
        return self.ranks // self.local


@dataclass(frozen=True, slots=True)
class Fabric:
    """What collectives run over; rates are GB/s one way.

    Attributes:
        link_gbs: what a ring attains over the links between GPUs of a node.
        adapter_gbs: what a GPU sends to another node while its neighbours do, too.
        ring_gbs: the bus bandwidth of a ring over all GPUs of the nodes.
        latency_us: what the network adds to each step.
        capability: of the GPUs.
        nvlink: whether GPUs of a node have NVLink between them; PCIe else.
        switched: whether through NVSwitches.
    """

    link_gbs: float
    adapter_gbs: float
    ring_gbs: float
    latency_us: float
    capability: tuple[int, int]
    nvlink: bool
    switched: bool

    def bus_gbs(self, group: RankGroup) -> float:
        """Return the bus bandwidth of a ring of Simple, in GB/s: that of the adapters of all its GPUs."""
        if group.nodes == 1:
            return self.link_gbs
        between = min(self.ring_gbs, self.adapter_gbs * group.local)
        return min(between, self.link_gbs) if group.local > 1 else between

    def seconds(self, collective: Collective, size: float, group: RankGroup) -> float:
        """Return the seconds of one collective of `size` bytes; none for a group of one."""
        if group.ranks == 1 or size <= 0:
            return 0.0
        return min(
            (latency + size / (1000 * bandwidth * _correction(algorithm, protocol, size))) / 1e6
            for algorithm, protocol, latency, bandwidth in _choices(self, collective, group)
        )

    def choice(self, collective: Collective, size: float, group: RankGroup) -> tuple[Algorithm, Protocol]:
        """Return what NCCL picks."""
        best = min(
            _choices(self, collective, group),
            key=lambda one: one[2] + size / (1000 * one[3] * _correction(one[0], one[1], size)),
        )
        return best[0], best[1]

    def taken(self, group: RankGroup) -> float:
        """Return the part of a GPU's multiprocessors that a ring's kernels keep: a thread block for each channel.

        NCCL doubles the channels that its search has found. Source: src/graph/connect.cc, ncclTopoPostset
        """
        return min(_MOST_CHANNELS, 2 * _channels(self, group)) / _MULTIPROCESSORS[_generation(self.capability)]

    def exchange(self, size: float, group: RankGroup) -> float:
        """Return the seconds of an all-to-all in which each rank has `size` bytes, its own part included."""
        if group.ranks == 1 or size <= 0:
            return 0.0
        near = size * (group.local - 1) / group.ranks / self.link_gbs
        far = size * (group.ranks - group.local) / group.ranks / self.adapter_gbs
        return max(near, far) / 1e9 + self._message_us(group.nodes == 1) / 1e6

    def send(self, size: float, *, inside: bool) -> float:
        """Return the seconds of a message from one rank to another, inside an NVLink domain (or node) or not."""
        return size / ((self.link_gbs if inside else self.adapter_gbs) * 1e9) + self._message_us(inside) / 1e6

    def _message_us(self, inside: bool) -> float:
        step = (_NVLINK if self.nvlink else _PCIE) if inside else _NET
        return _BASE[Algorithm.RING][2] + step[Algorithm.RING][2] + (0.0 if inside else 2 * self.latency_us)


def _correction(algorithm: Algorithm, protocol: Protocol, size: float) -> float:
    if algorithm is not Algorithm.TREE:
        return 1.0
    step = int(log2(size / 64)) if size >= 64 else -1
    factors = _TREE_CORRECTION[protocol]
    return factors[step] if 0 <= step < len(factors) else 1.0


@lru_cache(maxsize=4096)
def _choices(fabric: Fabric, collective: Collective, group: RankGroup) -> tuple[tuple[Algorithm, Protocol, float, float], ...]:
    """Return algorithm, protocol, latency in µs and algorithm bandwidth in GB/s of all that NCCL has for a group."""
    found = list(_rings(fabric, collective, group))
    if collective is Collective.ALL_REDUCE:
        found += _trees(fabric, group)
        found += _nvls(fabric, group)
    elif group.local == 1:
        found.append(_pat(fabric, group))
    return tuple(found)


def _channels(fabric: Fabric, group: RankGroup) -> int:
    """Return the channels of a group's rings and trees: an adapter each between nodes, else what fills the links."""
    if group.nodes > 1:
        return max(1, group.local)
    speeds = _INSIDE[_generation(fabric.capability)]
    speed = next((one for one in speeds if one <= fabric.link_gbs), speeds[-1])
    count = max(1, int(fabric.link_gbs / speed))
    return 2 * count if speed >= 50 or (speed >= 25 and fabric.capability < (9, 0)) else count


def _rings(fabric: Fabric, collective: Collective, group: RankGroup) -> list[tuple[Algorithm, Protocol, float, float]]:
    generation, which = _generation(fabric.capability), min(group.nodes, 3) - 1
    bus, channels = fabric.bus_gbs(group), _channels(fabric, group)
    reduces = 2 if collective is Collective.ALL_REDUCE else 1
    if generation == 2 and group.nodes == 1 and reduces == 1:
        bus = min(bus, _MOVED * (group.ranks - 1) / group.ranks)
    steps, between = reduces * (group.ranks - 1), 0 if group.nodes == 1 else reduces * (group.nodes - 1)
    inside = (_NVLINK if fabric.nvlink else _PCIE)[Algorithm.RING]
    found = []
    for at, protocol in enumerate(_PROTOCOLS):
        rate = bus
        if protocol is Protocol.LL:
            rate = min((_LL_ONE_NODE[generation] if group.nodes == 1 else _LL_INTEL[which]), bus / 2)
        elif protocol is Protocol.LL128:
            if not fabric.nvlink:
                continue  # NCCL takes it over NVLink alone
            rate = min(0.92 * bus, channels * _RING_LL128[generation][which])
        hop = max(inside[at], _POST[at]) if group.nodes > 1 else inside[at]
        net = _NET[Algorithm.TREE if group.local == 1 else Algorithm.RING][at]
        net += fabric.latency_us * (2 if protocol is Protocol.SIMPLE else 1)
        latency = _BASE[Algorithm.RING][at] + (steps - between) * hop + between * net
        if protocol is Protocol.SIMPLE and group.nodes > 1 and reduces == 2:
            latency *= _PLATEAU
        found.append((Algorithm.RING, protocol, latency, rate * group.ranks / steps))
    return found


def _trees(fabric: Fabric, group: RankGroup) -> list[tuple[Algorithm, Protocol, float, float]]:
    generation, which = _generation(fabric.capability), min(group.nodes, 3) - 1
    channels = _channels(fabric, group)
    # On two nodes a tree is bound by the links inside: half the data cross the network (busBw of bwIntra, tuning.cc).
    bus = fabric.link_gbs if group.nodes == 1 else fabric.bus_gbs(group)
    bus = min(2 * bus, fabric.link_gbs) if group.nodes == 2 and group.local > 1 else bus
    inside = (_NVLINK if fabric.nvlink else _PCIE)[Algorithm.TREE]
    found = []
    for at, protocol in enumerate(_PROTOCOLS):
        rate = min(0.92 * bus, channels * _TREE[generation][which])
        if protocol is Protocol.LL:
            rate = min(rate / 3.8, _LL_ONE_NODE[generation] if group.nodes == 1 else _LL_INTEL[which])
        elif protocol is Protocol.LL128:
            if not fabric.nvlink:
                continue
            rate = min(rate * (7 / 9 if group.nodes == 1 else 120 / 128), channels * _TREE_LL128[generation][which])
        net = _NET[Algorithm.TREE][at] + fabric.latency_us * (2 if protocol is Protocol.SIMPLE else 1)
        hops = (group.local - 1) * inside[at] + int(log2(group.nodes)) * net
        found.append((Algorithm.TREE, protocol, _BASE[Algorithm.TREE][at] + 2 * hops, rate / 2))
    return found


def _nvls(fabric: Fabric, group: RankGroup) -> list[tuple[Algorithm, Protocol, float, float]]:
    """NVLink SHARP's all-reduce: within a node by itself, between nodes with a tree."""
    generation = _generation(fabric.capability)
    if not fabric.switched or generation < 2 or group.local < 2:
        return []
    heads = group.local
    speed = next((one for one in _INSIDE[generation] if one * heads <= fabric.link_gbs), fabric.link_gbs / heads)
    rate = 2 * speed * _NVLS_EFFICIENCY[generation] * (heads - 1) / heads
    steps = 2 * (group.ranks - 1)
    if group.nodes == 1:
        return [(Algorithm.NVLS, Protocol.SIMPLE, _NVLINK[Algorithm.NVLS][2], heads * rate * group.ranks / steps)]
    between = fabric.bus_gbs(group) / heads * (2 if group.nodes == 2 else 1)
    rate = min(rate, between, _NVLS_TREE[generation][min(group.nodes, 3) - 1])
    net = _NET[Algorithm.NVLS_TREE][2] + 2 * fabric.latency_us
    latency = _NVLINK[Algorithm.NVLS][2] + 2 * int(log2(group.nodes)) * net
    return [(Algorithm.NVLS_TREE, Protocol.SIMPLE, latency, heads * rate * group.ranks / steps)]


def _pat(fabric: Fabric, group: RankGroup) -> tuple[Algorithm, Protocol, float, float]:
    """PAT's gathers and scatters among one GPU a node: logarithmic latency, with a part that grows with the ranks."""
    net = _NET[Algorithm.TREE][2] + 2 * fabric.latency_us
    latency = _BASE[Algorithm.PAT][2] + int(log2(group.nodes)) * net / 3.5 + group.ranks * 2.8
    return (Algorithm.PAT, Protocol.SIMPLE, latency, fabric.bus_gbs(group))


def fabric_of(rates: Rates, gpu: Gpu) -> Fabric:
    """Return what collectives between such GPUs run over, at these rates."""
    nvlink = gpu.link_gbs > gpu.pcie_gbs
    return Fabric(
        link_gbs=rates.link_gbs,
        adapter_gbs=rates.adapter_gbs,
        ring_gbs=rates.ring_gbs,
        latency_us=rates.network_us,
        capability=gpu.capability,
        nvlink=nvlink,
        switched=nvlink and gpu.switched,
    )
