"""The share of the GPU that a collective takes from the kernels that run beside it."""

from __future__ import annotations

#: Bytes of memory traffic that a byte sent costs the computation beside it: a collective's kernels keep processors and memory
#: busy, so hiding it gains less than its time. Derived from what one more gather of the parameters in the backward adds to a
#: step of 8B parameters on four H200s: stage 3 against stage 2 of the included runtime, which gathers into place, in
#: benchmarks/results/step/h200_x4.jsonl (6.6 bytes a byte). FSDP2's 10 have its copies in them, which are lines of their own.
#: On other cards it follows their memory's bandwidth.
MEMORY_PER_BYTE = 7

#: The same of a bucketed all-reduce: what `overlap_comm` gains at stage 2 on four H200s is the hidden buckets' time less this
#: (benchmarks/ground_truth/grid.jsonl: 6.6 bytes a byte at 1B parameters, 4.5 at 3B).
MEMORY_PER_BYTE_REDUCED = 5
