"""DDP's allocations over a run: a whole model, gradients, and the reducer's buckets.

Until the first backward has shown in which order gradients arrive, one bucket holds all of them; the second forward
replaces it by buckets of 25 MiB in that order (the first of 1 MiB). One rank alone is not wrapped.
Source: torch/nn/parallel/distributed.py, _ddp_init_helper; torch/csrc/distributed/c10d/reducer.cpp, rebuild_buckets and
compute_bucket_assignment_by_size, of torch 2.11.

Where a parameter gets no gradient, DDP runs with ``find_unused_parameters`` alone (the second forward raises without): its
buckets are those of the parameters' order from the first on, and hold the others, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroplan.core.buffers import Buffer
from zeroplan.core.sizes import MIB
from zeroplan.core.workload import DType
from zeroplan.engines.ddp.rank import DdpRank
from zeroplan.engines.torch_step import TorchSchedule
from zeroplan.simulate.recorder import Recorder

FIRST_BUCKET = MIB
BUCKET = 25 * MIB


class DdpSchedule(TorchSchedule[DdpRank]):
    """One rank's run. Buckets are reduced in place, and the optimizer allocates nothing before its first step."""

    def __init__(self, rank: DdpRank, recorder: Recorder) -> None:
        super().__init__(rank, recorder)
        self.grads: dict[int, int] = {}
        self.arrived: list[int] = []
        self.buckets: list[int] = []
        self.rebuilt = False

    def build(self) -> None:
        """Allocate the whole model. The second owner of a tied parameter has its own copy until the tie is made, and what is
        cast to 16 bits its fp32 one until all is made.
        """
        made: set[int] = set()
        wide: dict[int, int] = {}
        quantize = self.rank.workload.quantize
        if quantize is not None and quantize.shared_bytes:
            self.alloc(quantize.shared_bytes, Buffer.PARAM_FULL)
        for owned in self.rank.parameters.modules:
            for p in owned:
                if p in made and self.rank.workload.loop.moved:
                    continue
                if self._is_cast(p):
                    wide[p] = self.alloc(DType.FP32.bytes * self.rank.numel[p], Buffer.PARAM_FULL, note=p)
                    continue
                blocks = [self.alloc(nbytes, Buffer.PARAM_FULL, note=p) for nbytes in self.rank.kept(p)]
                if p in made:
                    self.recorder.free_all(blocks)
                made.add(p)
        for p, copied in wide.items():
            self.alloc(self.rank.original_bytes * self.rank.numel[p], Buffer.PARAM_FULL, note=p)
            self.recorder.free(copied)
        if self.rank.reference:
            for count in self.rank.numel:
                self.alloc(self.rank.original_bytes * count, Buffer.PARAM_REFERENCE)
        if self.rank.ranks > 1:
            parameters = self.rank.parameters
            sizes = [self.rank.original_bytes * self.rank.trainable]
            if parameters.unreached:
                sizes = self._bucket_sizes(parameters.trained)[::-1]
            self.buckets = [self.alloc(nbytes, Buffer.COMM_ALL_REDUCE) for nbytes in sizes]
            self.rebuilt = bool(parameters.unreached)

    def _is_cast(self, param: int) -> bool:
        """Whether a parameter is trained in 16 bits and was copied, by ``modules_to_save``, from the base's, which is fp32.

        Source: peft, utils/other.py (prepare_model_for_kbit_training, ModulesToSaveWrapper)
        """
        rank = self.rank
        if rank.workload.quantize is None or rank.original_bytes == DType.FP32.bytes:
            return False
        return rank.parameters.trainable[param] and not rank.parameters.adapters[param]

    def forward_begin(self) -> None:
        """Rebuild the reducer's buckets before the second forward."""
        if self.arrived and not self.rebuilt and self.rank.ranks > 1:
            self.rebuilt = True
            self.recorder.free_all(self.buckets)
            self.buckets = [self.alloc(nbytes, Buffer.COMM_ALL_REDUCE) for nbytes in self._bucket_sizes(self.arrived)]

    def _bucket_sizes(self, order: Sequence[int]) -> list[int]:
        sizes, current, limit = [], 0, FIRST_BUCKET
        for p in order:
            current += self.rank.original_bytes * self.rank.numel[p]
            if current >= limit:
                sizes.append(current)
                current, limit = 0, BUCKET
        return [*sizes, current] if current else sizes

    def grad(self, param: int, handle: int) -> None:
        """Keep the first micro batch's gradient until ``zero_grad``; add later ones to it."""
        if param in self.grads:
            self.free(handle)
        else:
            self.grads[param] = handle
            if not self.rebuilt:
                self.arrived.append(param)

    def step(self, applied: bool) -> None:
        """Clip the gradients, step the optimizer and free the gradients (``zero_grad``)."""
        self.step_optimizer(applied)
        if not self.rank.workload.loop.set_to_none:
            return
        self.recorder.free_all(self.grads.values())
        self.grads.clear()
