"""Stage 0: plain data parallelism, with the three ways in which DeepSpeed wraps the optimizer.

Gradients stay with their parameters through the window; at its end they are flattened bucket by bucket, all-reduced and
copied back. Source: runtime/engine.py, buffered_allreduce_fallback
"""

from __future__ import annotations

from zeroplan.core.buffers import Buffer
from zeroplan.engines.deepspeed.base import SCALAR, DeepSpeedSchedule
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.engines.deepspeed.versions import Knob
from zeroplan.simulate.recorder import Recorder

#: engine.py, MEMORY_OPT_ALLREDUCE_SIZE: elements in a bucket of stage 0's gradient all-reduce.
STAGE0_BUCKET = 500_000_000


class Stage0(DeepSpeedSchedule):
    """fp32: the optimizer steps the model's own parameters."""

    def __init__(self, rank: DeepSpeedRank, recorder: Recorder) -> None:
        super().__init__(rank, recorder)
        self.grads: dict[int, int] = {}
        self.trained = rank.trained
        groups = [group for _, group in rank.param_groups]
        self.groups = groups if rank.experts else [self.trained]  # experts are flattened apart

    def initialize(self) -> None:
        """Allocate the optimizer's overflow flag, all that it has before the first step."""
        self.alloc(SCALAR, Buffer.OPTIM_TEMP)

    def grad(self, param: int, handle: int) -> None:
        """Keep the gradient, or add it to the one that is there."""
        if param in self.grads:
            self.free(handle)
        else:
            self.grads[param] = handle

    def backward_end(self, boundary: bool) -> None:
        """All-reduce the gradients before a step, with one rank as well (engine.py, allreduce_gradients)."""
        if boundary:
            for p in sorted(self.rank.parameters.unreached):  # engine.py, _get_gradients_for_reduction: zeros
                if p in self.trained and p not in self.grads:
                    self.grads[p] = self.alloc(self.rank.param_bytes * self.rank.numel[p], Buffer.GRAD_FULL)
            for experts in (False, True):  # engine.py, buffered_allreduce_fallback
                own = [self.rank.numel[p] for p in self.trained if (p in self.rank.experts) is experts]
                self.all_reduce(own, self.rank.param_bytes)

    def all_reduce(self, counts: list[int], width: int) -> None:
        """engine.py, allreduce_no_retain: a bucket closes with the tensor that takes it beyond 500 M elements."""
        bucket = filled = 0
        for at, count in enumerate(counts):
            bucket += 1
            filled += count
            if filled > STAGE0_BUCKET or at == len(counts) - 1:
                flat = self.alloc(width * filled, Buffer.COMM_ALL_REDUCE) if bucket > 1 else None
                if self.rank.comm_bytes != width or self.rank.other_half:
                    self.temporary(self.rank.comm_bytes * filled, Buffer.COMM_ALL_REDUCE)
                if flat is not None:
                    self.free(flat)
                bucket = filled = 0

    def step(self, applied: bool) -> None:
        """Clip the gradients, step the optimizer and free the gradients (engine.py, _take_model_step)."""
        counts = [self.rank.numel[p] for p in self.trained]
        if self.rank.zero.step.gradient_clipping > 0:
            self.norms(counts, 0)
        self.gather_matrices()
        self.step_groups(first=not self.has_states)
        self.has_states = True
        self.drop_grads()

    def drop_grads(self) -> None:
        """Free every gradient (``param.grad = None``)."""
        self.free_all(self.grads.values())
        self.grads.clear()


class Stage0Flat(Stage0):
    """16-bit with FusedAdam: FP16_Optimizer, which keeps one flat fp32 master. Source: runtime/fp16/fused_optimizer.py."""

    def initialize(self) -> None:
        """Flatten the parameters, make the fp32 master, and step on zero gradients, which makes the states."""
        rank = self.rank
        w = rank.param_bytes
        self.alloc(SCALAR, Buffer.OPTIM_TEMP)
        for group in self.groups:
            total = sum(rank.numel[p] for p in group)
            clones = [self.alloc(w * rank.numel[p], Buffer.INIT_TEMP) for p in group]
            if len(clones) > 1:
                self.alloc(w * total, Buffer.PARAM_FULL)
                self.free_all(clones)
            for p in group:
                self.free(self.params.pop(p))
            clone = self.alloc(w * total, Buffer.INIT_TEMP)
            self.alloc(4 * total, Buffer.PARAM_MASTER)
            self.free(clone)
        grads = [self.alloc(4 * sum(rank.numel[p] for p in group), Buffer.INIT_TEMP) for group in self.groups]
        self.step_groups(first=True)
        self.has_states = True
        self.free_all(grads)

    def step(self, applied: bool) -> None:
        """Cast the gradients to fp32 one by one, flatten them, free the 16-bit ones, and step."""
        rank = self.rank
        if applied:
            flats = []
            for group in self.groups:
                casts = [self.alloc(4 * rank.numel[p], Buffer.GRAD_MASTER) for p in group]
                if len(casts) > 1:
                    flats.append(self.alloc(4 * sum(rank.numel[p] for p in group), Buffer.GRAD_MASTER))
                    self.free_all(casts)
                else:
                    flats += casts
                self.free_all([self.grads.pop(p) for p in group if p in self.grads])
            self.temporary(SCALAR, Buffer.OPTIM_NORM)
            self.step_groups(first=False)
            self.free_all(flats)
        self.drop_grads()


class Stage0Unfused(Stage0):
    """16-bit with any other optimizer: FP16_UnfusedOptimizer, a master a parameter. Source: fp16/unfused_optimizer.py."""

    def initialize(self) -> None:
        """Make a master for each parameter, and step on zero gradients, which makes the states."""
        rank = self.rank
        w = rank.param_bytes
        for p in self.trained:
            clone = self.alloc(w * rank.numel[p], Buffer.INIT_TEMP)
            self.alloc(4 * rank.numel[p], Buffer.PARAM_MASTER)
            self.free(clone)
        zeros = [self.alloc(width * rank.numel[p], Buffer.INIT_TEMP) for width in (w, 4) for p in self.trained]
        self.step_groups(first=True)
        self.has_states = True
        self.free_all(zeros)

    def step(self, applied: bool) -> None:
        """Cast the gradients to fp32 beside the 16-bit ones, step, and free both."""
        rank = self.rank
        if applied:
            if not rank.does(Knob.OVERFLOW_BY_EXTREMES):  # utils.py, CheckOverflow: the sum of an fp32 copy
                for p in self.trained:
                    self.temporary(4 * rank.numel[p], Buffer.OPTIM_NORM)
            casts = []
            for group in self.groups:
                for p in group:  # utils.py, get_weight_norm: through an fp32 copy, without the experts
                    if p not in rank.experts:
                        self.temporary(4 * rank.numel[p], Buffer.OPTIM_NORM)
                casts += [self.alloc(4 * rank.numel[p], Buffer.GRAD_MASTER) for p in group]
            self.gather_matrices()
            self.step_groups(first=False)
            self.free_all(casts)
        self.drop_grads()


class Stage1Bf16(Stage0):
    """Stage 1, bf16 with fp32 accumulation: BF16_Optimizer, whose fp32 gradients are never sharded.

    Pipeline stages have it at stage 0 in bf16, too; its gradients are then as wide as the model.

    Source: runtime/bf16_optimizer.py
    """

    def initialize(self) -> None:
        """Flatten the parameters, clone this rank's master, and make the fp32 gradients that live for the whole run."""
        rank = self.rank
        self.casts = rank.accum_bytes != rank.param_bytes  # else gradients add up in bf16, on pipeline stages of stage 0
        aligned, parts = [rank.flat_group], [rank.stepped]
        if rank.experts:
            parts = rank.stepped_at_once
            aligned = [part * ranks for part, ranks in zip(parts, rank.group_ranks, strict=True)]
        self.part = sum(parts)
        self.alloc(SCALAR, Buffer.OPTIM_TEMP)
        for group, whole, part in zip(self.groups, aligned, parts, strict=True):
            self.alloc(rank.param_bytes * whole, Buffer.PARAM_FULL)
            for p in group:
                self.free(self.params.pop(p))
            clone = self.alloc(rank.param_bytes * part, Buffer.INIT_TEMP)
            self.alloc(4 * part, Buffer.PARAM_MASTER)
            self.free(clone)
            self.alloc(rank.accum_bytes * whole, Buffer.GRAD_ACCUM)
        self.aligned, self.of_experts = aligned[:1], aligned[1:]
        if not rank.does(Knob.STATES_AT_FIRST_STEP):
            self.make_states()

    def backward_begin(self, boundary: bool) -> None:
        """Drop the last backward's bf16 gradients, where the step left them and nothing zeroes them in place."""
        if not (self.rank.does(Knob.BF16_GRADS_DROPPED_BY_STEP) or self.rank.does(Knob.BF16_GRADS_STAY)):
            self.drop_grads()

    def grad(self, param: int, handle: int) -> None:
        """Keep the bf16 gradient: it is zeroed and not freed between micro batches, unless each is freed at once."""
        at_once = self.rank.zero.step.immediate_grad_update
        if at_once and self.casts:
            self.temporary(self.rank.accum_bytes * self.rank.numel[param], Buffer.GRAD_ACCUM)
        if at_once and self.rank.does(Knob.IMMEDIATE_UPDATE_FREES):
            self.free(handle)
        else:
            super().grad(param, handle)

    def backward_end(self, boundary: bool) -> None:
        """Add the bf16 gradients to the fp32 ones, each through an fp32 copy, and reduce the fp32 ones."""
        if not self.rank.zero.step.immediate_grad_update and self.casts:
            for p in self.trained:
                self.temporary(self.rank.accum_bytes * self.rank.numel[p], Buffer.GRAD_ACCUM)
        if boundary:
            self.reduce()

    def reduce(self) -> None:
        """All-reduce the flat gradients."""
        self.all_reduce(self.aligned, self.rank.accum_bytes)
        self.all_reduce(self.of_experts, self.rank.accum_bytes)

    def step(self, applied: bool) -> None:
        """Step this rank's part, gather the parameters in place and free the bf16 gradients."""
        self.norms([self.rank.numel[p] for p in self.trained], 0)
        cast = self.alloc(self.rank.master_bytes * self.part, Buffer.GRAD_MASTER) if not self.casts else None
        self.gather_matrices()
        self.step_groups(first=not self.has_states)
        self.has_states = True
        if cast is not None:
            self.free(cast)
        if self.rank.does(Knob.BF16_GRADS_DROPPED_BY_STEP):
            self.drop_grads()


def stage0_schedule(rank: DeepSpeedRank, recorder: Recorder) -> Stage0:
    """Return the schedule of the wrapper that DeepSpeed chooses at stage 0 (engine.py, _do_optimizer_sanity_check)."""
    if not rank.own_masters:
        return Stage0(rank, recorder)
    return Stage0Flat(rank, recorder) if rank.flattens else Stage0Unfused(rank, recorder)
