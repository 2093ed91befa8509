"""Block-sparse attention: DeepSpeed's sparsity configs, run by FlexAttention; see docs/legacy.md."""

from zeroplan_runtime.techniques.sparse_attention.models import use_sparse_attention
from zeroplan_runtime.techniques.sparse_attention.padding import SparseAttentionUtils
from zeroplan_runtime.techniques.sparse_attention.self_attention import SparseSelfAttention
from zeroplan_runtime.techniques.sparse_attention.sparsity_config import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

__all__ = [
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
    "use_sparse_attention",
]
