"""What FSDP2's and DDP's jobs share: widths, chunks, gradient clipping and the step of torch's optimizers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zeroplan.core.buffers import Buffer
from zeroplan.core.optimizer_row import Domain, Optimizer
from zeroplan.core.optimizers import OPTIMIZERS, find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.tape import ExpandedTape
from zeroplan.core.workload import DType, Workload
from zeroplan.engines.torch_optimizer import muon_takes
from zeroplan.simulate.recorder import Recorder

#: Optimizer steps until peaks repeat: the first makes the states, the second runs with them, the third meets the blocks
#: that the second left in the cache.
STEPS_UNTIL_STEADY = 3
#: An optimizer's step count, or a norm: an fp32 scalar.
_SCALAR = 4
_BF16 = 2


@dataclass(frozen=True, slots=True)
class TorchJob:
    """One rank's job. Lists are in the order of ``module.parameters()``; counts are elements, `*_bytes` bytes an element.

    `chunk` is what this rank holds of each parameter: its first dimension split evenly, rounded up (DDP: all of it).
    `muon` says which parameters Muon would update, whatever the optimizer is.
    """

    workload: Workload
    optimizer: Optimizer
    ranks: int
    shapes: tuple[tuple[int, ...], ...]
    numel: tuple[int, ...]
    chunk: tuple[int, ...]
    trainable: tuple[bool, ...]
    muon: tuple[bool, ...]
    modules: tuple[tuple[int, ...], ...]
    original_bytes: int
    param_bytes: int
    reduce_bytes: int
    cublas_workspace: int
    steps: int = STEPS_UNTIL_STEADY
    skipped_steps: int = 0

    def stepped(self) -> list[tuple[Domain, int]]:
        """The trained parameters in the order in which they are stepped, each with its domain: Muon's matrices come first."""
        trained = [p for p, on in enumerate(self.trainable) if on]
        if not self.optimizer.rest:
            return [(Domain.ALL, p) for p in trained]
        matrices = [(Domain.MATRIX, p) for p in trained if self.muon[p]]
        return matrices + [(Domain.REST, p) for p in trained if not self.muon[p]]

    def states(self, domain: Domain, param: int) -> list[tuple[Buffer, int]]:
        """The optimizer's states of one parameter on this rank, in bytes."""
        return [
            (state.buffer, state.bytes_of(self.chunk[param], self.original_bytes))
            for state in self.optimizer.states
            if state.domain is domain
        ]

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
        shapes=tuple(p.shape for p in tape.params),
        numel=numel,
        chunk=chunk,
        trainable=tuple(p.trainable for p in tape.params),
        muon=tuple(muon_takes(p.name, len(p.shape)) for p in tape.params),
        modules=tuple(m.params for m in tape.modules),
        original_bytes=DType.FP32.bytes,
        param_bytes=workload.dtype.bytes if sharded else DType.FP32.bytes,
        reduce_bytes=DType.FP32.bytes,
        cublas_workspace=cublas_workspace,
    )


def optimizer_step(recorder: Recorder, job: TorchJob, *, applied: bool, first: bool) -> None:
    """Clipping, and the step of torch's optimizer on the GPU: its states, if `first`, then its temporaries.

    A step that is not `applied`, because a gradient is infinite, only takes the norms.
    """
    stepped = job.stepped()
    _norms(recorder, len(stepped))
    if not applied:
        return
    if first:
        _make_states(recorder, job, stepped)
    _temporaries(recorder, job, stepped)


def _norms(recorder: Recorder, tensors: int) -> None:
    """``clip_grad_norm_``'s scalars, one a tensor. Source: torch/nn/utils/clip_grad.py, _get_total_norm (_foreach_norm)."""
    norms = [recorder.alloc(_SCALAR, Buffer.OPTIM_NORM) for _ in range(tensors)]
    for handle in norms:
        recorder.free(handle)


def _make_states(recorder: Recorder, job: TorchJob, stepped: Sequence[tuple[Domain, int]]) -> None:
    """The states of one tensor after another. A fused step keeps each tensor's step count on the GPU as well."""
    counts = {domain: _counts_on_gpu(job.optimizer, domain) for domain in Domain}
    for domain, p in stepped:
        if counts[domain]:
            recorder.alloc(_SCALAR, Buffer.OPTIM_TEMP)
        for buffer, nbytes in job.states(domain, p):
            recorder.alloc(nbytes, buffer)


def _counts_on_gpu(optimizer: Optimizer, domain: Domain) -> bool:
    kind = OPTIMIZERS[optimizer.rest].torch if domain is Domain.REST and optimizer.rest else optimizer.torch
    return kind is None or (kind.fused and kind.counts_steps)


def _temporaries(recorder: Recorder, job: TorchJob, stepped: Sequence[tuple[Domain, int]]) -> None:
    """What the step itself needs: nothing if fused, lists of tensors in multi-tensor loops, and Muon's iterations."""
    kind = job.optimizer.torch
    if kind is not None and not kind.fused:
        lists = [
            recorder.alloc(job.original_bytes * job.chunk[p], Buffer.OPTIM_TEMP)
            for _ in range(kind.foreach_lists)
            for _, p in stepped
        ]
        for handle in lists:
            recorder.free(handle)
    update = -1
    for domain, p in stepped:
        if domain is Domain.MATRIX:
            update = _orthogonalize(recorder, job, p, update)
    if update >= 0:
        recorder.free(update)


def _orthogonalize(recorder: Recorder, job: TorchJob, param: int, previous: int) -> int:
    """Muon's update of one matrix, which it returns; the one before it goes when this one begins.

    The momentum's interpolation is in the parameter's dtype, everything that follows in bf16. Each Newton-Schulz iteration
    makes the smaller Gram matrix, a polynomial of it, and the next iterate; the iterations are alike from the second on.
    FSDP2's matrices are DTensors of rows: the Gram matrix of a tall one is a sum over the ranks; a wide one is gathered whole,
    by way of a copy.

    Source: torch/optim/_muon.py, _zeropower_via_newtonschulz; the gathers are those that torch 2.13's DTensor makes.
    """
    alloc, free = recorder.alloc, recorder.free
    rows, columns = job.shapes[param]
    held, whole, side = job.chunk[param], rows * columns, min(rows, columns)
    apart = job.ranks > 1 and job.numel[param] != held
    wide = apart and rows <= columns
    gram_bytes = _BF16 * (-(-side * side // job.ranks) if wide else side * side)
    update = alloc(job.original_bytes * held, Buffer.OPTIM_TEMP)
    if previous >= 0:
        free(previous)
    iterate = alloc(_BF16 * held, Buffer.OPTIM_TEMP)
    gram = polynomial = -1
    for _ in range(2):
        copy = _gathered_copy(recorder, _BF16 * held, _BF16 * whole) if wide else -1
        following = _summed(recorder, gram_bytes, apart and not wide)
        if wide:
            free(copy)
        if gram >= 0:
            free(gram)
        gram = following
        following = _summed(recorder, gram_bytes, apart and not wide)
        if polynomial >= 0:
            free(polynomial)
        polynomial = following
        gathered = [alloc(_BF16 * whole, Buffer.OPTIM_TEMP)] if wide else []
        following = alloc(_BF16 * held, Buffer.OPTIM_TEMP)
        for handle in (iterate, *gathered):
            free(handle)
        iterate = following
    for handle in (gram, polynomial, update):
        free(handle)
    return iterate


def _gathered_copy(recorder: Recorder, part: int, whole: int) -> int:
    """A matrix that is gathered from the ranks' contiguous parts, by columns, and put together; bytes."""
    sent, received = recorder.alloc(part, Buffer.OPTIM_TEMP), recorder.alloc(whole, Buffer.OPTIM_TEMP)
    copy = recorder.alloc(whole, Buffer.OPTIM_TEMP)
    recorder.free(sent)
    recorder.free(received)
    return copy


def _summed(recorder: Recorder, nbytes: int, over_ranks: bool) -> int:
    """A product's result; with `over_ranks` its sum over the ranks, which takes the place of this rank's part."""
    result = recorder.alloc(nbytes, Buffer.OPTIM_TEMP)
    if not over_ranks:
        return result
    total = recorder.alloc(nbytes, Buffer.OPTIM_TEMP)
    recorder.free(result)
    return total
