"""What a script asks of tensors, answered as if those on the meta device lay on a GPU; see Note [Tensors without memory].

Attention, dropout and autocast are those of :class:`zeroplan.trace.functions.CudaFunctions`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from zeroplan.capturing import places
from zeroplan.capturing.places import META, device_of, gpu, is_gpu, on_gpu, put_on_host, without_memory
from zeroplan.capturing.recorder import ScriptRecorder
from zeroplan.trace.functions import CudaFunctions

_Tensor = torch.Tensor


class ScriptFunctions(CudaFunctions):
    """The function mode that a script runs in."""

    def __init__(self, recorder: ScriptRecorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.autocast_seen: torch.dtype | None = None
        self.on_parameter_shape: Callable[[], None] | None = None  # called where the shape of a parameter is read

    def __enter__(self) -> Any:
        return TorchFunctionMode.__enter__(self)

    def __exit__(self, *exc: Any) -> None:
        TorchFunctionMode.__exit__(self, *exc)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        kwargs = kwargs or {}
        if handler is not None:
            return handler(self, func, args, kwargs)
        if "device" in kwargs or "generator" in kwargs:
            return self._placed(func, args, dict(kwargs))
        first = args[0] if args else None
        if not isinstance(first, _Tensor) and isinstance(first, (list, tuple)) and first:
            first = first[0]
        if not isinstance(first, _Tensor):  # as of einsum, which names its axes first
            first = next((value for value in (*args, *kwargs.values()) if isinstance(value, _Tensor)), None)
        if on_gpu(first):
            return self.on_device(func, types, args, kwargs)
        return func(*args, **kwargs)

    def on_device(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of GPU tensors, under the script's autocast."""
        self.autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        self.autocast_seen = self.autocast or self.autocast_seen
        self.recorder.inside += 1
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            self.recorder.inside -= 1

    def _placed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function that names a device."""
        device = kwargs.get("device")
        if is_gpu(device):
            kwargs["device"] = META
            kwargs.pop("generator", None)
            kwargs.pop("pin_memory", None)
            with self.recorder.wanting("gpu"):
                return func(*args, **kwargs)
        if any(on_gpu(one) for one in args) and device is None:
            kwargs.pop("generator", None)
            if "device" in kwargs:
                kwargs.pop("device")
            return self.on_device(func, (), args, kwargs)
        if device is not None and torch.device(device).type == "cpu" and args and without_memory(args[0]):
            kwargs["device"] = META  # as zeros_like of a parameter, kept on the host
            with self.recorder.wanting("host"):
                return func(*args, **kwargs)
        if device is not None and torch.device(device).type == "meta":
            ours = sys._getframe(2).f_globals.get("__name__", "").startswith("zeroplan.trace")  # a kernel's rule, in a backward
            with self.recorder.wanting("gpu" if ours else "meta"):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Within this context the mode is on, also inside a call of torch's that it has handled."""
        if any(mode is self for mode in _get_current_function_mode_stack()):
            yield
        else:
            with self:
                yield

    def as_zero3(self, on: bool) -> None:
        """Run linear layers as DeepSpeed's stage 3 does, or as torch does."""
        self._zero3 = on

    # ---- moves -------------------------------------------------------------------------------------------------------
    def to_gpu(self, tensor: torch.Tensor, dtype: torch.dtype | None = None, *, copy: bool = False) -> torch.Tensor:
        """Copy a tensor to the GPU, as ``Tensor.to`` does."""
        dtype = dtype or tensor.dtype
        if on_gpu(tensor):
            return tensor.to(dtype, copy=copy)
        with self.recorder.wanting("gpu"):
            if without_memory(tensor):
                return tensor.to(dtype, copy=True)
            return tensor.to(device=META, dtype=dtype)

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Copy a tensor to the host: with its values where they are known, else invented ones; unknown floats get none."""
        dtype = dtype or tensor.dtype
        if not on_gpu(tensor):
            return tensor.to(dtype)
        value = self.recorder.value_of(tensor)
        if value is not None:
            return value.detach().to(dtype)
        if tensor.is_floating_point():
            with self.recorder.wanting("host"):
                return tensor.to(dtype, copy=True)
        return self.recorder.invented(tensor).to(dtype)


def _shape(mode: ScriptFunctions, func: Any, args: Any, _kwargs: Any) -> Any:
    if mode.on_parameter_shape is not None and isinstance(args[0], torch.nn.Parameter):
        mode.on_parameter_shape()
    return func(*args)


def _device(_mode: ScriptFunctions, _func: Any, args: Any, _kwargs: Any) -> Any:
    return device_of(args[0])


def _is(kind: str) -> Callable[..., bool]:
    def answer(_mode: ScriptFunctions, _func: Any, args: Any, _kwargs: Any) -> bool:
        return device_of(args[0]).type == kind

    return answer


def _get_device(_mode: ScriptFunctions, _func: Any, args: Any, _kwargs: Any) -> int:
    device = device_of(args[0])
    index: int = device.index or 0
    return index if device.type == "cuda" else -1


def _to(mode: ScriptFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, device, dtype = args[0], kwargs.get("device"), kwargs.get("dtype")
    for one in args[1:]:
        if isinstance(one, torch.dtype):
            dtype = one
        elif isinstance(one, _Tensor):
            device, dtype = device_of(one), one.dtype
        elif isinstance(one, (str, torch.device)) or (isinstance(one, int) and not isinstance(one, bool)):
            device = one
    if isinstance(kwargs.get("other"), _Tensor):
        device, dtype = device_of(kwargs["other"]), kwargs["other"].dtype
    layout = {"memory_format": kwargs["memory_format"]} if kwargs.get("memory_format") is not None else {}
    copy = bool(kwargs.get("copy", False))
    if is_gpu(device):
        moved = mode.to_gpu(tensor, dtype, copy=copy)
        return moved.to(**layout) if layout else moved
    target = None if device is None else torch.device(device)
    if target is not None and target.type == "cpu" and without_memory(tensor) and device_of(tensor).type != "cpu":
        return mode.to_host(tensor, dtype)
    if target is not None and target.type == "meta":
        with mode.recorder.wanting("meta"):
            return tensor.to(device=META, dtype=dtype or tensor.dtype, copy=device_of(tensor).type != "meta" or copy)
    if without_memory(tensor):
        return tensor.to(dtype or tensor.dtype, copy=copy, **layout)
    return func(*args, **kwargs)


def _cuda(mode: ScriptFunctions, _func: Any, args: Any, _kwargs: Any) -> Any:
    return mode.to_gpu(args[0])


def _cpu(mode: ScriptFunctions, _func: Any, args: Any, _kwargs: Any) -> Any:
    return mode.to_host(args[0])


def _type(mode: ScriptFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, kind = args[0], args[1] if len(args) > 1 else kwargs.get("dtype")
    if kind is None:
        name = {torch.float32: "FloatTensor", torch.float16: "HalfTensor", torch.bfloat16: "BFloat16Tensor",
                torch.int64: "LongTensor", torch.int32: "IntTensor", torch.bool: "BoolTensor"}.get(tensor.dtype)  # fmt: skip
        return f"torch.cuda.{name}" if on_gpu(tensor) and name else func(*args, **kwargs)
    if isinstance(kind, torch.dtype):
        return tensor.to(kind)
    text = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
    dtype = {"FloatTensor": torch.float32, "HalfTensor": torch.float16, "BFloat16Tensor": torch.bfloat16,
             "LongTensor": torch.int64, "IntTensor": torch.int32,
             "BoolTensor": torch.bool}[text.rpartition(".")[2]]  # fmt: skip
    return mode.to_gpu(tensor, dtype) if "cuda" in text else mode.to_host(tensor, dtype)


def _type_as(_mode: ScriptFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    """``type_as``: to the device of the other tensor, too."""
    other = args[1] if len(args) > 1 else kwargs["other"]
    return args[0].to(device=device_of(other), dtype=other.dtype)


def _same(_mode: ScriptFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    """Leave a tensor as it is: pinning moves none to a GPU."""
    return args[0]


def _nothing(_mode: ScriptFunctions, func: Any, args: Any, kwargs: Any) -> None:
    return None


def _no(_mode: ScriptFunctions, func: Any, args: Any, kwargs: Any) -> bool:
    return False


def _values(mode: ScriptFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    """``numpy`` and ``tolist``: of a tensor without memory with known or invented values."""
    tensor = args[0]
    if not without_memory(tensor):
        return func(*args, **kwargs)
    value = mode.recorder.value_of(tensor)
    if value is None:
        value = mode.recorder.invented(tensor)
    return func(value.detach(), *args[1:], **kwargs)


def _format(_mode: ScriptFunctions, func: Any, args: Any, kwargs: Any) -> str:
    """A number in a text, as ``f"{loss:.3f}"`` has it, which torch reads of no tensor without memory."""
    tensor = args[0]
    if not without_memory(tensor) or tensor.dim() or device_of(tensor).type == "meta":
        return str(func(*args, **kwargs))
    return format(tensor.item(), *args[1:])


def _tensor(mode: ScriptFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.tensor`` and ``as_tensor`` of numbers: made on the host, then copied, so that values are known."""
    device = kwargs.get("device")
    if device is None and len(args) > 2 and isinstance(args[2], (str, torch.device)):
        device = args[2]
    if isinstance(args[0] if args else None, _Tensor) and without_memory(args[0]):
        made = args[0].detach().clone() if func is torch.tensor else args[0]
        return made.to(device=device or device_of(made), dtype=kwargs.get("dtype") or made.dtype)
    plain = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    if is_gpu(device):
        requires = plain.pop("requires_grad", False)
        with torch._C._DisableTorchDispatch():
            made = func(*args[:2], **plain, device=places.CPU)
        return mode.to_gpu(made).requires_grad_(requires)
    return func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})


def _data_ptr(_mode: ScriptFunctions, func: Any, args: Any, kwargs: Any) -> int:
    """An address that tells storages apart."""
    tensor = args[0]
    if without_memory(tensor):
        offset: int = tensor.storage_offset() * tensor.element_size()
        return int(tensor.untyped_storage()._cdata) + offset
    address: int = func(*args, **kwargs)
    return address


_Properties: Any = torch.Tensor
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _Properties.device.__get__: _device,
    _Properties.shape.__get__: _shape,
    _Properties.is_cuda.__get__: _is("cuda"),
    _Properties.is_cpu.__get__: _is("cpu"),
    _Properties.is_meta.__get__: _is("meta"),
    _Tensor.get_device: _get_device,
    _Tensor.to: _to,
    _Tensor.cuda: _cuda,
    _Tensor.cpu: _cpu,
    _Tensor.type: _type,
    _Tensor.type_as: _type_as,
    _Tensor.pin_memory: _same,
    _Tensor.is_pinned: _no,
    _Tensor.record_stream: _nothing,
    _Tensor.numpy: _values,
    _Tensor.tolist: _values,
    _Tensor.__array__: _values,
    _Tensor.data_ptr: _data_ptr,
    _Tensor.__format__: _format,
    torch.tensor: _tensor,
    torch.as_tensor: _tensor,
}

__all__ = ["ScriptFunctions", "gpu", "put_on_host"]
