"""Stage 3 (DeepSpeedZeroOptimizer_Stage3): sharded parameters, gathered for each module and released after it.

Functions named in brackets are those of DeepSpeed 0.19.8's runtime/zero/stage3.py, unless another file is named.
"""

from __future__ import annotations

from zeroplan.core.buffers import Buffer
from zeroplan.core.workload import ChunkedHead, OptimizerKind
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.engines.deepspeed.auto_ep import ReplacedBlocks
from zeroplan.engines.deepspeed.base import COMPUTE, REDUCE, SCALAR, DeepSpeedSchedule
from zeroplan.engines.deepspeed.checkpoint import gathered_by_module
from zeroplan.engines.deepspeed.coordinator import Coordinator
from zeroplan.engines.deepspeed.leaf_modules import inside_of, leaf_modules, subtree_params
from zeroplan.engines.deepspeed.outside_reads import never_called, outside_reads, passed_through
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.engines.deepspeed.reference import build_reference, reference_coordinator
from zeroplan.engines.deepspeed.saved_weights import saved_weights, weights_of_graphs
from zeroplan.engines.deepspeed.versions import Knob
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.chunked_head import chunked_head_of
from zeroplan.tape.expanded import ExpandedTape

#: stage3.py, _constant_buffered_norm2: elements whose norm is taken at once.
NORM_CHUNK = 250_000_000


class Stage3(DeepSpeedSchedule):
    """The schedule of stage 3, with any of its offloads."""

    follows_modules = True

    def __init__(self, rank: DeepSpeedRank, recorder: Recorder, tape: ExpandedTape) -> None:
        super().__init__(rank, recorder)
        zero, modules = rank.zero, tape.modules
        head = chunked_head_of(modules) if rank.workload.has(ChunkedHead) else -1
        self.reads, self.uncalled = outside_reads(modules), never_called(tape, (head,))
        self.through = passed_through(tape) if rank.fetches_wrapper else {}
        self.saves, self.keeps = saved_weights(rank, tape, self.uncalled), weights_of_graphs(rank, tape)
        self.held: list[tuple[int, int]] = []  # blocks that the micro batch's graph keeps, in the order in which they go
        self.held_again: list[tuple[int, int]] = []  # those that a recomputation's graph keeps
        self.offload, self.offload_param = rank.offloads_optimizer, zero.offloads_param
        self.swaps_optimizer = rank.optimizer_device is OffloadDevice.NVME
        self.stream = REDUCE if zero.overlaps_comm else COMPUTE
        self.shards, self.trained = rank.shards, rank.trained
        self.groups, self.counts = rank.sub_groups, rank.stepped_at_once
        # The GPU steps all sub-groups, unless the optimizer is offloaded.
        self.on_gpu = [not self.offload or i < rank.staying for i in range(len(self.groups))]
        leaves = leaf_modules(modules, rank.numel, zero)
        self.inside_leaf = inside_of(modules, leaves)
        fetched = [
            subtree_params(modules, m) if m in leaves else () if self.inside_leaf[m] else module.params
            for m, module in enumerate(modules)
        ]
        self.leaf_of = {p: m for m in leaves for p in fetched[m]}
        read_by = {head: modules[head].parent} if head >= 0 else {}
        self.coordinator = Coordinator(rank, recorder, fetched, read_by, modules=modules, leaves=leaves)
        self.reference = reference_coordinator(rank, recorder, self.coordinator) if rank.reference else None
        self.asked: Coordinator | None = None  # the reference's, while it runs
        self.twins: list[int] = []  # second owners of tied parameters, alive until they are collected
        self.own: dict[int, int] = {}  # gradients that own a block
        self.leaf_grads: dict[int, list[int]] = {m: [] for m in leaves}
        self.buckets: dict[int, list[int]] = {comm: [] for comm in rank.comm_widths}
        self.filled = dict.fromkeys(self.buckets, 0)
        self.micro = -1
        self.boundary = True
        self.backward = False
        self.stepped = False  # since the last forward
        self.replacing = ReplacedBlocks(self) if rank.layout.auto_ep and rank.zero_init else None
        self.evaluating = self.referring = False
        self.norm_results: list[int] = []
        self.lagging = -1  # the gradient freed last, which the reduction's stream may still read
        self.secondary: dict[int, int] = {}
        if zero.stage3.zero_hpz_partition_size > 1:
            self.coordinator.before_free = self._make_secondary
            self.coordinator.secondary = self.secondary

    # Initialisation

    def build(self) -> None:
        """Make and shard one module after another under ``zero.Init``; without it make the whole model first."""
        if not self.rank.zero_init:
            super().build()
            return
        w, seen = self.rank.param_bytes, set[int]()
        for params in self.rank.parameters.modules:
            if self.replacing is not None and self.replacing.build(params):
                continue
            owned = [p for p in params if not self.rank.parameters.adapters[p]]
            whole = [self.alloc(w * self.rank.numel[p], Buffer.PARAM_FULL, note=p) for p in owned]
            for p, handle in zip(owned, whole, strict=True):
                part = self.make_shard(p)
                if part is not None:
                    if p in seen:
                        self.twins.append(part)
                    else:
                        self.params[p] = part
                seen.add(p)
                self.free(handle)
        if self.reference is not None:
            self.twins += build_reference(self.rank, self.recorder)

    def make_shard(self, p: int) -> int | None:
        """Allocate hpZ's secondary shard, then this rank's own (partition_parameters.py, _partition)."""
        if self.rank.zero.stage3.zero_hpz_partition_size > 1:
            self._make_secondary(p)
        if self.offload_param:
            return None
        return self.alloc(self.rank.param_bytes * self.shards[p], self._shard_buffer(p), note=p)

    def _shard_buffer(self, p: int) -> Buffer:
        return Buffer.PARAM_SHARD if self.rank.parameters.trainable[p] else Buffer.PARAM_FROZEN

    def _make_secondary(self, p: int) -> None:
        """Allocate a secondary shard within the node, when a whole parameter is at hand (_partition_param_sec)."""
        if p not in self.secondary:
            # The host's copy is schedule_host's.
            on_gpu = 0 if self.offload_param else self.rank.param_bytes * self.rank.secondary_shards[p]
            self.secondary[p] = self.alloc(on_gpu, Buffer.PARAM_SECONDARY, note=p)

    def initialize(self) -> None:
        """Move the shards into one flat buffer, clone the masters, make buckets and gradient partitions (__init__)."""
        rank = self.rank
        w, m = rank.param_bytes, rank.master_bytes
        if self.replacing is not None:
            self.replacing.replace()
        self.build_optimizer()
        if not self.offload:
            self.alloc(SCALAR, Buffer.OPTIM_TEMP)
        for p in range(len(rank.numel)):  # zero/parameter_offload.py, _convert_to_zero_parameters
            made_later = rank.parameters.adapters[p] or (self.replacing is not None and p in self.replacing.routers)
            if made_later or not rank.zero_init:
                part = self.make_shard(p)
                self.free(self.params.pop(p))
                if part is not None:
                    self.params[p] = part
        self.alloc(1, Buffer.OPTIM_TEMP)  # inf_or_nan_tracker
        self.free_all(self.twins)
        self.twins.clear()
        total = sum(self.shards[p] for p in self.trained)
        if not self.offload_param:  # zero/utils.py, defragment: by way of the host
            for p in self.trained:
                self.free(self.params.pop(p))
            self.recorder.empty_cache()
            self.alloc(w * total, Buffer.PARAM_SHARD)
        self._make_masters()
        if not self.offload:
            if rank.momentum_precedes:
                self.alloc(rank.momentum_bytes * rank.matrix, Buffer.OPTIM_MOMENTUM)
            grads = self.alloc(m * max(self.counts, default=0), Buffer.INIT_TEMP)
            if rank.optimizer.torch is not None and rank.optimizer.torch.states_when_built:
                self.rebuild_optimizer()
            elif not rank.does(Knob.STATES_AT_FIRST_STEP):
                self.make_states()
            self.free(grads)
        if rank.zero.buckets.contiguous_gradients:
            for width in rank.bucket_widths:
                self.alloc(width * rank.zero.buckets.reduce_bucket_size, Buffer.COMM_BUCKET)
        if not self.offload:
            self.alloc(rank.accum_bytes * total, Buffer.GRAD_ACCUM)
        for p in self.trained:  # stage3.py, create_reduce_and_remove_grad_hooks gathers each parameter once
            whole = self.alloc(w * rank.whole[p], Buffer.PARAM_FULL, note=p)
            if self.offload_param:
                self.temporary(w * self.shards[p], Buffer.STAGE_H2D)
            self.free(whole)

    def _make_masters(self) -> None:
        """Convert each sub-group, then clone it; the conversion is freed with the next one's (_create_fp32_partitions)."""
        m, previous = self.rank.master_bytes, -1
        for i, on_gpu in enumerate(self.on_gpu):
            if not on_gpu or not self.rank.own_masters:
                continue
            count = self.counts[i]
            if not self.rank.does(Knob.MASTERS_CONVERTED_FIRST):
                self._make_master_of_clone(count)
                continue
            converted = self.alloc(m * count, Buffer.INIT_TEMP) if m != self.rank.param_bytes or self.offload_param else -1
            if previous >= 0:
                self.free(previous)
            previous = converted
            self.alloc(m * count, Buffer.PARAM_MASTER)
        if previous >= 0:
            self.free(previous)
        if self.offload:  # stage3.py, initialize_optimizer_states: a gradient made on the host moves to where its master is
            for i, on_gpu in enumerate(self.on_gpu):
                if on_gpu:
                    self.alloc(m * self.counts[i], Buffer.GRAD_MASTER)

    def _make_master_of_clone(self, count: int) -> None:
        """Clone a sub-group, which parameters offloaded reach the GPU for first, and convert the clone."""
        w, m = self.rank.param_bytes, self.rank.master_bytes
        moved = [self.alloc(w * count, Buffer.INIT_TEMP)] if self.offload_param else []
        clone = self.alloc(w * count, Buffer.INIT_TEMP if w != m else Buffer.PARAM_MASTER)
        self.free_all(moved)
        if w != m:
            self.alloc(m * count, Buffer.PARAM_MASTER)
            self.free(clone)

    # Forward and backward

    def forward_begin(self) -> None:
        """Begin the coordinator's trace anew."""
        self.micro += 1
        self.backward = self.stepped = False
        self.coordinator.begin()

    def evaluation_begin(self) -> None:
        """Begin the trace anew (_start_of_forward_hook); the modules are those of its first half."""
        self.evaluating = True
        self.forward_begin()

    def evaluation_end(self) -> None:
        """What the last modules left gathered waits for the next forward."""
        self.evaluating = False

    def enter(self, module: int) -> None:
        """Fetch a module's parameters before its forward or its recomputation."""
        if self.inside_leaf[module]:
            return
        if self.asked is not None:
            self.asked.fetch(module, forward=True)
        else:
            if module in self.reads and not self.backward:
                self.coordinator.read(*self.reads[module])
            self.coordinator.fetch(module, forward=True, recomputing=self.backward)
            if module in self.through:
                self.coordinator.fetch(self.through[module], forward=True)
            if module in self.uncalled and not self.backward:
                self.coordinator.read(module, self.uncalled[module])

    def exit(self, module: int) -> None:
        """Release a module's parameters after its forward."""
        if self.asked is not None:
            if not self.inside_leaf[module]:
                self.asked.release(module, forward=True)
            return
        saved = (self.saves.recomputation if self.backward else self.saves.forward).get(module)
        if saved and not self.evaluating:
            self.coordinator.save(module, saved)
        graphless = self.rank.workload.reentrant and not self.backward  # a reentrant checkpoint's forward has no graph
        if module in self.keeps and not (self.evaluating or self.referring or graphless):
            (self.held_again if self.backward else self.held).extend(self.coordinator.hold(self.keeps[module]))
        if not self.inside_leaf[module]:
            self.coordinator.release(module, forward=True)

    def generation_begin(self) -> None:
        """Gather every parameter that is not there, each by itself: TRL takes the hooks off while the model generates.

        Source: TRL 1.16, models/utils.py, _unwrap_model_for_generation; partition_parameters.py, _allgather_params_coalesced
        """
        self.coordinator.gather_all()

    def generation_end(self) -> None:
        """Partition all of them. Hooks that are put on again make the trace that was recorded void (parameter_offload.py)."""
        self.coordinator.release_all()
        self.coordinator.forget_trace()

    def reference_begin(self) -> None:
        """Begin the reference's own trace anew."""
        self.asked, self.referring = self.reference, True
        if self.reference is not None:
            self.reference.begin()

    def reference_end(self) -> None:
        """The modules that follow are the trained model's."""
        self.asked, self.referring = None, False

    def backward_begin(self, boundary: bool) -> None:
        """Note whether a step follows this backward."""
        self.boundary, self.backward = boundary, True

    def backward_enter(self, module: int) -> None:
        """Fetch a module's parameters before its backward. A recomputation before it is over, and its graph gone."""
        if self.held_again:
            self.coordinator.let_go(reversed(self.held_again))
            self.held_again = []
        if not self.inside_leaf[module]:
            self.coordinator.fetch(module, forward=False)
            if module in self.through:
                self.coordinator.fetch(self.through[module], forward=False)

    def backward_exit(self, module: int) -> None:
        """Release a module's parameters after its backward."""
        self.coordinator.drop_saved(module)
        if self.inside_leaf[module]:
            return
        self._collect_leaf(module)
        if module in self.coordinator.backward_modules:
            self.coordinator.release(module, forward=False)

    def grad(self, param: int, handle: int) -> None:
        """Put a gradient into the bucket (reduce_ready_partitions_and_remove_grads); a leaf module's wait."""
        self.own[param] = handle
        leaf = self.leaf_of.get(param)
        if leaf is None:
            self._collect(param)
        else:
            self.leaf_grads[leaf].append(param)

    def _collect_leaf(self, module: int) -> None:
        """Collect a leaf module's gradients at once when its backward is over, in the order of the parameters
        (reduce_leaf_module_grads).
        """
        waiting = self.leaf_grads.get(module)
        if waiting:
            self.leaf_grads[module] = []
            for p in sorted(waiting):
                self._collect(p)

    def _collect(self, param: int) -> None:
        """Put a gradient into the bucket, which is reduced when it would overflow
        (reduce_independent_p_g_buckets_and_remove_grads).
        """
        count, size = self.rank.numel[param], self.rank.zero.buckets.reduce_bucket_size
        comm = self.rank.comm_of[param]
        before = self.buckets[comm][-1:]
        if before and self.rank.partition_group[before[0]] != self.rank.partition_group[param]:
            self._reduce(comm)  # of another process group
        if self.filled[comm] and self.filled[comm] + count > size:
            self._reduce(comm)
        if self.rank.zero.buckets.contiguous_gradients and self.filled[comm] + count <= size:
            self._release_grad(param)
        self.buckets[comm].append(param)
        self.filled[comm] += count

    def _release_grad(self, param: int) -> None:
        handle = self.own.pop(param, None)
        if handle is None:
            return
        if self.stream == COMPUTE:
            self.free(handle)
            return
        self._settle_grad()
        self.recorder.record_stream(handle, self.stream)
        self.free(handle)
        self.lagging = handle

    def _settle_grad(self) -> None:
        """The copy out of the gradient freed last is done: hooks take longer than copies (coordinator.py, Note [Lag])."""
        if self.lagging >= 0:
            self.recorder.complete(self.lagging)
            self.lagging = -1

    def _reduce(self, comm: int) -> None:
        """Reduce the bucket of gradients of `comm` bytes on the reduction's stream (__reduce_and_partition_ipg_grads)."""
        rank = self.rank
        bucket, elements = sorted(self.buckets[comm]), self.filled[comm]
        self.buckets[comm], self.filled[comm] = [], 0
        if not bucket:
            return
        accum = rank.accum_bytes if rank.does(Knob.STAGE3_ACCUM_DTYPE) else rank.param_bytes
        buckets = rank.zero.buckets
        whole = not buckets.reduce_scatter and buckets.contiguous_gradients and elements <= buckets.reduce_bucket_size
        cast = comm != accum or rank.other_half
        held = self._reduced_whole(bucket, elements, comm, accum, cast) if whole else self._scattered(bucket, comm, accum, cast)
        self._partition(bucket)
        self.free_all(held)

    def _reduced_whole(self, bucket: list[int], elements: int, comm: int, accum: int, cast: bool) -> list[int]:
        """All-reduce the bucket where it lies; return what lives until its gradients are partitioned."""
        rank, stream = self.rank, self.stream
        held: list[int] = []
        if rank.ranks != rank.zero.step.gradient_predivide_factor:  # scaled out of place, by 1 as well
            held.append(self.alloc(comm * elements, Buffer.COMM_REDUCE_SCATTER, stream=stream))
        if cast:
            copied = self.alloc(accum * elements, Buffer.COMM_REDUCE_SCATTER, stream=stream)
            self.free_all(held)
            held = [copied]
        uneven = [p for p in bucket if rank.numel[p] % rank.ranks_of[bucket[0]]]
        return held + [self.alloc(accum * self.shards[p], Buffer.COMM_REDUCE_SCATTER, stream=stream) for p in uneven]

    def _scattered(self, bucket: list[int], comm: int, accum: int, cast: bool) -> list[int]:
        """Reduce-scatter the bucket; return what lives until its gradients are partitioned."""
        rank, stream = self.rank, self.stream
        ranks = rank.ranks_of[bucket[0]]
        held: list[int] = []
        if comm != rank.param_bytes or rank.other_half:  # those in the bucket have its dtype already
            apart = [p for p in bucket if p in self.own or not rank.does(Knob.STAGE3_BUCKET_DTYPE)]
            held = [self.alloc(comm * rank.numel[p], Buffer.COMM_REDUCE_SCATTER, stream=stream) for p in apart]
        flat: list[int] = []
        if len(bucket) > 1 or rank.numel[bucket[0]] % ranks:
            padded = sum(rank.whole[p] for p in bucket)
            flat = [self.alloc(comm * padded, Buffer.COMM_REDUCE_SCATTER, stream=stream)]
        if bucket[0] in rank.experts and ranks != rank.ranks:  # averaged over all ranks: scaled, out of place
            held += [self.alloc(comm * self.shards[p], Buffer.COMM_REDUCE_SCATTER, stream=stream) for p in bucket]
            self.free_all(flat)
            flat = []
        if cast:
            held += [self.alloc(accum * self.shards[p], Buffer.COMM_REDUCE_SCATTER, stream=stream) for p in bucket]
            self.free_all(flat)
            flat = []
        return held + flat

    def _partition(self, bucket: list[int]) -> None:
        """Move reduced gradients into the gradient partitions, or by way of the GPU to the host (partition_grads)."""
        rank, stream = self.rank, self.stream
        a, m = rank.accum_bytes, rank.master_bytes
        waiting: list[int] = []
        for p in bucket:
            place = rank.rank * rank.ranks_of[p] // rank.ranks
            part = min(self.shards[p], rank.numel[p] - self.shards[p] * place)
            if self.offload and part > 0:
                back = self.alloc(a * part, Buffer.STAGE_H2D, stream=stream, note=p)
                if self.boundary:
                    for at in range(0, part, NORM_CHUNK):
                        self.temporary(8 * min(NORM_CHUNK, part - at), Buffer.OPTIM_NORM, stream)
                    self.norm_results.append(self.alloc(8, Buffer.OPTIM_NORM, stream=stream))
                    if a != m:
                        cast = self.alloc(m * part, Buffer.STAGE_D2H, stream=stream, note=p)
                        if self.swaps_optimizer:
                            waiting.append(cast)
                        else:
                            self.free(cast)
                self.free(back)
            self._release_grad(p)
        self.free_all(waiting)

    def backward_end(self, boundary: bool) -> None:
        """Reduce the last bucket and release what no hook released (engine.py, _backward_epilogue)."""
        for module in self.leaf_grads:  # modules whose inputs needed no gradient
            self._collect_leaf(module)
        for comm in self.buckets:
            self._reduce(comm)
        self._settle_grad()
        self.coordinator.drop_all_saved()
        self.coordinator.end_backward()

    def graph_kept(self) -> object:
        """Return the gathered weights that the micro batch's products keep in its graph (saved_weights.py)."""
        held, self.held = self.held, []
        return held or None

    def graph_gone(self, held: object) -> None:
        """Free them. Behind a step the device has caught up with the host, which waited for its norm."""
        if isinstance(held, list):
            self.coordinator.let_go(reversed(held))
        if self.stepped and self.stream != COMPUTE:
            self.coordinator.deferred_frees.complete_all()

    def step(self, applied: bool) -> None:
        """Step one sub-group after another, then gather the persistent parameters (step)."""
        rank = self.rank
        self.micro, self.stepped = -1, True
        self.coordinator.release_all()
        if self.stream != COMPUTE:
            self.coordinator.deferred_frees.complete_all()
        total = sum(self.shards[p] for p in self.trained)
        if rank.looks_at_flat_gradients and not self.offload:  # isinf through the absolute values, then isnan
            magnitudes = self.alloc(rank.accum_bytes * total, Buffer.OPTIM_NORM, stream=self.stream)
            mask = self.alloc(total, Buffer.OPTIM_NORM, stream=self.stream)
            self.free(magnitudes)
            self.free(mask)
            self.temporary(total, Buffer.OPTIM_NORM, self.stream)
        if applied:
            self.gather_matrices()
            if not self.offload:
                for group in self.groups:
                    self.norms([self.shards[p] for p in group], 8)
            for i, group in enumerate(self.groups):
                if self.on_gpu[i]:
                    self._step_group(i, len(group))
            self.has_states = True
        self.free_all(self.norm_results)
        self.norm_results.clear()
        if applied:
            if self.coordinator.persistent:
                self.coordinator.gather_persistent()
            for p, handle in list(self.secondary.items()):
                if rank.parameters.trainable[p]:
                    self.free(handle)
                    del self.secondary[p]

    def save(self) -> None:
        """Partition all parameters, gather one module's after another where weights are gathered, then the persistent ones
        (checkpoint_event_prologue, engine.py's _zero3_consolidated_16bit_state_dict, checkpoint_event_epilogue).
        """
        self.coordinator.release_all()
        if self.stream != COMPUTE:
            self.coordinator.deferred_frees.complete_all()
        for sizes in gathered_by_module(self.rank):
            self.free_all([self.alloc(nbytes, Buffer.PARAM_FULL) for nbytes in sizes])
        if self.coordinator.persistent:
            self.coordinator.gather_persistent()

    def _step_group(self, at: int, pieces: int) -> None:
        """Cast one sub-group's gradients and step its optimizer (_prepare_fp32_grad_for_sub_group)."""
        rank, count = self.rank, self.counts[at]
        if self.offload:  # stage3.py, backup_optimizer: torch's AdamW, whose gradients have their own fp32 buffer
            self.optimizer_step(not self.has_states, [at], OptimizerKind.FOREACH)
            return
        flat = self.alloc(rank.accum_bytes * count, Buffer.GRAD_SHARD) if pieces > 1 else None
        grads = flat
        if rank.accum_bytes != rank.master_bytes:
            grads = self.alloc(rank.master_bytes * count, Buffer.GRAD_MASTER)
            if flat is not None:
                self.free(flat)
        self.optimizer_step(not self.has_states, [at])
        if grads is not None:
            self.free(grads)
