"""BERT, RoBERTa and ModernBERT, with their masked-language-model heads.

Source: transformers 5.17 ``modeling_bert.py``, ``modeling_roberta.py``, ``modeling_modernbert.py``.
"""

from __future__ import annotations

from zeroplan.models.families.config import Config
from zeroplan.models.families.layers import Tensors, blocks, embedding, flat, linear, norm, param, stack, unit, units
from zeroplan.models.spec import SpecUnit, Tensor


def decoder_head(width: int, vocab: int, *, words: str | None, bias: str | None) -> Tensors:
    """The masked-language-model decoder; its weight is tied to the word embedding, its bias to the head's own."""
    return (
        Tensor("decoder.weight", (vocab, width), tied_to=words, kind="head"),
        Tensor("decoder.bias", (vocab,), tied_to=bias),
    )


def predictions(prefix: str, hidden: int, width: int, vocab: int, *, words: str | None) -> tuple[SpecUnit, ...]:
    """BERT's ``cls.predictions``: the bias, a dense layer with norm, the decoder."""
    tied_bias = f"{prefix}.bias" if words else None
    return unit(
        prefix,
        param("bias", vocab),
        linear("transform.dense", hidden, width, True),
        norm("transform.LayerNorm", width, bias=True),
        decoder_head(width, vocab, words=words, bias=tied_bias),
    )


def encoder_rest(hidden: int, inner: int) -> Tensors:
    """A BERT block after its self-attention: output projection, MLP, and the norms behind both."""
    return flat(
        linear("attention.output.dense", hidden, hidden, True),
        norm("attention.output.LayerNorm", hidden, bias=True),
        linear("intermediate.dense", hidden, inner, True),
        linear("output.dense", inner, hidden, True),
        norm("output.LayerNorm", hidden, bias=True),
    )


def _encoder(c: Config, name: str, hidden: int, vocab: int, *, positions_last: bool) -> tuple[SpecUnit, ...]:
    c.none_of("add_cross_attention", "is_decoder")
    c.whole_heads(hidden, "num_attention_heads", default=12)
    positions = embedding("position_embeddings", c.size("max_position_embeddings", default=512), hidden)
    kinds = embedding("token_type_embeddings", c.size("type_vocab_size", default=2), hidden)
    normed = norm("LayerNorm", hidden, bias=True)
    words = embedding("word_embeddings", vocab, hidden)
    ordered = (words, kinds, normed, positions) if positions_last else (words, positions, kinds, normed)
    block = flat(
        *(linear(f"attention.self.{part}", hidden, hidden, True) for part in ("query", "key", "value")),
        encoder_rest(hidden, c.size("intermediate_size", default=3072)),
    )
    return units(
        unit(f"{name}.embeddings", *ordered),
        blocks(f"{name}.encoder.layer.{{}}", c.depth("num_hidden_layers", default=12), block),
    )


def bert(c: Config) -> tuple[SpecUnit, ...]:
    """BERT with its masked-language-model head; the pooler and next-sentence head of pre-training are left out."""
    hidden, vocab = c.size("hidden_size", default=768), c.size("vocab_size", default=30522)
    tied = c.flag("tie_word_embeddings", default=True)
    words = "bert.embeddings.word_embeddings.weight" if tied else None
    return units(
        _encoder(c, "bert", hidden, vocab, positions_last=False),
        predictions("cls.predictions", hidden, hidden, vocab, words=words),
    )


def roberta(c: Config) -> tuple[SpecUnit, ...]:
    """RoBERTa: BERT's encoder, the head under ``lm_head``."""
    hidden, vocab = c.size("hidden_size", default=768), c.size("vocab_size", default=50265)
    tied = c.flag("tie_word_embeddings", default=True)
    return units(
        _encoder(c, "roberta", hidden, vocab, positions_last=True),
        unit(
            "lm_head",
            param("bias", vocab),
            linear("dense", hidden, hidden, True),
            norm("layer_norm", hidden, bias=True),
            decoder_head(
                hidden,
                vocab,
                words="roberta.embeddings.word_embeddings.weight" if tied else None,
                bias="lm_head.bias" if tied else None,
            ),
        ),
    )


def modernbert(c: Config) -> tuple[SpecUnit, ...]:
    """ModernBERT: rotary positions, GeGLU, no biases; the first block has no norm before its attention."""
    hidden, inner = c.size("hidden_size", default=768), c.size("intermediate_size", default=1152)
    vocab, depth = c.size("vocab_size", default=50368), c.depth("num_hidden_layers", default=22)
    c.whole_heads(hidden, "num_attention_heads", default=12)
    norm_bias, attention_bias = c.flag("norm_bias", default=False), c.flag("attention_bias", default=False)
    mlp_bias, head_bias = c.flag("mlp_bias", default=False), c.flag("classifier_bias", default=False)
    first = flat(
        linear("attn.Wqkv", hidden, 3 * hidden, attention_bias),
        linear("attn.Wo", hidden, hidden, attention_bias),
        norm("mlp_norm", hidden, norm_bias),
        linear("mlp.Wi", hidden, 2 * inner, mlp_bias),
        linear("mlp.Wo", inner, hidden, mlp_bias),
    )
    others = flat(norm("attn_norm", hidden, norm_bias), first)
    words = "model.embeddings.tok_embeddings.weight" if c.flag("tie_word_embeddings", default=True) else None
    decoder: Tensors = (Tensor("weight", (vocab, hidden), tied_to=words, kind="head"),)
    if c.flag("decoder_bias", default=True):
        decoder = (*decoder, Tensor("bias", (vocab,)))
    return units(
        unit("model.embeddings", embedding("tok_embeddings", vocab, hidden), norm("norm", hidden, norm_bias)),
        stack("model.layers.{}", [first] + [others] * (depth - 1)),
        unit("model.final_norm", norm("", hidden, norm_bias)),
        unit("head", linear("dense", hidden, hidden, head_bias), norm("norm", hidden, norm_bias)),
        unit("decoder", decoder),
    )
