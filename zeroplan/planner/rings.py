"""What the first ranks of a context-parallel group keep beyond the last, of which a plan's figures are.

Note [Ranks of a ring]
    The last rank merges whole results of attention, the others halves: torch's ring puts these together by a concatenation
    (``_partial_update``), which is laid out by heads, where the next product takes channels, and so keeps a copy. A block holds
    it until its backward, also where the ring has saved the output itself. The last rank has the larger temporaries.

    Measured on two H200s (benchmarks/results/mesh.jsonl): the first rank of R04 and R25 had exactly one such copy for each of
    its 12 blocks more, that of R05, whose blocks are recomputed, exactly one.
    Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py (``_SDPAMerger._merge_one``).
"""

from __future__ import annotations

from zeroplan.engines.base import Case


def beyond_last_rank(case: Case) -> int:
    """Return how many bytes more than planned the first ranks that share a sample may have. See Note [Ranks of a ring]."""
    layout, work, config = case.layout, case.workload, case.spec.config
    heads = int(config.get("num_attention_heads") or 0)
    if layout.cp == 1 or not heads:
        return 0
    channels = heads * int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    copy = (
        work.batch.micro_batch * ((work.batch.seq_len or 0) // layout.cp) * (channels // layout.tp) * work.numerics.dtype.bytes
    )
    if work.recomputation is not None:
        return copy
    blocks = len({block for block in case.spec.parameters.blocks if block})
    if layout.pp == 1:
        return copy * blocks
    return copy * -(-blocks // layout.pp) * min(work.batch.grad_accum, layout.pp * layout.vpp)
