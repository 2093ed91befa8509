"""What Megatron-LM refuses, each with the check in its source that does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import DType, Workload
from zeroplan.engines.megatron.chunk import ChunkLayers
from zeroplan.models.megatron import MegatronModel

#: What selective recomputation may run again.
_RECOMPUTED = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")


class RefusedArgument(NamedTuple):
    """What is wrong, the argument, and what to do."""

    what: str
    where: str
    remedy: str


def require_valid(model: MegatronModel, layout: ParallelLayout, workload: Workload) -> None:
    """Refuse arguments that Megatron-LM's own checks refuse.

    Sources: Megatron-LM core_v0.16.1, ``megatron/training/arguments.py`` (``validate_args``),
    ``megatron/core/transformer/transformer_config.py`` (``__post_init__``), ``megatron/core/utils.py`` (``divide``).
    """
    for refused in (*_widths(model, layout, workload), *_layers(model, layout, workload), *_choices(model, layout, workload)):
        raise BadInput(refused.what, where=refused.where, remedy=refused.remedy)


def _widths(m: MegatronModel, layout: ParallelLayout, work: Workload) -> Iterator[RefusedArgument]:
    """What tensor- and context-parallel ranks cannot share."""
    tp, cp, seq = layout.tp, layout.cp, work.batch.seq_len or 1
    shared = {"num_attention_heads": m.num_attention_heads, "ffn_hidden_size": m.ffn_hidden_size}
    for name, number in shared.items():
        if number % tp:
            yield RefusedArgument(
                f"tp {tp} does not divide {name} {number:,}", _flag(name), f"use a divisor of {number:,} for the ranks"
            )
    groups = m.num_query_groups
    if m.num_attention_heads % groups:
        what = f"{groups} query groups do not divide the {m.num_attention_heads} heads"
        yield RefusedArgument(what, "--num-query-groups", "use a divisor of the heads")
    if groups % tp and tp % groups:
        yield RefusedArgument(
            f"neither of tp {tp} and {groups} query groups divides the other", "--num-query-groups", "change one"
        )
    if layout.sp and seq % (tp * cp):
        yield RefusedArgument(f"{tp * cp} ranks do not divide {seq:,} tokens", "--seq-length", f"use a multiple of {tp * cp}")
    if cp > 1 and seq % (2 * cp):
        yield RefusedArgument(
            f"{seq:,} tokens are no multiple of 2 × cp {cp}", "--seq-length", f"use a multiple of {2 * cp}, as Megatron asks"
        )
    if m.max_position_embeddings and seq > m.max_position_embeddings:
        what = f"{seq:,} tokens are beyond the {m.max_position_embeddings:,} positions"
        yield RefusedArgument(what, "--max-position-embeddings", "raise it to the sequence length")
    if not m.max_position_embeddings and m.position_embedding_type == "learned_absolute":
        yield RefusedArgument("learned positions need their number", "--max-position-embeddings", "give it")
    if m.padded_vocab_size % tp:
        yield RefusedArgument(
            f"tp {tp} does not divide the padded vocabulary", "--padded-vocab-size", f"use a multiple of {tp}"
        )


def _layers(m: MegatronModel, layout: ParallelLayout, work: Workload) -> Iterator[RefusedArgument]:
    """Yield why the layers cannot be divided into these stages and chunks."""
    pp, vpp = layout.pp, layout.vpp
    count = m.num_layers + m.account_for_embedding_in_pipeline_split + m.account_for_loss_in_pipeline_split
    uneven = (m.decoder_first_pipeline_num_layers > 0) + (m.decoder_last_pipeline_num_layers > 0)
    if not uneven and count % (pp * vpp):
        what = f"pp {pp}{f' × vpp {vpp}' if vpp > 1 else ''} does not divide {count} layers"
        yield RefusedArgument(what, "--num-layers", "use a divisor of the layers, or uneven first and last stages")
    rest = m.num_layers - m.decoder_first_pipeline_num_layers - m.decoder_last_pipeline_num_layers
    if uneven and (pp <= uneven or rest <= 0 or rest % (pp - uneven)):
        what = f"{pp - uneven} further stages cannot share {rest} layers evenly"
        yield RefusedArgument(what, "--decoder-first-pipeline-num-layers", "leave a multiple of the other stages")
    if uneven and vpp > 1:
        yield RefusedArgument(
            "uneven stages with chunks are not modelled", "--decoder-first-pipeline-num-layers", "leave vpp at 1"
        )
    if vpp > 1 and work.batch.grad_accum % pp:
        what = f"pp {pp} does not divide {work.batch.grad_accum} micro batches, as interleaving needs"
        yield RefusedArgument(what, "--global-batch-size", f"use a multiple of {pp} micro batches")


def _choices(m: MegatronModel, layout: ParallelLayout, work: Workload) -> Iterator[RefusedArgument]:
    """Arguments that exclude each other."""
    yield from _recomputation(m)
    yield from _computation(m, layout, work)
    yield from _experts(m, layout)
    yield from _attention(m)


def _recomputation(m: MegatronModel) -> Iterator[RefusedArgument]:
    """What is recomputed: a granularity, its method and its number of layers."""
    if m.recompute_granularity not in ("", "full", "selective"):
        yield RefusedArgument(
            f"{m.recompute_granularity[:40]!r} is no granularity", "--recompute-granularity", "use full or selective"
        )
    if m.recompute_granularity == "selective" and m.recompute_method:
        yield RefusedArgument(
            "a method beside selective recomputation", "--recompute-method", "leave it out, or recompute full layers"
        )
    unknown = sorted(set(m.recompute_modules) - set(_RECOMPUTED))
    if m.recompute_granularity == "selective" and unknown:
        yield RefusedArgument(
            f"{unknown[0][:40]!r} is no part of a layer", "--recompute-modules", f"of {', '.join(_RECOMPUTED)}"
        )
    if m.recompute_granularity == "full":
        if m.recompute_method not in ("uniform", "block"):
            yield RefusedArgument("full recomputation without a method", "--recompute-method", "use uniform or block")
        if m.recompute_num_layers < 1:
            yield RefusedArgument("full recomputation of no layers", "--recompute-num-layers", "use 1 or more")
    if m.recompute_granularity != "full" and m.recompute_num_layers:
        yield RefusedArgument("layers to recompute, and no full recomputation", "--recompute-num-layers", "leave it out")


def _computation(m: MegatronModel, layout: ParallelLayout, work: Workload) -> Iterator[RefusedArgument]:
    """Layers, kernels and precision, and what they need of the layout."""
    if m.normalization not in ("LayerNorm", "RMSNorm"):
        yield RefusedArgument(f"{m.normalization[:40]!r} is no norm", "--normalization", "use LayerNorm or RMSNorm")
    if m.transformer_impl not in ("local", "transformer_engine"):
        yield RefusedArgument(
            f"{m.transformer_impl[:40]!r} is not modelled", "--transformer-impl", "use local or transformer_engine"
        )
    if m.position_embedding_type not in ("learned_absolute", "rope", "none"):
        what = f"{m.position_embedding_type[:40]!r} positions are not modelled"
        yield RefusedArgument(what, "--position-embedding-type", "use rope, learned_absolute or none")
    if work.has(Float8Recipe) and not m.uses_engine:
        yield RefusedArgument("8-bit products are TransformerEngine's", "--transformer-impl", "use transformer_engine")
    if not m.uses_engine and m.normalization == "RMSNorm" and layout.sp:
        yield RefusedArgument("torch's RMSNorm knows no sequence parallelism", "--transformer-impl", "use transformer_engine")
    if not m.uses_engine and layout.cp > 1:
        yield RefusedArgument(
            "Megatron's own attention knows no context parallelism", "--transformer-impl", "use transformer_engine"
        )
    if not m.uses_engine and m.attention_backend in ("flash", "fused"):
        yield RefusedArgument(
            "Megatron's own layers have no flash attention", "--attention-backend", "use --transformer-impl transformer_engine"
        )
    if m.attention_backend not in ("auto", "flash", "fused", "unfused", "local"):
        yield RefusedArgument(
            f"{m.attention_backend[:40]!r} is no backend", "--attention-backend", "use auto, flash, fused or unfused"
        )
    if m.cross_entropy_fusion_impl not in ("native", "te"):
        yield RefusedArgument("no such implementation", "--cross-entropy-fusion-impl", "use native or te")
    if m.grad_reduce_in_bf16 and work.numerics.dtype is not DType.BF16:
        yield RefusedArgument("gradients in bf16 without a bf16 model", "--grad-reduce-in-bf16", "give --bf16 as well")
    if layout.sp and layout.tp == 1:
        yield RefusedArgument(
            "sequence parallelism without tensor parallelism", "--sequence-parallel", "raise tp, or leave it out"
        )


def _experts(m: MegatronModel, layout: ParallelLayout) -> Iterator[RefusedArgument]:
    """A mixture's experts, its router and its dispatcher."""
    if layout.ep > 1 and not m.num_experts:
        yield RefusedArgument(
            "expert parallelism without experts", "--expert-model-parallel-size", "give --num-experts as well"
        )
    if not m.num_experts:
        return
    if m.num_experts % layout.ep:
        what = f"ep {layout.ep} does not divide {m.num_experts} experts"
        yield RefusedArgument(what, "--expert-model-parallel-size", f"use a divisor of {m.num_experts}")
    if layout.tp > 1 and not layout.sp:
        yield RefusedArgument(
            "experts beside tensor parallelism need sequence parallelism", "--sequence-parallel", "give it as well"
        )
    if m.moe_token_dispatcher_type not in ("allgather", "alltoall", "flex"):
        what = f"{m.moe_token_dispatcher_type[:40]!r} is no dispatcher"
        yield RefusedArgument(what, "--moe-token-dispatcher-type", "use allgather, alltoall or flex")
    if m.moe_token_dispatcher_type == "flex" and layout.tp * layout.ep == 1:
        what = "the flex dispatcher requires ranks that share experts or matrices"
        yield RefusedArgument(what, "--moe-token-dispatcher-type", "use alltoall, or raise ep")
    if m.moe_token_drop_policy not in ("probs", "position"):
        yield RefusedArgument("no such policy of dropping tokens", "--moe-token-drop-policy", "use probs or position")
    if m.moe_grouped_gemm and not m.uses_engine:
        what = "grouped products need TransformerEngine, or a package that Megatron-Core is about to drop"
        yield RefusedArgument(what, "--moe-grouped-gemm", "use --transformer-impl transformer_engine")
    if m.moe_router_score_function not in ("softmax", "sigmoid"):
        yield RefusedArgument("no such function of scores", "--moe-router-score-function", "use softmax or sigmoid")
    if m.moe_router_enable_expert_bias and m.moe_router_score_function != "sigmoid":
        yield RefusedArgument("a bias of experts without sigmoids", "--moe-router-enable-expert-bias", "use sigmoid scores")
    if m.add_bias_linear and m.moe_shared_expert_intermediate_size:
        yield RefusedArgument("biases in shared experts", "--disable-bias-linear", "give it, as Megatron-Core asks")
    if layout.etp > 1 and m.moe_ffn_hidden_size % layout.etp:
        what = f"etp {layout.etp} does not divide moe_ffn_hidden_size {m.moe_ffn_hidden_size:,}"
        yield RefusedArgument(what, "--expert-tensor-parallel-size", f"use a divisor of {m.moe_ffn_hidden_size:,}")
    if m.moe_router_topk > m.num_experts:
        yield RefusedArgument("more experts a token than there are", "--moe-router-topk", "lower it")


def _attention(m: MegatronModel) -> Iterator[RefusedArgument]:
    """Latent attention, and which layers are mixtures."""
    if m.multi_latent_attention and not m.uses_engine:
        what = "Megatron's own attention has keys and values of one width alone"
        yield RefusedArgument(what, "--multi-latent-attention", "use --transformer-impl transformer_engine")
    if m.multi_latent_attention and m.rope_type not in ("", "rope", "yarn"):
        yield RefusedArgument(f"{m.rope_type[:40]!r} is no kind of positions", "--rope-type", "use rope or yarn")
    if m.multi_latent_attention and m.num_query_groups != m.num_attention_heads:
        yield RefusedArgument("query groups beside latent attention", "--group-query-attention", "leave it out")
    if m.moe_layer_freq and len(m.moe_layer_freq) != m.num_layers:
        yield RefusedArgument(
            f"a pattern of {len(m.moe_layer_freq)} for {m.num_layers} layers", "--moe-layer-freq", "give one a layer"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def layers_of(model: MegatronModel, layout: ParallelLayout, rank: int) -> tuple[ChunkLayers, ...]:
    """Return what each chunk of a pipeline rank has of the model.

    Embedding and loss count as a layer of the first and of the last stage where the arguments say so.
    Source: megatron/core/transformer/transformer_layer.py (``get_transformer_layer_offset``), transformer_block.py
    (``get_num_layers_to_build``)
    """
    pp, vpp = layout.pp, layout.vpp
    stages = pp * vpp
    first, last = (model.decoder_first_pipeline_num_layers, model.decoder_last_pipeline_num_layers) if pp > 1 else (0, 0)
    counts: list[int] = []
    for stage in range(stages):
        if stage == 0 and first:
            counts.append(first)
        elif stage == stages - 1 and last:
            counts.append(last)
        elif first or last:
            counts.append((model.num_layers - first - last) // (pp - (first > 0) - (last > 0)))
        else:
            extra = model.account_for_embedding_in_pipeline_split, model.account_for_loss_in_pipeline_split
            each = (model.num_layers + sum(extra)) // stages
            counts.append(each - (extra[0] and stage == 0) - (extra[1] and stage == stages - 1))
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return tuple(
        ChunkLayers(tuple(range(ends[stage] - counts[stage], ends[stage])), stage == 0, stage == stages - 1)
        for stage in range(rank, stages, pp)
    )
