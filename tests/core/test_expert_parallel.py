"""Expert parallelism: what a rank holds of the experts, over which ranks it is sharded, and which degrees are refused."""

from __future__ import annotations

import math

import pytest

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.expert_parallel import is_expert, with_local_experts
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.fsdp2.engine import Fsdp2
from zeroplan.engines.fsdp2.rank import Fsdp2Rank
from zeroplan.models.load import load_model
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}


def _rank(layout: ParallelLayout) -> Fsdp2Rank:
    cluster = Cluster(gpus=layout.gpus, nodes=layout.nodes)
    case = Case(load_model(CONFIG), Workload.of(seq_len=64), cluster, ZeroConfig.of(3), parallel=layout)
    return Fsdp2().rank(case, case.parameters)


def test_a_rank_has_its_share_of_the_experts_and_all_of_the_rest() -> None:
    parameters = load_model(CONFIG).parameters
    local = with_local_experts(parameters, 4)
    for name, whole, part in zip(parameters.names, parameters.shapes, local.shapes, strict=True):
        assert part == ((2, *whole[1:]) if is_expert(name) else whole)
    assert sum(map(is_expert, parameters.names)) == 2 * 4
    assert not is_expert("model.layers.3.mlp.shared_experts.up_proj.weight")
    assert not is_expert("model.layers.3.mlp.gate.weight")


@pytest.mark.parametrize(("ep", "ranks"), [(2, 4), (4, 2), (8, 1)])
def test_experts_are_sharded_over_the_ranks_that_hold_the_same(ep: int, ranks: int) -> None:
    """All ranks together hold each parameter once, whether it is sharded over eight ranks or over eight / ep."""
    layout = ParallelLayout(gpus=8, ep=ep)
    assert layout.expert_shard_group == ranks
    rank, whole = _rank(layout), load_model(CONFIG).parameters
    for p, name in enumerate(whole.names):
        held = 8 * rank.chunks[p]
        assert rank.group_of(p) == (ranks if is_expert(name) else 8)
        assert held >= math.prod(whole.shapes[p])
        if is_expert(name):
            assert held == math.prod(whole.shapes[p])


def test_more_ranks_than_experts_shard_the_second_dimension() -> None:
    """Sixteen ranks of 4 × 4 have two experts each: a quarter of each expert's rows, and no padding."""
    rank = _rank(ParallelLayout(gpus=8, nodes=2, ep=4))
    assert rank.expert_dimension == 1
    at = next(p for p, name in enumerate(rank.parameters.names) if name.endswith("gate_up_proj"))
    assert rank.parameters.shapes[at] == (2, 96, 64)
    assert rank.chunks[at] == 2 * 24 * 64
    assert _rank(ParallelLayout(gpus=8, ep=4)).expert_dimension == 0


def test_pipeline_stages_have_expert_groups_of_their_own() -> None:
    layout = ParallelLayout(gpus=8, nodes=4, pp=2, ep=4)
    assert (layout.dp, layout.shard_group, layout.expert_shard_group) == (16, 16, 4)
    assert ParallelLayout(gpus=8, nodes=256, pp=16, ep=64).expert_shard_group == 2


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"ep": 3}, "ep 3 does not divide the 8 ranks of one stage and replica"),
        ({"ep": 16}, "ep 16 does not divide the 8 ranks of one stage and replica"),
        ({"ep": 16, "nodes": 2}, "ep 16 does not divide the 8 experts"),
        ({"ep": 4, "pp": 4, "stage": 2, "grad_accum": 4}, "ep 4 does not divide the 2 ranks of one stage and replica"),
        ({"ep": 2, "etp": 2}, "etp 2 is neither 1 nor tp 1"),
        ({"ep": 2, "tp": 4, "etp": 2}, "etp 2 is neither 1 nor tp 4"),
        ({"ep": 0}, "ep 0 is below 1"),
        ({"ep": 2, "lora_rank": 4}, "expert parallelism with LoRA is not modelled"),
        ({"ep": 2, "dtype": "fp32"}, "shared experts are modelled in 16 bits"),
        ({"ep": 4, "nodes": 5}, "the 10 ranks that hold the same experts do not divide the 96 rows of gate_up_proj"),
    ],
)
def test_impossible_degrees_are_refused_in_one_line(asked: dict[str, object], said: str) -> None:
    options: dict[str, object] = {"gpus": 8, "seq_len": 64, "engine": "fsdp2", "depth": "formula"}
    with pytest.raises(BadInput) as caught:
        estimate_report(Ask(model=CONFIG, **(options | asked)))  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama"}, "llama has no experts to share"),
        ({"model_type": "phimoe", "num_local_experts": 8}, "expert parallelism of phimoe is not modelled"),
    ],
)
def test_models_without_shared_experts_are_refused(config: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        estimate_report(Ask(model=CONFIG | config, gpus=8, ep=2, seq_len=64, engine="fsdp2", depth="formula"))
