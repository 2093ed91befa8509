"""Whatever the knobs, a run gets steady: nothing leaks from step to step, and no block is freed twice."""

from __future__ import annotations

from typing import Any

import pytest
from llama_tape import llama_tape

from tests.workloads import flat_workload
from zeroplan.core.gpus import DEFAULT_GPU
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import DType, OptimizerKind, Precision, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.deepspeed.rank import deepspeed_rank
from zeroplan.engines.deepspeed.schedule import distinct_ranks, record_deepspeed
from zeroplan.simulate.recorder import simulate
from zeroplan.tape.expanded import ExpandedTape, TapeParam

STREAM = llama_tape(3)
KNOBS: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {}),
    (1, {"grad_accum_dtype": DType.FP32}),
    (1, {"overlap_comm": True, "round_robin_gradients": True}),
    (1, {"offload_optimizer": "cpu"}),
    (2, {}),
    (2, {"grad_accum_dtype": DType.FP32, "overlap_comm": True}),
    (2, {"reduce_bucket_size": 1_000_000, "use_multi_rank_bucket_allreduce": False}),
    (2, {"contiguous_gradients": False, "reduce_scatter": False}),
    (2, {"offload_optimizer": "cpu", "grad_accum_dtype": DType.FP32}),
    (2, {"communication_data_type": DType.FP32, "parameter_alignment": True}),
    (3, {}),
    (3, {"overlap_comm": False}),
    (3, {"prefetch_bucket_size": 0}),
    (3, {"max_live_parameters": 0, "max_reuse_distance": 0, "param_persistence_threshold": 0}),
    (3, {"reduce_bucket_size": 1_000_000, "sub_group_size": 5_000_000, "contiguous_gradients": False}),
    (3, {"allgather_sequential": True}),
    (3, {"use_all_reduce_for_fetch_params": True}),
    (3, {"module_granularity_threshold": 20_000_000}),
    (3, {"zero_hpz_partition_size": 2}),
    (3, {"offload_optimizer": "cpu"}),
    (3, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
    (3, {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": "/nvme"}),
]
KINDS = [
    {},
    {"dtype": DType.FP16},
    {"precision": Precision.AUTOCAST},
    {"precision": Precision.FP32, "dtype": DType.FP32},
    {"optimizer_kind": OptimizerKind.LOOP},
    {"optimizer_kind": OptimizerKind.FOREACH, "optimizer": "muon"},
]


@pytest.mark.parametrize(("stage", "knobs"), KNOBS, ids=lambda value: str(value))
@pytest.mark.parametrize("ranks", [1, 2, 7, 300])
def test_steps_repeat(stage: int, knobs: dict[str, Any], ranks: int) -> None:
    zero = ZeroConfig.of(stage, **knobs)
    for i, kind in enumerate(KINDS):
        workload = flat_workload(grad_accum=(1, 2, 5)[i % 3], **kind)
        first = deepspeed_rank(STREAM.parameters, workload, zero, ParallelLayout(ranks), gpu=DEFAULT_GPU)
        for rank in distinct_ranks(first, most=3):
            line = simulate(record_deepspeed(first.at(rank), STREAM, steps=5, skipped_steps=i % 2))
            after = [mark for mark in line.marks if mark.name.startswith("step")]
            assert after[-1].allocated == after[-2].allocated == after[-3].allocated, (kind, rank)
            assert after[-1].peak == after[-2].peak, (kind, rank)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("zero_init", [False, True])
def test_frozen_parameters_have_no_states(stage: int, zero_init: bool) -> None:
    """Only the norms train: states and masters are theirs alone."""
    small = tuple(TapeParam(p.name, p.shape, len(p.shape) == 1, p.itemsize) for p in STREAM.params)
    frozen = ExpandedTape(STREAM.modules, small, *_without_frozen_grads(STREAM, small))
    trainable = sum(p.shape[0] for p in small if p.trainable)
    whole = sum(p.shape[0] * (p.shape[1] if len(p.shape) > 1 else 1) for p in small)
    rank = deepspeed_rank(frozen.parameters, Workload(), ZeroConfig.of(stage), ParallelLayout(), zero_init=zero_init)
    line = simulate(record_deepspeed(rank, frozen, steps=3))
    bucket = 2 * 500_000_000 if stage == 3 else 0
    states = line.marks[-1].allocated - 2 * whole - bucket
    assert 12 * trainable <= states <= 14 * trainable + (4 << 20)


def _without_frozen_grads(tape: ExpandedTape, params: tuple[TapeParam, ...]) -> tuple[list[int], ...]:
    gone = {aux for op, arg, aux in zip(tape.op, tape.arg, tape.aux, strict=True) if op == 6 and not params[arg].trainable}
    kept = [
        i
        for i, (op, arg) in enumerate(zip(tape.op, tape.arg, strict=True))
        if not (op == 0 and arg in gone) and not (op == 6 and tape.aux[i] in gone)
    ]
    return tuple([column[i] for i in kept] for column in (tape.op, tape.arg, tape.aux, tape.kind, tape.module))
