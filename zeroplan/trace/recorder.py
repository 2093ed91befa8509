"""Records what a model's forward and backward allocate, without a GPU and without weights.

Note [Meta tracing]
    The model is on the meta device, where operators compute only shapes and strides. A dispatch mode sees every operator that
    autograd issues, and follows *storages*, not tensors: a storage is allocated when an operator returns one that was not
    seen before, and freed when its last reference dies, which is when eager CUDA frees the block. Allocations within CUDA
    kernels are added by :mod:`zeroplan.trace.kernels`.

Note [Accumulating in place]
    Where two gradients of one tensor meet, autograd adds the later into the earlier in place if nothing else refers to it,
    but never while a dispatch mode is on. The recorder sees such an addition and makes the same test. Where autograd would
    add in place, the result gets the earlier gradient's storage id.
"""

from __future__ import annotations

import bisect
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zeroplan.tape.expanded import Mark, Op
from zeroplan.trace import kernels, remembered, selection
from zeroplan.trace.kernels import Size
from zeroplan.trace.known import KnownValues
from zeroplan.trace.ranks import receives

_aten = torch.ops.aten
_PRIM_DEVICE = torch.ops.prim.device.default
_ADD = _aten.add.Tensor
#: Files of Python code between an operator and the mode.
_MACHINERY = (__file__, torch.utils._python_dispatch.__file__)
#: The namespace of collectives that return new tensors.
_COLLECTIVES = "_c10d_functional"
#: Waits for a collective and returns its output, of which the meta device makes another tensor.
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_META = torch.device("meta")
_READ = _aten._local_scalar_dense.default
#: The value of a number that is read back from the meta device. Models ask whether *all* tokens are unpadded or not packed
#: (yes), and whether a random number is below a layer's drop probability (no).
_READ_AS = {torch.bool: False, torch.float32: 1.0, torch.float16: 1.0, torch.bfloat16: 1.0}
_TRUE_OF = (_aten.all.default, _aten.all.dim, _aten.all.dims, _aten.eq.Scalar)
#: The phase that begins with each mark: 0 is none, 1 the forward, 2 the backward.
_PHASE_BEHIND = {
    Mark.FORWARD_BEGIN: 1,
    Mark.FORWARD_END: 1,
    Mark.BACKWARD_BEGIN: 2,
    Mark.WEIGHTS_BEGIN: 2,
    Mark.BACKWARD_END: 0,
}
#: Out-of-place operators that stand for an in-place one in these nodes while a dispatch mode is on.
_IN_PLACE_IN_EAGER = {
    ("IndexBackward0", _aten.index_put.default),
    ("GatherBackward0", _aten.scatter_add.default),
    ("IndexSelectBackward0", _aten.index_add.default),
    ("CumsumBackward0", _aten.index_put.default),
}


@dataclass(slots=True)
class RawAlloc:
    """One recorded allocation. `last` is the size of the last dimension, which tells logits."""

    size: Size
    module: int
    phase: int  # 0 before the forward, 1 forward, 2 backward
    recomputed: bool
    last: int
    cast_of_param: bool = False
    collective: bool = False


@dataclass(slots=True)
class Recording:
    """Events in order, as parallel lists (see :class:`zeroplan.tape.expanded.Op`), and each storage's allocation."""

    op: list[int] = field(default_factory=list)
    arg: list[int] = field(default_factory=list)
    aux: list[int] = field(default_factory=list)
    allocs: list[RawAlloc] = field(default_factory=list)

    def add(self, op: Op, arg: int, aux: int = 0) -> None:
        """Append one event."""
        self.op.append(op)
        self.arg.append(arg)
        self.aux.append(aux)


class CallTree:
    """The module calls that made each autograd node, by the nodes' sequence numbers.

    A call made the nodes numbered from its begin to its end, and backward runs nodes from the highest number down, so the
    number of the node that runs tells which calls backward is inside. Nodes that accumulate gradients have no place.
    """

    _NO_PLACE = 1 << 62

    def __init__(self) -> None:
        self._calls: list[tuple[int, int, int]] = []  # begin, -end, module
        self._parents: list[int] = []
        self._sorted = True
        self._inside: list[tuple[int, int, int]] = []
        self._at = self._NO_PLACE

    def add(self, begin: int, end: int, module: int) -> None:
        """Record a call of `module` that made the nodes from `begin` to before `end`."""
        if end > begin:
            self._calls.append((begin, -end, module))
            self._sorted = False

    def _sort(self) -> None:
        self._calls.sort()
        self._parents = []
        open_calls: list[int] = []
        for i, (begin, _, _) in enumerate(self._calls):
            while open_calls and -self._calls[open_calls[-1]][1] <= begin:
                open_calls.pop()
            self._parents.append(open_calls[-1] if open_calls else -1)
            open_calls.append(i)
        self._sorted = True

    def moved(self, number: int) -> Iterator[tuple[bool, int]]:
        """Yield the modules left (False) and entered (True) on the way to node `number`; -1 leaves all."""
        if number == self._at or number >= self._NO_PLACE:
            return
        self._at = number
        if not self._sorted:
            self._sort()
        chain: list[tuple[int, int, int]] = []
        i = bisect.bisect_right(self._calls, (number, 1, 0)) - 1 if number >= 0 else -1
        while i >= 0:
            if -self._calls[i][1] > number:
                chain.append(self._calls[i])
            i = self._parents[i]
        chain.reverse()
        keep = 0
        while keep < min(len(chain), len(self._inside)) and chain[keep] == self._inside[keep]:
            keep += 1
        for call in reversed(self._inside[keep:]):
            yield False, call[2]
        for call in chain[keep:]:
            yield True, call[2]
        self._inside = chain


def _reads_on_host(made: torch.Tensor, kwargs: Any) -> bool:
    return bool(made.device.type == kwargs.get("device", _META).type == "cpu")


class StorageRecorder(TorchDispatchMode):
    """The dispatch mode. Use as a context manager around inputs, forward and backward."""

    def __init__(
        self, outside: Sequence[torch.Tensor], *, unwrapped: tuple[type, ...] = (), known: KnownValues | None = None
    ) -> None:
        """Start with `outside`: parameters and registered buffers, which are not the tape's.

        Args:
            outside: the tensors that are not followed.
            unwrapped: classes of tensors that hold others, such as DTensor. What they run on those is recorded.
            known: the values of the batch's tensors, where the model reads them; see Note [Known values].
        """
        super().__init__()
        self._known = known
        self.out = Recording()
        self.phase = 0
        self.modules: list[int] = []
        self._last: Any = None
        self._unwrapped = unwrapped
        self._wrapped_add = False
        self._ids: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._holders: list[int] = []
        self._engine_owned: set[int] = set()
        self._grad_when_dropped: dict[int, int] = {}
        self._param_storages: set[int] = set()
        for tensor in outside:
            self._param_storages.add(self._follow(tensor, -1))
        self._sole_tensor, self._sole_storage = _uncontended_counts()
        self.calls: CallTree | None = None

    # ---- storages ----------------------------------------------------------------------------------------------------
    def _follow(self, tensor: torch.Tensor, ident: int) -> int:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        self._ids[key] = ident

        def dead(_: object, key: int = key) -> None:
            self._refs.pop(key, None)
            self._release(self._ids.pop(key, -1))

        self._refs[key] = weakref.ref(storage, dead)
        return key

    def _release(self, ident: int) -> None:
        if ident < 0:
            return
        self._holders[ident] -= 1
        if self._holders[ident] == 0 and ident in self._grad_when_dropped:
            self.out.add(Op.GRAD, self._grad_when_dropped[ident], ident)
        elif self._holders[ident] == 0 and ident not in self._engine_owned:
            self.out.add(Op.FREE, ident)

    def _new(self, size: Size, last: int = 0, *, cast: bool = False, collective: bool = False) -> int:
        ident = len(self.out.allocs)
        self.out.allocs.append(
            RawAlloc(
                size,
                self.modules[-1] if self.modules else -1,
                self.phase,
                self.phase == 2 and torch.is_grad_enabled(),
                last,
                cast,
                collective,
            )
        )
        self._holders.append(1)
        self.out.add(Op.ALLOC, ident)
        return ident

    def _take(self, sizes: kernels.Sizes) -> list[int]:
        """Allocate blocks in order; free those of an inner list at once."""
        held = []
        for size in sizes:
            if isinstance(size, list):
                self._give_back(self._take(size))
            elif size != 0:
                held.append(self._new(size))
        return held

    def _give_back(self, idents: list[int]) -> None:
        for ident in reversed(idents):
            self._release(ident)

    def ident(self, tensor: torch.Tensor) -> int:
        """The storage's id; -1 for a storage that is not followed."""
        return self._ids.get(int(tensor.untyped_storage()._cdata), -1)

    # ---- operators -----------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._unwrapped and any(issubclass(kind, self._unwrapped) for kind in types):
            # Its class runs the operator on the tensors inside, and those calls come here again.
            self._wrapped_add = func is _ADD
            return NotImplemented
        if func is _PRIM_DEVICE:
            return func(*args)
        if func is _WAIT:
            return args[0]
        if func is _READ and args[0].device.type == "meta":
            return self._read(args[0])
        kwargs = kwargs or {}
        self._last = func
        known = self._known
        made = known.compute(func, args, kwargs) if known is not None else None
        if made is not None and func is _aten._to_copy.default and _reads_on_host(made, kwargs):
            return made
        if self.phase == 2 and self.calls is not None:
            self._locate(self.calls)
        heir = self._heir(func, args, kwargs)
        before, after = kernels.BEFORE.get(func), kernels.AFTER.get(func)
        held = self._take(before(args, kwargs)) if before is not None else []
        out = self._result(func, args, kwargs, made)
        with torch._C.DisableTorchFunction():  # else the trace's own mode is asked for each attribute that is read there
            self._follow_outputs(func, args, out, heir)
        if after is not None:
            self._give_back(self._take(after(args, kwargs, out)))
        self._give_back(held)
        return out

    def _read(self, tensor: torch.Tensor) -> Any:
        """The number that a program reads from a tensor without values: the known one, else one that lets it go on."""
        value = self._known.of(tensor) if self._known is not None else None
        if value is not None:
            return value.item()
        return True if self._last in _TRUE_OF else _READ_AS.get(tensor.dtype, 0)

    def _heir(self, func: Any, args: Any, kwargs: Any) -> int:
        """The storage into which the operator writes where eager would; -1 where it makes its own."""
        if self._unwrapped and func is _ADD and (self._wrapped_add or _called_by_python()):
            self._wrapped_add = False  # autograd adds no subclass of Tensor in place (input_buffer.cpp)
        elif self.phase == 2 and not torch.is_grad_enabled():
            return self._accumulated_into(func, args, kwargs)
        elif kernels.in_math_attention and func is _ADD:
            return self.ident(args[0])
        return -1

    def _result(self, func: Any, args: Any, kwargs: Any, made: Any) -> Any:
        """Run the operator on tensors without values; `made` is its output where the values are known."""
        known = self._known
        out = known.result(func, made) if known is not None else None
        if out is None:
            out = selection.result(func, args, known)
        if out is None:
            out = remembered.run(func, selection.arguments(func, args, known), kwargs)
        if known is not None:
            known.keep(out, made)
        return out

    def _follow_outputs(self, func: Any, args: Any, out: Any, heir: int) -> None:
        """Follow the storages that the operator made, as large as its kernel makes them."""
        patch = kernels.OUTPUT_BYTES.get(func)
        collective = func.namespace == _COLLECTIVES or receives()
        outputs = list(enumerate(out if isinstance(out, (tuple, list)) else (out,)))
        if func in kernels.REVERSED_OUTPUTS:
            outputs.reverse()
        for i, tensor in outputs:
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != "meta":
                continue
            storage = tensor.untyped_storage()
            if int(storage._cdata) in self._ids:
                continue
            size: Size = kernels.pending.pop() if kernels.pending else storage.nbytes()
            if patch is not None:
                size = patch(i, size, args)
            if size == 0:
                self._follow(tensor, -1)
            elif heir >= 0:
                self._holders[heir] += 1
                self._follow(tensor, heir)
            else:
                cast = func is _aten._to_copy.default and int(args[0].untyped_storage()._cdata) in self._param_storages
                self._follow(tensor, self._new(size, tensor.shape[-1] if tensor.dim() else 0, cast=cast, collective=collective))

    def _accumulated_into(self, func: Any, args: Any, kwargs: Any) -> int:
        """The storage that eager would have written into, or -1. See Note [Accumulating in place]."""
        if func is _ADD:
            old, new = args[0], args[1]
            if kwargs or not isinstance(new, torch.Tensor) or old.shape != new.shape or old.dtype != new.dtype:
                return -1
            if old._use_count() > self._sole_tensor or not torch.ops.aten.is_non_overlapping_and_dense.default(old):
                return -1
            if torch._C._storage_Use_Count(old.untyped_storage()._cdata) > self._sole_storage:
                return -1
            return self.ident(old)
        node = torch._C._current_autograd_node()
        if node is not None and (node.name(), func) in _IN_PLACE_IN_EAGER:
            return self.ident(args[0])
        return -1

    def _locate(self, calls: CallTree) -> None:
        """Record the modules that the backward has left and entered since the last operator."""
        node: Any = torch._C._current_autograd_node()  # None before the first
        if node is None:
            return
        for entered, module in calls.moved(node._sequence_nr()):
            if entered:
                self.out.add(Op.BWD_ENTER, module)
                self.modules.append(module)
            else:
                self.out.add(Op.BWD_EXIT, module)
                if self.modules and self.modules[-1] == module:
                    self.modules.pop()

    # ---- marks -----------------------------------------------------------------------------------------------------------
    def mark(self, mark: Mark) -> None:
        """Record a point of the micro batch, and set the phase."""
        if mark in (Mark.WEIGHTS_BEGIN, Mark.BACKWARD_END) and self.calls is not None:
            for _, module in self.calls.moved(-1):
                self.out.add(Op.BWD_EXIT, module)
        self.modules.clear()
        self.out.add(Op.MARK, mark)
        self.phase = _PHASE_BEHIND[mark]

    def gradient(self, param: int, tensor: torch.Tensor) -> None:
        """Record that a parameter's gradient is complete. From here on it belongs to the engine.

        Gradients of two parameters may be views of one block, as those of two tokens put before one sample's: the first has it.
        """
        ident = self.ident(tensor)
        if ident in self._engine_owned:
            ident = self._new(tensor.numel() * tensor.element_size())
        self._engine_owned.add(ident)
        self.out.add(Op.GRAD, param, ident)

    def gradient_when_dropped(self, param: int, tensor: torch.Tensor) -> None:
        """Let a parameter's gradient be the engine's as soon as nothing in the backward refers to it any more."""
        self._grad_when_dropped[self.ident(tensor)] = param


def _called_by_python() -> bool:
    """Return whether the operator that the mode sees is called by Python code within a backward, and not by autograd itself.

    DTensor runs some backwards in Python. What autograd adds up comes from the frame that has started the backward.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in _MACHINERY:
        frame = frame.f_back
    return frame.f_code.co_name != "_backward"


def _uncontended_counts() -> tuple[int, int]:
    """Measure the reference counts that a dispatch mode sees of a gradient that only autograd's buffer holds."""
    seen: list[tuple[int, int]] = []

    class CountReferences(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD and not torch.is_grad_enabled():
                seen.append((args[0]._use_count(), torch._C._storage_Use_Count(args[0].untyped_storage()._cdata)))
            return func(*args, **(kwargs or {}))

    x = torch.empty(2, device="meta", requires_grad=True)
    y = x * 2.0
    z = (y * 2.0) * (y * 3.0)
    with CountReferences():
        z.backward(torch.empty(2, device="meta"))
    return seen[0]
