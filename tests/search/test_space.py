"""Batch arithmetic and the candidates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Workload
from zeroplan.engines.registry import find_engine
from zeroplan.search.space import NVME_PATH, all_candidates, batch_splits

ENGINE = find_engine("deepspeed")


@given(st.integers(1, 64), st.integers(1, 64))
def test_splits_make_the_batch(share: int, ranks: int) -> None:
    pairs = batch_splits(share * ranks, ParallelLayout(ranks))
    assert all(micro * accum * ranks == share * ranks for micro, accum in pairs)
    assert len(pairs) == sum(share % d == 0 for d in range(1, share + 1))
    assert [micro for micro, _ in pairs] == sorted(micro for micro, _ in pairs)


@pytest.mark.parametrize(
    ("batch", "ranks", "micro", "accum"), [(30, 4, None, None), (32, 4, 3, None), (32, 4, None, 5), (0, 1, None, None)]
)
def test_impossible_batches_are_refused(batch: int, ranks: int, micro: int | None, accum: int | None) -> None:
    with pytest.raises(BadInput, match="--global-batch"):
        batch_splits(batch, ParallelLayout(ranks), micro_batch=micro, grad_accum=accum)


def test_fixed_parts_hold() -> None:
    assert batch_splits(32, ParallelLayout(4), micro_batch=2) == [(2, 4)]
    assert batch_splits(32, ParallelLayout(4), grad_accum=8) == [(1, 8)]
    assert batch_splits(None, ParallelLayout(4), micro_batch=3, grad_accum=5) == [(3, 5)]


def test_disk_is_tried_only_where_there_is_one() -> None:
    without = ENGINE.search_space(Cluster.of(gpus=2), NVME_PATH)
    assert not [z for z, _ in without if "nvme" in (z.offload_optimizer.device, z.offload_param.device)]
    found = ENGINE.search_space(Cluster.of(gpus=2, nvme="2T"), "/disk")
    paths = {z.offload_optimizer.nvme_path for z, _ in found if z.offload_optimizer.device == "nvme"}
    assert paths == {"/disk"}


def test_the_space_is_the_product_without_repeats() -> None:
    zeros = ENGINE.search_space(Cluster.of(gpus=4), NVME_PATH)
    space = list(all_candidates(zeros, Workload.of(seq_len=128), [(1, 2), (2, 1)], (False, True), ENGINE.alloc_confs))
    assert len(space) == len(set(space)) == len(zeros) * 2 * 2 * 2
    assert {c.alloc_conf for c in space} == {"", "expandable_segments:True"}
    assert min(c.effort for c in space) == 0
