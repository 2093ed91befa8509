"""Gradient clipping and the step of torch's optimizers, which the schedules of torch's engines share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from zeroplan.core.buffers import Buffer
from zeroplan.core.optimizer_row import LEVELS, Domain, Optimizer
from zeroplan.core.optimizers import OPTIMIZERS
from zeroplan.core.saving import Saving
from zeroplan.core.workload import OptimizerKind
from zeroplan.engines.player import EngineSchedule, Run, play
from zeroplan.engines.torch_rank import TorchRank
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.expanded import ExpandedTape
from zeroplan.techniques.table import blocks_of

#: Optimizer steps until peaks repeat: the first makes the states, the second runs with them, the third meets the blocks
#: that the second left in the cache.
STEPS_UNTIL_STEADY = 3
#: An optimizer's step count, or a norm: an fp32 scalar.
_SCALAR = 4
_BF16 = 2
_FP32 = 4

R = TypeVar("R", bound=TorchRank)


class TorchSchedule(EngineSchedule, Generic[R]):
    """What the schedules of torch's engines share: the optimizer allocates nothing before its first step."""

    def __init__(self, rank: R, recorder: Recorder) -> None:
        self.rank, self.recorder = rank, recorder
        self.alloc, self.free = recorder.alloc, recorder.free
        self.stepped = False

    def step_optimizer(self, applied: bool) -> None:
        """Clip and step on the GPU."""
        optimizer_step(self.recorder, self.rank, applied=applied, first=not self.stepped)
        self.stepped |= applied


def record(rank: TorchRank, tape: ExpandedTape, make: Callable[[Recorder], EngineSchedule]) -> Recorder:
    """Record every allocation and free of one rank's run, until it repeats. See :func:`zeroplan.engines.player.play`."""
    workload, recorder = rank.workload, Recorder()
    run = Run(
        workload.batch.grad_accum,
        STEPS_UNTIL_STEADY,
        cublas_workspace=rank.cublas_workspace,
        detached_loss=workload.loop.detached_loss,
        saves=workload.has(Saving),
        longest_first=workload.batch.longest_first,
        blocks=blocks_of(workload, rank),
    )
    play(run, tape, recorder, make(recorder))
    return recorder


def optimizer_step(recorder: Recorder, rank: TorchRank, *, applied: bool, first: bool) -> None:
    """Clip the gradients and step torch's optimizer on the GPU: make its states if `first`, then its temporaries.

    A step that is not `applied`, because a gradient is infinite, only takes the norms.
    """
    stepped = rank.stepped()
    _norms(recorder, len(stepped))
    if not applied:
        return
    if rank.optimizer.steps_one_by_one:
        _adafactor(recorder, rank, stepped, first=first)
        return
    if first:
        _make_states(recorder, rank, stepped)
    _temporaries(recorder, rank, stepped)


def _norms(recorder: Recorder, tensors: int) -> None:
    """Allocate and free the scalars of ``clip_grad_norm_``, one a tensor. Source: torch/nn/utils/clip_grad.py, _get_total_norm
    (_foreach_norm).
    """
    norms = [recorder.alloc(_SCALAR, Buffer.OPTIM_NORM) for _ in range(tensors)]
    recorder.free_all(norms)


def _make_states(recorder: Recorder, rank: TorchRank, stepped: Sequence[tuple[Domain, int]]) -> None:
    """Allocate the states of one tensor after another. A fused step keeps each tensor's step count on the GPU as well."""
    if any(not rank.keeps_whole_states(p) for _, p in stepped) and rank.optimizer.least_8bit:
        for _ in range(2):
            recorder.alloc(LEVELS, Buffer.OPTIM_SCALE)  # the maps of signed and of unsigned 8-bit numbers
    counts = {domain: not _unfused(rank) and _counts_on_gpu(rank.optimizer, domain) for domain in Domain}
    for domain, p in stepped:
        if counts[domain]:
            recorder.alloc(_SCALAR, Buffer.OPTIM_TEMP)
        for buffer, nbytes in rank.states(domain, p):
            recorder.alloc(nbytes, buffer)


def _counts_on_gpu(optimizer: Optimizer, domain: Domain) -> bool:
    if optimizer.least_8bit:
        return False  # bitsandbytes counts in Python
    kind = OPTIMIZERS[optimizer.rest].torch if domain is Domain.REST and optimizer.rest else optimizer.torch
    return kind is None or (kind.fused and kind.counts_steps)


def _unfused(rank: TorchRank) -> bool:
    """Return whether a fused step was to be had and was not asked for."""
    kind = rank.optimizer.torch
    return kind is not None and kind.fused and rank.workload.numerics.optimizer_kind is not OptimizerKind.FUSED


def _temporaries(recorder: Recorder, rank: TorchRank, stepped: Sequence[tuple[Domain, int]]) -> None:
    """Allocate and free the step's temporaries: none if fused, lists of tensors in multi-tensor loops, and Muon's
    iterations.
    """
    kind = rank.optimizer.torch
    if _unfused(rank) and rank.workload.numerics.optimizer_kind is OptimizerKind.LOOP:
        _one_by_one(recorder, rank, stepped)
    elif kind is not None and (not kind.fused or _unfused(rank)):
        lists = [
            recorder.alloc(rank.original_bytes * rank.chunks[p], Buffer.OPTIM_TEMP)
            for _ in range(kind.foreach_lists)
            for _, p in stepped
        ]
        for _, p in stepped if kind.selects else ():
            chosen = [recorder.alloc(width * rank.chunks[p], Buffer.OPTIM_TEMP) for width in (1, rank.original_bytes)]
            recorder.free_all(chosen)
        for handle in lists:
            recorder.free(handle)
    update = -1
    for domain, p in stepped:
        if domain is Domain.MATRIX:
            update = _orthogonalize(recorder, rank, p, update)
    if update >= 0:
        recorder.free(update)


def _one_by_one(recorder: Recorder, rank: TorchRank, stepped: Sequence[tuple[Domain, int]]) -> None:
    """Allocate and free what a loop over single tensors makes: the root of each second moment and its quotient
    (``_single_tensor_adam``).
    """
    if not rank.optimizer.torch or not rank.optimizer.torch.foreach_lists:
        return  # SGD updates in place
    previous = -1
    for _, p in stepped:
        nbytes = rank.original_bytes * rank.chunks[p]
        root = recorder.alloc(nbytes, Buffer.OPTIM_TEMP)
        quotient = recorder.alloc(nbytes, Buffer.OPTIM_TEMP)
        recorder.free(root)
        if previous >= 0:
            recorder.free(previous)  # the loop's variable, until it is assigned again
        previous = quotient
    if previous >= 0:
        recorder.free(previous)


def _adafactor(recorder: Recorder, rank: TorchRank, stepped: Sequence[tuple[Domain, int]], *, first: bool) -> None:
    """Play transformers' Adafactor, one parameter after another; its names keep their tensors until they are bound again.

    Of a 16-bit parameter the gradient and the parameter itself are cast to fp32 first. The squared gradient is made twice, the
    second time with epsilon added; then come the update from rows and columns and, beside it, its negative.

    Source: transformers 5.17, optimization.py, Adafactor.step
    """
    alloc, free = recorder.alloc, recorder.free
    casts = rank.original_bytes != _FP32
    bound: dict[str, int] = {}

    def bind(name: str, handle: int = -1) -> None:
        if name in bound:
            free(bound.pop(name))
        if handle >= 0:
            bound[name] = handle

    for domain, p in stepped:
        nbytes = _FP32 * rank.chunks[p]
        bind("grad")
        if casts:
            bind("grad", alloc(nbytes, Buffer.OPTIM_TEMP))
        if first:
            for buffer, kept in rank.states(domain, p):
                alloc(kept, buffer)
            alloc(_SCALAR, Buffer.OPTIM_TEMP)  # the parameter's root mean square, which the state keeps
        bind("param")
        if casts:
            bind("param", alloc(nbytes, Buffer.OPTIM_TEMP))
        square = alloc(nbytes, Buffer.OPTIM_TEMP)
        raised = alloc(nbytes, Buffer.OPTIM_TEMP)
        free(square)
        bind("update", raised)
        bind("update", alloc(nbytes, Buffer.OPTIM_TEMP))
        free(alloc(nbytes, Buffer.OPTIM_TEMP))
    for name in tuple(bound):
        bind(name)


def _orthogonalize(recorder: Recorder, rank: TorchRank, param: int, previous: int) -> int:
    """Play Muon's update of one matrix and return its handle; the update before it is freed when this one begins.

    The momentum's interpolation is in the parameter's dtype, everything that follows in bf16. Each Newton-Schulz iteration
    makes the smaller Gram matrix, a polynomial of it, and the next iterate; the iterations are alike from the second on.
    FSDP2's matrices are DTensors of rows: the Gram matrix of a tall one is a sum over the ranks; a wide one is gathered whole,
    by way of a copy.

    Source: torch/optim/_muon.py, _zeropower_via_newtonschulz; the gathers are those that torch 2.13's DTensor makes.
    """
    alloc, free = recorder.alloc, recorder.free
    rows, columns = rank.parameters.shapes[param]
    held, whole, side = rank.chunks[param], rows * columns, min(rows, columns)
    apart = rank.ranks > 1 and rank.numel[param] != held
    wide = apart and rows <= columns
    gram_bytes = _BF16 * (-(-side * side // rank.ranks) if wide else side * side)
    update = alloc(rank.original_bytes * held, Buffer.OPTIM_TEMP)
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
        recorder.free_all((iterate, *gathered))
        iterate = following
    recorder.free_all((gram, polynomial, update))
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
