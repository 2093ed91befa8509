"""Records what a script allocates and frees on its GPU, in order, whichever code does it.

The rules of CUDA's kernels are those of :class:`zeroplan.trace.recorder.StorageRecorder`, which this mode extends to a whole
script: tensors on the host are left alone, and values that the script reads back from the GPU are invented and noted.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from zeroplan.capturing import places
from zeroplan.capturing.branches import changes_nothing, goes_on
from zeroplan.capturing.places import META, on_gpu, put_on_host
from zeroplan.capturing.result import EMPTY_CACHE, WORKSPACE
from zeroplan.capturing.source import CodeLine, asking_line, deciding_line, user_line
from zeroplan.engines.process import CONTEXT
from zeroplan.tape.expanded import Op
from zeroplan.trace import kernels
from zeroplan.trace.known import KnownValues
from zeroplan.trace.recorder import StorageRecorder

_aten = torch.ops.aten
_COPY = _aten._to_copy.default
_READ = _aten._local_scalar_dense.default
_COPY_INTO = _aten.copy_.default
_ADDMM = _aten.addmm.default
_PACK = _aten._pack_padded_sequence.default  # reads the lengths, which the host holds
#: Operators that call cuBLAS, into a tensor that is there (``out=``), too.
_PRODUCTS = frozenset((_aten.mm, _aten.bmm, _aten.addmm, _aten.addmm_, _aten.baddbmm, _aten.baddbmm_, _aten.addbmm,
                       _aten.addbmm_, _aten.mv, _aten.addmv, _aten.addmv_, _aten.dot))  # fmt: skip
#: Reductions of which a script asks whether all is well.
_ALL = frozenset((_aten.all.default, _aten.all.dim, _aten.all.dims, _aten._is_all_true.default))
#: Operators of logic, and the operand that alone decides the result.
_DECISIVE = {_aten.bitwise_or.Tensor: True, _aten.logical_or.default: True, _aten.bitwise_and.Tensor: False,
             _aten.logical_and.default: False, _aten.mul.Tensor: False}  # fmt: skip
#: Turns after which a loop that waits for a value is ended, whatever it does.
_MOST_TURNS = 200
#: Blocks are whole multiples of this.
_GRAIN = 512
#: Bytes up to which invented floats are written.
_MOST_ONES = 1 << 20
#: Operators that change their arguments alone, with no result and nothing allocated on CUDA (``AmpKernels.cu``,
#: ``FusedAdamKernel.cu`` and its like).
_IN_PLACE_ALONE = frozenset(("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_", "_fused_adam_",
                             "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"))  # fmt: skip


class StoppedError(BaseException):
    """The script cannot go on so. No ``except Exception`` of the script's holds it.

    Args:
        why: one line for the user.
        line: where the script is.
    """

    def __init__(self, why: str, line: CodeLine | None = None) -> None:
        super().__init__(why)
        self.why, self.line = why, line


class ScriptRecorder(StorageRecorder):
    """The dispatch mode that a script runs in; see the module."""

    def __init__(self) -> None:
        super().__init__((), known=KnownValues())
        self._wanted: str | None = None
        self._among_gpu = True  # whether the last operator over tensors without values ran on the GPU
        self.inside = 0  # functions of GPU tensors that run
        self.invented_reads: dict[CodeLine, str] = {}
        self.open_branches: dict[CodeLine, bool] = {}
        self.labels: dict[int, str] = {}
        self.lines: dict[CodeLine | None, int] = {}
        self.line_of = array("q")
        self._workspaces: set[int] = set()
        self.bf16 = False
        self.peak_since = 0
        self.waits: Callable[[], bool] = lambda: False  # whether steps are still wanted of a loop that asks the GPU
        self.ended: dict[CodeLine, None] = {}  # loops whose end was invented
        self._turns: dict[CodeLine, int] = {}
        self._process = os.getpid()
        self.on_fork: Callable[[CodeLine | None], None] = lambda _: None  # called where a forked process puts a tensor there

    @property
    def live(self) -> tuple[int, int]:
        """Bytes that the script has on the GPU now, as torch counts them, and the most since :meth:`forget_peak`.

        Blocks whose size the GPU decides are not counted.
        """
        sizes, alive, most = [alloc.size for alloc in self.out.allocs], 0, 0
        for at, (op, arg) in enumerate(zip(self.out.op, self.out.arg, strict=True)):
            if op in (Op.ALLOC, Op.FREE) and isinstance(size := sizes[arg], int):
                alive += (1 if op == Op.ALLOC else -1) * (-(-size // _GRAIN) * _GRAIN)
            most = max(most, alive) if at >= self.peak_since else alive
        return alive, max(alive, most)

    def empty_cache(self) -> None:
        """Note that blocks nobody uses go back to the device."""
        self.out.add(EMPTY_CACHE, 0)  # type: ignore[arg-type]

    @property
    def in_use(self) -> int:
        """Bytes of the GPU that NVML counts as the process's, once it has anything there."""
        return CONTEXT + self.live[0] if self.out.op else 0

    def forget_peak(self, *_: Any) -> None:
        """Count the most from here on."""
        self.peak_since = len(self.out.op)

    # ---- where results go --------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def wanting(self, place: str) -> Iterator[None]:
        """Within this context what is made without a source, or copied, lies on the ``gpu``, the ``host`` or ``meta``."""
        before, self._wanted = self._wanted, place
        try:
            yield
        finally:
            self._wanted = before

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's values where they are known."""
        assert self._known is not None
        with torch._C.DisableTorchFunction():
            return self._known.of(tensor)

    def set_value(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """Give a tensor values, or unknown ones, as a collective does."""
        assert self._known is not None
        if value is None:
            self._known.forget(tensor)
            return
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            if tensor.device.type == "meta":
                self._known.keep(tensor, value.detach().to(tensor.dtype))
            else:
                tensor.copy_(value)

    def invented(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a real tensor of invented values: ones, and of a mask all."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            if tensor.is_floating_point() and tensor.numel() * tensor.element_size() > _MOST_ONES:
                return torch.zeros(tensor.shape, dtype=tensor.dtype)  # the system gives pages as they are written
            return torch.ones(tensor.shape, dtype=tensor.dtype)

    # ---- operators ---------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, types, args, kwargs or {})

    def _run(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = _tensors(args, kwargs)
        bare = [one for one in tensors if one.device.type == "meta"]
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":  # named where no function mode is on, as in a handled function
            with self.wanting("gpu"):
                return self._run(func, types, args, {**kwargs, "device": META})
        made_bare = device is not None and device.type == "meta"
        if not bare and not made_bare:
            return func(*args, **kwargs)
        if _is_made_of_others(func):
            with self:  # of tensors of inference mode: autograd, which takes such operators apart, is not on
                return func.decompose(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name in _IN_PLACE_ALONE:
            return args[0] if name == "_amp_update_scale_" else None
        if func is _READ:
            return self._read(args[0])
        gpu = self._on_gpu(func, bare)
        if bare:
            self._among_gpu = gpu
        if func is _COPY_INTO and args[0].device.type != "meta":
            return self._copied_back(args)
        if func is _COPY and device is not None and device.type == "cpu":
            value = self.value_of(args[0])
            return self.invented(args[0]).to(kwargs.get("dtype") or args[0].dtype) if value is None else value.clone()
        if gpu and self._wanted is None and len(tensors) > 1:
            places.refuse_mixed(func, args, tensors)
        if len(bare) < len(tensors) and func is not _PACK:
            args, kwargs = _all_bare(args, kwargs, keep=func is _COPY)
        if not gpu:
            return self._on_host(func, args, kwargs)
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if func.overloadpacket in _PRODUCTS:
                self._multiplied(func, args)
            self._decided(func, args, out)
            return out
        except NotImplementedError as error:
            text = " ".join(str(error).split())[:120]
            raise StoppedError(f"no rule knows what {func} allocates on a GPU ({text})", user_line()) from None

    def _multiplied(self, func: Any, args: Any) -> None:
        """Take a thread's workspace at its first product: cuBLAS's, or cuBLASLt's where a bias is added in the kernel."""
        self.bf16 = self.bf16 or args[0].dtype is torch.bfloat16
        biased = func is _ADDMM and args[0].dim() == 1
        index = (2 if biased else 0) + (self.phase == 2)
        for one in (index, index % 2):
            if one not in self._workspaces:
                self._workspaces.add(one)
                self.out.add(WORKSPACE, one)  # type: ignore[arg-type]

    def _on_gpu(self, func: Any, bare: list[torch.Tensor]) -> bool:
        if self._wanted is not None and (func is _COPY or not bare or func in _FACTORIES_LIKE):
            return self._wanted == "gpu"
        if not bare:  # made within an operator of torch's own, where its tensors are
            return self.inside > 0 or (self.phase == 2 and self._among_gpu)
        return any(on_gpu(one) for one in bare)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self._last = func
        place = META if self._wanted == "meta" else places.CPU

        def tagged(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "meta" and int(tensor.untyped_storage()._cdata) not in self._ids:
                put_on_host(tensor, place)
            return tensor

        return tree_map_only(torch.Tensor, tagged, out)

    def _copied_back(self, args: Any) -> Any:
        """Copy into a real tensor: known values, else what it holds stays."""
        value = self.value_of(args[1])
        if value is not None:
            args[0].copy_(value)
        return args[0]

    def _read(self, tensor: torch.Tensor) -> Any:
        """The value of a number that the script reads from the GPU: the known one, or an invented one that is noted."""
        value = self.value_of(tensor)
        if value is not None:
            return value.item()
        if tensor.dtype is not torch.bool:
            return 1.0 if tensor.is_floating_point() else 1
        holds = self._last in _ALL
        line, decides = user_line(), deciding_line()
        onward = None if decides is None else goes_on(decides)
        if onward is not None and decides is not None:  # a loop that waits for a value
            self._turns[decides] = self._turns.get(decides, 0) + 1
            if self.waits() and self._turns[decides] < _MOST_TURNS:
                return onward
            self.ended.setdefault(decides)
            return not onward
        if line is not None:
            self.invented_reads.setdefault(line, f"a condition on values of the GPU is taken to be {str(holds).lower()}")
        if decides is not None and not changes_nothing(decides, holds):
            self.open_branches.setdefault(decides, holds)
        return holds

    def _decided(self, func: Any, args: Any, out: Any) -> None:
        """Note the result of an operator of logic that one of its operands decides, whatever the other is."""
        decisive = _DECISIVE.get(func)
        known = self._known
        if decisive is None or known is None or known.of(out) is not None:
            return
        for one in args[:2]:
            value = known.of(one) if isinstance(one, torch.Tensor) else None
            if value is not None and value.shape == out.shape and bool((value.bool() == decisive).all()):
                known.keep(out, torch.full(out.shape, decisive, dtype=out.dtype))

    # ---- events ------------------------------------------------------------------------------------------------------
    def _new(self, *args: Any, **kwargs: Any) -> int:
        line = asking_line()
        if os.getpid() != self._process:
            self.on_fork(user_line())
        self.line_of.append(self.lines.setdefault(line, len(self.lines)))
        return super()._new(*args, **kwargs)

    def gradient(self, param: int, tensor: torch.Tensor) -> None:
        """Record that a parameter's gradient is complete; unlike a tape's, it is freed where the script frees it."""
        self.out.add(Op.GRAD, param, self.ident(tensor))

    def label(self, tensor: Any, buffer: str) -> None:
        """Name what a GPU tensor's storage is."""
        if on_gpu(tensor):
            ident = self.ident(tensor)
            if ident >= 0:
                self.labels[ident] = buffer


#: Operators that make a tensor like another, which ``device=`` may put elsewhere.
_FACTORIES_LIKE = frozenset(
    getattr(_aten, name).default
    for name in ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros",
                 "new_ones", "new_full", "new_empty_strided")
)  # fmt: skip


def _tensors(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments, which hold lists one level deep."""
    found: list[torch.Tensor] = []
    for one in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, (list, tuple)):
            found += [inner for inner in one if isinstance(inner, torch.Tensor)]
    return found


@lru_cache(maxsize=4096)
def _is_made_of_others(func: Any) -> bool:
    """Return whether an operator is nothing but calls of others."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite))


def _all_bare(args: Any, kwargs: Any, *, keep: bool) -> tuple[Any, Any]:
    """Return the arguments with tensors of the host, single numbers aside, in the form of those without memory."""

    def bare(tensor: torch.Tensor) -> torch.Tensor:
        if keep or tensor.device.type == "meta" or not tensor.dim():
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return tree_map_only(torch.Tensor, bare, args), tree_map_only(torch.Tensor, bare, kwargs)


def _norms(args: Any, kwargs: Any) -> kernels.Sizes:
    """Partial norms of every 65,536 elements of each tensor, as many as the largest has (``ForeachReduceOp.cu``)."""
    tensors = args[0]
    chunks = max((-(-one.numel() // _CHUNK) for one in tensors), default=0)
    return [4 * len(tensors) * chunks]


#: Elements that a block of a multi-tensor kernel takes (``MultiTensorApply.cuh``, kChunkSize).
_CHUNK = 65_536
kernels.BEFORE.setdefault(_aten._foreach_norm.Scalar, _norms)
