"""Whisper. Source: transformers 5.17 ``modeling_whisper.py``."""

from __future__ import annotations

from zeroplan.models.families.config import Config
from zeroplan.models.families.layers import Tensors, blocks, embedding, flat, linear, lm_head, norm, table, unit, units
from zeroplan.models.spec import SpecUnit, Tensor


def whisper(c: Config) -> tuple[SpecUnit, ...]:
    """Whisper: two convolutions and frozen sinusoids before the encoder, learned positions before the decoder, tied head."""
    hidden, vocab = c.size("d_model", "hidden_size", default=384), c.size("vocab_size", default=51865)
    c.whole_heads(hidden, "encoder_attention_heads", default=6)
    c.whole_heads(hidden, "decoder_attention_heads", default=6)

    def attend(name: str) -> Tensors:
        return flat(
            *(
                linear(f"{name}.{part}", hidden, hidden, part != "k_proj")
                for part in ("k_proj", "v_proj", "q_proj", "out_proj")
            ),
            norm(f"{name}_layer_norm", hidden, bias=True),
        )

    def mlp(inner: int) -> Tensors:
        return flat(
            linear("fc1", hidden, inner, True), linear("fc2", inner, hidden, True), norm("final_layer_norm", hidden, bias=True)
        )

    def convolution(name: str, inputs: int) -> Tensors:
        return Tensor(f"{name}.weight", (hidden, inputs, 3)), Tensor(f"{name}.bias", (hidden,))

    encoder = flat(attend("self_attn"), mlp(c.size("encoder_ffn_dim", default=1536)))
    decoder = flat(attend("self_attn"), attend("encoder_attn"), mlp(c.size("decoder_ffn_dim", default=1536)))
    frames, positions = c.size("max_source_positions", default=1500), c.size("max_target_positions", default=448)
    tied = c.flag("tie_word_embeddings", default=True)
    return units(
        unit(
            "model.encoder",
            convolution("conv1", c.size("num_mel_bins", default=80)),
            convolution("conv2", hidden),
            embedding("embed_positions", frames, hidden, trainable=False),
        ),
        blocks("model.encoder.layers.{}", c.depth("encoder_layers", "num_hidden_layers", default=4), encoder),
        unit("model.encoder.layer_norm", norm("", hidden, bias=True)),
        table("model.decoder.embed_tokens", vocab, hidden),
        table("model.decoder.embed_positions", positions, hidden),
        blocks("model.decoder.layers.{}", c.depth("decoder_layers", default=4), decoder),
        unit("model.decoder.layer_norm", norm("", hidden, bias=True)),
        lm_head("proj_out", hidden, vocab, tied_to="model.decoder.embed_tokens.weight" if tied else None),
    )
