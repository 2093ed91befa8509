"""States and activations against published formulas, and what a run leaves alive against the ledger."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.published.rows import kept
from tests.engines.test_contract import ledger_and_schedule_differ
from tests.workloads import flat_workload
from zeroplan.core.cluster import Cluster
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import DType, Precision
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.megatron.autograd import TapeWriter
from zeroplan.engines.megatron.chunk import ChunkLayers
from zeroplan.engines.megatron.end_operators import embedding_gradient
from zeroplan.engines.megatron.engine import Megatron
from zeroplan.engines.megatron.shapes import Shapes
from zeroplan.ledger.line import evaluate
from zeroplan.models.load import load_model
from zeroplan.models.megatron import MegatronModel
from zeroplan.tape.expanded import Op

GPT: dict[str, Any] = {
    "model_type": "megatron_gpt",
    "num_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}
LLAMA: dict[str, Any] = {
    **GPT,
    "num_query_groups": 4,
    "ffn_hidden_size": 1024,
    "position_embedding_type": "rope",
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def _case(config: dict[str, Any], *, stage: int = 1, work: dict[str, Any] | None = None, **layout: Any) -> Case:
    parallel = ParallelLayout(**{"gpus": 8, **layout})
    workload = flat_workload(**{"seq_len": 256, "grad_accum": 8, **(work or {})})
    return Case(load_model(config), workload, Cluster.of(gpus=8, gpu="H100"), ZeroConfig.of(stage), parallel=parallel)


def _states(case: Case) -> int:
    return sum(item.bytes for item in evaluate(*Megatron().ledger(case)) if item.state)


MOE = {**LLAMA, "num_experts": 8, "moe_ffn_hidden_size": 256}
EXPERTS = {
    "num_experts": 8,
    "moe_ffn_hidden_size": 256,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
}
EXCHANGED = {**LLAMA, **EXPERTS}
MLA = {
    **LLAMA,
    "num_query_groups": 8,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
}
#: Bytes that compute_weight_and_optimizer_memory of Megatron-LM (megatron/training/theoretical_memory_usage.py, August 2026)
#: returns for these arguments.
THEORY: list[tuple[dict[str, Any], int, dict[str, Any], int]] = [
    (LLAMA, 0, {}, 415_392_768),
    (LLAMA, 0, {"tp": 2}, 207_774_720),
    (LLAMA, 1, {}, 173_080_320),
    (LLAMA, 1, {"tp": 2}, 103_887_360),
    (MOE, 0, {"ep": 4}, 302_736_384),
    (MOE, 1, {"ep": 4}, 154_451_712),
    (MLA, 0, {}, 348_180_480),
]


@pytest.mark.parametrize(("config", "stage", "layout", "theirs"), THEORY)
def test_states_are_those_of_megatrons_own_script(
    config: dict[str, Any], stage: int, layout: dict[str, Any], theirs: int
) -> None:
    """To the byte without the distributed optimizer; with it, but for the padding that their script leaves out."""
    own = _states(_case(config, stage=stage, **layout))
    _, rank = Megatron().ledger(_case(config, stage=stage, **layout))
    assert own - theirs == 6 * (rank.buffered - rank.held) + 12 * rank.stepped - 12 * _shared(rank) if stage else own == theirs
    assert 0 <= own - theirs < theirs // 100


def _shared(rank: Any) -> float:
    dense = sum(p.numel for p in rank.chunks[0] if not p.expert)
    return dense / rank.layout.shard_group + (rank.held - dense) / rank.layout.expert_shard_group


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True), (8, True)])
def test_unfused_layers_keep_what_korthikanti_counts(tp: int, sp: bool) -> None:
    """Korthikanti et al. 2022, equations 2 to 4: 34·sbh + 5·as²b bytes a layer, shared by tensor and sequence parallelism.

    On top come a mean and a scale of each row of both norms, in fp32.
    """
    s, b, h, a = 256, 2, 512, 8
    model = MegatronModel.of({**GPT, "transformer_impl": "local", "attention_backend": "unfused"})
    shapes = Shapes(model=model, micro_batch=b, seq=s, tp=tp, sequence=sp, flash=False)
    sbh, scores = s * b * h, a * s * s * b
    formula = sbh * 34 // tp if sp else sbh * 10 + sbh * 24 // tp
    norms = 4 * 4 * s * b // (tp if sp else 1)
    assert _kept_by_a_layer(shapes) == formula + 5 * scores // tp + norms


def test_flash_layers_keep_by_hand() -> None:
    """TransformerEngine's layers in Llama's form: norms' inputs and outputs, q, k, v, the output with its log-sums."""
    s, b, h, f = 256, 2, 512, 1024
    shapes = Shapes(model=MegatronModel.of(LLAMA), micro_batch=b, seq=s, cudnn=True)
    rows = s * b
    attention = 2 * rows * (h + h + h + h // 2 + h // 2 + h) + 4 * rows * 8
    mlp = 2 * rows * (h + h + 2 * f + f)
    assert _kept_by_a_layer(shapes) == attention + mlp + 2 * 4 * rows


def test_a_mixture_of_grouped_products_keeps_by_hand() -> None:
    """TransformerEngine's kernels: the norm's input and output, the tokens once for each expert they take, what the experts'
    first product makes and its activation, probabilities and places; and the attention as without experts.
    """
    s, b, h, f, experts, topk, ep = 256, 2, 512, 256, 8, 2, 4
    model = MegatronModel.of(EXCHANGED)
    shapes = Shapes(model=model, micro_batch=b, seq=s, cudnn=True, ep=ep)
    rows, sent = s * b, s * b * topk
    attention = 2 * rows * (h + h + h + h // 2 + h // 2 + h) + 4 * rows * 8 + 4 * rows
    norm = 2 * rows * (h + h) + 4 * rows
    router = 8 * sent + 4 * sent  # places of the largest, and their softmax
    tokens = 2 * sent * (h + 2 * f + f + 1) + 4 * rows * (2 * experts + 1) + 2 * 4 * sent
    assert _kept_by_a_layer(shapes) == attention + norm + router + tokens


@pytest.mark.parametrize("tp", [1, 2])
def test_latent_attention_keeps_by_hand(tp: int) -> None:
    """With YaRN's fused kernels: the norm's input and output, the compressed queries, a copy of the compressed keys, what their
    norms make, queries, keys and values of this rank's heads, the output with its log-sums, and the MLP.
    """
    s, b, h, f, a, own, positions, values, q, kv = 256, 2, 512, 1024, 8, 32, 16, 32, 128, 64
    shapes = Shapes(model=MegatronModel.of(MLA), micro_batch=b, seq=s, tp=tp, sequence=tp > 1, cudnn=True)
    rows, heads = s * b, a // tp
    between = rows // tp
    outside = 2 * between * (h + h) + 4 * between
    latents = 2 * between * (q + q + kv + kv) + 2 * 4 * between
    inside = 2 * rows * heads * (2 * (own + positions) + values + values) + 4 * rows * heads
    mlp = 2 * between * (h + h) + 4 * between + 2 * rows * 3 * f // tp
    assert _kept_by_a_layer(shapes) == outside + latents + inside + mlp


def _kept_by_a_layer(shapes: Shapes) -> int:
    two, three = (kept(shapes, ChunkLayers(tuple(range(1, 1 + count)), False, False)) for count in (2, 3))
    return three - two


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (LLAMA, {"tp": 2, "sp": True}),
        (GPT, {"tp": 2, "cp": 2}),
        (GPT, {"pp": 4}),
        (LLAMA, {"pp": 4, "tp": 2, "sp": True}),
        (LLAMA, {"pp": 2, "vpp": 2, "cp": 2}),
        ({**LLAMA, "grad_reduce_in_bf16": True, "overlap_grad_reduce": True, "ddp_bucket_size": 100_000}, {"pp": 2}),
        ({**GPT, "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}, {"pp": 2, "tp": 2}),
        ({**GPT, "transformer_impl": "local"}, {"tp": 2, "sp": True}),
        (EXCHANGED, {"ep": 4}),
        ({**EXCHANGED, "moe_token_dispatcher_type": "allgather"}, {"ep": 4, "pp": 2}),
        (MLA, {"tp": 2, "sp": True}),
        ({**MLA, **EXPERTS, "apply_rope_fusion": False}, {"pp": 2, "ep": 2}),
        ({**EXCHANGED, "moe_shared_expert_intermediate_size": 256}, {"tp": 2, "sp": True, "ep": 2, "pp": 2}),
        (
            {**EXCHANGED, "moe_grouped_gemm": False, "moe_permute_fusion": False, "transformer_impl": "local"},
            {"ep": 2, "pp": 2},
        ),
    ],
)
def test_what_the_ledger_keeps_the_schedule_leaves_alive(config: dict[str, Any], layout: dict[str, Any], stage: int) -> None:
    engine = Megatron()
    for rank in range(layout.get("pp", 1)):
        case = _case(config, stage=stage, **layout)
        case = Case(case.spec, case.workload, case.cluster, case.zero, parallel=case.parallel, pp_rank=rank)
        engine.require_workload(case)
        tape = engine.own_tape(case)
        assert tape is not None
        assert ledger_and_schedule_differ(case, engine, tape) == {}


def test_the_heads_stand_in_gradient_is_kept_with_transformer_engine() -> None:
    """One for each shape of a weight: q, k and v; the output's; both of the MLP; the head."""
    _, rank = Megatron().ledger(_case(LLAMA, tp=2))
    shapes = {(512, 512), (512, 256), (1024, 512), (2048, 512)}
    assert rank.stand_in_bytes == sum(2 * rows * columns for rows, columns in shapes)
    _, rank = Megatron().ledger(_case({**LLAMA, "transformer_impl": "local"}, tp=2))
    assert rank.stand_in_bytes == 0


@pytest.mark.parametrize(
    ("config", "layout", "work"),
    [
        ({**MOE, "moe_token_dispatcher_type": "flex"}, {"ep": 4}, {}),
        ({**LLAMA, "num_query_groups": 2}, {"tp": 4}, {}),
        (LLAMA, {}, {"dtype": DType.FP32, "precision": Precision.FP32}),
    ],
)
def test_what_is_not_described_has_states_and_no_activations(
    config: dict[str, Any], layout: dict[str, Any], work: dict[str, Any]
) -> None:
    case = _case(config, work=work, **layout)
    assert not Megatron().simulates(case)
    assert Megatron().own_tape(case) is None
    assert _states(case) > 0


def test_what_may_need_more_is_named() -> None:
    engine = Megatron()
    assert [one.key for one in engine.unmodelled(_case(LLAMA))] == ["unmeasured"]
    found = engine.unmodelled(_case({**LLAMA, "attention_backend": "unfused"}, cp=2))
    assert [one.key for one in found] == ["unmeasured", "--attention-backend"]


def test_more_than_3072_words_are_sorted_for_the_embeddings_gradient() -> None:
    """torch's kernel adds the rows of one word without sorting up to 3,072 words, and by segments of sorted words beyond."""
    made = {}
    for count in (3072, 3073):
        w = TapeWriter("GPTModel")
        out = embedding_gradient(w, count, 1000, 64, 2 * 64 * 1000)
        assert out.nbytes == 2 * 64 * 1000
        sizes = [aux for op, aux in zip(w.tape()[0].op, w.tape()[0].aux, strict=True) if op == Op.ALLOC]
        made[count] = sizes
    assert made[3072] == [128000]
    partial = (1000 + 3073 // 10) * 64 * 4  # fp32 sums of at most ten rows each, fewer than that
    assert 1000 * 64 * 4 <= max(made[3073]) <= partial


def test_stages_hold_one_micro_batch_less_each() -> None:
    """1F1B: stage i of p has p − i micro batches in flight, each with the layers' saved tensors and its input."""
    model = MegatronModel.of({**LLAMA, "create_attention_mask_in_dataloader": False})
    shapes = Shapes(model=model, micro_batch=1, seq=256, cudnn=True)
    each = kept(shapes, ChunkLayers((2, 3), False, False))
    peaks = {}
    for rank in (1, 2):
        case = _case({**LLAMA, "create_attention_mask_in_dataloader": False}, pp=4)
        case = Case(case.spec, case.workload, case.cluster, case.zero, parallel=case.parallel, pp_rank=rank)
        tape = Megatron().own_tape(case)
        assert tape is not None
        peaks[rank] = Megatron().simulate(case, tape).peak_allocated
    # A layer's tensors with its output, which goes when it is sent; its input comes from the stage before.
    assert peaks[1] - peaks[2] == pytest.approx(each, abs=2 * 512 * 40)
