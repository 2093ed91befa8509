"""What Megatron-LM refuses is refused in one line, with the argument's name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workloads import flat_workload
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import DType, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.megatron.engine import Megatron
from zeroplan.engines.megatron.rules import layers_of, require_valid
from zeroplan.models.load import load_model
from zeroplan.models.megatron import MegatronModel

BASE: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
#: What is changed of the model, of the layout and of the workload, and the words that the message must hold.
IMPOSSIBLE: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ({"hidden_size": 1000}, {}, {}, "16 heads do not divide"),
    ({"hidden_size": None}, {}, {}, "--hidden-size"),
    ({"num_layers": 0}, {}, {}, "--num-layers"),
    ({"hidden_dropout": 1.5}, {}, {}, "--hidden-dropout"),
    ({"num_attention_heads": 12, "hidden_size": 768}, {"gpus": 8, "tp": 8}, {}, "num_attention_heads 12"),
    ({"ffn_hidden_size": 4100}, {"gpus": 8, "tp": 8}, {}, "ffn_hidden_size 4,100"),
    ({"num_query_groups": 5}, {}, {}, "query groups do not divide"),
    ({"num_attention_heads": 24, "kv_channels": 64, "num_query_groups": 3}, {"gpus": 8, "tp": 2}, {}, "neither"),
    ({}, {"gpus": 8, "tp": 8, "sp": True}, {"seq_len": 1001}, "1,001 tokens"),
    ({}, {"gpus": 8, "cp": 4}, {"seq_len": 1004}, "no multiple of 2 × cp 4"),
    ({}, {}, {"seq_len": 8192}, "beyond the 4,096 positions"),
    ({"max_position_embeddings": 0}, {}, {}, "learned positions"),
    ({}, {"gpus": 3, "pp": 3}, {}, "pp 3 does not divide 8 layers"),
    ({}, {"gpus": 4, "pp": 4, "vpp": 4}, {"grad_accum": 8}, "pp 4 × vpp 4"),
    ({}, {"gpus": 4, "pp": 4, "vpp": 2}, {"grad_accum": 6}, "pp 4 does not divide 6 micro batches"),
    ({"decoder_first_pipeline_num_layers": 3}, {"gpus": 4, "pp": 4}, {}, "share 5 layers"),
    ({"recompute_granularity": "some"}, {}, {}, "--recompute-granularity"),
    ({"recompute_granularity": "full"}, {}, {}, "--recompute-method"),
    ({"recompute_granularity": "full", "recompute_method": "block"}, {}, {}, "--recompute-num-layers"),
    ({"recompute_granularity": "selective", "recompute_method": "block"}, {}, {}, "--recompute-method"),
    ({"recompute_num_layers": 2}, {}, {}, "--recompute-num-layers"),
    ({"recompute_granularity": "selective", "recompute_modules": ["attn"]}, {}, {}, "--recompute-modules"),
    ({"normalization": "BatchNorm"}, {}, {}, "--normalization"),
    ({"position_embedding_type": "mrope"}, {}, {}, "--position-embedding-type"),
    ({"transformer_impl": "local", "normalization": "RMSNorm"}, {"gpus": 2, "tp": 2, "sp": True}, {}, "torch's RMSNorm"),
    ({"transformer_impl": "local"}, {"gpus": 2, "cp": 2}, {}, "context parallelism"),
    ({"transformer_impl": "local", "attention_backend": "flash"}, {}, {}, "--attention-backend"),
    ({"grad_reduce_in_bf16": True}, {}, {"dtype": DType.FP16}, "--grad-reduce-in-bf16"),
    ({}, {"gpus": 8, "ep": 8}, {}, "expert parallelism without experts"),
    ({"num_experts": 6}, {"gpus": 8, "ep": 4}, {}, "ep 4 does not divide 6 experts"),
    ({"num_experts": 8}, {"gpus": 2, "tp": 2}, {}, "need sequence parallelism"),
    ({"num_experts": 2, "moe_router_topk": 4}, {}, {}, "--moe-router-topk"),
    ({"num_experts": 8, "moe_layer_freq": [1, 0]}, {}, {}, "--moe-layer-freq"),
    ({"multi_latent_attention": True, "transformer_impl": "local"}, {}, {}, "--multi-latent-attention"),
    ({"multi_latent_attention": True, "rope_type": "mrope"}, {}, {}, "--rope-type"),
    ({"num_experts": 8, "moe_token_dispatcher_type": "gather"}, {}, {}, "no dispatcher"),
    ({"num_experts": 8, "moe_token_dispatcher_type": "flex"}, {}, {}, "flex dispatcher requires ranks"),
    ({"num_experts": 8, "moe_token_drop_policy": "last"}, {}, {}, "--moe-token-drop-policy"),
    ({"num_experts": 8, "moe_grouped_gemm": True, "transformer_impl": "local"}, {}, {}, "--moe-grouped-gemm"),
    ({"num_experts": 8, "moe_router_score_function": "tanh"}, {}, {}, "--moe-router-score-function"),
    ({"num_experts": 8, "moe_router_enable_expert_bias": True}, {}, {}, "--moe-router-enable-expert-bias"),
    ({"num_experts": 8, "moe_shared_expert_intermediate_size": 64}, {}, {}, "--disable-bias-linear"),
    (
        {"num_experts": 8, "moe_ffn_hidden_size": 1023},
        {"gpus": 2, "tp": 2, "sp": True, "etp": 2},
        {},
        "--expert-tensor-parallel-size",
    ),
    ({"padded_vocab_size": 32001}, {"gpus": 2, "tp": 2}, {}, "--padded-vocab-size"),
]


@pytest.mark.parametrize(("model", "layout", "work", "words"), IMPOSSIBLE, ids=lambda one: str(one)[:40])
def test_impossible_arguments_are_one_line(
    model: dict[str, Any], layout: dict[str, Any], work: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput) as refused:
        _plan(model, layout, work)
    text = str(refused.value)
    assert words in text
    assert "\n" not in text


def _plan(model: dict[str, Any], layout: dict[str, Any], work: dict[str, Any]) -> None:
    given = MegatronModel.of({**BASE, **model})
    require_valid(given, ParallelLayout(**{"gpus": 1, **layout}), flat_workload(**{"seq_len": 1024, **work}))


def test_layers_go_to_stages_and_chunks_as_in_megatron() -> None:
    model = MegatronModel.of(BASE)
    layout = ParallelLayout(gpus=2, pp=2, vpp=2)
    assert [part.layers for part in layers_of(model, layout, 0)] == [(0, 1), (4, 5)]
    assert [part.layers for part in layers_of(model, layout, 1)] == [(2, 3), (6, 7)]
    assert [part.embeds for part in layers_of(model, layout, 0)] == [True, False]
    assert [part.ends for part in layers_of(model, layout, 1)] == [False, True]
    counted = MegatronModel.of(
        {
            **BASE,
            "num_layers": 6,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        }
    )
    layout = ParallelLayout(gpus=4, pp=4)
    assert [len(layers_of(counted, layout, rank)[0].layers) for rank in range(4)] == [1, 2, 2, 1]
    uneven = MegatronModel.of({**BASE, "decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3})
    assert [len(layers_of(uneven, layout, rank)[0].layers) for rank in range(4)] == [1, 2, 2, 3]
    # A layout without stages is timed by all of its layers.
    assert len(layers_of(uneven, ParallelLayout(gpus=4), 0)[0].layers) == 8


def test_a_model_that_megatron_core_has_no_layers_for_is_refused_by_name() -> None:
    config = {"model_type": "t5", "num_layers": 1, "d_model": 64}
    case = Case(load_model(config), Workload.of(seq_len=64), Cluster(), ZeroConfig.of(1))
    with pytest.raises(BadInput, match="Megatron-LM's form of t5 is not modelled; of llama"):
        Megatron().require_workload(case)
