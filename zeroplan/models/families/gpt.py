"""GPT-2, GPT-J, GPT-NeoX with Pythia, OPT and Galactica.

Source: transformers 5.17 ``modeling_gpt2.py``, ``modeling_gptj.py``, ``modeling_gpt_neox.py``, ``modeling_opt.py``.
"""

from __future__ import annotations

from zeroplan.models.families.config import Config
from zeroplan.models.families.layers import Tensors, blocks, conv1d, flat, linear, lm_head, norm, table, unit, units
from zeroplan.models.spec import SpecUnit


def gpt2(c: Config) -> tuple[SpecUnit, ...]:
    """GPT-2: learned positions, Conv1D layers, the head tied to the embedding."""
    c.none_of("add_cross_attention")
    hidden = c.size("n_embd", "hidden_size", default=768)
    c.whole_heads(hidden, "n_head", "num_attention_heads", default=12)
    inner = c.size("n_inner", default=4 * hidden)
    vocab = c.size("vocab_size", default=50257)
    block = flat(
        norm("ln_1", hidden, bias=True),
        conv1d("attn.c_attn", hidden, 3 * hidden),
        conv1d("attn.c_proj", hidden, hidden),
        norm("ln_2", hidden, bias=True),
        conv1d("mlp.c_fc", hidden, inner),
        conv1d("mlp.c_proj", inner, hidden),
    )
    tied = c.flag("tie_word_embeddings", default=True)
    return units(
        table("transformer.wte", vocab, hidden),
        table("transformer.wpe", c.size("n_positions", "max_position_embeddings", default=1024), hidden),
        blocks("transformer.h.{}", c.depth("n_layer", "num_hidden_layers", default=12), block),
        unit("transformer.ln_f", norm("", hidden, bias=True)),
        lm_head("lm_head", hidden, vocab, tied_to="transformer.wte.weight" if tied else None),
    )


def gptj(c: Config) -> tuple[SpecUnit, ...]:
    """GPT-J: rotary positions, no biases in attention, a head with bias."""
    hidden = c.size("n_embd", "hidden_size", default=4096)
    c.whole_heads(hidden, "n_head", "num_attention_heads", default=16)
    inner = c.size("n_inner", default=4 * hidden)
    vocab = c.size("vocab_size", default=50400)
    block = flat(
        norm("ln_1", hidden, bias=True),
        *(linear(f"attn.{name}", hidden, hidden) for name in ("k_proj", "v_proj", "q_proj", "out_proj")),
        linear("mlp.fc_in", hidden, inner, True),
        linear("mlp.fc_out", inner, hidden, True),
    )
    tied = c.flag("tie_word_embeddings", default=False)
    return units(
        table("transformer.wte", vocab, hidden),
        blocks("transformer.h.{}", c.depth("n_layer", "num_hidden_layers", default=28), block),
        unit("transformer.ln_f", norm("", hidden, bias=True)),
        lm_head("lm_head", hidden, vocab, tied_to="transformer.wte.weight" if tied else None, bias=True),
    )


def gpt_neox(c: Config) -> tuple[SpecUnit, ...]:
    """GPT-NeoX and Pythia: rotary positions, q, k, v in one matrix, an untied head."""
    hidden = c.size("hidden_size", default=6144)
    c.whole_heads(hidden, "num_attention_heads", default=64)
    inner = c.size("intermediate_size", default=24576)
    vocab = c.size("vocab_size", default=50432)
    bias = c.flag("attention_bias", default=True)
    block = flat(
        norm("input_layernorm", hidden, bias=True),
        norm("post_attention_layernorm", hidden, bias=True),
        linear("attention.query_key_value", hidden, 3 * hidden, bias),
        linear("attention.dense", hidden, hidden, bias),
        linear("mlp.dense_h_to_4h", hidden, inner, True),
        linear("mlp.dense_4h_to_h", inner, hidden, True),
    )
    tied = c.flag("tie_word_embeddings", default=False)
    return units(
        table("gpt_neox.embed_in", vocab, hidden),
        blocks("gpt_neox.layers.{}", c.depth("num_hidden_layers", default=44), block),
        unit("gpt_neox.final_layer_norm", norm("", hidden, bias=True)),
        lm_head("lm_head", hidden, vocab, tied_to="gpt_neox.embed_in.weight" if tied else None),
    )


#: OPT's position table begins with two rows that no position uses.
_POSITION_OFFSET = 2


def opt(c: Config) -> tuple[SpecUnit, ...]:
    """OPT: learned positions, ReLU MLP, tied head; the 350M model projects its narrower embedding in and out."""
    hidden = c.size("hidden_size", default=768)
    c.whole_heads(hidden, "num_attention_heads", default=12)
    width = c.size("word_embed_proj_dim", default=hidden)
    inner, vocab = c.size("ffn_dim", default=3072), c.size("vocab_size", default=50272)
    bias, affine = c.flag("enable_bias", default=True), c.flag("layer_norm_elementwise_affine", default=True)

    def layer_norm(name: str) -> Tensors:
        return norm(name, hidden, bias=True) if affine else ()

    block = flat(
        *(linear(f"self_attn.{name}", hidden, hidden, bias) for name in ("k_proj", "v_proj", "q_proj", "out_proj")),
        layer_norm("self_attn_layer_norm"),
        linear("fc1", hidden, inner, bias),
        linear("fc2", inner, hidden, bias),
        layer_norm("final_layer_norm"),
    )
    last = c.flag("do_layer_norm_before", default=True) and not c.flag("_remove_final_layer_norm", default=False)
    projected = width != hidden
    tied = c.flag("tie_word_embeddings", default=True)
    top = "model.decoder"
    return units(
        table(f"{top}.embed_tokens", vocab, width),
        table(f"{top}.embed_positions", c.size("max_position_embeddings", default=2048) + _POSITION_OFFSET, hidden),
        unit(f"{top}.project_out", linear("", hidden, width)) if projected else (),
        unit(f"{top}.project_in", linear("", width, hidden)) if projected else (),
        unit(f"{top}.final_layer_norm", layer_norm("")) if last and affine else (),
        blocks(f"{top}.layers.{{}}", c.depth("num_hidden_layers", default=12), block),
        lm_head("lm_head", width, vocab, tied_to=f"{top}.embed_tokens.weight" if tied else None),
    )
