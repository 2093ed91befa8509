"""What is replaced in torch: compilation, and archives, which are kept as shapes."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_map_only

from zeroplan.capturing import places
from zeroplan.capturing.hooks.imports import changes
from zeroplan.capturing.recorder import StoppedError
from zeroplan.capturing.source import user_line
from zeroplan.capturing.spans import SAVE

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture

#: What was saved, in order: objects whose tensors have no memory. Files hold the place in this list.
_saved: list[Any] = []
_TOKEN = b"zeroplan capture, shapes alone: "


def install(capture: Capture) -> None:
    """Replace ``torch.compile``, ``torch.save`` and ``torch.load``."""
    recorder, functions = capture.recorder, capture.functions

    def compiled(model: Any = None, **options: Any) -> Any:
        if model is getattr(sys.modules.get("torch.nn.attention.flex_attention"), "flex_attention", sys):
            from zeroplan.capturing.kernels.flex_attention import compiled_flex_attention

            return compiled_flex_attention
        capture.leave_out("torch.compile", "unknown", "torch.compile is called; figures are of the code run eagerly")
        if isinstance(model, torch.nn.Module):
            model.__dict__["_orig_mod"] = model  # scripts unwrap it before they save
        return (lambda inner: inner) if model is None else model

    torch.compile = compiled
    recurrent: Any = torch.nn.RNNBase

    def flattened(module: Any) -> None:
        if any(places.on_gpu(weight) for weight in module._flat_weights):
            says = "cuDNN's recurrent kernels have no rule; figures are of torch's own, which keep every time step"
            capture.leave_out("recurrent layers", "unknown", says)

    recurrent.flatten_parameters = flattened
    _data_parallel()
    _module_to()
    enabled = torch.is_autocast_enabled

    def autocasts(*kind: str) -> bool:
        return enabled(*("cuda" if one == "meta" else one for one in kind))  # of kernels' rules, which run on meta tensors

    home: Any = torch
    home.is_autocast_enabled = autocasts
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
        token = _TOKEN + b"%08d" % len(_saved)
        _saved.append(tree_map_only(torch.Tensor, kept, obj))
        if hasattr(f, "write"):
            f.write(token)
        else:
            with open(f, "wb") as file:
                file.write(token)

    def loaded(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        at = _saved_at(f)
        if at is None:
            return _without_weights(capture, load, f, map_location, args, kwargs)
        onto = map_location if isinstance(map_location, (str, torch.device)) else None
        held = _saved[at]
        return held if onto is None else tree_map_only(torch.Tensor, lambda one: one.to(onto, copy=True), held)

    _native_writers(capture)
    torch.save, torch.load = save, loaded
    torch.serialization.save, torch.serialization.load = save, loaded


def _native_writers(capture: Capture) -> None:
    """Let what torch writes by code of its own go to the temporary folder: scripted modules, and a profiler's trace."""
    import torch.profiler

    profiler: Any = torch.profiler.profile
    for home, name, at in ((torch.jit, "save", 1), (profiler, "export_chrome_trace", 1), (profiler, "export_stacks", 1)):
        changes(home)
        setattr(home, name, _redirected(capture, getattr(home, name), at))


def _redirected(capture: Capture, own: Any, at: int) -> Any:
    """A function whose argument number `at` is the path of a file that it writes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        words, overlay = list(args), capture.overlay
        if overlay is not None and len(words) > at and isinstance(words[at], (str, os.PathLike)):
            words[at] = overlay.writing(words[at])
        return own(*words, **kwargs)

    return call


def _module_to() -> None:
    """``model.to(0)``: torch names the GPU by a number only where it finds one."""
    plain: Any = torch.nn.Module
    changes(plain)
    own = plain.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (torch.device("cuda", args[0]), *args[1:])
        return own(self, *args, **kwargs)

    plain.to = to


def _data_parallel() -> None:
    """``nn.DataParallel`` over one GPU calls the model as it is; over several it copies it in every step, by no rule here."""
    plain: Any = torch.nn.DataParallel
    changes(plain)

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if len(self.device_ids) > 1:
            says = f"nn.DataParallel over {len(self.device_ids)} GPUs has no rule: start one process a GPU, or give --gpus 1"
            raise StoppedError(says, user_line())
        device = torch.device("cuda", self.device_ids[0]) if self.device_ids else None
        if device is not None:
            inputs, kwargs = tree_map_only(torch.Tensor, lambda one: one.to(device), (inputs, kwargs))
        return self.module(*inputs, **kwargs)

    plain.forward = forward


#: Bytes from which a checkpoint's tensor is taken for a weight, of which the shape alone is read.
_WEIGHT = 1 << 20


def _without_weights(capture: Capture, load: Any, f: Any, onto: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Read an archive without its large tensors' values, which stay on the disk."""
    with torch._C.DisableTorchFunction():
        try:
            held = load(f, "cpu", *args, **{**kwargs, "mmap": isinstance(f, (str, os.PathLike))})
        except (RuntimeError, ValueError):  # no zip archive
            held = load(f, "cpu", *args, **{**kwargs, "mmap": None})

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.numel() * tensor.element_size() >= _WEIGHT:
            with capture.recorder.wanting("host"), torch.no_grad():
                tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=places.META)
        return tensor.to(onto) if isinstance(onto, (str, torch.device)) else tensor

    return tree_map_only(torch.Tensor, placed, held)


def _saved_at(f: Any) -> int | None:
    """The place of what was saved in a file, or in an open one, which is then as before; None for another file's."""
    if hasattr(f, "read"):
        begin = f.tell()
        text = f.read(len(_TOKEN) + 8)
        f.seek(begin)
    else:
        with open(f, "rb") as file:
            text = file.read(len(_TOKEN) + 8)
    return int(text[len(_TOKEN) :]) if text.startswith(_TOKEN) else None


def _groups_on_gpu() -> None:
    """Let torch's multi-tensor loops see the device that a script sees, of which they choose their kernels by."""
    import torch.nn.utils.clip_grad
    import torch.optim.optimizer
    import torch.utils._foreach_utils

    foreach: Any = torch.utils._foreach_utils

    own = foreach._group_tensors_by_device_and_dtype

    def grouped(tensors: Any, with_indices: bool = False) -> Any:
        found = own(tensors, with_indices)
        named: dict[Any, Any] = {}
        for (device, dtype), group in found.items():
            first = next((one for one in group[0][0] if one is not None), None)
            named[(device if first is None else places.device_of(first), dtype)] = group
        return named

    homes: tuple[Any, ...] = (foreach, sys.modules["torch.optim.optimizer"], torch.nn.utils.clip_grad)
    for home in homes:
        if hasattr(home, "_group_tensors_by_device_and_dtype"):
            home._group_tensors_by_device_and_dtype = grouped


def install_safetensors(capture: Capture, module: Any) -> None:
    """Keep shapes in place of files."""

    def save_file(tensors: dict[str, Any], filename: Any, metadata: Any = None) -> None:
        torch.save(tensors, filename)

    load = module.load_file

    def load_file(filename: Any, device: Any = "cpu") -> dict[str, Any]:
        if _saved_at(filename) is not None:
            return torch.load(filename, map_location=device)  # type: ignore[no-any-return]
        return load(filename, device="cpu")  # type: ignore[no-any-return]

    module.save_file, module.load_file = save_file, load_file
    module.save_model = lambda model, filename, metadata=None, force_contiguous=True: torch.save(model.state_dict(), filename)
