"""What is replaced in torch: compilation, and archives, which are kept as shapes."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_map_only

from zeroplan.capturing import places
from zeroplan.capturing.spans import SAVE

if TYPE_CHECKING:
    from zeroplan.capturing.session import Capture

#: What was saved, by real path: objects whose tensors have no memory.
_saved: dict[str, Any] = {}


def install(capture: Capture) -> None:
    """Replace ``torch.compile``, ``torch.save`` and ``torch.load``."""
    recorder, functions = capture.recorder, capture.functions

    def compiled(model: Any = None, **options: Any) -> Any:
        capture.leave_out("torch.compile", "unknown", "torch.compile is called; figures are of the code run eagerly")
        return (lambda inner: inner) if model is None else model

    torch.compile = compiled
    clear = torch.clear_autocast_cache

    def cleared() -> None:
        functions.drop_casts()
        clear()

    torch.clear_autocast_cache = cleared
    checkpoint: Any = torch.utils.checkpoint
    if hasattr(checkpoint, "_allowed_determinism_checks_to_fns"):  # the device that it reads depends on who asks
        checkpoint._allowed_determinism_checks_to_fns["default"] = lambda one: {"shape": one.shape, "dtype": one.dtype}
    _groups_on_gpu()
    load = torch.load

    def kept(value: torch.Tensor) -> torch.Tensor:
        if not places.without_memory(value):
            return value.detach().clone()
        with recorder.wanting("host"), torch.no_grad():
            return value.detach().to(value.dtype, copy=True)

    def save(obj: Any, f: Any, *_: Any, **__: Any) -> None:
        capture.spans.enter(SAVE)
        if isinstance(f, (str, os.PathLike)):
            path = os.path.abspath(os.fspath(f))
            _saved[path] = tree_map_only(torch.Tensor, kept, obj)
            with open(f, "wb") as file:
                file.write(b"zeroplan capture: shapes alone")
        elif hasattr(f, "write"):
            f.write(b"zeroplan capture: shapes alone")

    def loaded(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        path = os.path.abspath(os.fspath(f)) if isinstance(f, (str, os.PathLike)) else ""
        if path not in _saved:
            with torch._C.DisableTorchFunction():
                return load(f, *args, map_location="cpu", **kwargs)
        onto = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
        return tree_map_only(torch.Tensor, lambda one: one.to(onto, copy=True), _saved[path])

    torch.save, torch.load = save, loaded
    torch.serialization.save, torch.serialization.load = save, loaded


def _groups_on_gpu() -> None:
    """Let torch's multi-tensor loops see the device that a script sees, of which they choose their kernels by."""
    import torch.nn.utils.clip_grad
    import torch.optim.optimizer
    from torch.utils import _foreach_utils

    own = _foreach_utils._group_tensors_by_device_and_dtype

    def grouped(tensors: Any, with_indices: bool = False) -> Any:
        found = own(tensors, with_indices)
        named: dict[Any, Any] = {}
        for (device, dtype), group in found.items():
            first = next((one for one in group[0][0] if one is not None), None)
            named[(device if first is None else places.device_of(first), dtype)] = group
        return named

    for home in (_foreach_utils, sys.modules["torch.optim.optimizer"], torch.nn.utils.clip_grad):
        if hasattr(home, "_group_tensors_by_device_and_dtype"):
            home._group_tensors_by_device_and_dtype = grouped


def install_safetensors(capture: Capture, module: Any) -> None:
    """Keep shapes in place of files."""

    def save_file(tensors: dict[str, Any], filename: Any, metadata: Any = None) -> None:
        torch.save(tensors, filename)

    load = module.load_file

    def load_file(filename: Any, device: Any = "cpu") -> dict[str, Any]:
        path = os.path.abspath(os.fspath(filename))
        if path in _saved:
            return torch.load(path, map_location=device)  # type: ignore[no-any-return]
        return load(filename, device="cpu")  # type: ignore[no-any-return]

    module.save_file, module.load_file = save_file, load_file
    module.save_model = lambda model, filename, metadata=None, force_contiguous=True: torch.save(model.state_dict(), filename)
