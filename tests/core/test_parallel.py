"""The parallel layout: the groups that follow from its degrees, and the layouts that cannot be."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout, least_ranks
from zeroplan.core.workload import Workload
from zeroplan.engines.case import Case
from zeroplan.engines.registry import engine_names, find_engine
from zeroplan.models.load import bare_params


def test_a_cluster_is_data_parallel_over_all_its_gpus() -> None:
    layout = Cluster(gpus=8, nodes=4).layout
    assert (layout.world_size, layout.dp, layout.shard_group) == (32, 32, 32)
    assert not layout.shards_on_one_node
    assert Cluster(gpus=8).layout.shards_on_one_node


def test_deepseek_v3_on_2048_gpus() -> None:
    """Its report, section 3.1: 16-way pipeline parallelism, 64-way expert parallelism across 8 nodes, ZeRO-1, no TP."""
    layout = ParallelLayout(gpus=8, nodes=256, pp=16, ep=64)
    assert (layout.world_size, layout.dp, layout.shard_group) == (2048, 128, 128)


def test_groups_of_five_dimensions() -> None:
    layout = ParallelLayout(gpus=8, nodes=8, tp=2, sp=True, cp=2, pp=2, vpp=2, ep=4, etp=2, dp_replicate=2)
    assert (layout.dp, layout.shard_group) == (8, 8)  # 64 / (2 · 2 · 2); (8 / 2) shards × 2 context-parallel ranks
    assert not layout.shards_on_one_node  # 8 shards × 2 tensor-parallel ranks
    assert replace(layout, gpus=16, nodes=4).shards_on_one_node
    assert layout.secondary_group(4) == 4
    assert layout.secondary_group(64) == 8


def test_a_group_that_does_not_divide_a_node_leaves_it() -> None:
    assert not ParallelLayout(gpus=8, nodes=3, dp_replicate=4).shards_on_one_node  # groups of 6 ranks, the second on two nodes
    assert ParallelLayout(gpus=8, nodes=3, dp_replicate=6).shards_on_one_node  # groups of 4


@given(st.sampled_from((1, 2, 4, 8)), st.integers(1, 64), *(st.sampled_from((1, 2, 3, 4)) for _ in range(4)))
def test_the_groups_hold_every_rank_once(gpus: int, nodes: int, tp: int, cp: int, pp: int, ep: int) -> None:
    try:
        layout = ParallelLayout(gpus, nodes, tp=tp, cp=cp, pp=pp, ep=ep)
    except BadInput:
        assert (gpus * nodes) % (tp * cp * pp) or (gpus * nodes // pp) % ep
        return
    assert layout.dp * tp * cp * pp == gpus * nodes
    assert layout.shard_group * tp * pp == gpus * nodes


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ({"tp": 3}, "tp: tp 3 does not divide 2 × 4 = 8 ranks"),
        ({"pp": 3}, "pp: pp 3 does not divide 2 × 4 = 8 ranks"),
        ({"ulysses": 3}, "ulysses: ulysses 3 does not divide 2 × 4 = 8 ranks"),
        ({"tp": 4, "cp": 2, "pp": 2}, "tp 4 × cp 2 × pp 2 = 16 does not divide 2 × 4 = 8 ranks"),
        ({"tp": 2, "dp_replicate": 3}, "dp_replicate 3 does not divide the 4 data-parallel ranks"),
        ({"pp": 2, "ep": 8}, "ep 8 does not divide the 4 ranks of one stage and replica"),
        ({"ep": 4, "etp": 4}, "ep 4 × etp 4 = 16 does not divide the 8 ranks of one stage and replica"),
        ({"vpp": 2}, "vpp 2 needs pipeline stages"),
        ({"sp": True}, "sp needs tensor parallelism"),
        ({"cp": 0}, "cp 0 is below 1"),
    ],
)
def test_impossible_layouts_name_the_divisor(degrees: dict[str, int], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        ParallelLayout(gpus=4, nodes=2, **degrees)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


#: The least layout of eight ranks that has each degree.
DEGREES: dict[str, dict[str, int]] = {
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sp": True},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
    "vpp": {"pp": 2, "vpp": 2},
    "ep": {"ep": 2},
    "etp": {"tp": 2, "etp": 2},
    "dp_replicate": {"dp_replicate": 2},
    "ulysses": {"ulysses": 2},
}


def test_every_degree_is_tried() -> None:
    assert {field.name for field in fields(ParallelLayout)} - {
        "gpus",
        "nodes",
        "whole_vocabulary",
        "own_experts",
        "auto_ep",
    } == set(DEGREES)


@pytest.mark.parametrize(
    ("degrees", "ranks"),
    [
        ({}, 1),
        ({"tp": 2, "cp": 2}, 4),
        ({"pp": 2, "tp": 2}, 4),
        ({"ep": 4, "cp": 2}, 4),
        ({"ep": 4, "tp": 2}, 4),
        ({"ep": 4, "tp": 2, "etp": 2}, 8),
        ({"ep": 6, "tp": 4}, 12),
        ({"dp_replicate": 2}, 4),
        ({"dp_replicate": 2, "tp": 2}, 8),
        ({"dp_replicate": 2, "cp": 2}, 4),
        ({"ulysses": 4}, 4),
    ],
)
def test_the_fewest_ranks_make_a_layout(degrees: dict[str, int], ranks: int) -> None:
    assert least_ranks(**degrees) == ranks
    layout = ParallelLayout(ranks, **degrees)
    assert layout.dp_replicate == 1 or layout.shard_group > 1


def test_ranks_of_one_matrix_or_sample_read_the_same() -> None:
    layout = ParallelLayout(16, tp=2, cp=2, pp=2)
    assert [layout.sample_of(rank) for rank in range(16)] == [0, 0, 0, 0, 1, 1, 1, 1] * 2


#: The degrees that engines have beside data parallelism's.
HAS = {
    "deepspeed": {"tp", "pp", "ulysses", "ep"},
    "fsdp2": set(DEGREES) - {"ulysses"},
    "zeroplan": {"tp", "sp", "cp", "pp", "vpp", "ep", "etp"},
    "megatron": {"tp", "sp", "cp", "pp", "vpp", "ep", "etp"},
}


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", engine_names())
def test_engines_refuse_what_they_do_not_have(name: str, degree: str) -> None:
    engine, cluster = find_engine(name), Cluster(gpus=8)
    case = Case(bare_params(10**9), Workload(), cluster, engine.options()[0])
    assert case.layout == cluster.layout
    engine.require_layout(case.layout)
    layout = replace(case, parallel=ParallelLayout(gpus=8, **DEGREES[degree])).layout
    if degree in HAS.get(name, ()):
        engine.require_layout(layout)
        return
    with pytest.raises(BadInput, match=f"{name} has data parallelism.* only"):
        engine.require_layout(layout)
