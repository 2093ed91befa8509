"""Degrees of parallelism that ``recommend`` is given: the search keeps to them, and says why they cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import zeroplan
from zeroplan.core.errors import BadInput
from zeroplan.engines.base import SearchedLayouts
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask
from zeroplan.search.layout_orders import LayoutOrders, divides, fixed_degrees, flags_of, least_ranks
from zeroplan.search.layouts import search_layouts, smallest_cluster

Cli = Callable[..., tuple[int, str, str]]
NAME = "meta-llama/Llama-3.1-8B"
FSDP2 = SearchedLayouts(stage=3, staged=2)
LLAMA = Ask(model=NAME, gpus=8, gpu="H100", depth="formula")
MIXTURE = LLAMA.replace(model="deepseek-ai/DeepSeek-V2-Lite")


def test_what_is_said_is_fixed() -> None:
    assert fixed_degrees(LLAMA) == {}
    asked = LLAMA.replace(tp=4, sp=True, pp=1, gpus=8, engine="deepspeed")
    assert fixed_degrees(asked) == {"tp": 4, "sp": True, "pp": 1}
    assert flags_of(fixed_degrees(asked)) == "--tp 4 --sp --pp 1"
    assert flags_of(fixed_degrees(LLAMA.replace(sp=False))) == "--no-sp"


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"tp": 4}, {(4, 1, 1), (4, 2, 1)}),
        ({"tp": 4, "pp": 1}, {(4, 1, 1)}),
        ({"tp": 1, "pp": 2}, {(1, 2, 1)}),
        ({"sp": True, "pp": 1}, {(2, 1, 1), (4, 1, 1), (8, 1, 1)}),
        ({"vpp": 2, "tp": 1}, {(1, 2, 1), (1, 4, 1), (1, 8, 1)}),
        ({"cp": 2, "pp": 4}, {(1, 4, 2)}),
        ({"dp_replicate": 4}, {(1, 1, 1), (2, 1, 1), (1, 2, 1)}),
        ({"tp": 3}, set()),
    ],
)
def test_the_rest_is_searched(asked: dict[str, Any], found: set[tuple[int, int, int]]) -> None:
    request = LLAMA.replace(**asked)
    degrees = [one for one in LayoutOrders(FSDP2).of(request) if divides(request.replace(**one))]
    assert {(one["tp"], one["pp"], one["cp"]) for one in degrees} == found
    for one in degrees:
        assert one["stage"] == (3 if one["pp"] == 1 else 2)
        assert ("grad_accum" in one) == (one["pp"] > 1)
    assert all(one["stage"] == 2 for one in LayoutOrders(FSDP2).of(request.replace(stage=2)))


def test_what_a_search_leaves_out_may_be_asked_for() -> None:
    """Matrices shared between nodes, short rings, and other numbers than powers of two."""
    degrees = list(LayoutOrders(FSDP2).of(LLAMA.replace(nodes=3, tp=3, cp=2, pp=4, seq_len=512)))
    assert [(one["tp"], one["cp"], one["pp"]) for one in degrees] == [(3, 2, 4)]
    assert [one["tp"] for one in LayoutOrders(FSDP2).of(LLAMA.replace(nodes=2, tp=16, pp=1, cp=1))] == [16]


def test_the_batch_decides_the_accumulation() -> None:
    found = LayoutOrders(FSDP2, global_batch=96).of(LLAMA.replace(micro_batch=2, cp=1, pp=1))
    assert [(one["tp"], one["grad_accum"]) for one in found] == [(1, 6), (2, 12), (4, 24), (8, 48)]
    answer = search_layouts(LLAMA.replace(tp=2), global_batch=96)
    assert answer.chosen is not None
    chosen = answer.chosen.request
    assert (chosen.grad_accum or 1) * answer.chosen.layout.dp == 96
    with pytest.raises(BadInput, match="do not make 7 sequences a step"):
        search_layouts(LLAMA.replace(tp=2, pp=1, cp=1), global_batch=7)


def test_an_answer_keeps_to_them(cli: Cli) -> None:
    code, said, fault = cli("recommend", NAME, "--gpu", "8xH100", "--tp", "4", "--json")
    assert (code, fault) == (0, "")
    answer = json.loads(said)
    assert answer["fixed"] == "--tp 4"
    assert answer["best"]["layout"]["tp"] == 4
    (first,) = answer["ranking"]
    assert first["fits"] is True
    assert first["tokens_per_second"] == answer["best"]["modelled"]["tokens_per_second"]
    assert first["plan"]["gpu"]["total"] == answer["best"]["total"]
    code, said, _ = cli("recommend", NAME, "--gpu", "8xH100", "--tp", "1", "--pp", "1", "--quiet")
    assert code == 0
    assert said.startswith("Fits: 8 GPUs as dp 8, ZeRO-2")


#: Odd degrees of Llama 3.1 8B on eight H100, each with what its line names.
ODD = [
    ("--tp 3", "tp 3 does not divide 1 × 8 = 8 ranks"),
    ("--tp 0", "tp 0 is below 1"),
    ("--tp 16", "tp 16 does not divide 1 × 8 = 8 ranks"),
    ("--tp 64 --nodes 8", "tp 64 does not divide the 32 attention heads"),
    ("--tp 16 --nodes 2", "tp 16 does not divide the 8 KV heads"),
    ("--tp 2 --lora-rank 8", "tensor parallelism with LoRA"),
    ("--tp 2 --optimizer muon", "muon steps whole matrices"),
    ("--tp 2 --etp 4 --ep 1", "etp 4"),
    ("--tp 2 --etp 2", "llama has no experts whose matrices could be shared"),
    ("--sp --tp 1", "sp needs tensor parallelism"),
    ("--ep 2", "llama has no experts to share"),
    ("--pp 3", "pp 3 does not divide 1 × 8 = 8 ranks"),
    ("--pp 64 --nodes 8", "64 pipeline stages leave one without any of the 32 blocks"),
    ("--pp 4 --grad-accum 2", "1f1b over 4 stages takes 4 micro batches or more, and not 2"),
    ("--vpp 2 --pp 1", "vpp 2 needs pipeline stages"),
    ("--cp 8 --seq-len 100", "100 tokens are no multiple of 16"),
    ("--cp 2 --dtype fp32", "ring attention is modelled for 16 bits"),
    ("--dp-replicate 3", "dp_replicate 3 does not divide the 8 data-parallel ranks"),
    ("--dp-replicate 8", "8 replicas leave no ranks to shard over"),
    ("--schedule zbv --vpp 3 --pp 2", "zbv runs exactly 2 chunks a rank, and not 3"),
    ("--schedule interleaved --pp 2", "the interleaved schedule is 1f1b with several chunks"),
    ("--stage 1 --tp 2", "has no stage 1"),
    ("--stage 3 --pp 2", "keeps parameters gathered"),
]


@pytest.mark.parametrize(("words", "says"), ODD)
def test_what_cannot_be_is_said_as_estimate_says_it(cli: Cli, words: str, says: str) -> None:
    asked = (NAME, "--gpu", "8xH100", *words.split())
    code, _, fault = cli("recommend", *asked)
    assert (code, len(fault.splitlines())) == (2, 1)
    assert says in fault
    stage = () if "--stage" in words or "--pp" not in words else ("--stage", "2")
    accumulated = () if "--grad-accum" in words else ("--grad-accum", "8")
    assert fault == cli("estimate", *asked, "--engine", "fsdp2", *stage, *accumulated)[2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--goal memory", "--goal: cannot stand beside --tp"),
        ("-o run/", "--output: cannot stand beside --tp"),
        ("--compile blocks", "on replicas of the shards, alone; leave --tp out"),
        ("--from ds.json", "--from: cannot stand beside --tp"),
        ("--offload-optimizer cpu", "the time of layouts with offload is not modelled"),
        ("--engine ddp", "layouts are searched for deepspeed, fsdp2 and megatron alone"),
        ("--global-batch 0", "--global-batch: 0 is below 1"),
        ("--smallest --nodes 2", "--nodes: is what --smallest finds"),
        ("--gpus 4", "is 8 GPUs, and --gpus says 4"),
    ],
)
def test_what_cannot_stand_beside_degrees_is_refused_by_name(cli: Cli, words: str, says: str) -> None:
    code, _, fault = cli("recommend", NAME, "--gpu", "8xH100", "--tp", "2", *words.split())
    assert (code, len(fault.splitlines())) == (2, 1)
    assert says in fault


def test_python_takes_them_too() -> None:
    found = zeroplan.recommend(NAME, gpu="8xH100", tp=2, pp=1, depth="formula")
    assert found.best is not None
    assert found.layouts is not None
    assert found[0] is found.best
    assert "--tp 2" in repr(found)
    assert found.layouts.fixed == "--tp 2 --pp 1"
    assert "dp 4 × tp 2" in found.table()
    assert "Unknown: no layout is known to fit" in str(found)  # formulas know no activations
    smallest = zeroplan.recommend(NAME, gpu="H100", smallest=True, depth="formula")
    assert (smallest.layouts is not None) == (len(smallest) == 1)
    with pytest.raises(BadInput, match="goal: cannot stand beside tp"):
        zeroplan.recommend(NAME, gpu="8xH100", tp=2, goal="memory")
    with pytest.raises(BadInput, match="nodes: is what smallest finds"):
        zeroplan.recommend(NAME, gpu="8xH100", smallest=True, nodes=2)
    with pytest.raises(BadInput, match="layouts are searched for"):
        zeroplan.recommend(NAME, gpu="8xH100", tp=2, engine="ddp")


def test_the_smallest_cluster_has_ranks_for_them() -> None:
    request = LLAMA.replace(gpu="H200", tp=2, pp=3, cp=2, dp_replicate=2)
    assert least_ranks(request) == 24
    answer = smallest_cluster(LLAMA.replace(pp=3))
    assert answer.chosen is not None
    assert answer.chosen.request.nodes * answer.chosen.request.gpus % 3 == 0
    with pytest.raises(BadInput, match="tp 3 does not divide the 32 attention heads"):
        smallest_cluster(LLAMA.replace(tp=3))


def test_of_what_is_not_measured_the_first_that_may_fit_is_said(cli: Cli) -> None:
    asked = ("recommend", "Qwen/Qwen3-30B-A3B", "--gpu", "8xH200", "--tp", "2", "--ep", "2", "--depth", "formula")
    code, said, fault = cli(*asked)
    assert (code, fault) == (1, "")
    assert said.startswith("Unknown: no layout is known to fit. The fastest that may is")
    answer = json.loads(cli(*asked, "--json")[1])
    assert answer["best"] is None
    assert answer["may_fit"]["layout"]["ep"] == 2


def test_the_layout_that_is_found_is_planned_alike() -> None:
    answer = search_layouts(LLAMA.replace(depth=None, pp=2, tp=1, cp=1))
    assert answer.best is not None
    (plan,) = estimate_report(answer.best.request).plans
    assert plan.gpu.total == answer.best.plan.gpu.total


def _ways(asked: Ask, **degrees: Any) -> list[tuple[int, ...]]:
    return [tuple(one.values()) for one in LayoutOrders(FSDP2).variants(asked, asked.replace(**degrees))]


def test_variants_of_a_layout() -> None:
    staged = {"pp": 4, "stage": 2, "grad_accum": 16}
    assert _ways(LLAMA, **staged) == [(2,)]
    assert _ways(LLAMA.replace(vpp=1), **staged) == []
    assert _ways(LLAMA.replace(vpp=4), **staged) == []
    assert _ways(LLAMA.replace(schedule="zbv"), **staged, vpp=2) == []
    assert _ways(LLAMA, stage=3) == [(1, 2)]
    assert _ways(LLAMA.replace(nodes=4), stage=3) == [(1, 2), (4, 3), (4, 2)]
    assert _ways(LLAMA.replace(nodes=4, stage=3), stage=3) == [(4, 3)]
    assert _ways(LLAMA.replace(nodes=4, dp_replicate=1), stage=3) == [(1, 2)]
    assert _ways(LLAMA.replace(nodes=16, stage=3), stage=3) == [(16, 3), (2, 3)]
    assert _ways(LLAMA.replace(nodes=16, stage=3), stage=3, ep=16) == [(2, 3)]  # a node does not hold all experts
    assert _ways(LLAMA.replace(nodes=4, stage=2), stage=2, ep=8) == [(4, 2)]


def test_a_variant_is_taken_where_it_is_faster_and_said_so(cli: Cli) -> None:
    asked = ("recommend", NAME, "--gpu", "8xH100", "--pp", "4", "--tp", "1", "--cp", "1", "--seq-len", "1024")
    code, said, _ = cli(*asked)
    assert code == 0
    assert "would wait for" in said
    assert "Links: pp 4, shards over 2 ranks within a node at " in said
    best = json.loads(cli(*asked, "--json")[1])["best"]
    modelled = best["modelled"]
    assert (best["schedule"], best["layout"]["vpp"]) == ("1f1b", 2)
    assert modelled["bubble"] < modelled["simpler"]["bubble"] / 1.5
    assert modelled["tokens_per_second"] > 1.03 * modelled["simpler"]["tokens_per_second"]
    assert {one["group"]: one["inside"] for one in modelled["links"]} == {"pp": True, "shards": True}


def test_shards_within_nodes_are_taken_where_the_network_is_slow() -> None:
    found = search_layouts(LLAMA.replace(depth=None, nodes=4, network="25G", stage=3, tp=1, pp=1, cp=1))
    assert found.best is not None
    assert found.best.layout.dp_replicate == 4
    assert found.best.layout.shards_on_one_node
    assert found.best.simpler is not None
    assert found.best.time.sharding < 0.85 * found.best.simpler.sharding
