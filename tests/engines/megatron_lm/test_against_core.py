"""The descriptions of Megatron's layers, buffers and schedules against the installed Megatron-Core; skipped where it is not."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core")

from tests.engines.megatron_lm.core_on_meta import CASES, described_events, kept_events, peak
from zeroplan.core.pipeline_order import Do, PipelineOrder, PipelineSchedule
from zeroplan.engines.megatron.rank import Parameter, grad_buffer

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

#: One half of the rotary angles, joined with the other and freed, when they are made once.
_HALF_OF_ANGLES = 8192


@pytest.mark.parametrize("name", CASES)
def test_allocations_and_peaks_are_megatron_cores(name: str) -> None:
    """Peaks agree to the byte, and every allocation of one side is one of the other's."""
    run = CASES[name]
    real, described = run.real(), run.described()
    own, kept = described_events(described), kept_events(described)
    assert peak(real) == peak(own) + sum(size for _, size in kept)
    theirs = Counter(size for what, size in real if what == "A")
    ours = Counter(size for what, size in (*own, *kept) if what == "A")
    if run.passes > 1:  # what a dispatcher holds is of the tape as well
        tape = Counter({size: run.passes * count for size, count in Counter(size for what, size in own if what == "A").items()})
        assert not tape - theirs
        assert set(theirs - tape) <= {size for _, size in (*own, *kept)}
        return
    beyond = theirs - ours
    beyond.pop(_HALF_OF_ANGLES, None)
    if run.sp:  # the shared buffer is made anew once, when scores need a larger one
        beyond -= Counter([run.micro_batch * run.seq * run.model.hidden_size * 2])
    assert not ours - theirs
    if run.recompute == "selective":  # gradients of strided views are copied for the leaves of a checkpoint, and go at once
        assert set(beyond) <= {size for what, size in own if what == "A"}
    else:
        assert not beyond


class _Group:
    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("seed", range(12))
def test_buffers_are_megatron_cores(seed: int) -> None:
    """Elements with padding, and the first rank's part of each parameter, with and without buckets and tied embeddings."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig, param_and_grad_buffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    draw = random.Random(seed)
    sizes = [draw.randint(1, 5000) for _ in range(draw.randint(1, 12))]
    ranks, distributed = draw.choice([1, 2, 3, 8]), bool(seed % 4)
    bucket = draw.choice([0, 4000])
    tied = draw.choice([0, None]) if distributed else None
    params = [torch.nn.Parameter(torch.empty(size, dtype=torch.bfloat16, device="meta")) for size in sizes]
    if tied is not None:
        params[tied].shared_embedding = True  # type: ignore[attr-defined]
    groups = mock.Mock(tp=_Group(1), dp_cp=_Group(ranks))
    with (
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("meta")),
        mock.patch.object(param_and_grad_buffer, "log_on_each_pipeline_stage"),
    ):
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
        real: Any = param_and_grad_buffer._ParamAndGradBuffer(
            config,
            torch.bfloat16,
            torch.float32,
            params,
            _Group(ranks),
            bucket or None,
            {param: str(at) for at, param in enumerate(params)},
            1.0,
            list(range(len(params))),
            False,
            groups,
        )
    parts = [Parameter(size, tied=at == tied) for at, size in enumerate(sizes)]
    own = grad_buffer(parts, ranks, distributed=distributed, bucket=bucket)
    assert own.numel == real.numel
    if distributed:
        found = []
        for number in range(len(real.buckets)):
            ranges = DistributedOptimizer._build_model_gbuf_range(real, number)["param_map"]
            found += [one["param"].size for one in ranges.values()]
        assert sorted(own.shards) == sorted(found)


def _mocked(ranks: int, chunks: int, rank: int) -> dict[str, int]:
    return {
        "get_pipeline_model_parallel_world_size": ranks,
        "get_pipeline_model_parallel_rank": rank,
        "get_virtual_pipeline_model_parallel_world_size": chunks,
    }


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(4, 1, 6), (4, 1, 2), (2, 2, 8), (4, 3, 8), (4, 2, 4)])
def test_warm_up_and_order_are_megatron_cores(ranks: int, chunks: int, micro_batches: int) -> None:
    from megatron.core.pipeline_parallel import schedules

    for rank in range(ranks):
        order = PipelineOrder(PipelineSchedule.ONE_F_ONE_B, rank, ranks, chunks, micro_batches, takes_fewer=True)
        actions = order.shortened()
        forwards = [action for action in actions if action.do is Do.FORWARD]
        ahead = next(at for at, action in enumerate(actions) if action.do is Do.BACKWARD)
        if chunks == 1:
            warm_up = min(ranks - rank - 1, micro_batches)
        else:
            with contextlib.ExitStack() as stack:
                for name, value in _mocked(ranks, chunks, rank).items():
                    stack.enter_context(mock.patch.object(schedules.parallel_state, name, lambda value=value: value))
                _, _, warm_up, _ = schedules.get_pp_rank_microbatches(
                    micro_batches, chunks, ranks, forward_only=False, overlap_moe_expert_parallel_comm=False
                )
            table = schedules.get_schedule_table(micro_batches, chunks, ranks)
            assert [(action.micro_batch, action.chunk) for action in forwards] == table[: len(forwards)]
        assert ahead == min(warm_up + 1, len(forwards))
