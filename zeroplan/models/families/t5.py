"""T5, T5 v1.1 and FLAN-T5. Source: transformers 5.17 ``modeling_t5.py``."""

from __future__ import annotations

from zeroplan.models.families.config import Config
from zeroplan.models.families.layers import Tensors, embedding, flat, linear, lm_head, norm, stack, table, unit, units
from zeroplan.models.spec import SpecUnit


def t5(c: Config) -> tuple[SpecUnit, ...]:
    """An encoder and a decoder that share the embedding; the first block of each holds the relative position bias.

    Where the config unties the head (v1.1 and FLAN), it is untied here: loading such a checkpoint keeps its two matrices
    apart. Building one with random weights, transformers 5 ties them whatever the config says.
    """
    hidden, vocab = c.size("d_model", "hidden_size", default=512), c.size("vocab_size", default=32128)
    heads, head = c.count("num_heads", "num_attention_heads", default=8), c.size("d_kv", "head_dim", default=64)
    depth = c.depth("num_layers", "num_hidden_layers", default=6)
    gated = c.text("feed_forward_proj", default="relu").startswith("gated")
    inner, buckets = c.size("d_ff", default=2048), c.count("relative_attention_num_buckets", default=32)

    def attend(at: int, kind: str, bias: bool) -> Tensors:
        return flat(
            *(linear(f"layer.{at}.{kind}.{name}", hidden, heads * head) for name in ("q", "k", "v")),
            linear(f"layer.{at}.{kind}.o", heads * head, hidden),
            embedding(f"layer.{at}.{kind}.relative_attention_bias", buckets, heads) if bias else (),
            norm(f"layer.{at}.layer_norm", hidden),
        )

    def mlp(at: int) -> Tensors:
        into = ("wi_0", "wi_1") if gated else ("wi",)
        return flat(
            *(linear(f"layer.{at}.DenseReluDense.{name}", hidden, inner) for name in into),
            linear(f"layer.{at}.DenseReluDense.wo", inner, hidden),
            norm(f"layer.{at}.layer_norm", hidden),
        )

    encoder, decoder = (
        [flat(attend(0, "SelfAttention", first), mlp(1)) for first in (True, False)],
        [flat(attend(0, "SelfAttention", first), attend(1, "EncDecAttention", False), mlp(2)) for first in (True, False)],
    )
    decoder_depth = c.depth("num_decoder_layers", default=depth)
    tied = c.flag("tie_word_embeddings", default=True)
    return units(
        table("shared", vocab, hidden),
        table("encoder.embed_tokens", vocab, hidden, tied_to="shared.weight"),
        stack("encoder.block.{}", [encoder[0]] + [encoder[1]] * (depth - 1)),
        unit("encoder.final_layer_norm", norm("", hidden)),
        table("decoder.embed_tokens", vocab, hidden, tied_to="shared.weight"),
        stack("decoder.block.{}", [decoder[0]] + [decoder[1]] * (decoder_depth - 1)),
        unit("decoder.final_layer_norm", norm("", hidden)),
        lm_head("lm_head", hidden, vocab, tied_to="shared.weight" if tied else None),
    )
