"""The buckets that a search tries with DeepSpeed. All sizes are elements."""

from __future__ import annotations

from typing import Any

from zeroplan.core.cluster import Cluster
from zeroplan.core.zero_config import ZeroConfig

#: Stages 1 and 2: DeepSpeed's own buckets; a tenth, which saves 1.8 GB a bucket; and overlap with small ones, because
#: `overlap_comm` keeps two.
_STAGES_1_2: tuple[dict[str, Any], ...] = (
    {},
    {"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000},
    {"overlap_comm": True, "reduce_bucket_size": 100_000_000, "allgather_bucket_size": 100_000_000},
)
#: Stage 3: DeepSpeed's own; and a tenth of what it prefetches, keeps alive and reduces at once.
_STAGE_3: tuple[dict[str, Any], ...] = (
    {},
    {
        "reduce_bucket_size": 50_000_000,
        "prefetch_bucket_size": 5_000_000,
        "max_live_parameters": 100_000_000,
        "sub_group_size": 100_000_000,
    },
)
_BUCKET_EFFORT = 2


def with_buckets(offloads: list[tuple[ZeroConfig, int]], cluster: Cluster) -> list[tuple[ZeroConfig, int]]:
    """Return each configuration with each set of bucket sizes that its stage has."""
    found = []
    for zero, effort in offloads:
        sets = _STAGE_3 if zero.stage == 3 else _STAGES_1_2 if zero.stage else ({},)
        if cluster.layout.dp == 1 and zero.stage in (1, 2):
            sets = sets[:2]  # one rank has nothing to overlap
        found += [(zero.but(**buckets), effort + _BUCKET_EFFORT * bool(buckets)) for buckets in sets]
    return found
