"""The ``sparse_attention`` section of a ds_config, applied to a model."""

from __future__ import annotations

from collections.abc import Callable

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

_SHARED = ("block", "different_layout_per_head")
_GLOBAL = ("global_block_indices", "global_block_end_indices")
#: Each mode's class, and the keys that it reads.
_KINDS: dict[str, tuple[type[SparsityConfig], tuple[str, ...]]] = {
    SparsityMode.DENSE: (DenseSparsityConfig, _SHARED),
    SparsityMode.FIXED: (
        FixedSparsityConfig,
        (
            *_SHARED,
            "num_local_blocks",
            "num_global_blocks",
            "attention",
            "horizontal_global_attention",
            "num_different_global_patterns",
        ),
    ),
    SparsityMode.VARIABLE: (
        VariableSparsityConfig,
        (*_SHARED, "num_random_blocks", "local_window_blocks", *_GLOBAL, "attention", "horizontal_global_attention"),
    ),
    SparsityMode.BIGBIRD: (
        BigBirdSparsityConfig,
        (*_SHARED, "num_random_blocks", "num_sliding_window_blocks", "num_global_blocks", "attention"),
    ),
    SparsityMode.BSLONGFORMER: (
        BSLongformerSparsityConfig,
        (*_SHARED, "num_sliding_window_blocks", *_GLOBAL, "attention"),
    ),
    SparsityMode.LOCAL_SLIDING_WINDOW: (
        LocalSlidingWindowSparsityConfig,
        ("block", "num_sliding_window_blocks", "attention"),
    ),
}


def sparsity_config(section: SparseAttention, num_heads: int) -> SparsityConfig:
    """Returns the section's kind for layers of `num_heads` heads; random blocks are drawn with seed 0."""
    kind, keys = _KINDS[section.mode]
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
