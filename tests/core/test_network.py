"""The network between nodes: how it is written, what it carries, and what collectives take over it."""

from __future__ import annotations

import pytest

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.gpus import GPUS, find_gpu
from zeroplan.core.network import NETWORKS, Network, parse_network, usual_network
from zeroplan.core.rates import rates_of
from zeroplan.search.collectives import Algorithm, Collective, Fabric, Protocol, RankGroup, _choices, fabric_of

_LARGE = float(1 << 33)


def _fabric(gpu: str = "H100", network: str | None = None, gpus: int = 8) -> Fabric:
    card = find_gpu(gpu)
    return fabric_of(rates_of(card, None if network is None else parse_network(network), gpus), card)


def _bus(fabric: Fabric, collective: Collective, group: RankGroup, size: float = _LARGE) -> float:
    """Return the bus bandwidth in GB/s as nccl-tests computes it."""
    part = (2 if collective is Collective.ALL_REDUCE else 1) * (group.ranks - 1) / group.ranks
    return size * part / fabric.seconds(collective, size, group) / 1e9


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8x400G", Network(8, 400)),
        ("8 x 400 Gb/s", Network(8, 400)),
        ("25G", Network(1, 25, "ethernet")),
        ("4x100G:efa", Network(4, 100, "efa")),
        ("1.6T", Network(1, 1600)),
        ("4x400G:infiniband/72", Network(4, 400, "infiniband", 72)),
        ("AWS-P5", NETWORKS["aws-p5"]),
    ],
)
def test_networks_are_read(text: str, expected: Network) -> None:
    assert parse_network(text) == expected


@pytest.mark.parametrize("text", ["", "fast", "8x", "400", "0x400G", "8x0G", "8x400G:token-ring", "9999x999999T", "aws-p9"])
def test_what_is_no_network_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_network(text)
    assert "--network" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_a_networks_text_is_read_as_the_same_network(name: str) -> None:
    network = NETWORKS[name]
    again = parse_network(network.text)
    assert (again.adapters, again.gigabits, again.fabric, again.domain) == (
        *(network.adapters, network.gigabits, network.fabric, network.domain),
    )


@pytest.mark.parametrize("name", sorted(GPUS))
def test_every_card_has_a_usual_network_with_a_source(name: str) -> None:
    for gpus in (1, 2, 4, 8):
        network = usual_network(GPUS[name], gpus)
        assert network.source
        assert network.node_gbs > 0


@pytest.mark.parametrize("nodes", [2, 8, 64])
def test_a_ring_uses_all_rails_and_an_all_to_all_one_adapter(nodes: int) -> None:
    """Eight adapters of 400 Gb/s: a ring has 340 to 390 GB/s of bus bandwidth, a GPU's own messages at most 48."""
    fabric, group = _fabric(), RankGroup(8 * nodes, 8)
    for collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        assert 320 < _bus(fabric, collective, group) <= 390
    sent = _LARGE * (group.ranks - 8) / group.ranks
    assert 44 < sent / fabric.exchange(_LARGE, group) / 1e9 <= 48
    assert 44 < _LARGE / fabric.send(_LARGE, inside=False) / 1e9 <= 48


@pytest.mark.parametrize("nodes", [2, 8, 64])
def test_25_gigabit_ethernet_bounds_everything_between_nodes(nodes: int) -> None:
    """One adapter of 25 Gb/s carries 3 GB/s for all GPUs of a node together."""
    fabric, group = _fabric("RTX4090", "25G", gpus=4), RankGroup(4 * nodes, 4)
    assert 2.8 < _bus(fabric, Collective.ALL_GATHER, group) <= 3.0
    assert _LARGE / fabric.send(_LARGE, inside=False) / 1e9 < 0.75
    sent = _LARGE * (group.ranks - 4) / group.ranks
    assert sent / fabric.exchange(_LARGE, group) / 1e9 <= 0.75
    inside = RankGroup(4, 4)
    assert _bus(fabric, Collective.ALL_GATHER, inside) > 5 * _bus(fabric, Collective.ALL_GATHER, group)


def test_a_group_with_one_gpu_a_node_has_one_adapter() -> None:
    fabric = _fabric()
    one, half = _bus(fabric, Collective.ALL_GATHER, RankGroup(8, 1)), _bus(fabric, Collective.ALL_GATHER, RankGroup(32, 4))
    assert one == pytest.approx(48, rel=0.15)
    assert half == pytest.approx(4 * 48, rel=0.05)


def test_nvlink_sharp_on_a_node_of_h100s_is_as_measured() -> None:
    """476 GB/s of bus bandwidth, which NCCL's maintainers expect. Source: NVIDIA/nccl-tests issue 290."""
    fabric = _fabric()
    assert fabric.choice(Collective.ALL_REDUCE, _LARGE, RankGroup(8, 8)) == (Algorithm.NVLS, Protocol.SIMPLE)
    assert _bus(fabric, Collective.ALL_REDUCE, RankGroup(8, 8)) == pytest.approx(476, rel=0.01)
    assert fabric.choice(Collective.ALL_REDUCE, _LARGE, RankGroup(64, 8))[0] is Algorithm.NVLS_TREE
    assert fabric.choice(Collective.ALL_REDUCE, _LARGE, RankGroup(8, 1))[0] in (Algorithm.RING, Algorithm.TREE)
    assert _fabric("A100").choice(Collective.ALL_REDUCE, _LARGE, RankGroup(8, 8))[0] is Algorithm.RING


def test_small_messages_take_other_protocols_and_many_ranks_take_trees() -> None:
    fabric = _fabric("A100")
    assert fabric.choice(Collective.ALL_GATHER, 1 << 10, RankGroup(8, 8))[1] is Protocol.LL
    assert fabric.choice(Collective.ALL_GATHER, 1 << 33, RankGroup(64, 8))[1] is Protocol.SIMPLE
    assert fabric.choice(Collective.ALL_REDUCE, 1 << 14, RankGroup(512, 8))[0] is Algorithm.TREE
    assert fabric.choice(Collective.ALL_GATHER, 1 << 12, RankGroup(512, 1))[0] is Algorithm.PAT


def test_two_gpus_have_the_latencies_that_nccl_prints_and_gather_as_fast_as_measured() -> None:
    """NCCL_DEBUG_SUBSYS=TUNING of NCCL 2.28 on two H200s, µs and GB/s; gathers and reductions attained less than it expects."""
    fabric, pair = _fabric("H200"), RankGroup(2, 2)
    printed = {Protocol.LL: (7.8, 141.0), Protocol.LL128: (17.8, 331.2), Protocol.SIMPLE: (15.2, 360.0)}
    rings = {one[1]: one[2:] for one in _choices(fabric, Collective.ALL_REDUCE, pair) if one[0] is Algorithm.RING}
    assert rings == {protocol: pytest.approx(figures, abs=0.06) for protocol, figures in printed.items()}
    for collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        assert (1 << 30) / 2 / fabric.seconds(collective, 1 << 30, pair) / 1e9 == pytest.approx(272, rel=0.02)
        assert _bus(fabric, collective, RankGroup(8, 8)) == pytest.approx(360, rel=0.01)


@pytest.mark.parametrize("collective", list(Collective))
def test_time_grows_with_size_and_with_nodes(collective: Collective) -> None:
    fabric = _fabric()
    sizes = [1 << power for power in range(20, 34)]
    for group in (RankGroup(8, 8), RankGroup(64, 8), RankGroup(16, 1)):
        taken = [fabric.seconds(collective, size, group) for size in sizes]
        assert taken == sorted(taken)
    assert fabric.seconds(collective, 1 << 26, RankGroup(512, 8)) > fabric.seconds(collective, 1 << 26, RankGroup(16, 8))
    assert fabric.seconds(collective, 1 << 26, RankGroup(1, 1)) == 0.0


def test_a_rack_of_gb200_is_one_domain() -> None:
    rack = Cluster.of(gpus=4, nodes=18, gpu="GB200")
    assert rack.domain == 72
    assert Cluster.of(gpus=8, nodes=8, gpu="H100").domain == 8
    assert Cluster.of(gpus=4, nodes=18, gpu="H100", network="4x400G:infiniband/72").domain == 72


def test_efa_adds_its_latency() -> None:
    group = RankGroup(64, 8)
    plain, efa = _fabric(network="32x100G"), _fabric(network="aws-p5")
    small = 1 << 20
    assert efa.seconds(Collective.ALL_GATHER, small, group) > plain.seconds(Collective.ALL_GATHER, small, group) + 3e-4
    assert _bus(efa, Collective.ALL_GATHER, group) == pytest.approx(_bus(plain, Collective.ALL_GATHER, group), rel=0.06)
