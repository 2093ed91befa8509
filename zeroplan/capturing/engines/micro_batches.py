"""Records each micro batch of the model that an engine was given, as the script runs it, and makes tapes of them.

Note [Slices of a recording]
    The whole script is one recording. A micro batch's slice begins behind the backward, or the optimizer's step, before it, so
    that its own batch lies in it, and ends where the next one begins. What was there before a slice is not the tape's: its
    parameters are the engine's, and what else there is counts as other bytes.
    Storages of a slice that outlive it are what the loop keeps. Where the next slice frees them in its forward, the loop keeps
    them by name until the model has returned again, and the tape marks that point (``Mark.OUTPUT``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeroplan.capturing.batches import Shapes, shapes_of
from zeroplan.capturing.result import sizes_on
from zeroplan.tape.expanded import Mark, Op
from zeroplan.tape.format import Tape
from zeroplan.tape.options import TraceOptions
from zeroplan.tape.sizes import KernelDevice
from zeroplan.trace.assemble import Assembler
from zeroplan.trace.fit import TracePoint
from zeroplan.trace.hooks import ModuleHooks
from zeroplan.trace.recorder import CallTree, Recording

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture

#: Micro batches with shapes of their own that are played before the largest.
_BEFORE = 2
_HOOKS = frozenset((Op.ENTER, Op.EXIT, Op.BWD_ENTER, Op.BWD_EXIT))


@dataclass(slots=True)
class MicroBatchSlice:
    """One micro batch of the recording.

    Attributes:
        begin, forward, backward: events at which it, its forward and its backward begin.
        end: the event behind its backward; -1 while it runs.
        zero3: whether it ran through the hooks and the linear function of DeepSpeed's stage 3.
        shapes: of the forward's arguments.
        forwards: calls of the model with gradients.
        others: calls of the model without.
        autocast: the forward's autocast dtype.
        trains: whether the model was in training mode.
    """

    begin: int
    forward: int
    zero3: bool
    shapes: Shapes
    backward: int = -1
    end: int = -1
    forwards: int = 1
    others: int = 0
    backwards: int = 0
    autocast: torch.dtype | None = None
    trains: bool = True


class _Hooks(ModuleHooks):
    """Module hooks that leave a gradient to the micro batches' keeper."""

    def __init__(self, keeper: MicroBatches, module: nn.Module, *, zero3: bool) -> None:
        self._keeper = keeper
        super().__init__(module, keeper.capture.recorder, zero3=zero3)

    def _gradient(self, index: int) -> Any:
        def hook(param: torch.Tensor) -> None:
            self._keeper.gradient(index, param)

        return hook


@dataclass(slots=True)
class Recorded:
    """Tapes of one way to run the model: those of the first micro batches, then the largest, by which the engine plans."""

    tapes: list[Tape]
    shapes: list[Shapes] = field(default_factory=list)


class MicroBatches:
    """Follows one module.

    Args:
        capture: the capture.
        module: the module, whose forward and backward are the micro batch.
        zero3: whether it runs as under DeepSpeed's stage 3.
        both: record one micro batch in the other way, too, for plans of other stages.
        keeps_grads: whether the script sees gradients behind the backward, for an optimizer of its own.
    """

    def __init__(
        self, capture: Capture, module: nn.Module, *, zero3: bool = False, both: bool = False, keeps_grads: bool = True
    ) -> None:
        self.capture, self.module = capture, module
        self.slices: list[MicroBatchSlice] = []
        self.steps: list[int] = []
        self._zero3, self._both, self._keeps_grads = zero3, both, keeps_grads
        self._next = len(capture.recorder.out.op)
        self._open: MicroBatchSlice | None = None
        self._grads: dict[int, torch.Tensor] = {}
        self._stashed: dict[int, torch.Tensor] = {}
        self._hooks: _Hooks | None = None
        self.params = list(module.parameters())
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        self._attach(zero3)
        capture.spans.on_backward_begin.append(self._backward_begins)
        capture.spans.on_backward_end.append(self._backward_ends)
        capture.spans.on_step.append(self._stepped)

    def _attach(self, zero3: bool) -> None:
        if self._hooks is not None:
            self._hooks.detach()
        self._hooks = _Hooks(self, self.module, zero3=zero3)
        self.capture.functions.as_zero3(zero3)

    # ---- one micro batch ---------------------------------------------------------------------------------------------
    def _before(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        recorder = self.capture.recorder
        if recorder.phase == 2:
            return
        now = self._open
        if not torch.is_grad_enabled():
            if now is not None:
                now.others += 1
            return
        if now is not None:
            now.forwards += 1
            return
        other = self._both and len(self.slices) == 2
        zero3 = self._zero3 != other
        if self._hooks is not None and len(self.slices) in (2, 3) and self._both:
            self._attach(zero3)
        if not zero3:
            recorder.calls = CallTree()
        self.capture.functions.autocast_seen = None
        at = len(recorder.out.op)
        shapes = shapes_of({**{str(n): one for n, one in enumerate(args)}, **kwargs})
        now = MicroBatchSlice(self._next, at, zero3, shapes, trains=self.module.training)
        self._open = now
        recorder.mark(Mark.FORWARD_BEGIN)

    def _backward_begins(self) -> None:
        now, recorder = self._open, self.capture.recorder
        if now is None:
            return
        if now.backwards == 0:
            now.autocast = self.capture.functions.autocast_seen
            recorder.mark(Mark.FORWARD_END)
            now.backward = len(recorder.out.op)
            recorder.mark(Mark.BACKWARD_BEGIN)
        now.backwards += 1
        self._stashed = {}
        for index, param in enumerate(self.params):
            if param.grad is not None:
                self._stashed[index] = param.grad
                param.grad = None

    def gradient(self, index: int, param: torch.Tensor) -> None:
        """Take a parameter's complete gradient, which is the engine's from here on."""
        grad = param.grad
        if grad is None:
            return
        self.capture.recorder.gradient(index, grad)
        if self._keeps_grads:
            self._grads[index] = grad
        param.grad = None

    def _backward_ends(self) -> None:
        now, recorder = self._open, self.capture.recorder
        if now is not None:
            recorder.mark(Mark.BACKWARD_END)
            now.end = self._next = len(recorder.out.op)
            self.slices.append(now)
            self._open = None
        for index, grad in {**self._grads, **self._stashed}.items():
            self.params[index].grad = grad
        self._grads, self._stashed = {}, {}

    def _stepped(self) -> None:
        self._next = len(self.capture.recorder.out.op)
        self.steps.append(self._next)

    # ---- tapes -------------------------------------------------------------------------------------------------------
    @property
    def apart(self) -> list[int]:
        """The events at which the forwards of micro batches begin that were run in the other way."""
        return [one.forward for one in self.slices if one.zero3 != self._zero3]

    @property
    def accumulates(self) -> int:
        """Micro batches a step, as the script took them; 1 where it took no step."""
        if not self.steps or not self.slices:
            return 1
        last = self.steps[-1]
        return max(1, round(sum(one.end <= last for one in self.slices) / len(self.steps)))

    def recorded(self, *, zero3: bool) -> Recorded | None:
        """Return the tapes of one way to run the model; None where no micro batch ran so."""
        found = [(at, one) for at, one in enumerate(self.slices) if one.zero3 == zero3]
        if len(found) > 1:  # the first one also makes what is kept for all
            found = found[1:]
        if not found:
            return None
        sizes = sizes_on([alloc.size for alloc in self.capture.recorder.out.allocs], self._device)
        peaks = [self._peak(one, sizes) for _, one in found]
        largest = max(range(len(found)), key=lambda at: peaks[at])
        chosen = [largest]
        for at in range(largest - 1, -1, -1):
            if found[at][1].shapes not in [found[one][1].shapes for one in chosen] and len(chosen) <= _BEFORE:
                chosen.insert(0, at)
        tapes = [self._tape(found[at][0]) for at in chosen]
        return Recorded(tapes, [found[at][1].shapes for at in chosen])

    @property
    def _device(self) -> KernelDevice:
        card = self.capture.job.card
        return KernelDevice(card.multiprocessors)

    def _peak(self, one: MicroBatchSlice, sizes: list[int]) -> int:
        out = self.capture.recorder.out
        now = peak = 0
        inside: set[int] = set()
        for op, arg in zip(out.op[one.begin : one.end], out.arg[one.begin : one.end], strict=True):
            if op == Op.ALLOC:
                inside.add(arg)
                now += sizes[arg]
                peak = max(peak, now)
            elif op == Op.FREE and arg in inside:
                now -= sizes[arg]
        return peak

    def _tape(self, at: int) -> Tape:
        config = getattr(self.module, "config", None)
        vocab = getattr(config, "vocab_size", 0)
        assembler = Assembler(self.module, [], TraceOptions(), vocab if isinstance(vocab, int) else 0)
        program, _ = assembler.program([TracePoint(1, 1)], [self._recording(at)], (1, 0), (1, 0))
        return assembler.tape([program], [tuple(p.shape) for p in self.params])

    def _recording(self, at: int) -> Recording:
        """Return a slice as a recording of its own."""
        out, one = self.capture.recorder.out, self.slices[at]
        found = Recording()
        numbers: dict[int, int] = {}
        graded: set[int] = set()
        output = self._lets_go(at)
        for place in range(one.begin, one.end):
            op, arg, aux = out.op[place], out.arg[place], out.aux[place]
            if place == output:
                found.add(Op.MARK, Mark.OUTPUT)
            if op == Op.ALLOC:
                numbers[arg] = len(found.allocs)
                found.allocs.append(out.allocs[arg])
                found.add(Op.ALLOC, numbers[arg])
            elif op == Op.FREE:
                if arg in numbers and arg not in graded:
                    found.add(Op.FREE, numbers.pop(arg))
            elif op == Op.GRAD:
                if aux in numbers and aux not in graded:
                    graded.add(aux)
                    found.add(Op.GRAD, arg, numbers[aux])
                else:  # a view of a block that another parameter's gradient has
                    number = len(found.allocs)
                    param = self.params[arg]
                    found.allocs.append(_like(out.allocs[aux], param.numel() * param.element_size()))
                    found.add(Op.ALLOC, number)
                    found.add(Op.GRAD, arg, number)
            elif op in _HOOKS or (op == Op.MARK and arg <= max(Mark)):
                found.add(Op(op), arg, aux)
        for storage, number in numbers.items():
            if storage not in graded:
                found.add(Op.FREE, number)
        return found

    def _lets_go(self, at: int) -> int:
        """The event of a slice's forward at which the loop lets go of what it kept of the one before; -1 if it does not there.

        What counts is the largest storage that outlives its micro batch.
        """
        if at == 0:
            return -1
        out, one, before = self.capture.recorder.out, self.slices[at], self.slices[at - 1]
        alive: set[int] = set()
        for op, arg in zip(out.op[before.begin : one.begin], out.arg[before.begin : one.begin], strict=True):
            if op == Op.ALLOC:
                alive.add(arg)
            elif op == Op.FREE:
                alive.discard(arg)
        graded = {out.aux[place] for place in range(before.begin, before.end) if out.op[place] == Op.GRAD}
        freed = [
            place
            for place in range(one.forward, one.backward)
            if out.op[place] == Op.FREE and out.arg[place] in alive - graded and out.allocs[out.arg[place]].phase
        ]
        if not freed:
            return -1
        sizes = sizes_on([out.allocs[out.arg[place]].size for place in freed], self._device)
        return freed[max(range(len(freed)), key=lambda n: sizes[n])]

    def keeps_after(self, at: int) -> bool:
        """Whether the loop keeps anything larger than a number of a micro batch beyond its backward."""
        one = self.slices[at]
        return self._lets_go(at) >= 0 or self._kept_bytes(one) > 4096

    def _kept_bytes(self, one: MicroBatchSlice) -> int:
        """Bytes of a slice's own storages that are there when its backward has ended, gradients and batch aside."""
        out = self.capture.recorder.out
        alive: set[int] = set()
        graded: set[int] = set()
        for place in range(one.forward, one.end):
            op, arg = out.op[place], out.arg[place]
            if op == Op.ALLOC:
                alive.add(arg)
            elif op == Op.FREE:
                alive.discard(arg)
            elif op == Op.GRAD:
                graded.add(out.aux[place])
        later = one.end
        while later < len(out.op) and later < one.end + 64 and out.op[later] != Op.ALLOC:  # goes with the backward's return
            if out.op[later] == Op.FREE:
                alive.discard(out.arg[later])
            later += 1
        return sum(sizes_on([out.allocs[arg].size for arg in alive - graded], self._device))


def _like(alloc: Any, size: int) -> Any:
    from dataclasses import replace

    return replace(alloc, size=size)
