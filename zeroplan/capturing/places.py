"""Where a tensor without memory lies, as the script sees it: on the GPU, or on the host.

Note [Tensors without memory]
    All tensors without memory are on torch's meta device, where operators compute shapes alone and autograd needs no GPU. One
    that the script has put on a GPU is told by its storage's not being in :data:`_on_host`; parameters of a module that the
    script has built on the CPU, and what is computed from them, are. Tensors that hold data (batches, counters) are real CPU
    tensors and keep their values.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

#: Storages without memory that lie on the host or on torch's own meta device, by their address.
_on_host: dict[int, torch.device] = {}
CPU, META = torch.device("cpu"), torch.device("meta")
#: The GPU of this rank, as the script names it.
_gpu = torch.device("cuda", 0)


def gpu() -> torch.device:
    """Return this process's current GPU."""
    return _gpu


def set_gpu(index: int) -> None:
    """Make another GPU the current one."""
    global _gpu
    _gpu = torch.device("cuda", index)


def raw_device(tensor: torch.Tensor) -> torch.device:
    """The device that torch itself sees."""
    with torch._C.DisableTorchFunction():
        return tensor.device


def device_of(tensor: torch.Tensor) -> torch.device:
    """The device that the script sees."""
    real = raw_device(tensor)
    if real.type != "meta":
        return real
    if not tensor.untyped_storage()._cdata:
        return _gpu
    return _on_host.get(int(tensor.untyped_storage()._cdata), _gpu)


def on_gpu(value: Any) -> bool:
    """Return whether a value is a tensor on the GPU."""
    return (
        isinstance(value, torch.Tensor)
        and raw_device(value).type == "meta"
        and int(value.untyped_storage()._cdata) not in _on_host
    )


def without_memory(value: Any) -> bool:
    """Return whether a value is a tensor without values, wherever it lies."""
    return isinstance(value, torch.Tensor) and raw_device(value).type == "meta"


def put_on_host(tensor: torch.Tensor, device: torch.device = CPU) -> torch.Tensor:
    """Let a tensor without memory lie on the host, or on the script's own meta device."""
    storage = tensor.untyped_storage()
    key = int(storage._cdata)
    if key not in _on_host:
        _on_host[key] = device
        weakref.finalize(storage, _on_host.pop, key, None)
    return tensor


#: Operators that take tensors of the host beside those of a GPU: copies, and lengths of sequences.
_MAY_MIX = frozenset(("copy_", "_to_copy", "set_", "_pack_padded_sequence", "_ctc_loss", "_ctc_loss_backward"))
#: Operators whose positions may lie on the host where the tensor is on the GPU (``TensorAdvancedIndexing.cpp``).
_INDEXED = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"))


#: Operators in which a single number of the host is a tensor like any other.
_EQUALS = frozenset(("cat", "stack"))


def refuse_mixed(func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
    """Raise what torch raises of an operator over tensors of a GPU and of the host; single numbers may lie there.

    Args:
        func: the operator, of which one tensor is on the GPU.
        args: its arguments.
        tensors: all tensors among them.

    Raises:
        RuntimeError: as on a machine with that GPU.
    """
    name = func._schema.name.partition("::")[2]
    if func.namespace != "aten" or name in _MAY_MIX or name.startswith("_foreach_") or "attention" in name:
        return
    if name in _INDEXED and on_gpu(args[0]):
        tensors = [one for one in args[2:3] if isinstance(one, torch.Tensor)]
    if any((one.dim() or name in _EQUALS) and device_of(one).type == "cpu" for one in tensors):
        raise RuntimeError(f"all tensors must be on the same device, but {name} has some on {_gpu} and some on cpu")


def is_gpu(device: Any) -> bool:
    """Return whether what a script passes as a device names a GPU."""
    if isinstance(device, bool) or device is None:
        return False
    if isinstance(device, int):
        return True
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"
