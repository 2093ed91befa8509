"""FSDP 1's allocations over a run: what each unit gathers, computes and reduces, and when.

Note [FSDP 1's buffers]
    A unit's parameters are views of one flat parameter, of which each rank keeps an even part. To unshard it, the part is cast
    (where the dtypes differ) and gathered into the padded flat parameter. FULL_SHARD frees a block after its forward and keeps
    the root; SHARD_GRAD_OP keeps all. In the backward the block before the one that runs is gathered ahead. The gradients of
    a unit's parameters are held until the last of them is there, then joined into a flat gradient (the backward of the views'
    ``torch.split``), the unit's parameters are freed, and the flat gradient is reduced into this rank's part and cast to the
    parameters' dtype. The root's gradients wait so for the embedding's, the backward's last.
    NO_SHARD, which a single rank has too, casts the whole flat parameter for each use and reduces gradients in place.
    With gradient accumulation under ``no_sync`` the flat gradients stay whole, and later ones are added to them.
    Source: torch/distributed/fsdp/_runtime_utils.py (_unshard, _post_forward_reshard, _pre_backward_hook, _post_backward_hook,
    _reduce_grad, _reduce_grad_no_shard) and _flat_param.py of torch 2.11.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zeroplan.core.buffers import Buffer
from zeroplan.core.tape import ExpandedTape, block_of_each
from zeroplan.engines.fsdp.rank import FsdpRank
from zeroplan.engines.player import EngineSchedule, Run, play
from zeroplan.engines.torch_step import STEPS_UNTIL_STEADY, optimizer_step
from zeroplan.simulate.recorder import Recorder

#: Streams of the simulated device: compute, the all-gathers', the reductions', the casts' before a gather.
COMPUTE, GATHER, REDUCE, CAST = 0, 1, 2, 3
_NONE = -1


@dataclass(slots=True)
class Unit:
    """A flat parameter and the blocks of memory that it has at the moment; -1 for none.

    Attributes:
        name: of the block; empty for the root.
        params: its trained parameters.
        whole: the gathered flat parameter.
        grads: by parameter, gradients that wait for the unit's others.
        flat_grad: the flat gradient of micro batches that were not reduced.
        reduced: this rank's part of the reduced gradient.
    """

    name: str
    params: set[int]
    whole: int = _NONE
    grads: dict[int, int] = field(default_factory=dict)
    flat_grad: int = _NONE
    reduced: int = _NONE


class FsdpSchedule(EngineSchedule):
    """One rank's run. The optimizer allocates nothing before its first step."""

    follows_modules = True

    def __init__(self, rank: FsdpRank, tape: ExpandedTape, recorder: Recorder) -> None:
        self.rank, self.recorder = rank, recorder
        self.alloc, self.free = recorder.alloc, recorder.free
        self.home = self._homes(tape)
        names = {home: tape.modules[home].name if home >= 0 else "" for home in self.home}
        self.units = {home: Unit(name, set()) for home, name in names.items()}
        for p in rank.trained:
            self.units[self.home[p]].params.add(p)
        trained = rank.parameters.adapters
        self.adapters = {name for name, params in rank.units.items() if trained[params[0]]}
        self.order: list[int] = []  # units but the root, as their forwards ended
        self.position: dict[int, int] = {}
        self.in_backward = False
        self.reduces = True
        self.stepped = False

    def _homes(self, tape: ExpandedTape) -> list[int]:
        """The module of each parameter's unit: its block, an adapter's own module, or -1 for the root."""
        homes = block_of_each(tape.modules, len(tape.params))
        adapters = self.rank.parameters.adapters
        for index, module in enumerate(tape.modules):
            for p in module.params:
                if adapters[p]:
                    homes[p] = index
        return homes

    def build(self) -> None:
        """Allocate this rank's part of each flat parameter: units are moved to the GPU, flattened and sharded one by one."""
        for unit in self.units.values():
            self.alloc(self.rank.bytes_of(unit.name) * self.rank.shard(unit.name), Buffer.PARAM_SHARD)

    # --- unshard, reshard -------------------------------------------------------------------------------------------------

    def _unshard(self, unit: Unit) -> None:
        rank = self.rank
        if unit.whole >= 0 or not (rank.sharded or rank.casts):
            return
        if not rank.sharded:  # the cast itself is what the unit computes with
            unit.whole = self.alloc(rank.param_bytes * rank.flat(unit.name), Buffer.PARAM_FULL, stream=CAST)
            return
        cast = _NONE
        if rank.casts:
            cast = self.alloc(rank.param_bytes * rank.shard(unit.name), Buffer.COMM_ALL_GATHER, stream=CAST)
        unit.whole = self.alloc(rank.param_bytes * rank.padded(unit.name), Buffer.PARAM_FULL, stream=GATHER)
        if cast >= 0:
            self.free(cast)

    def _reshard(self, unit: Unit) -> None:
        if unit.whole >= 0:
            self.free(unit.whole)
            unit.whole = _NONE

    def forward_begin(self) -> None:
        """Unshard the root."""
        self.in_backward = False
        self.order.clear()
        if -1 in self.units:
            self._unshard(self.units[-1])

    def enter(self, module: int) -> None:
        """Unshard a unit before its forward. A recomputation finds its block unsharded, and the adapters in it not."""
        unit = self.units.get(module)
        if unit is not None and module >= 0:
            self._unshard(unit)

    def exit(self, module: int) -> None:
        """Free a unit after its forward, under FULL_SHARD and where nothing is sharded; a recomputed block stays."""
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
        self.in_backward, self.reduces = True, boundary
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

    # --- gradients --------------------------------------------------------------------------------------------------------

    def grad(self, param: int, handle: int) -> None:
        """Hold a parameter's gradient until its unit's others are there."""
        unit = self.units[self.home[param]]
        unit.grads[param] = handle
        if len(unit.grads) == len(unit.params):
            self._post_backward(unit)

    def _post_backward(self, unit: Unit) -> None:
        rank = self.rank
        joined = self.alloc(rank.param_bytes * rank.flat(unit.name), Buffer.GRAD_FULL)
        for handle in unit.grads.values():
            self.free(handle)
        unit.grads.clear()
        if unit.flat_grad >= 0:  # AccumulateGrad adds in place
            self.free(joined)
        else:
            unit.flat_grad = joined
        if rank.reshard or self.reduces or not rank.sharded:
            self._reshard(unit)
        if self.reduces:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        rank = self.rank
        if rank.sharded:
            padded = _NONE
            if rank.padded(unit.name) != rank.flat(unit.name):
                padded = self.alloc(rank.param_bytes * rank.padded(unit.name), Buffer.COMM_REDUCE_SCATTER, stream=REDUCE)
            received = self.alloc(rank.param_bytes * rank.shard(unit.name), Buffer.GRAD_SHARD, stream=REDUCE)
            part = self._in_own_dtype(received, rank.shard(unit.name))
            for handle in (padded, unit.flat_grad):
                if handle >= 0:
                    self.free(handle)
        else:
            part = self._in_own_dtype(unit.flat_grad, rank.flat(unit.name))
        unit.flat_grad, unit.reduced = _NONE, part

    def _in_own_dtype(self, gradient: int, count: int) -> int:
        """Return the gradient cast to the parameters' dtype."""
        if not self.rank.casts:
            return gradient
        cast = self.alloc(self.rank.original_bytes * count, Buffer.GRAD_SHARD, stream=REDUCE)
        self.free(gradient)
        return cast

    def backward_end(self, boundary: bool) -> None:
        """Finish units of which not every parameter had a gradient; free what is still unsharded."""
        for unit in self.units.values():
            if unit.grads:
                self._post_backward(unit)
            if boundary or self.rank.reshard or not self.rank.sharded:
                self._reshard(unit)

    def step(self, applied: bool) -> None:
        """Clip, step this rank's parts and free their gradients (``zero_grad``)."""
        optimizer_step(self.recorder, self.rank, applied=applied, first=not self.stepped)
        self.stepped |= applied
        for unit in self.units.values():
            if unit.reduced >= 0:
                self.free(unit.reduced)
                unit.reduced = _NONE


def record_fsdp(rank: FsdpRank, tape: ExpandedTape) -> Recorder:
    """Record every allocation and free of one rank's run, in order. See :func:`zeroplan.engines.player.play`."""
    recorder = Recorder()
    run = Run(rank.workload.grad_accum, STEPS_UNTIL_STEADY, cublas_workspace=rank.cublas_workspace)
    play(run, tape, recorder, FsdpSchedule(rank, tape, recorder))
    return recorder
