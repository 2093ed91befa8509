"""The part of a schedule that all stages share: the model's build, optimizer states, and bookkeeping of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zeroplan.core.buffers import Buffer
from zeroplan.core.workload import DType, OptimizerKind
from zeroplan.engines.deepspeed.rank import DeepSpeedRank
from zeroplan.engines.deepspeed.versions import Knob
from zeroplan.engines.player import EngineSchedule
from zeroplan.ledger.derive import shard
from zeroplan.simulate.recorder import Recorder

#: Streams of the simulated device. Blocks are reused only on the stream that allocated them.
COMPUTE, GATHER, REDUCE = 0, 1, 2

#: Bytes of a scalar on the device; the allocator rounds it to 512.
SCALAR = 4


class DeepSpeedSchedule(EngineSchedule):
    """The hooks that all stages share; each stage overrides those that it runs differently."""

    def __init__(self, rank: DeepSpeedRank, recorder: Recorder) -> None:
        self.rank = rank
        self.recorder = recorder
        self.alloc = recorder.alloc
        self.free = recorder.free
        self.params: dict[int, int] = {}  # parameter -> its block, while it has one of its own
        self.has_states = False
        self.has_gathers = False

    def build(self) -> None:
        """Allocate the whole model on the GPU. The second owner of a tied parameter has its own copy until the tie is made.

        A reference model is there first: the trainer prepares it when it is made, the trained one when training begins.
        """
        width, twins = self.rank.param_bytes, []
        if self.rank.reference:
            for count in self.rank.numel:
                self.alloc(width * count, Buffer.PARAM_REFERENCE)
        for owned in self.rank.parameters.modules:
            for p in owned:
                if self.rank.parameters.adapters[p]:
                    continue
                handle = self.alloc(width * self.rank.numel[p], self._param_buffer(p), note=p)
                if p in self.params:
                    twins.append(handle)
                else:
                    self.params[p] = handle
        for nbytes in self.rank.quant_states:
            self.alloc(nbytes, Buffer.PARAM_FROZEN)
        self.free_all(twins)
        if self.rank.quant_states and not self.rank.workload.base_on_host:  # prepare_model_for_kbit_training
            quantized = set(self.rank.parameters.packed)
            self._recast([p for p in self.params if p not in quantized], DType.FP32.bytes)

    def add_adapters(self) -> None:
        """Allocate the parameters that peft adds to the built model, whole and on the GPU.

        Beside a quantised base they are made in fp32, and DeepSpeed casts them with all that is not quantised. A base that
        waits on the host is not prepared in fp32 (TRL 0.11, ``is_sharded_qlora``), so that adapters alone are cast.
        """
        prepared = bool(self.rank.quant_states)
        width = DType.FP32.bytes if prepared else self.rank.param_bytes
        for p, added in enumerate(self.rank.parameters.adapters):
            if added:
                self.params[p] = self.alloc(width * self.rank.numel[p], self._param_buffer(p), note=p)
        if prepared:
            quantized, alone = set(self.rank.parameters.packed), self.rank.workload.base_on_host
            others = [p for p in sorted(self.params) if p not in quantized]
            cast = [p for p in others if self.rank.parameters.adapters[p] or not alone]
            self._recast(cast, self.rank.param_bytes)

    def _recast(self, params: Iterable[int], width: int) -> None:
        """Put another dtype's copy in the place of each parameter."""
        for p in params:
            cast = self.alloc(width * self.rank.numel[p], self._param_buffer(p), note=p)
            self.free(self.params[p])
            self.params[p] = cast

    def reduce(self) -> None:
        """Reduce what a pipeline stage's backwards have left (``_exec_reduce_grads`` of runtime/pipe/engine.py)."""
        self.backward_end(True)

    def _param_buffer(self, p: int) -> Buffer:
        return Buffer.PARAM_FULL if self.rank.parameters.trainable[p] else Buffer.PARAM_FROZEN

    def temporary(self, nbytes: int, buffer: Buffer, stream: int = 0) -> None:
        """Allocate a block and free it at once."""
        self.free(self.alloc(nbytes, buffer, stream=stream))

    def free_all(self, handles: Iterable[int]) -> None:
        """Free the blocks in the given order."""
        self.recorder.free_all(handles)

    def optimizer_step(self, first: bool, places: Sequence[int] | None = None, kind: OptimizerKind | None = None) -> None:
        """Step the groups at these places in ``stepped_at_once`` (all, if None): states if `first`, temporaries.

        FusedAdam and torch's fused kernels need none; multi-tensor loops hold lists of temporaries (AdamW: all denominators);
        its loop makes a square root and a quotient, one tensor after another. `kind` None is the workload's. A list of
        gradients with weight decay is there beside them, for SGD before the momentum, which is its clone.
        Sources: torch/optim/adam.py (_multi_tensor_adam, _single_tensor_adam), torch/optim/sgd.py (_multi_tensor_sgd),
        deepspeed/ops/adam/fused_adam.py
        """
        rank = self.rank
        places = range(len(rank.stepped_at_once)) if places is None else places
        counts = [rank.stepped_at_once[at] for at in places]
        kind = kind or rank.workload.numerics.optimizer_kind
        width = rank.master_bytes
        lists = rank.decay_lists if kind is OptimizerKind.FOREACH else 0
        if not rank.optimizer.clones_gradients:
            self._make_states_of(places if first else ())
        decayed = [self.alloc(width * count, Buffer.OPTIM_TEMP) for _ in range(lists) for count in counts]
        if rank.optimizer.clones_gradients:
            self._make_states_of(places if first else ())
        if kind is OptimizerKind.FOREACH:
            lists = rank.optimizer.foreach_lists
            held = [self.alloc(width * count, Buffer.OPTIM_TEMP) for _ in range(lists) for count in counts]
            for count in counts if rank.optimizer.selects else ():
                self.free_all([self.alloc(nbytes * count, Buffer.OPTIM_TEMP) for nbytes in (1, width)])
            self.free_all([*decayed, *held])
        elif kind is OptimizerKind.LOOP:
            before: list[int] = []  # a quotient keeps its name until the next tensor's is made
            for count in counts:
                root = self.alloc(width * count, Buffer.OPTIM_TEMP)
                quotient = self.alloc(width * count, Buffer.OPTIM_TEMP)
                self.free(root)
                self.free_all(before)
                before = [quotient]
            self.free_all(before)

    def _make_states_of(self, places: Sequence[int]) -> None:
        """Make the states of the groups at these places in ``stepped_at_once``."""
        rank = self.rank
        for at in places:
            for buffer, nbytes in rank.states(at):
                if nbytes and not (buffer is Buffer.OPTIM_MOMENTUM and rank.momentum_precedes):
                    self.alloc(nbytes, buffer)
            if rank.optimizer.compresses:
                self.alloc(4 * shard(rank.stepped_at_once[at], rank.ranks), Buffer.OPTIM_SERVER_ERROR)

    def step_groups(self, first: bool) -> None:
        """Step all groups: an optimizer of torch's walks its parameter groups, of which experts have their own."""
        rank = self.rank
        if not rank.experts:
            self.optimizer_step(first)
            return
        begin = 0
        for _, group in rank.param_groups:
            count = len(group) if rank.stage == 0 and not rank.flattens else 1
            self.optimizer_step(first, range(begin, begin + count))
            begin += count

    def build_optimizer(self) -> None:
        """Make the states that the optimizer's constructor makes of the module's own parameters, which stay."""
        for p in self.rank.built_for:
            for state in self.rank.optimizer.states:
                self.alloc(self.rank.param_bytes * self.rank.numel[p], state.buffer)

    def rebuild_optimizer(self) -> None:
        """Make the states of what the rank steps, by the constructor of a second optimizer."""
        for at in range(len(self.rank.stepped_at_once)):
            for buffer, nbytes in self.rank.states(at):
                self.alloc(nbytes, buffer)
        self.has_states = True

    def make_states(self) -> None:
        """Make the optimizer's states before the first step, by a step on zero gradients."""
        if not self.has_states:
            self.step_groups(first=True)
            self.has_states = True

    def overflow_check(self, counts: Sequence[int], width: int, stream: int = 0) -> None:
        """Look for inf and nan in gradients of `counts` elements of `width` bytes, elementwise.

        Source: zero/stage_1_and_2.py, _has_inf_or_nan, before its :attr:`Knob.OVERFLOW_BY_EXTREMES`
        """
        on_device = self.rank.does(Knob.OVERFLOW_ON_DEVICE)
        for count in counts:
            copy = [self.alloc(4 * count, Buffer.OPTIM_NORM, stream=stream)] if width != 4 else []
            if on_device:
                nan = self.alloc(count, Buffer.OPTIM_NORM, stream=stream)
                magnitudes = self.alloc(4 * count, Buffer.OPTIM_NORM, stream=stream)
                inf = self.alloc(count, Buffer.OPTIM_NORM, stream=stream)
                self.free(magnitudes)
                either = self.alloc(count, Buffer.OPTIM_NORM, stream=stream)
                self.temporary(4 * count, Buffer.OPTIM_NORM, stream)
                self.free_all([nan, inf, either])
            self.free_all(copy)

    def gather_matrices(self) -> None:
        """Gather Muon's matrices and update them (muon.py). The first call allocates the buffers that stay."""
        if not self.rank.optimizer.rest:
            return
        gathers = self.rank.matrix_gathers
        if not self.has_gathers and gathers.kept:
            self.alloc(gathers.kept, Buffer.COMM_ALL_GATHER)
        self.has_gathers = True
        for nbytes in gathers.passing:
            self.temporary(nbytes, Buffer.OPTIM_TEMP)

    def norms(self, counts: Sequence[int], width: int) -> None:
        """Norms of tensors of `counts` elements, each through a copy of `width` bytes an element (0: none).

        The results, a scalar each, are stacked once all are made.
        """
        results = []
        for count in counts:
            if width:
                copy = self.alloc(width * count, Buffer.OPTIM_NORM)
                results.append(self.alloc(SCALAR, Buffer.OPTIM_NORM))
                self.free(copy)
            else:
                results.append(self.alloc(SCALAR, Buffer.OPTIM_NORM))
        self.free_all(results)
