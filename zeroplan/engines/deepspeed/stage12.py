"""Stages 1 and 2 (DeepSpeedZeroOptimizer): flat groups, a partition of fp32 masters, buckets of gradients.

Functions named in brackets are those of DeepSpeed 0.19.8's runtime/zero/stage_1_and_2.py, unless another file is named.

Note [Gradients of stages 1 and 2]
    Stage 2 copies each gradient into a bucket as soon as it is made; a full bucket is reduced, and what this rank owns is
    copied on into one buffer for the whole backward. Stage 1 leaves gradients with their parameters until the boundary and
    then sends them through the same buckets in the order of the parameters. A parameter larger than the bucket is reduced
    where it lies. While a parameter's gradient is a view of a buffer it owns no block: ``own`` lacks it.

    Parameter groups of experts (Note [Groups of experts] in moe.py) are flattened, partitioned and stepped one after another.
    Their gradients fill the same buckets. Muon's groups are taken together.

    After a backward that was reduced, an owned parameter without gradient gets one of zeros, beside the buffer that has room
    for it, unless the optimizer is on the host or gradients add up in the partition's own buffer (get_all_grad_tensors).
"""

from __future__ import annotations

from collections.abc import Iterable

from zeroplan.core.buffers import Buffer
from zeroplan.engines.deepspeed.base import REDUCE, SCALAR, DeepSpeedSchedule
from zeroplan.engines.deepspeed.groups import Batch, FlatGroup
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.engines.deepspeed.versions import Knob
from zeroplan.simulate.recorder import Recorder


class _Bucket:
    """Gradients on their way to one reduction: its buffers (two if overlapped), and what has been copied there."""

    __slots__ = ("blocks", "comm", "filled", "params")

    def __init__(self, comm: int) -> None:
        self.comm = comm  # bytes an element while it is reduced
        self.blocks: list[int] = []
        self.filled = 0
        self.params: list[int] = []


class Stage12(DeepSpeedSchedule):
    """The schedule of stages 1 and 2, with or without the optimizer on the host."""

    def __init__(self, rank: DeepSpeedRank, recorder: Recorder, tiled_head: int = -1) -> None:
        """`tiled_head`: the module whose gradients the forward makes, tile by tile (TiledFusedLogitsLoss); -1 for none."""
        super().__init__(rank, recorder)
        self.tiled_head, self.tiles = tiled_head, 0
        self.follows_modules = tiled_head >= 0
        zero = rank.zero
        self.partitions_grads = zero.stage == 2
        self.offload = rank.offloads_optimizer
        self.contiguous = rank.contiguous_gradients
        self.overlap = zero.overlaps_comm
        self.stream = REDUCE if self.overlap else 0
        self.bucket_size = zero.buckets.reduce_bucket_size
        self.uses_grad_accum_attribute = rank.uses_grad_accum_attribute  # stage_1_and_2.py, use_grad_accum_attribute
        self.bucket_bytes = rank.accum_bytes if self.uses_grad_accum_attribute else rank.param_bytes
        self.compact = rank.compact
        self.numel, self.comm_of = rank.numel, rank.comm_of
        self.group = rank.flat
        self.parts = self.group.each
        self.part_of = {p: at for at, part in enumerate(self.parts) for p in part.order}
        self.places = [part.place(rank.rank, self.group.ranks) for part in self.parts]
        self.owned = dict(self.group.owned(rank.rank))
        self.owned_numel = sum(rank.numel[p] for p in self.owned)
        alone = not self.offload and not self.compact
        self.zeros = [rank.numel[p] for p in self.owned if p in rank.parameters.unreached] if alone else []

        self.own: dict[int, int] = {}  # gradients that own a block
        self.buckets = {comm: _Bucket(comm) for comm in rank.comm_widths}
        self.ready = False
        self.norm_results: list[int] = []
        self.partition_grads: list[int] = []  # this backward's owned gradients, whole parameters
        self.accumulated: list[int] = []  # those of earlier micro batches of the window
        self.compact_partitions: dict[int, int] = {}  # by the place of the flat tensor
        self.micro = 0
        self.boundary = True
        self.updates: list[int] = []  # Muon's, of the matrices that this rank's partition touches
        self.has_momentum = False

    # Initialisation

    def initialize(self) -> None:
        """Flatten the parameter groups, clone the masters and make zero gradients for them, which are freed again."""
        rank = self.rank
        w, m = rank.param_bytes, rank.master_bytes
        self.build_optimizer()
        if not self.offload:
            self.alloc(SCALAR, Buffer.OPTIM_TEMP)  # FusedAdam's overflow flag
        masters = 0
        for part in self.parts:
            self.recorder.empty_cache()  # before it asks how much memory is left
            self._flatten(part, masters)
            if self.offload and not rank.does(Knob.MASTERS_CLONED_ON_GPU):
                continue
            clone = self.alloc(w * part.partition, Buffer.INIT_TEMP if self.offload or w != m else Buffer.PARAM_MASTER)
            if self.offload:
                self.free(clone)
                continue
            masters += m * part.partition
            if w != m:
                self.alloc(m * part.partition, Buffer.PARAM_MASTER)
                self.free(clone)
        if self.offload:
            self.alloc(w * rank.largest_param, Buffer.STAGE_D2H)  # temp_grad_buffer_for_gpu_offload
            return
        grads = [self.alloc(m * part.partition, Buffer.INIT_TEMP) for part in self.parts]
        if rank.optimizer.torch is not None and rank.optimizer.torch.states_when_built:
            self.rebuild_optimizer()
        elif not rank.does(Knob.STATES_AT_FIRST_STEP):
            self.make_states()
        self.free_all(grads)

    def _flatten(self, group: FlatGroup, masters: int) -> None:
        """Flatten a group's parameters on the GPU or, where it has no room beside `masters` bytes, on the host."""
        rank = self.rank
        w = rank.param_bytes
        flat_bytes = w * group.numel
        lacks_room = rank.device_memory is not None and rank.device_memory - w * sum(rank.numel) - masters < flat_bytes
        if lacks_room or not rank.does(Knob.FLATTENS_ON_GPU):
            self._free_params(group)
            self.recorder.empty_cache()
            self.alloc(flat_bytes, Buffer.PARAM_FULL)
            return
        pad = group.numel - sum(rank.numel[p] for p in group.order)
        gap = self.alloc(w * pad, Buffer.INIT_TEMP)
        self.alloc(flat_bytes, Buffer.PARAM_FULL)
        self.free(gap)
        self._free_params(group)

    def _free_params(self, group: FlatGroup) -> None:
        for p in group.order:
            self.free(self.params.pop(p))

    # A head in tiles

    def forward_begin(self) -> None:
        """No tile has run."""
        self.tiles = 0

    def enter(self, module: int) -> None:
        """Open the buckets before the second tile: the first one's gradient, though not complete, has asked for them
        (process_gradients).
        """
        if module == self.tiled_head:
            self.tiles += 1
            if self.tiles > 1 and not self.ready:
                self._open_buckets()

    # Backward

    def backward_begin(self, boundary: bool) -> None:
        """Note whether a step follows this backward."""
        self.boundary = boundary
        if not (self.ready or self.rank.does(Knob.BUCKETS_AT_FIRST_GRADIENT)):
            self._open_buckets()

    def grad(self, param: int, handle: int) -> None:
        """Put a complete gradient into its bucket (process_gradients)."""
        if not self.ready:
            self._open_buckets()
        if self.uses_grad_accum_attribute:
            if param in self.own:
                self.temporary(self.rank.accum_bytes * self.rank.numel[param], Buffer.GRAD_ACCUM)
            else:
                self.own[param] = self.alloc(self.rank.accum_bytes * self.rank.numel[param], Buffer.GRAD_ACCUM)
            self.free(handle)
        elif param in self.own:
            self.free(handle)  # autograd adds it to the gradient that is there
        else:
            self.own[param] = handle
        if self.partitions_grads or (self.overlap and self.boundary):
            self._reduce(param)

    def backward_end(self, boundary: bool) -> None:
        """Reduce what is left in the buckets (engine.py, allreduce_gradients; independent_gradient_partition_epilogue)."""
        if not self.partitions_grads:
            if not boundary:
                return
            if not self.overlap:
                for p in self.group.order:
                    if p in self.own:
                        self._reduce(p)
        self._flush(self.buckets.values())
        if self.overlap:
            self.recorder.synchronize(self.stream)
        if not self.contiguous:
            self.partition_grads = [self.own.pop(p) for p in self.owned if p in self.own]
        gradients = self.partition_grads + self._make_zeros()
        if not self.accumulated and not self.compact:
            self.accumulated = gradients
        else:
            self.free_all(gradients)
        self.partition_grads = []
        if boundary and self.rank.stages_momentum:
            self._update_matrices()
        self._close_buckets()

    def _make_zeros(self) -> list[int]:
        """Make gradients for parameters that got none (get_all_grad_tensors)."""
        return [self.alloc(self.rank.accum_bytes * count, Buffer.GRAD_SHARD) for count in self.zeros]

    def reduce(self) -> None:
        """Put a second bucket beside that of a pipeline stage's backwards, and reduce (reduce_gradients)."""
        if self.contiguous:
            for bucket in self.buckets.values():
                bucket.blocks.append(self.alloc(self.bucket_bytes * self.bucket_size, Buffer.COMM_BUCKET))
        super().reduce()

    def _update_matrices(self) -> None:
        """Update whole matrices by Muon, beside their gradients, with momentum and its staged copy (get_flat_partition)."""
        rank = self.rank
        if not self.has_momentum:
            for _ in range(2):
                self.alloc(rank.momentum_bytes * rank.momentum, Buffer.OPTIM_MOMENTUM)
            self.has_momentum = True
        self.updates = [self.alloc(rank.momentum_bytes * count, Buffer.GRAD_SHARD) for count in rank.touched_matrices]

    def _open_buckets(self) -> None:
        self.ready = True
        self.micro += 1
        if self.contiguous:
            for _ in range(2 if self.overlap else 1):
                for bucket in self.buckets.values():
                    bucket.blocks.append(self.alloc(self.bucket_bytes * self.bucket_size, Buffer.COMM_BUCKET))

    def _close_buckets(self) -> None:
        self.ready = False
        for bucket in self.buckets.values():
            self.free_all(bucket.blocks)
            bucket.blocks.clear()
        self.free_all(self.own.values())
        self.own.clear()

    def _reduce(self, param: int) -> None:
        """Put a gradient into its bucket, and reduce the bucket when it is full
        (reduce_independent_p_g_buckets_and_remove_grads).
        """
        count, bucket = self.numel[param], self.buckets[self.comm_of[param]]
        if bucket.filled + count > self.bucket_size:
            self._flush([bucket])
        if self.contiguous:
            if count > self.bucket_size:
                if self.offload:  # a copy that no other stream can overwrite
                    copy = self.alloc(self.rank.param_bytes * count, Buffer.GRAD_FULL)
                    self.free(self.own[param])
                    self.own[param] = copy
            else:
                self.free(self.own.pop(param))
        bucket.filled += count
        bucket.params.append(param)

    def _flush(self, buckets: Iterable[_Bucket]) -> None:
        """Average the buckets, then keep or drop each gradient in them (reduce_ipg_grads)."""
        buckets = [bucket for bucket in buckets if bucket.params]
        for bucket in buckets:
            if self.contiguous:
                self._average(bucket)
            else:
                self._average_scattered(bucket)
        for bucket in buckets:
            for p in bucket.params:
                if p in self.owned:
                    if self.contiguous:
                        self._keep(p)
                elif self.partitions_grads and p in self.own:
                    self.free(self.own.pop(p))
            bucket.params, bucket.filled = [], 0

    def _average(self, bucket: _Bucket) -> None:
        """Reduce the bucket's slices by owner, flattened anew unless one owner has all (average_tensor)."""
        zero, rank = self.rank.zero, self.rank
        if not zero.buckets.reduce_scatter or not rank.does(Knob.REDUCED_IN_COPIES):
            if bucket.comm != self.bucket_bytes or rank.other_half:
                cast = bucket.filled if rank.does(Knob.REDUCES_FILLED_PART) else max(bucket.filled, self.bucket_size)
                self.temporary(bucket.comm * cast, Buffer.COMM_ALL_REDUCE, self.stream)
            if self.compact:
                for p in bucket.params:
                    if p in self.owned:
                        self._add_to_compact(self.part_of[p], self.owned[p].count, bucket.comm)
            return
        if self.compact:
            batches = self._batches(bucket.params)
        else:
            known, key = (
                self.group.batches,
                (tuple(bucket.params), self.bucket_size, zero.buckets.use_multi_rank_bucket_allreduce),
            )
            if key not in known:
                known[key] = self._batches(bucket.params)
            batches = known[key]
        for batch, elements in batches:
            self._all_reduce(batch, elements, bucket.comm)

    def _batches(self, params: list[int]) -> list[Batch]:
        """Yield the slices that are reduced together: of one owner, as many as fill a bucket; with `compact` this opens its
        buffer.
        """
        zero = self.rank.zero
        runs: dict[tuple[bool, int], list[tuple[int, int | None]]] = {}  # of experts and of others, by owner
        last = (False, -1)
        for p in params:
            at, expert = self.part_of[p], p in self.rank.experts
            for part in self.group.slices[p]:
                mine = self.compact and part.rank == self.places[at]
                queue = runs.setdefault((expert, -1 if zero.buckets.use_multi_rank_bucket_allreduce else part.rank), [])
                if (expert, part.rank) == last and not mine and queue and queue[-1][1] is None:
                    queue[-1] = (queue[-1][0] + part.count, None)
                else:
                    queue.append((part.count, at if mine else None))
                last = (expert, part.rank)
                if mine:
                    self._open_compact(at)
        found: list[Batch] = []
        for queue in runs.values():
            batch: list[tuple[int, int | None]] = []
            total = 0
            for item in queue:
                batch.append(item)
                total += item[0]
                if total > self.bucket_size:
                    found.append((batch, total))
                    batch, total = [], 0
            if batch:
                found.append((batch, total))
        return found

    def _all_reduce(self, batch: list[tuple[int, int | None]], elements: int, comm: int) -> None:
        """All-reduce a batch and copy the result back (allreduce_bucket); in fp32 where ranks share samples (Ulysses)."""
        width, flat = self.bucket_bytes, None
        comm = comm if self.rank.layout.ulysses == 1 else 4
        if len(batch) > 1:
            flat = self.alloc(width * elements, Buffer.COMM_ALL_REDUCE, stream=self.stream)
        if comm != width or self.rank.other_half:
            cast = self.alloc(comm * elements, Buffer.COMM_ALL_REDUCE, stream=self.stream)
            if flat is not None:
                self.free(flat)
            flat = cast
        for count, at in batch:
            if at is not None:
                self._add_to_compact(at, count, comm)
        if flat is not None:
            self.free(flat)

    def _average_scattered(self, bucket: _Bucket) -> None:
        """Flatten the gradients for every reduction, where there are no contiguous buffers (buffered_reduce_fallback)."""
        self._all_reduce([(self.rank.numel[p], None) for p in bucket.params], bucket.filled, bucket.comm)
        if self.compact:
            for p in bucket.params:
                if p in self.owned:
                    self._add_to_compact(self.part_of[p], self.owned[p].count, bucket.comm)

    def _open_compact(self, at: int) -> None:
        if at not in self.compact_partitions:
            nbytes = 4 * self.parts[at].partition
            self.compact_partitions[at] = self.alloc(nbytes, Buffer.GRAD_SHARD, stream=self.stream)

    def _add_to_compact(self, at: int, count: int, comm: int) -> None:
        self._open_compact(at)
        if comm != 4:
            self.temporary(4 * count, Buffer.GRAD_SHARD, self.stream)

    def _keep(self, param: int) -> None:
        """Move an owned gradient on to the partition's buffer, or to the host (copy_grads_in_partition)."""
        rank = self.rank
        part = self.owned[param]
        if self.offload:
            if self.boundary:
                copy = self.alloc(8 * part.count, Buffer.OPTIM_NORM, stream=self.stream)
                self.norm_results.append(self.alloc(8, Buffer.OPTIM_NORM, stream=self.stream))
                self.free(copy)
                if rank.looks_for_overflow(offloaded=True):
                    self.overflow_check([rank.numel[param]], self.bucket_bytes, self.stream)
                if not self.compact and rank.param_bytes != rank.master_bytes:
                    self.temporary(rank.master_bytes * part.count, Buffer.STAGE_D2H, self.stream)
                if param in self.own:
                    self.free(self.own.pop(param))
            return
        if self.compact:
            if self.uses_grad_accum_attribute and param in self.own:
                self.free(self.own.pop(param))
            return
        if not self.partition_grads:
            self.partition_grads = [self.alloc(rank.param_bytes * self.owned_numel, Buffer.GRAD_SHARD, stream=self.stream)]
        if param in self.own:
            self.free(self.own.pop(param))

    # Step

    def step(self, applied: bool) -> None:
        """Take the norm, cast the gradients to fp32, step the optimizer and gather the parameters in place (step)."""
        rank = self.rank
        self.micro = 0
        if self.offload:
            if applied:
                self.gather_matrices()
            self.free_all(self.norm_results)
            self.norm_results.clear()
            if applied and rank.does(Knob.UPDATES_CAST_ON_GPU):
                self.temporary(rank.master_bytes * max(rank.stepped_at_once, default=0), Buffer.STAGE_H2D)
            self._drop_grads()
            return
        owned = [[self.owned[p].count for p in part.order if p in self.owned] for part in self.parts]
        counts = [mine or [part.partition] for mine, part in zip(owned, self.parts, strict=True)]
        pads = [part.partition - sum(mine) for mine, part in zip(owned, self.parts, strict=True)]
        padding = [self.alloc(rank.accum_bytes * pad, Buffer.GRAD_SHARD) for pad in pads]
        if rank.looks_for_overflow():
            self.overflow_check([count for group in counts for count in group], rank.accum_bytes)
        for group in counts if applied and rank.zero.buckets.compute_grad_norm else ():
            self.norms(group, 8)
        if not applied:
            self._drop_grads()
            self.free_all(padding)
            return
        for at, (mine, pad) in enumerate(zip(owned, pads, strict=True)):
            single = self._flat_gradient(at, pieces=len(mine) + (1 if pad else 0))
            if at == len(self.parts) - 1 and single is not None:
                self._drop_grads()
            self.free(padding[at])
            self.optimizer_step(first=not self.has_states, places=None if len(self.parts) == 1 else (at,))
            if single is not None:
                self.free(single)
        self._drop_grads()
        self.has_states = True

    def _flat_gradient(self, at: int, pieces: int) -> int | None:
        """The partition's gradients of a group as one tensor, in the master's dtype; the pieces go after it is made.

        A single piece is that tensor, and None where it is a view of what other groups' gradients lie in, too.
        """
        rank, count = self.rank, self.parts[at].partition
        if self.compact:
            self._open_compact(at)
            return self.compact_partitions.pop(at)
        flat = self.alloc(rank.accum_bytes * count, Buffer.GRAD_SHARD) if pieces > 1 else None
        if rank.accum_bytes == rank.master_bytes:
            return flat if flat is not None or len(self.parts) > 1 else self.accumulated.pop()
        single = self.alloc(rank.master_bytes * count, Buffer.GRAD_MASTER)
        if flat is not None:
            self.free(flat)
        return single

    def _drop_grads(self) -> None:
        self.free_all([*self.accumulated, *self.updates])
        self.accumulated, self.updates = [], []
        self.free_all(self.compact_partitions.values())
        self.compact_partitions.clear()
