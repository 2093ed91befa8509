"""What one rank of Megatron-Core computes for a micro batch: embedding, layers, head and loss, in operators of sizes.

See Note [Sizes without numbers] in ``autograd.py``. Tensors are laid out ``[tokens, samples, channels]``.
Sources: Megatron-Core 0.16.1, ``megatron/core/models/gpt/gpt_model.py``, ``megatron/core/transformer/transformer_block.py``,
``transformer_layer.py``, ``attention.py``, ``dot_product_attention.py``, ``mlp.py``,
``megatron/core/models/common/embeddings``; ``pretrain_gpt.py`` (``loss_func``).

Of multi-head latent attention: ``megatron/core/transformer/multi_latent_attention.py`` (``MLASelfAttention``),
``megatron/core/fusions/fused_mla_yarn_rope_apply.py``; TransformerEngine of 22 August 2026, ``pytorch/module/base.py``
(``prepare_forward``, which makes inputs contiguous).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from zeroplan.engines.megatron import operators as ops
from zeroplan.engines.megatron.autograd import Gradients, Storage, TapeWriter, Value
from zeroplan.engines.megatron.end_operators import cross_entropy, embedding_gradient, mean_loss
from zeroplan.engines.megatron.experts import mixture
from zeroplan.engines.megatron.operators import Linear, Saved
from zeroplan.engines.megatron.ring import ring_attention
from zeroplan.engines.megatron.rotary import rotated
from zeroplan.engines.megatron.shapes import Shapes
from zeroplan.tape.expanded import Kind


def latent_query_key_value(w: TapeWriter, s: Shapes, x: Value) -> tuple[Value, ...]:
    """Compress, normalize, expand to heads, and rotate the channels of positions, which all heads' keys share.

    Returns query, key and value, and what Megatron's variables hold besides until the attention has run.
    """
    model = s.model
    narrow = x
    if model.q_lora_rank:
        with w.module("linear_q_down_proj", "Linear"):
            narrow = ops.column_linear(w, x, s.whole_linear(model.q_lora_rank, model.hidden_size))
    rank, positions = model.kv_lora_rank, model.qk_pos_emb_head_dim
    with w.module("linear_kv_down_proj", "Linear"):
        combined = ops.column_linear(w, x, s.whole_linear(rank + positions, model.hidden_size))
    sizes = s.rows * rank * s.element, s.rows * positions * s.element
    latent, key_positions = ops.split(w, combined, sizes)
    if s.sequence and s.tp > 1:
        key_positions = _gathered(w, s, key_positions)
    if not model.uses_engine:  # TransformerEngine's layers normalize themselves
        narrow = _normed(w, s, narrow, model.q_lora_rank) if model.q_lora_rank else narrow
        latent = _normed(w, s, latent, rank)
    made = _expanded(w, s, narrow, latent, key_positions)
    return (*made, narrow, latent, combined)[:3]


def _gathered(w: TapeWriter, s: Shapes, x: Value) -> Value:
    """Gather all tokens' channels of positions; what is gathered is a contiguous copy."""
    size = x.nbytes
    out = w.empty(size * s.tp, Kind.COMM)
    w.empty(size)

    return w.apply([x], [out], [], w.fresh(size, kind=Kind.COMM))[0]


def _normed(w: TapeWriter, s: Shapes, x: Value, channels: int) -> Value:
    return ops.normalize(w, x, s.norm_of(channels, s.rows)) if s.model.qk_layernorm else x


def _up(w: TapeWriter, s: Shapes, x: Value, sizes: Linear, channels: int, *, normalizes: bool) -> Value:
    """Expand to heads; TransformerEngine's layer normalizes first, and reads a copy where its input is a view of a part."""
    if not s.model.uses_engine:
        return ops.column_linear(w, x, sizes)
    copied = ops.contiguous(w, x) if x.is_part else x
    if normalizes and s.model.qk_layernorm:
        return ops.norm_linear(w, copied, s.norm_of(channels, s.rows), sizes)
    return ops.column_linear(w, copied, sizes)


def _expanded(w: TapeWriter, s: Shapes, narrow: Value, latent: Value, key_positions: Value) -> tuple[Value, Value, Value]:
    model = s.model
    heads, own, positions, values = model.num_attention_heads, model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
    into = model.q_lora_rank or model.hidden_size
    sizes = s.column(heads * (own + positions), into, bias=False, adds=False)
    with w.module("linear_q_up_proj" if model.q_lora_rank else "linear_q_proj", "ColumnParallelLinear"):
        query = _up(w, s, narrow, sizes, into, normalizes=bool(model.q_lora_rank))
    sizes = s.column(heads * (own + values), model.kv_lora_rank, bias=False, adds=False)
    with w.module("linear_kv_up_proj", "ColumnParallelLinear"):
        both = _up(w, s, latent, sizes, model.kv_lora_rank, normalizes=True)
    each = s.tokens * heads // s.tp * s.element  # bytes of one channel of all tokens and heads
    if model.fuses_latent_positions:
        return _fused(w, s, query, both, key_positions, each)
    plain, turning = ops.split(w, query, (each * own, each * positions))
    keys, value = ops.split(w, both, (each * own, each * values))
    turned = rotated(w, s, turning, positions)
    shared = rotated(w, s, key_positions, positions)
    query = _joined(w, plain, turned)
    size = shared.nbytes

    spread = w.apply([shared], [shared.storage], [], w.fresh(size), (0,))[0]
    key = w.apply([keys, spread], [w.empty(each * (own + positions))], [], lambda saved, g: [g[0], g[0]])[0]
    return query, key, ops.contiguous(w, value)


def _joined(w: TapeWriter, first: Value, second: Value) -> Value:
    """Join channels; the gradients are views of that of the whole."""
    return w.apply([first, second], [w.empty(first.nbytes + second.nbytes)], [], lambda saved, g: [g[0], g[0]])[0]


def _fused(w: TapeWriter, s: Shapes, query: Value, both: Value, key_positions: Value, each: int) -> tuple[Value, Value, Value]:
    """One kernel rotates the queries in place; another makes keys and values."""
    model = s.model
    own, positions, values = model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
    w.keep(("rotary", (w.layer,)), 2 * s.seq * positions * s.element)  # cosines and sines of the model's dtype
    query = w.apply([query], [query.storage], [], lambda saved, g: g[:])[0]
    sizes = both.nbytes, key_positions.nbytes

    def backward(saved: Saved, g: Gradients) -> Gradients:
        return [w.empty(size) for size in sizes]

    outputs = [w.empty(each * (own + positions)), w.empty(each * values)]
    key, value = w.apply([both, key_positions], outputs, [], backward)
    return query, key, value


_FP32, _INT64 = 4, 8
#: The element of an attention mask.
_BOOL = 1


def load(w: TapeWriter, s: Shapes) -> tuple[Storage, Storage, Storage | None]:
    """Bring a micro batch to the GPU: words, labels, weights, positions and attention's mask, which the loader makes.

    The first tensor-parallel rank, which sends them to the others, loads all of them. Context-parallel ranks copy their parts.
    Returns words, weights and the mask, that go when nothing needs them; labels and positions go here, a little early.
    Source: megatron/training/utils.py (``get_batch_on_this_tp_rank``)
    """
    made: list[Storage] = []
    for share in (1, s.cp) if s.cp > 1 else (1,):
        count = s.tokens * s.cp // share
        sizes = [count * _INT64, count * _INT64, count * _FP32, count * _INT64]
        if s.model.create_attention_mask_in_dataloader:
            sizes.append(s.micro_batch * s.seq * s.cp * s.seq * s.cp // share * _BOOL)
        made = [w.empty(size, Kind.INPUT) for size in sizes]
    return made[0], made[2], made[4] if len(made) > 4 else None


def embed(w: TapeWriter, s: Shapes, words: Storage) -> Value:
    """The word embedding of this rank's part of the vocabulary, positions, and dropout."""
    model = s.model
    learned = model.position_embedding_type == "learned_absolute"
    with w.module("embedding", "LanguageModelEmbedding"):
        x = _look_up(w, s, words)
        if learned:
            x = _with_positions(w, s, x)
        if s.micro_batch > 1:
            x = ops.contiguous(w, x)
        if s.sequence:
            x = ops.contiguous(w, ops.share_tokens(w, x, s.hidden) if learned else ops.scatter(w, x, s.hidden))
        return ops.drop(w, x, s.element) if model.hidden_dropout else x


def _look_up(w: TapeWriter, s: Shapes, words: Storage) -> Value:
    """Look words up. Other ranks' words are masked in the output, in place; its gradient is copied to mask it, too."""
    count, table = s.tokens, s.model.padded(s.tp) // s.tp * s.model.hidden_size * s.element
    saved = [words]
    mask = None
    if s.tp > 1:
        below, above = w.empty(count), w.empty(count)
        mask = w.empty(count)
        del below, above
        cloned = w.empty(count * _INT64)
        saved = [w.empty(count * _INT64)]
        del cloned
    out = w.empty(s.whole)
    size = s.whole

    def look_up_backward(saved: Saved, g: Gradients) -> Gradients:
        made = embedding_gradient(w, count, s.model.padded(s.tp) // s.tp, s.model.hidden_size, table)
        w.attributes.pop(ops.WAITING, None)
        return [made]

    found = w.apply([], [out], saved, look_up_backward)[0]
    if mask is None:
        return found
    return w.apply([found], [found.storage], [mask], w.fresh(size))[0]


def _with_positions(w: TapeWriter, s: Shapes, x: Value) -> Value:
    table = s.model.max_position_embeddings * s.model.hidden_size * s.element
    positions = w.empty(s.whole)

    def table_backward(saved: Saved, g: Gradients) -> Gradients:
        rows, width = s.model.max_position_embeddings, s.model.hidden_size
        return [embedding_gradient(w, s.tokens, rows, width, table)]

    looked_up = w.apply([], [positions], [], table_backward)[0]
    del positions
    out = w.empty(x.nbytes)
    return w.apply([x, looked_up], [out], [], lambda saved, g: [g[0], g[0]])[0]


def layer(w: TapeWriter, s: Shapes, number: int, x: Value) -> Value:
    """A transformer layer."""
    w.layer = number
    with w.module(f"decoder.layers.{number}", "TransformerLayer", block=True):
        latent = s.model.multi_latent_attention
        kind = "MLASelfAttention" if latent else "SelfAttention"
        x = _half(w, s, x, norm="input_layernorm", name="self_attention", kind=kind, run=_attention, apart=latent)
        if s.model.has_experts(number):
            run = partial(_mixture, number=number)
            return _half(w, s, x, norm="pre_mlp_layernorm", name="mlp", kind="MoELayer", run=run, apart=True)
        return _half(w, s, x, norm="pre_mlp_layernorm", name="mlp", kind="MLP", run=_mlp)


def _again(w: TapeWriter, s: Shapes, module: str, x: Value, run: Callable[[Value], Value]) -> Value:
    """Run a part of a layer, and again in the backward where selective recomputation names it."""
    if not s.model.recomputes(module):
        return run(x)
    return ops.checkpoint(w, lambda inputs: run(inputs[0]), [x], masked=False)


def _mixture(w: TapeWriter, s: Shapes, x: Value, number: int) -> Value:
    width = s.model.moe_shared_expert_intermediate_size

    def shared(tokens: Value) -> Value:
        return _again(w, s, "shared_experts", tokens, partial(_wide, w, s, width, normalizes=False))

    return _again(w, s, "moe", x, lambda tokens: mixture(w, s, number, tokens, shared if width else None))


def _half(
    w: TapeWriter,
    s: Shapes,
    residual: Value,
    *,
    norm: str,
    name: str,
    kind: str,
    run: Callable[[TapeWriter, Shapes, Value], Value],
    apart: bool = False,
) -> Value:
    """Normalize, run one half of a layer, and add its output to what came in.

    TransformerEngine has the norm in the first linear layer, unless that is not the only reader (`apart`).
    """
    model = s.model
    bias = model.hidden_size * s.element if model.add_bias_linear else 0
    normed = None
    if apart or not model.uses_engine:
        with w.module(norm, model.normalization):
            normed = ops.normalize(w, residual, s.norm)
    with w.module(name, kind):
        out = run(w, s, residual if normed is None else normed)
    mixed = ops.add(w, out, residual, bias=bias, dropout=model.hidden_dropout > 0, element=s.element)
    del normed, out
    return mixed


def _attention(w: TapeWriter, s: Shapes, x: Value) -> Value:
    """Queries, keys and values in one product, positions, the attention itself, and the output's product."""
    model = s.model
    latent = model.multi_latent_attention
    made = (latent_query_key_value if latent else _query_key_value)(w, s, x)  # held to the end, as Megatron's variables hold it
    query, key, value = made
    if model.position_embedding_type == "rope" and not latent:
        query, key = (rotated(w, s, one, model.kv_channels) for one in (query, key))
    with w.module("core_attention", "DotProductAttention"):
        run = partial(_core, w, s)
        selected = model.recomputes("core_attn")
        context = ops.checkpoint(w, run, [query, key, value]) if selected else run([query, key, value])
    width = model.value_channels * model.num_attention_heads
    with w.module("linear_proj", "RowParallelLinear"):
        return ops.row_linear(w, context, s.row(model.hidden_size, width, bias=model.add_bias_linear, kept=True))


def _query_key_value(w: TapeWriter, s: Shapes, x: Value) -> tuple[Value, Value, Value]:
    """Views of one product; queries are copied where groups of them share keys, since groups do not lie side by side."""
    model = s.model
    out = model.kv_channels * (model.num_attention_heads + 2 * model.num_query_groups)
    sizes = s.column(out, model.hidden_size, bias=model.add_bias_linear or model.add_qkv_bias, adds=True)
    with w.module("linear_qkv", "ColumnParallelLinear"):
        mixed = ops.norm_linear(w, x, s.norm, sizes) if model.uses_engine else ops.column_linear(w, x, sizes)
    query, key, value = ops.split(w, mixed, (s.query, s.key, s.key))
    if s.heads > s.groups > 1:
        query = ops.contiguous(w, query)
    if model.qk_layernorm:
        query, key = _head_norm(w, s, query, s.heads), _head_norm(w, s, key, s.groups)
    return query, key, value


def _head_norm(w: TapeWriter, s: Shapes, x: Value, heads: int) -> Value:
    """A norm of each head; TransformerEngine's reads a copy where its input is a view of a part."""
    copied = ops.contiguous(w, x) if x.is_part and s.model.uses_engine else x
    return ops.normalize(w, copied, s.head_norm(heads))


def _core(w: TapeWriter, s: Shapes, parts: list[Value]) -> Value:
    """The attention itself: one kernel, or scores that are kept."""
    query, key, value = parts
    if not s.flash:
        return _scored(w, s, query, key, value)
    views = query.storage is key.storage is value.storage
    if not views:  # TransformerEngine knows no layout of tensors beside views of parts, and makes all contiguous
        query, key, value = (ops.contiguous(w, one) if one.is_part else one for one in (query, key, value))
    stats = s.tokens * s.heads * _FP32
    if s.cp > 1:
        query, key, value = (ops.contiguous(w, one) if one.is_part else one for one in (query, key, value))
        return ring_attention(w, query, key, value, ranks=s.cp, output=s.context, stats=stats)
    copies = not s.cudnn and s.micro_batch > 1
    return ops.attention(w, query, key, value, output=s.context, stats=stats, packed=views and s.cudnn, copies=copies)


def _scored(w: TapeWriter, s: Shapes, query: Value, key: Value, value: Value) -> Value:
    """Megatron's own ``DotProductAttention``: all scores, their softmax and, with dropout, that and its mask."""
    model = s.model
    w.keep(ops.SHARED, s.scores)
    if model.num_attention_heads > model.num_query_groups:
        key, value = ops.repeat(w, key, s.query), ops.repeat(w, value, s.query)
    heads, context_size = query.nbytes, value.nbytes

    def scores_backward(saved: Saved, g: Gradients) -> Gradients:
        made = []
        for _ in range(2):
            exact = w.empty(heads)
            made.append(w.empty(heads))  # scaled
            del exact
        return [*made]

    raw = w.apply([query, key], [w.empty(s.scores)], [query.storage, key.storage], scores_backward)[0]
    probabilities = _softmax(w, s, raw)
    if model.attention_dropout:
        probabilities = ops.drop(w, probabilities, s.element)
    scores = s.scores

    def context_backward(saved: Saved, g: Gradients) -> Gradients:
        value_gradient = w.empty(context_size)
        return [w.empty(scores), value_gradient]

    saved = [probabilities.storage, value.storage]
    context = w.apply([probabilities, value], [w.empty(context_size)], saved, context_backward)[0]
    context = ops.contiguous(w, context)
    return context  # noqa: RET504 - the product goes before the scores do


def _softmax(w: TapeWriter, s: Shapes, raw: Value) -> Value:
    """Apex's kernel, which keeps its result and writes its gradient over the one it gets; or fp32 copies by torch's operators,
    masked in place.

    Source: megatron/core/fusions/fused_softmax.py (``forward_torch_softmax``)
    """
    size, wide = s.scores, s.scores // s.element * _FP32
    if s.model.masked_softmax_fusion:
        kept = w.empty(size)
        return w.apply([raw], [kept], [kept], lambda saved, g: [g[0]])[0]

    def softmax_backward(saved: Saved, g: Gradients) -> Gradients:
        made = w.empty(wide)
        w.empty(wide)
        return [made]

    exact = w.apply([raw], [w.empty(wide)], [], w.fresh(size))[0]
    masked = w.apply([exact], [exact.storage], [] if w.mask is None else [w.mask], w.fresh(wide))[0]
    del exact
    kept = w.empty(wide)
    result = w.apply([masked], [kept], [kept], softmax_backward)[0]
    del kept
    return w.apply([result], [w.empty(size)], [], w.fresh(wide))[0]


def _mlp(w: TapeWriter, s: Shapes, x: Value) -> Value:
    return _again(w, s, "mlp", x, partial(_wide, w, s, s.model.ffn_hidden_size, normalizes=s.model.uses_engine))


def _wide(w: TapeWriter, s: Shapes, width: int, x: Value, *, normalizes: bool) -> Value:
    """Two products with an activation between them; bias and activation are one kernel."""
    model = s.model
    sizes = s.column(width * (1 + model.gated), model.hidden_size, bias=model.add_bias_linear, adds=False)
    with w.module("linear_fc1", "ColumnParallelLinear"):
        up = ops.norm_linear(w, x, s.norm, sizes) if normalizes else ops.column_linear(w, x, sizes)
    active = ops.activate(w, up, gated=model.gated, bias=sizes.bias)
    with w.module("linear_fc2", "RowParallelLinear"):
        return ops.row_linear(w, active, s.row(model.hidden_size, width, bias=model.add_bias_linear))


def head(w: TapeWriter, s: Shapes, x: Value, loss_mask: Storage, *, tied: bool) -> Value:
    """The final norm, this rank's part of the logits, the loss over all parts, and its mean over the labelled tokens.

    `tied`: the matrix is the embedding's, in the same chunk.
    """
    model = s.model
    with w.module("final_layernorm", model.normalization):
        normed = ops.normalize(w, x, s.norm)
    vocabulary = model.padded(s.tp)
    column = s.column(vocabulary, model.hidden_size, bias=False, adds=False)
    sizes = replace(column, engine=False, eight=None)  # always Megatron's own
    with w.module("output_layer", "ColumnParallelLinear"):
        logits = ops.column_linear(w, normed, sizes, kind=Kind.LOGITS, waits=tied)
    del normed
    fused = model.cross_entropy_loss_fusion
    in_place = fused and model.cross_entropy_fusion_impl == "te"
    loss = cross_entropy(w, logits, s.tokens, fused=fused, in_place=in_place)
    del logits
    return mean_loss(w, loss, s.tokens, loss_mask)
