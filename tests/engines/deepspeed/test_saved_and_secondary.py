"""Stage 3's less used knobs against DeepSpeed 0.19.8 itself: what two gloo ranks held, on the CPU.

The model is a chain of six 512 × 512 linear layers in bf16, without persistent parameters, prefetching and reuse. A
profiler's allocations of at least 100,000 bytes were added up over each forward of the third step; what stays is what is
gathered, saved or kept beside the run's own buffers.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.deepspeed.test_against_deepspeed import chain_stream
from zeroplan.core.buffers import Buffer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.deepspeed.rank import deepspeed_rank
from zeroplan.engines.deepspeed.schedule import record_deepspeed
from zeroplan.simulate.recorder import simulate
from zeroplan.simulate.timeline import Timeline

LAYERS = [[512, 512]] * 6
WEIGHT = 2 * 512 * 512
ALONE: dict[str, Any] = {"param_persistence_threshold": 0, "prefetch_bucket_size": 0, "max_reuse_distance": 0}


def run(ranks: int = 2, **knobs: Any) -> Timeline:
    """Three steps of one rank."""
    stream = chain_stream(2, LAYERS)
    zero = ZeroConfig.of(3, **ALONE, reduce_bucket_size=600_000, **knobs)
    rank = deepspeed_rank(stream.parameters, Workload(), zero, ParallelLayout(ranks), zero_init=False)
    return simulate(record_deepspeed(rank, stream))


def left_by_last_forward(timeline: Timeline) -> int:
    """Bytes allocated at the end of the last forward beyond those before it."""
    marks = timeline.marks
    at = max(i for i, mark in enumerate(marks) if mark.name == "fwd")
    return marks[at].allocated - marks[at - 1].allocated


def test_deepspeeds_linear_function_leaves_nothing() -> None:
    assert left_by_last_forward(run()) == 0  # measured: 0, and 20,484 in small ones


def test_torchs_linear_function_leaves_every_weight_whose_input_needs_a_gradient() -> None:
    """All but the first layer's."""
    timeline = run(memory_efficient_linear=False)
    assert left_by_last_forward(timeline) == 5 * WEIGHT == 2_641_924 - 20_484
    ends = [mark.allocated for mark in timeline.marks if mark.name.startswith("step")]
    assert ends[-1] == [mark.allocated for mark in run().marks if mark.name.startswith("step")][-1]


def test_one_rank_gathers_nothing_that_could_be_saved() -> None:
    assert run(1, memory_efficient_linear=False).peak_allocated == run(1).peak_allocated


def test_the_second_shard_is_made_in_the_forward_and_dropped_by_the_step() -> None:
    timeline = run(zero_hpz_partition_size=2)
    assert left_by_last_forward(timeline) == 6 * WEIGHT // 2 == 1_593_348 - 20_484
    plain = run()
    for mark, other in zip(timeline.marks, plain.marks, strict=True):
        if mark.name.startswith("step"):
            assert mark.allocated == other.allocated
        elif mark.name == "init":
            assert mark.allocated - other.allocated == 6 * WEIGHT // 2


@pytest.mark.parametrize(("group", "part"), [(2, 4), (4, 2), (8, 1), (64, 1)])
def test_the_second_shard_is_one_of_its_group(group: int, part: int) -> None:
    """A group wider than the ranks is all of them."""
    timeline = run(8, zero_hpz_partition_size=group)
    assert timeline.alive_by_buffer()[Buffer.PARAM_SECONDARY] == part * 6 * WEIGHT // 8
