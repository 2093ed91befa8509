"""FSDP 1's allocations over a run: what each unit gathers, computes and reduces, and when.

Note [FSDP 1's buffers]
    A unit's parameters are views of one flat parameter, of which each rank keeps an even part. To unshard it, the part is cast
    (where the dtypes differ) and gathered into the padded flat parameter. FULL_SHARD frees a block after its forward and keeps
    the root; SHARD_GRAD_OP keeps all. In the backward the block before the one that runs is gathered ahead. The gradients of
    a unit's parameters are held until the last of them is there, then joined into a flat gradient (the backward of the views'
    ``torch.split``), the unit's parameters are freed, and the flat gradient is reduced into this rank's part and cast to the
    parameters' dtype. The root's gradients wait so for the embedding's, the backward's last.
    NO_SHARD, which a single rank has too, casts the whole flat parameter for each use and reduces gradients in place.
    The views are made on the gathers' stream, so autograd joins the gradients there, and adds up those of a shared matrix: both
    come from that stream's pool. What flattening and the first forward allocate stays in the cache, and later blocks lie in it.
    ``use_orig_params`` makes the optimizer's parameters views: ``zero_grad`` frees the gradients' views, and the flat gradients
    stay until the next forward or state dict notices that (_flat_param.py, _reset_flat_param_grad_info_if_needed).
    With gradient accumulation under ``no_sync`` the flat gradients stay whole, and later ones are added to them.
    A frozen unit waits for the gradients of its inputs by ``register_multi_grad_hook``, which holds the nodes of those inputs
    until the backward's end. Under reentrant checkpoints these are leaves: the block's recomputed input and its gradient, which
    stay for each block. (Run by tests/engines/torch/test_fsdp_reentrant.py: torch 2.13 does so, and not without reentrance.)
    Source: torch/distributed/fsdp/_runtime_utils.py (_unshard, _post_forward_reshard, _pre_backward_hook, _post_backward_hook,
    _reduce_grad, _reduce_grad_no_shard) and _flat_param.py of torch 2.11.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from zeroplan.core.buffers import Buffer
from zeroplan.core.saving import Saving
from zeroplan.engines.fsdp.rank import FsdpRank
from zeroplan.engines.fsdp.saving import record_save
from zeroplan.engines.torch_step import TorchSchedule
from zeroplan.simulate.recorder import Recorder
from zeroplan.tape.expanded import ExpandedTape, Kind, Op, block_of_each

#: Streams of the simulated device: compute, the all-gathers', the reductions', the casts' before a gather.
COMPUTE, GATHER, REDUCE, CAST = 0, 1, 2, 3
_NONE = -1
_CHECKPOINT = (int(Op.ALLOC), int(Kind.CHECKPOINT))


@dataclass(slots=True)
class FlatUnit:
    """A flat parameter and the blocks of memory that it has at the moment; -1 for none.

    Attributes:
        name: of the block; empty for the root.
        params: its trained parameters.
        whole: the gathered flat parameter.
        copied: this rank's part, as it came from the host.
        grads: by parameter, gradients that wait for the unit's others.
        arrived: how many have come.
        flat_grad: the flat gradient of micro batches that were not reduced.
        reduced: this rank's part of the reduced gradient.
    """

    name: str
    params: set[int]
    whole: int = _NONE
    copied: int = _NONE
    grads: dict[int, int] = field(default_factory=dict)
    arrived: int = 0
    flat_grad: int = _NONE
    reduced: int = _NONE


class FsdpSchedule(TorchSchedule[FsdpRank]):
    """One rank's run. The optimizer allocates nothing before its first step."""

    follows_modules = True

    def __init__(self, rank: FsdpRank, tape: ExpandedTape, recorder: Recorder) -> None:
        super().__init__(rank, recorder)
        self.parts = Counter(arg for op, arg in zip(tape.op, tape.arg, strict=True) if op == Op.GRAD)
        self.in_reduction: list[int] = []  # flat gradients that the reductions' stream reads
        self.home = self._homes(tape)
        self.whole = next((at for at, module in enumerate(tape.modules) if not module.name), _NONE)
        names = {home: tape.modules[home].name if home >= 0 else "" for home in self.home}
        self.units = {home: FlatUnit(name, set()) for home, name in names.items()}
        for p in rank.with_gradient:
            self.units[self.home[p]].params.add(p)
        mixed, added = rank.workload.loop.mixed_units, rank.parameters.adapters
        self.adapters = {name for name, params in rank.units.items() if added[params[0]] and not mixed}
        inputs = [aux for op, aux, kind in zip(tape.op, tape.aux, tape.kind, strict=True) if (op, kind) == _CHECKPOINT]
        self.held_bytes = max(inputs, default=0) if rank.workload.reentrant else 0
        self.held: list[int] = []  # inputs of blocks and their gradients, which their units hold
        self.order: list[int] = []  # units but the root, as their forwards ended
        self.position: dict[int, int] = {}
        self.in_backward = False
        self.reduces = True
        self.begun = self.over = False  # over: a step is, whose gradients are still there

    def _homes(self, tape: ExpandedTape) -> list[int]:
        """The module of each parameter's unit: its block, an adapter's own module, or -1 for the root."""
        homes = block_of_each(tape.modules, len(tape.params))
        if self.rank.workload.loop.one_unit:
            homes = [-1] * len(homes)
        adapters = self.rank.parameters.adapters
        for index, module in enumerate(tape.modules):
            for p in module.params:
                if adapters[p] and not self.rank.workload.loop.mixed_units:
                    homes[p] = index
        return homes

    def build(self) -> None:
        """Move the units to the GPU, flatten and shard them one by one, the blocks before the root that holds them.

        Source: _init_utils.py, _init_param_handle_from_module; _flat_param.py, FlatParamHandle.shard
        """
        rank = self.rank
        there = {}
        if rank.quant_states:  # a quantised base is on the GPU already, with all that stands beside it
            away = rank.parameters.packed if rank.workload.base_on_host or rank.offload else ()
            counts = {p: count for p, count in enumerate(rank.numel) if p not in set(away)}
            there = {p: self.alloc(rank.width(p) * count, Buffer.PARAM_FULL) for p, count in counts.items()}
            for nbytes in rank.quant_states:
                self.alloc(nbytes, Buffer.PARAM_FULL)
        for unit in sorted(self.units.values(), key=lambda unit: not unit.name):
            width, params = rank.bytes_of(unit.name), rank.units[unit.name]
            moved = [there[p] if p in there else self.alloc(width * rank.numel[p], Buffer.PARAM_FULL) for p in params]
            flat = self.alloc(width * rank.flat(unit.name), Buffer.PARAM_SHARD)
            if rank.sharded:
                part = self.alloc(width * rank.shard(unit.name), Buffer.PARAM_SHARD)
                self.free(flat)
                if rank.offload:
                    self.free(part)
            self.recorder.free_all(moved)

    def _make_attributes(self) -> None:
        """Make and free, at the first forward, what each flat parameter is to be cast and gathered into: storages of those
        sizes stay in the cache.

        Source: _flat_param.py, init_flat_param_attributes
        """
        rank = self.rank
        for unit in sorted(self.units.values(), key=lambda unit: bool(unit.name)):
            shard, whole = rank.shard(unit.name), rank.padded(unit.name)
            casts = rank.casts(unit.name)
            sizes = [rank.param_bytes * shard] if casts else []
            if rank.sharded:
                sizes.append(rank.param_bytes * whole)
                sizes += [rank.bytes_of(unit.name) * whole] if casts else []
            for nbytes in sizes:
                self.free(self.alloc(nbytes, Buffer.PARAM_FULL))

    # --- unshard, reshard -------------------------------------------------------------------------------------------------

    def _unshard(self, unit: FlatUnit) -> None:
        rank = self.rank
        casts = rank.casts(unit.name)
        if unit.whole >= 0 or not (rank.sharded or casts):
            return
        if not rank.sharded:  # the cast itself is what the unit computes with
            unit.whole = self.alloc(rank.param_bytes * rank.flat(unit.name), Buffer.PARAM_FULL, stream=CAST)
            return
        cast = _NONE
        if casts:
            cast = self.alloc(rank.param_bytes * rank.shard(unit.name), Buffer.COMM_ALL_GATHER, stream=CAST)
        if rank.offload:  # See Note [CPUOffload of FSDP 1]
            copied = self.alloc(rank.bytes_of(unit.name) * rank.shard(unit.name), Buffer.STAGE_H2D, stream=CAST)
            if casts:
                self.free(copied)
            else:
                unit.copied = copied
        unit.whole = self.alloc(rank.param_bytes * rank.padded(unit.name), Buffer.PARAM_FULL, stream=GATHER)
        if cast >= 0:
            self.free(cast)

    def _reshard(self, unit: FlatUnit) -> None:
        for block in (unit.whole, unit.copied):
            if block >= 0:
                self.free(block)
        unit.whole = unit.copied = _NONE

    def forward_begin(self) -> None:
        """Unshard the root. The gradients of the step before go first."""
        if self.over:
            self._free_stepped()
            self.over = False
        self.in_backward = False
        self.order.clear()
        if not self.begun:
            self.begun = True
            self._make_attributes()
        if -1 in self.units:
            self._unshard(self.units[-1])

    def enter(self, module: int) -> None:
        """Unshard a unit before its forward. A recomputation finds its block unsharded, and the adapters in it not."""
        unit = self.units.get(module)
        if unit is not None and module >= 0:
            self._unshard(unit)

    def exit(self, module: int) -> None:
        """Free a unit after its forward, under FULL_SHARD and where nothing is sharded; a recomputed block stays."""
        if module == self.whole and not self.rank.sharded and not self.in_backward and -1 in self.units:
            self._reshard(self.units[-1])  # the root's cast goes, too (FlatParamHandle.post_reshard)
        unit = self.units.get(module)
        if unit is None or module < 0:
            return
        if not self.in_backward:
            self.position[module] = len(self.order)
            self.order.append(module)
        elif unit.name not in self.adapters:
            return
        if self.rank.reshard or not self.rank.sharded:
            self._reshard(unit)

    def backward_begin(self, boundary: bool) -> None:
        """Begin a backward, for which the last block is gathered ahead."""
        self.in_backward, self.reduces = True, boundary or not self.rank.leaves_whole_gradients
        if -1 in self.units:
            self._unshard(self.units[-1])
        self._prefetch(len(self.order) - 1)

    def _prefetch(self, position: int) -> None:
        if position >= 0:
            self._unshard(self.units[self.order[position]])

    def backward_enter(self, module: int) -> None:
        """Unshard a unit before its backward, and ahead of its use the one whose forward ended before its own."""
        unit = self.units.get(module)
        if unit is None or module < 0:
            return
        self._unshard(unit)
        self._prefetch(self.position.get(module, 0) - 1)

    def backward_exit(self, module: int) -> None:
        """Free a frozen block when the gradients of its inputs have been made (_post_backward_reshard_only_hook)."""
        unit = self.units.get(module)
        if unit is not None and module >= 0 and not unit.params:
            self._reshard(unit)
            if self.held_bytes:
                if self.held:  # the gradient that the block behind it has made use of
                    self.held.append(self.alloc(self.held_bytes, Buffer.ACTIVATION_TEMP))
                self.held.append(self.alloc(self.held_bytes, Buffer.ACTIVATION_CHECKPOINT))

    # --- gradients --------------------------------------------------------------------------------------------------------

    def grad(self, param: int, handle: int) -> None:
        """Hold a parameter's gradient until its unit's others are there; two of a shared matrix are added up."""
        unit = self.units[self.home[param]]
        first = unit.grads.get(param, _NONE)
        if first >= 0:
            total = self.alloc(self.rank.param_bytes * self.rank.numel[param], Buffer.GRAD_FULL, stream=GATHER)
            self.free(first)
            self.free(handle)
            handle = total
        unit.grads[param] = handle
        unit.arrived += 1
        if unit.arrived == sum(self.parts[p] for p in unit.params):
            self._post_backward(unit)

    def _post_backward(self, unit: FlatUnit) -> None:
        rank = self.rank
        lasts = not rank.sharded and not rank.casts(unit.name)  # reduced in place
        what = Buffer.GRAD_SHARD if lasts else Buffer.GRAD_FULL
        joined = self.alloc(rank.param_bytes * rank.flat(unit.name), what, stream=GATHER)
        self.recorder.free_all(unit.grads.values())
        unit.grads.clear()
        unit.arrived = 0
        if unit.flat_grad >= 0:  # AccumulateGrad adds in place
            self.free(joined)
        else:
            unit.flat_grad = joined
        if rank.reshard or self.reduces or not rank.sharded:
            self._reshard(unit)
        if self.reduces:
            self._reduce(unit)

    def _reduce(self, unit: FlatUnit) -> None:
        rank = self.rank
        if rank.sharded:
            padded = _NONE
            if rank.padded(unit.name) != rank.flat(unit.name):
                padded = self.alloc(rank.param_bytes * rank.padded(unit.name), Buffer.COMM_REDUCE_SCATTER, stream=REDUCE)
            received = self.alloc(rank.param_bytes * rank.shard(unit.name), Buffer.GRAD_SHARD, stream=REDUCE)
            part = self._in_own_dtype(unit, received, rank.shard(unit.name))
            if padded >= 0:
                self.free(padded)
            self._free_reduced(unit.flat_grad)
        elif rank.casts(unit.name):
            part = self._in_own_dtype(unit, _NONE, rank.flat(unit.name))
            self._free_reduced(unit.flat_grad)
        else:
            part = unit.flat_grad  # reduced in place
        unit.flat_grad = _NONE
        if unit.reduced >= 0:
            self.free(part)  # added to what an earlier micro batch of the step reduced (_accumulate_sharded_grad)
        else:
            unit.reduced = part

    def _in_own_dtype(self, unit: FlatUnit, gradient: int, count: int) -> int:
        """Return the gradient cast to the parameters' dtype."""
        if not self.rank.casts(unit.name):
            return gradient
        cast = self.alloc(self.rank.original_bytes * count, Buffer.GRAD_SHARD, stream=REDUCE)
        if gradient >= 0:
            self.free(gradient)
        return cast

    def _free_reduced(self, gradient: int) -> None:
        """Free a flat gradient that the reductions' stream reads: it is back when the reduction is done, one unit later.

        On one rank no gather holds the host, which issues the whole backward ahead of a busy device: all are back at its end.
        """
        self.recorder.record_stream(gradient, REDUCE)
        self.free(gradient)
        if self.rank.ranks > 1:
            self._complete_reductions()
        self.in_reduction.append(gradient)

    def _complete_reductions(self) -> None:
        for gradient in self.in_reduction:
            self.recorder.complete(gradient)
        self.in_reduction.clear()

    def backward_end(self, boundary: bool) -> None:
        """Finish units of which not every parameter had a gradient; free what is still unsharded."""
        self.recorder.free_all(self.held)
        self.held.clear()
        for unit in self.units.values():
            if unit.grads:
                self._post_backward(unit)
            if boundary or self.rank.reshard or not self.rank.sharded:
                self._reshard(unit)
        if self.rank.offload and self.reduces:
            self._complete_reductions()
            self._free_stepped()

    def step(self, applied: bool) -> None:
        """Clip and step this rank's parts. Their gradients stay: ``zero_grad`` frees the views that the optimizer has."""
        self._complete_reductions()
        if self.rank.offload:
            return
        self.step_optimizer(applied)
        self.over = True

    def _free_stepped(self) -> None:
        """Free the gradients of the step before."""
        for unit in self.units.values():
            if unit.reduced >= 0:
                self.free(unit.reduced)
                unit.reduced = _NONE

    def save(self) -> None:
        """Gather what the workload's state dict needs."""
        self._free_stepped()
        saving = self.rank.workload.technique(Saving)
        if saving is not None:
            record_save(self.rank, saving, self.recorder)
