"""DeBERTa and DeBERTa V2/V3. Source: transformers 5.17 ``modeling_deberta.py``, ``modeling_deberta_v2.py``."""

from __future__ import annotations

from zeroplan.models.families.bert import encoder_rest, predictions
from zeroplan.models.families.config import Config, NotDescribedError
from zeroplan.models.families.layers import Tensors, blocks, embedding, flat, linear, norm, param, unit, units
from zeroplan.models.spec import SpecUnit, Tensor


def _embeddings(c: Config, hidden: int, width: int, vocab: int) -> tuple[SpecUnit, ...]:
    """Word, position and token-type tables; the latter two only where the config has them."""
    positions, kinds = c.flag("position_biased_input", default=True), c.size("type_vocab_size", default=0, low=0)
    projection = linear("embed_proj", width, hidden) if width != hidden else ()
    normed = norm("LayerNorm", hidden, bias=True)
    return unit(
        "deberta.embeddings",
        embedding("word_embeddings", vocab, width),
        embedding("position_embeddings", c.size("max_position_embeddings", default=512), width) if positions else (),
        embedding("token_type_embeddings", kinds, width) if kinds else (),
        projection,
        normed,
    )


def _reach(c: Config) -> int:
    """Longest relative distance: `max_relative_positions`, or `max_position_embeddings` where that is not set."""
    reach = c.size("max_relative_positions", default=-1, low=-1)
    return reach if reach >= 1 else c.size("max_position_embeddings", default=512)


def deberta(c: Config) -> tuple[SpecUnit, ...]:
    """DeBERTa: disentangled attention with q, k, v in one matrix and separate projections of the positions."""
    c.none_of("talking_head")
    hidden, vocab = c.size("hidden_size", default=768), c.size("vocab_size", default=50265)
    c.whole_heads(hidden, "num_attention_heads", default=12)
    width, relative = c.size("embedding_size", default=hidden), c.flag("relative_attention", default=False)
    kinds = c.words("pos_att_type") if relative else ()
    own = flat(
        param("attention.self.q_bias", hidden),
        param("attention.self.v_bias", hidden),
        linear("attention.self.in_proj", hidden, 3 * hidden),
        linear("attention.self.pos_proj", hidden, hidden) if "c2p" in kinds else (),
        linear("attention.self.pos_q_proj", hidden, hidden, True) if "p2c" in kinds else (),
    )
    block = flat(own, encoder_rest(hidden, c.size("intermediate_size", default=3072)))
    tied = c.flag("tie_word_embeddings", default=True)
    return units(
        _embeddings(c, hidden, width, vocab),
        blocks("deberta.encoder.layer.{}", c.depth("num_hidden_layers", default=12), block),
        unit("deberta.encoder", embedding("rel_embeddings", 2 * _reach(c), hidden)) if relative else (),
        _head(c, hidden, width, vocab, tied=tied),
    )


def deberta_v2(c: Config) -> tuple[SpecUnit, ...]:
    """DeBERTa V2 and V3: bucketed relative positions, the key and query projections usually shared with them."""
    hidden, vocab = c.size("hidden_size", default=1536), c.size("vocab_size", default=128100)
    heads = c.whole_heads(hidden, "num_attention_heads", default=24)
    attended = heads * c.size("attention_head_size", default=hidden // heads)
    width, relative = c.size("embedding_size", default=hidden), c.flag("relative_attention", default=False)
    shared = c.flag("share_att_key", default=False)
    kinds = c.words("pos_att_type") if relative and not shared else ()
    own = flat(
        *(linear(f"attention.self.{part}", hidden, attended, True) for part in ("query_proj", "key_proj", "value_proj")),
        linear("attention.self.pos_key_proj", hidden, attended, True) if "c2p" in kinds else (),
        linear("attention.self.pos_query_proj", hidden, attended, True) if "p2c" in kinds else (),
    )
    block = flat(own, encoder_rest(hidden, c.size("intermediate_size", default=6144)))
    tied = c.flag("tie_word_embeddings", default=True)
    return units(
        _embeddings(c, hidden, width, vocab),
        blocks("deberta.encoder.layer.{}", c.depth("num_hidden_layers", default=24), block),
        unit("deberta.encoder", _around(c, hidden, relative)),
        _head(c, hidden, width, vocab, tied=tied),
    )


def _around(c: Config, hidden: int, relative: bool) -> Tensors:
    """Return the tensors of V2's encoder beside its blocks: the relative positions, their norm, a convolution."""
    buckets = c.size("position_buckets", default=-1, low=-1)
    kernel = c.size("conv_kernel_size", default=0, low=0)
    convolution = (
        Tensor("conv.conv.weight", (hidden, c.divided(hidden, c.count("conv_groups", default=1), "conv_groups"), kernel)),
        Tensor("conv.conv.bias", (hidden,)),
    )
    return flat(
        embedding("rel_embeddings", 2 * (buckets if buckets > 0 else _reach(c)), hidden) if relative else (),
        norm("LayerNorm", hidden, bias=True) if "layer_norm" in c.words("norm_rel_ebd") else (),
        flat(convolution, norm("conv.LayerNorm", hidden, bias=True)) if kernel else (),
    )


def _head(c: Config, hidden: int, width: int, vocab: int, *, tied: bool) -> tuple[SpecUnit, ...]:
    """The masked-language-model head that transformers builds by default (``legacy``)."""
    if not c.flag("legacy", default=True):
        raise NotDescribedError("legacy")
    words = "deberta.embeddings.word_embeddings.weight" if tied else None
    return predictions("cls.predictions", hidden, width, vocab, words=words)
