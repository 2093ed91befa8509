"""Multi-head latent attention's queries, keys and values in operators of sizes.

Sources: Megatron-Core 0.16.1, ``megatron/core/transformer/multi_latent_attention.py`` (``MLASelfAttention``),
``megatron/core/fusions/fused_mla_yarn_rope_apply.py``; TransformerEngine of 22 August 2026, ``pytorch/module/base.py``
(``prepare_forward``, which makes inputs contiguous).
"""

from __future__ import annotations

from zeroplan.engines.megatron import operators as ops
from zeroplan.engines.megatron.autograd import Gradients, TapeWriter, Value
from zeroplan.engines.megatron.operators import Linear, Saved
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

    def backward(saved: Saved, g: Gradients) -> Gradients:
        return [w.empty(size, Kind.COMM)]

    return w.apply([x], [out], [], backward)[0]


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

    def expand_backward(saved: Saved, g: Gradients) -> Gradients:
        return [w.empty(size)]

    spread = w.apply([shared], [shared.storage], [], expand_backward, (0,))[0]
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
