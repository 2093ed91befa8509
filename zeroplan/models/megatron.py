"""A model as Megatron-LM's arguments describe it, and the parameters that Megatron-Core makes of it.

Note [Megatron's arguments]
    A config with ``model_type`` ``megatron_gpt`` holds arguments of Megatron-LM under its own names (``num_layers``,
    ``swiglu``, ``recompute_granularity``, …) and with its own defaults. They say what the model is,
    and how Megatron-Core runs it: its ``TransformerConfig`` holds both.
    Source: Megatron-LM core_v0.16.1, ``megatron/training/arguments.py`` (``validate_args``), ``megatron/core/transformer``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from zeroplan.core.errors import BadInput

#: The ``model_type`` of such a config.
MODEL_TYPE = "megatron_gpt"
#: The release of Megatron-Core that is described.
MEGATRON_CORE = "0.16.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronModel:
    """Megatron-LM's arguments, by its names and with its defaults, for a decoder of text (``pretrain_gpt.py``).

    Attributes:
        vocab_size: words, before they are padded.
        num_query_groups: heads of keys and values; as many as heads without grouped-query attention.
        ffn_hidden_size: channels of the MLP, before gating doubles what its first matrix makes.
        moe_layer_freq: for each layer whether it is a mixture of experts; empty for all, where there are experts.
        recompute_modules: what selective recomputation runs again.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    ffn_hidden_size: int
    kv_channels: int
    num_query_groups: int
    max_position_embeddings: int = 0
    make_vocab_size_divisible_by: int = 128
    padded_vocab_size: int = 0
    position_embedding_type: str = "learned_absolute"
    normalization: str = "LayerNorm"
    swiglu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = True
    qk_layernorm: bool = False
    untie_embeddings_and_output_weights: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    transformer_impl: str = "transformer_engine"
    attention_backend: str = "auto"
    masked_softmax_fusion: bool = True
    bias_dropout_fusion: bool = True
    apply_rope_fusion: bool = True
    gradient_accumulation_fusion: bool = True
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: str = "native"
    grad_reduce_in_bf16: bool = False
    fp8_param_gather: bool = False
    fp8_amax_history_len: int = 1
    overlap_grad_reduce: bool = False
    ddp_bucket_size: int = 0
    create_attention_mask_in_dataloader: bool = True
    recompute_granularity: str = ""
    recompute_method: str = ""
    recompute_num_layers: int = 0
    recompute_modules: tuple[str, ...] = ("core_attn",)
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0
    moe_layer_freq: tuple[int, ...] = ()
    moe_router_topk: int = 2
    moe_shared_expert_intermediate_size: int = 0
    moe_grouped_gemm: bool = False
    moe_token_dispatcher_type: str = "allgather"
    moe_permute_fusion: bool = False
    moe_router_dtype: str = ""
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_enable_expert_bias: bool = False
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float = 0.0
    moe_expert_capacity_factor: float = 0.0
    moe_token_drop_policy: str = "probs"
    multi_latent_attention: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    rope_type: str = ""
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    decoder_first_pipeline_num_layers: int = 0
    decoder_last_pipeline_num_layers: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> MegatronModel:
        """Return the model of a config with Megatron's names; keys that are no fields are left aside.

        Raises:
            BadInput: a number that is missing or below 1, or a value of another kind.
        """
        values = {one.name: config[one.name] for one in fields(cls) if config.get(one.name) is not None}
        for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
            if name not in values:
                raise BadInput("is not said", where=_flag(name), remedy="give it; Megatron-LM requires it")
        for one in fields(cls):
            if one.name in values:
                values[one.name] = _checked(one.name, str(one.type), one.default, values[one.name])
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        if "kv_channels" not in values:
            if hidden % heads:
                raise BadInput(
                    f"{heads} heads do not divide the {hidden:,} channels",
                    where=_flag("num_attention_heads"),
                    remedy="change one of the two, or give --kv-channels",
                )
            values["kv_channels"] = hidden // heads
        if "ffn_hidden_size" not in values:
            gated = bool(values.get("swiglu"))
            values["ffn_hidden_size"] = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
        values.setdefault("num_query_groups", heads)
        if values.get("num_experts") and not values.get("moe_ffn_hidden_size"):
            values["moe_ffn_hidden_size"] = values["ffn_hidden_size"]
        if not values.get("add_bias_linear", True) and "add_qkv_bias" not in values:
            values["add_qkv_bias"] = False
        return cls(**values)

    @property
    def uses_engine(self) -> bool:
        """Whether the layers are TransformerEngine's."""
        return self.transformer_impl == "transformer_engine"

    @property
    def gated(self) -> bool:
        """Whether the MLP's first matrix makes a gate, too."""
        return self.swiglu

    @property
    def value_channels(self) -> int:
        """Channels of a head's values."""
        return self.v_head_dim if self.multi_latent_attention else self.kv_channels

    @property
    def fuses_latent_positions(self) -> bool:
        """Whether latent attention's positions are one kernel with the making of keys and values: for YaRN's alone."""
        return self.uses_engine and self.apply_rope_fusion and self.rope_type in ("", "yarn")

    def padded(self, tp: int) -> int:
        """Return the words of the vocabulary, padded so that `tp` ranks share them evenly.

        Source: megatron/training/tokenizer/tokenizer.py (``_vocab_size_with_padding``)
        """
        multiple = self.make_vocab_size_divisible_by * tp
        return self.padded_vocab_size or -(-self.vocab_size // multiple) * multiple

    def recomputes(self, module: str) -> bool:
        """Return whether selective recomputation runs this part of a layer again."""
        return self.recompute_granularity == "selective" and module in self.recompute_modules

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer is a mixture of experts."""
        if not self.num_experts:
            return False
        return bool(self.moe_layer_freq[layer]) if self.moe_layer_freq else True


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter.

    Attributes:
        name: in full.
        shape: on all tensor-parallel ranks together, of one expert for an expert's.
        split: the dimension that tensor-parallel ranks share; None for a whole one.
        expert: whether it is an expert's, which expert-parallel ranks share.
        block: the full name of the layer that it lies in; empty outside the layers.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    expert: bool = False
    block: str = ""

    @property
    def multiplies(self) -> bool:
        """Whether a layer multiplies with it; a router's matrix is no linear layer's."""
        return bool(self.block) and len(self.shape) == 2 and ".router." not in self.name

    def local(self, ranks: int) -> tuple[int, ...]:
        """Return the shape of one of `ranks` parts."""
        return tuple(size // ranks if at == self.split else size for at, size in enumerate(self.shape))


def embedding_weights(model: MegatronModel, tp: int) -> Iterator[Weight]:
    """Yield the parameters in front of the layers."""
    yield Weight("embedding.word_embeddings.weight", (model.padded(tp), model.hidden_size), 0)
    if model.position_embedding_type == "learned_absolute":
        yield Weight("embedding.position_embeddings.weight", (model.max_position_embeddings, model.hidden_size))


def final_weights(model: MegatronModel, tp: int, *, own_head: bool) -> Iterator[Weight]:
    """Yield the parameters behind the layers; `own_head` says that the output's matrix is not the embedding's own."""
    for name in _norm_names(model):
        yield Weight(f"decoder.final_layernorm.{name}", (model.hidden_size,))
    if own_head:
        yield Weight("output_layer.weight", (model.padded(tp), model.hidden_size), 0)


def layer_weights(model: MegatronModel, layer: int, experts: int) -> Iterator[Weight]:
    """Yield the parameters of a layer with so many of its experts, in Megatron's order."""
    block = f"decoder.layers.{layer}"
    for one in (*_attention(model), *(_mixture(model, experts) if model.has_experts(layer) else _mlp(model))):
        yield Weight(f"{block}.{one.name}", one.shape, one.split, one.expert, block)


def _norm_names(model: MegatronModel) -> tuple[str, ...]:
    return ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",)


def _norm(model: MegatronModel, prefix: str, width: int) -> Iterator[Weight]:
    for name in _norm_names(model):
        yield Weight(f"{prefix}{name}", (width,))


def _column(name: str, out: int, width: int, *, bias: bool = False) -> Iterator[Weight]:
    if bias:
        yield Weight(f"{name}.bias", (out,), 0)
    yield Weight(f"{name}.weight", (out, width), 0)


def _row(name: str, out: int, width: int, *, bias: bool = False) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (out, width), 1)
    if bias:
        yield Weight(f"{name}.bias", (out,))


def _attention(model: MegatronModel) -> Iterator[Weight]:
    """The input's norm and the attention; TransformerEngine has the norm in the layer that follows it."""
    hidden, own = model.hidden_size, "self_attention"
    if model.multi_latent_attention:
        yield from _latent_attention(model)
        return
    width = model.kv_channels * model.num_attention_heads
    out = width + 2 * model.kv_channels * model.num_query_groups
    if not model.uses_engine:
        yield from _norm(model, "input_layernorm.", hidden)
    yield from _row(f"{own}.linear_proj", hidden, width, bias=model.add_bias_linear)
    if model.uses_engine:
        yield from _norm(model, f"{own}.linear_qkv.layer_norm_", hidden)
    yield from _column(f"{own}.linear_qkv", out, hidden, bias=model.add_bias_linear or model.add_qkv_bias)
    if model.qk_layernorm:
        yield from _norm(model, f"{own}.q_layernorm.", model.kv_channels)
        yield from _norm(model, f"{own}.k_layernorm.", model.kv_channels)


def _latent_attention(model: MegatronModel) -> Iterator[Weight]:
    """Multi-head latent attention: down-projections are whole on every rank.

    Source: megatron/core/transformer/multi_latent_attention.py
    """
    hidden, heads, own = model.hidden_size, model.num_attention_heads, "self_attention"
    head = model.qk_head_dim + model.qk_pos_emb_head_dim
    yield from _norm(model, "input_layernorm.", hidden)
    yield from _row(f"{own}.linear_proj", hidden, heads * model.v_head_dim, bias=model.add_bias_linear)
    if model.q_lora_rank:
        yield Weight(f"{own}.linear_q_down_proj.weight", (model.q_lora_rank, hidden))
        if model.qk_layernorm:
            yield from _norm(model, f"{own}.q_layernorm.", model.q_lora_rank)
        yield from _column(f"{own}.linear_q_up_proj", heads * head, model.q_lora_rank)
    else:
        yield from _column(f"{own}.linear_q_proj", heads * head, hidden)
    yield Weight(f"{own}.linear_kv_down_proj.weight", (model.kv_lora_rank + model.qk_pos_emb_head_dim, hidden))
    if model.qk_layernorm:
        yield from _norm(model, f"{own}.kv_layernorm.", model.kv_lora_rank)
    yield from _column(f"{own}.linear_kv_up_proj", heads * (model.qk_head_dim + model.v_head_dim), model.kv_lora_rank)


def _mlp(model: MegatronModel) -> Iterator[Weight]:
    hidden, width, bias = model.hidden_size, model.ffn_hidden_size, model.add_bias_linear
    yield from _norm(model, "mlp.linear_fc1.layer_norm_" if model.uses_engine else "pre_mlp_layernorm.", hidden)
    yield from _column("mlp.linear_fc1", width * (1 + model.gated), hidden, bias=bias)
    yield from _row("mlp.linear_fc2", hidden, width, bias=bias)


def _mixture(model: MegatronModel, experts: int) -> Iterator[Weight]:
    """A router, `experts` experts and what all tokens pass. Source: megatron/core/transformer/moe"""
    hidden, width, gates = model.hidden_size, model.moe_ffn_hidden_size, 1 + model.gated
    yield from _norm(model, "pre_mlp_layernorm.", hidden)
    yield Weight("mlp.router.weight", (model.num_experts, hidden))
    bias = model.add_bias_linear
    for part, out, into, split in (("linear_fc1", width * gates, hidden, 0), ("linear_fc2", hidden, width, 1)):
        for expert in range(experts):
            yield Weight(f"mlp.experts.{part}.weight{expert}", (out, into), split, True)
            if bias:
                yield Weight(f"mlp.experts.{part}.bias{expert}", (out,), 0 if split == 0 else None, True)
    shared = model.moe_shared_expert_intermediate_size
    if shared:
        yield from _column("mlp.shared_experts.linear_fc1", shared * gates, hidden, bias=bias)
        yield from _row("mlp.shared_experts.linear_fc2", hidden, shared, bias=bias)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


#: The largest width, and the most layers and experts; they keep arithmetic and loops sane.
_MOST = 1 << 28
_MOST_OF = {"num_layers": 10_000, "num_experts": 4096, "num_attention_heads": 1 << 16}


def _checked(name: str, kind: str, default: Any, value: Any) -> Any:
    """Return a value of the kind that the field has; a number may be 0 where that is the default."""
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_OF.get(name, _MOST):
        if value or default == 0:
            return value
    elif kind == "bool" and isinstance(value, bool):
        return value
    elif kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        if 0 <= value < (_MOST if name == "moe_expert_capacity_factor" else 1):
            return float(value)
    elif kind == "str" and isinstance(value, str):
        return value
    elif kind.startswith("tuple") and isinstance(value, list | tuple):
        return tuple(value)
    raise BadInput(f"{str(value)[:40]!r} cannot be", where=_flag(name), remedy="give what Megatron-LM takes there")
