"""Rotary positions in operators of sizes.

Sources: Megatron-Core 0.16.1, ``megatron/core/models/common/embeddings/rope_utils.py`` (``_apply_rotary_pos_emb_bshd``),
``megatron/core/fusions/fused_mla_yarn_rope_apply.py``.
"""

from __future__ import annotations

from zeroplan.engines.megatron import operators as ops
from zeroplan.engines.megatron.autograd import TapeWriter, Value
from zeroplan.engines.megatron.shapes import Shapes

_FP32 = 4


def rotated(w: TapeWriter, s: Shapes, x: Value, channels: int) -> Value:
    """Rotate `channels` channels of each head: by TransformerEngine's kernel, or with cosines and sines that each use makes
    and keeps for the backward. Latent attention's channels are put in another order first.
    """
    latent = s.model.multi_latent_attention
    angles = s.seq * channels
    w.keep(("rotary", (w.layer,) if latent else ()), angles * _FP32)  # each latent attention caches angles of its own
    if s.model.apply_rope_fusion and s.model.uses_engine and not latent:
        return ops.pointwise(w, x)
    nbytes = x.nbytes

    rest = w.apply([x], [x.storage], [], w.fresh(nbytes), (0,))[0]  # the channels that are not rotated: none of them
    if latent:
        even, odd = (w.apply([x], [x.storage], [], w.fresh(nbytes), (nbytes // 2,))[0] for _ in range(2))
        x = w.apply([even, odd], [w.empty(nbytes)], [], lambda saved, g: [g[0], g[0]])[0]
        del even, odd
    tables = []
    for _ in range(2):
        exact = w.empty(angles * _FP32)
        scaled = w.empty(angles * _FP32)
        del exact
        tables.append(w.empty(angles * s.element))
        del scaled
    cosine, sine = tables
    straight = w.apply([x], [w.empty(nbytes)], [cosine], w.fresh(nbytes))[0]
    first, second = ops.split(w, x, (nbytes // 2, nbytes // 2))
    negative = ops.pointwise(w, second)
    turned = w.apply([negative, first], [w.empty(nbytes)], [], lambda saved, g: [g[0], g[0]])[0]
    del negative
    crossed = w.apply([turned], [w.empty(nbytes)], [sine], w.fresh(nbytes))[0]
    del turned
    both = w.apply([straight, crossed], [w.empty(nbytes)], [], lambda saved, g: [g[0], g[0]])[0]
    del straight, crossed
    return w.apply([both, rest], [w.empty(nbytes)], [], lambda saved, g: [g[0], g[0]])[0]
