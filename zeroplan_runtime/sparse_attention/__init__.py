"""Block-sparse attention by the name that users import; it is :mod:`zeroplan_runtime.techniques.sparse_attention`."""

from zeroplan_runtime.techniques.sparse_attention import *  # noqa: F403
