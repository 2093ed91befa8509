"""The runtime's allocations over a run: the Arena's blocks, and the tape without the gradients that land in place.

After initialisation the runtime allocates nothing of its own: gathers and reductions use slots, and the kernels need no
temporaries. What remains is the model's own computation. A plain linear layer's weight gradient is written into its flat
by the product itself; every other gradient is made by autograd, copied into its flat and dropped at once.
Source: zeroplan_runtime/arena.py, allocate; zeroplan_runtime/landing.py; zeroplan_runtime/store.py, _fill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

from zeroplan.core.buffers import Buffer
from zeroplan.core.layout import Layout, runtime_buffers
from zeroplan.core.tape import Mark, Op, Stream
from zeroplan.core.workload import Workload
from zeroplan.simulate.stream import Recorder

#: Optimizer steps until peaks repeat: the second runs with the blocks that the first left in the cache.
STEPS_UNTIL_STEADY = 2


@dataclass(frozen=True, slots=True)
class RuntimeJob:
    """One rank's job, as the player reads it."""

    workload: Workload
    layout: Layout
    cublas_workspace: int
    steps: int = STEPS_UNTIL_STEADY
    skipped_steps: int = 0


class RuntimeSchedule:
    """One rank's run. Hooks as in the player's StageSchedule."""

    follows_modules = False

    def __init__(self, job: RuntimeJob, recorder: Recorder) -> None:
        self.job, self.recorder = job, recorder

    def build(self) -> None:
        """The model is made in host memory."""

    def add_adapters(self) -> None:
        """Adapters are part of the model."""

    def initialize(self) -> None:
        """The Arena takes one block for each run of rows of one kind; then parameters pass through, one at a time."""
        rows = runtime_buffers(self.job.layout)
        for (buffer, _, _), group in groupby(rows, key=lambda row: (row.buffer, row.dtype, row.place)):
            self.recorder.alloc(sum(row.bytes for row in group), buffer)
        width = self.job.layout.setup.param_dtype.bytes
        for unit in self.job.layout.units:
            for param in unit.shape.params:
                self.recorder.free(self.recorder.alloc(param.numel * width, Buffer.INIT_TEMP, note=param.name))

    def forward_begin(self) -> None:
        """Nothing is allocated."""

    def enter(self, module: int) -> None:
        """A unit is gathered into its slot."""

    def exit(self, module: int) -> None:
        """Its slot may be used by the next."""

    def backward_begin(self, boundary: bool) -> None:
        """Nothing is allocated."""

    def backward_enter(self, module: int) -> None:
        """A unit is gathered into its slot."""

    def backward_exit(self, module: int) -> None:
        """Its gradients are reduced where they lie."""

    def grad(self, param: int, handle: int) -> None:
        """A gradient that autograd made is copied into its flat and dropped."""
        self.recorder.free(handle)

    def backward_end(self, boundary: bool) -> None:
        """What is left is reduced where it lies."""

    def step(self, applied: bool) -> None:
        """The kernels read shards and write shards."""


def with_direct_gradients(stream: Stream) -> Stream:
    """The tape without the weight gradients that linear layers write in place.

    Where other modules use the weight, too (a tied embedding), autograd's sum of their gradients is left out as well: each
    arrives on its own and is added in place.
    """
    weights = _direct_weights(stream)
    final = {
        aux: arg for op, arg, aux in zip(stream.op, stream.arg, stream.aux, strict=True) if op == Op.GRAD and arg in weights
    }
    dropped: set[int] = set()
    alive: dict[int, tuple[int, int]] = {}  # storages of the backward: bytes and module
    backward = False
    for op, arg, aux, module in zip(stream.op, stream.arg, stream.aux, stream.module, strict=True):
        if op == Op.MARK:
            backward = arg == Mark.BACKWARD_BEGIN
        elif op == Op.FREE:
            alive.pop(arg, None)
        elif op == Op.ALLOC and backward:
            if arg in final:
                dropped |= _replaced(arg, module, alive, *weights[final[arg]])
            alive[arg] = (aux, module)
    return _without(stream, dropped)


def _direct_weights(stream: Stream) -> dict[int, tuple[int, frozenset[int]]]:
    """For each trainable weight of a plain linear layer, its gradient's bytes and the layers that use it."""
    users: dict[int, set[int]] = {}
    for index, module in enumerate(stream.modules):
        if module.type == "Linear":
            for p in module.params:
                if stream.params[p].trainable and len(stream.params[p].shape) == 2:
                    users.setdefault(p, set()).add(index)
    params = stream.params
    return {p: (math.prod(params[p].shape) * params[p].itemsize, frozenset(layers)) for p, layers in users.items()}


def _replaced(final: int, module: int, alive: dict[int, tuple[int, int]], nbytes: int, layers: frozenset[int]) -> set[int]:
    """What is never made of one weight's gradient, whose `final` storage is being allocated in `module`."""
    if module in layers:
        return {final}
    same = {storage: where for storage, (size, where) in alive.items() if size == nbytes}
    written = {storage for storage, where in same.items() if where in layers}
    return {*written, final} if written and len(written) < len(same) else written


def _without(stream: Stream, dropped: set[int]) -> Stream:
    kept = [
        i
        for i, (op, arg, aux) in enumerate(zip(stream.op, stream.arg, stream.aux, strict=True))
        if not ((op in (Op.ALLOC, Op.FREE) and arg in dropped) or (op == Op.GRAD and aux in dropped))
    ]
    columns = [[column[i] for i in kept] for column in (stream.op, stream.arg, stream.aux, stream.kind, stream.module)]
    return Stream(stream.modules, stream.params, *columns)
