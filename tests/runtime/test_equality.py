"""N ranks equal one plain torch process, at each stage and precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import distance, ds_config, dtype_of, loss_distance, train_all

STEPS = 4


def plain_run(ranks: int, dtype: str, optimizer: Any, **options: Any) -> tuple[models.Plain, list[list[float]]]:
    plain = models.Plain(
        models.make(), optimizer, ranks, dtype=dtype_of(dtype), scale=1024.0 if dtype == "fp16" else 1.0, **options
    )
    return plain, [plain.step(number) for number in range(STEPS)]


EXACT = [(ranks, dtype) for ranks in (1, 2) for dtype in ("fp32", "bf16", "fp16")]
#: What the quick suite leaves out: each precision is in it, and both numbers of ranks whose sums are the same in any order.
MORE = [pytest.param(*case, marks=pytest.mark.long) for case in (EXACT[1], EXACT[5], (3, "fp16"), (4, "bf16"))]


@pytest.mark.parametrize(("ranks", "dtype"), [*EXACT[::2], EXACT[3], (3, "fp32"), *MORE])
def test_every_stage_and_precision_equals_plain_torch(pool: RankPool, ranks: int, dtype: str) -> None:
    plain, expected = plain_run(ranks, dtype, lambda p: models.RoundedAdamW(p, lr=1e-2, weight_decay=0.1))
    results = pool.run(ranks, train_all, [(ds_config(stage, dtype), {}) for stage in range(4)], STEPS)
    for stage in range(4):
        mine = [rank[stage] for rank in results]
        if ranks <= 2:
            # The mean of two is the same in any order, so every bit must agree.
            assert loss_distance(mine, expected) == 0, stage
            assert distance(mine[0], plain) == 0, stage
        else:
            # The order in which gloo adds three or more differs from the plain loop's; Adam turns that into steps of lr.
            assert loss_distance(mine, expected) < {"fp32": 2e-5, "bf16": 3e-2, "fp16": 5e-3}[dtype], stage
    for stage in range(1, 4):
        # All stages add in the same order, so they agree among themselves at any number of ranks.
        assert results[0][stage]["losses"] == results[0][1]["losses"]


def test_agrees_with_torch_adamw_to_rounding(pool: RankPool) -> None:
    plain, expected = plain_run(2, "fp32", lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1))
    results = pool.run(2, train_all, [(ds_config(3), {})], STEPS)
    assert loss_distance([rank[0] for rank in results], expected) < 1e-5
    assert distance(results[0][0], plain) < 1e-4
