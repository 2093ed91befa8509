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


def is_gpu(device: Any) -> bool:
    """Return whether what a script passes as a device names a GPU."""
    if isinstance(device, bool) or device is None:
        return False
    if isinstance(device, int):
        return True
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"
