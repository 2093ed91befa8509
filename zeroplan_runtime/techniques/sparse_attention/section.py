"""The ``sparse_attention`` section of a ds_config, applied to a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan.core.sparse_attention import SparseAttention, SparsityMode
from zeroplan_runtime.mesh import MeshRanks
from zeroplan_runtime.techniques.sparse_attention.models import heads_of, use_sparse_attention
from zeroplan_runtime.techniques.sparse_attention.sparsity_config import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

_KINDS: dict[str, type[SparsityConfig]] = {
    SparsityMode.DENSE: DenseSparsityConfig,
    SparsityMode.FIXED: FixedSparsityConfig,
    SparsityMode.VARIABLE: VariableSparsityConfig,
    SparsityMode.BIGBIRD: BigBirdSparsityConfig,
    SparsityMode.BSLONGFORMER: BSLongformerSparsityConfig,
    SparsityMode.LOCAL_SLIDING_WINDOW: LocalSlidingWindowSparsityConfig,
}


def sparsity_config(section: SparseAttention, num_heads: int) -> SparsityConfig:
    """Returns the section's kind for layers of `num_heads` heads; random blocks are drawn with seed 0."""
    kind = _KINDS[section.mode]
    keys = [one.name for one in fields(kind) if one.init and one.name not in ("num_heads", "seed")]
    return kind(num_heads, **{key: getattr(section, key) for key in keys}, seed=0)


def attach_sparse_attention(model: nn.Module, section: SparseAttention, ranks: MeshRanks) -> Callable[[], None]:
    """Gives the models of transformers in `model` the section's attention; returns what undoes that.

    Raises:
        BadInput: for a model that :func:`.models.use_sparse_attention` refuses, and ranks that share more than samples.
    """
    if ranks.model:
        names = ", ".join(ranks.model)
        raise BadInput(
            f"it is not supported where ranks share the model or its tokens ({names})",
            where="ds_config.sparse_attention",
            remedy=f"leave the key out, or use a mesh without {names}",
        )
    return use_sparse_attention(model, sparsity_config(section, heads_of(model)))
