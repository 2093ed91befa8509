"""OPT and Galactica. Source: transformers 5.17 ``modeling_opt.py``."""

from __future__ import annotations

from zeroplan.models.families.config import Config
from zeroplan.models.families.layers import Tensors, blocks, flat, linear, lm_head, norm, table, unit, units
from zeroplan.models.spec import SpecUnit

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
