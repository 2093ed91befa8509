"""What FSDP2's and DDP's jobs share: widths, chunks, gradient clipping and torch's optimizers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zeroplan.core.buffers import Buffer
from zeroplan.core.optimizer_row import Optimizer
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.tape import ExpandedTape
from zeroplan.core.workload import DType, OptimizerKind, Workload
from zeroplan.simulate.recorder import Recorder

#: Optimizer steps until peaks repeat: the first makes the states, the second runs with them, the third meets the blocks
#: that the second left in the cache.
STEPS_UNTIL_STEADY = 3
#: An optimizer's step count, or a norm: an fp32 scalar.
_SCALAR = 4


@dataclass(frozen=True, slots=True)
class TorchJob:
    """One rank's job. Lists are in the order of ``module.parameters()``; counts are elements, `*_bytes` bytes an element.

    `chunk` is what this rank holds of each parameter: its first dimension split evenly, rounded up (DDP: all of it).
    """

    workload: Workload
    optimizer: Optimizer
    ranks: int
    numel: tuple[int, ...]
    chunk: tuple[int, ...]
    trainable: tuple[bool, ...]
    modules: tuple[tuple[int, ...], ...]
    original_bytes: int
    param_bytes: int
    reduce_bytes: int
    cublas_workspace: int
    steps: int = STEPS_UNTIL_STEADY
    skipped_steps: int = 0

    def padded(self, param: int) -> int:
        """Elements of a gathered parameter, padding included."""
        return max(self.numel[param], self.chunk[param] * self.ranks)


def torch_job(
    tape: ExpandedTape, workload: Workload, layout: ParallelLayout, *, sharded: bool, cublas_workspace: int
) -> TorchJob:
    """The job of rank 0, whose chunks are the largest.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _init_sharded_param (chunks of the first dimension)
    """
    ranks = layout.shard_group if sharded else layout.dp
    numel = tuple(math.prod(p.shape) for p in tape.params)
    chunk = numel
    if sharded:
        chunk = tuple(
            -(-p.shape[0] // ranks) * (count // p.shape[0]) if p.shape and p.shape[0] else count
            for p, count in zip(tape.params, numel, strict=True)
        )
    return TorchJob(
        workload=workload,
        optimizer=find_optimizer(workload.optimizer),
        ranks=ranks,
        numel=numel,
        chunk=chunk,
        trainable=tuple(p.trainable for p in tape.params),
        modules=tuple(m.params for m in tape.modules),
        original_bytes=DType.FP32.bytes,
        param_bytes=workload.dtype.bytes if sharded else DType.FP32.bytes,
        reduce_bytes=DType.FP32.bytes,
        cublas_workspace=cublas_workspace,
    )


def adam_states(recorder: Recorder, counts: Sequence[int], job: TorchJob) -> None:
    """The optimizer's states, made by its first step: those of one tensor after another, and a scalar step count each."""
    for count in counts:
        recorder.alloc(_SCALAR, Buffer.OPTIM_TEMP)
        for state in job.optimizer.states:
            recorder.alloc(state.bytes_of(count, job.original_bytes), state.buffer)


def step_temporaries(recorder: Recorder, counts: Sequence[int], job: TorchJob, kind: OptimizerKind) -> None:
    """``clip_grad_norm_``'s scalars, one a tensor, and what the optimizer itself needs.

    Source: torch/nn/utils/clip_grad.py, _get_total_norm (_foreach_norm); torch/optim/adam.py
    """
    norms = [recorder.alloc(_SCALAR, Buffer.OPTIM_NORM) for _ in counts]
    for handle in norms:
        recorder.free(handle)
    if kind is OptimizerKind.FOREACH:
        temps = [recorder.alloc(job.original_bytes * count, Buffer.OPTIM_TEMP) for count in counts]
        for handle in temps:
            recorder.free(handle)
