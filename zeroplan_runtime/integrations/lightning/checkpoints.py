"""Checkpoints under Lightning: a folder with the engine's own checkpoint, which carries what Lightning saves beside tensors.

So one rename makes both visible, and one checksum covers both. The folder's name is the one that Lightning chose, such as
``epoch=1-step=20.ckpt``.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zeroplan.core.errors import BadInput
from zeroplan_runtime.checkpoint.planners import states_in_files
from zeroplan_runtime.checkpoint.save import HeldCheckpoint
from zeroplan_runtime.engine import Engine
from zeroplan_runtime.parameter_values import write_value

TAG = "checkpoint"
#: The client state's key for what Lightning saves, as bytes that ``torch.save`` made.
LIGHTNING = "lightning"
#: What the engine saves in place of Lightning.
_OF_ENGINE = ("state_dict", "optimizer_states")


def save_folder(source: Engine | HeldCheckpoint, folder: Path, checkpoint: Mapping[str, Any]) -> None:
    """Saves the engine's checkpoint, or what is held of one, with the rest of Lightning's. Every rank must call it.

    Raises:
        BadInput: as :meth:`zeroplan_runtime.Engine.save_checkpoint`.
    """
    stream = io.BytesIO()
    torch.save({key: value for key, value in checkpoint.items() if key not in _OF_ENGINE}, stream)
    client = {LIGHTNING: stream.getvalue()}
    if isinstance(source, HeldCheckpoint):
        source.save(folder, TAG, client)
    else:
        source.save_checkpoint(folder, TAG, client, save_latest=False)


class AfterFit:
    """The checkpoint of a fit that has ended, in host memory, or the reason why there is none."""

    def __init__(self, engine: Engine) -> None:
        self._held: HeldCheckpoint | None = None
        self._why = went("the optimizer's states, in files, went with the engine when fit() ended")
        self._module = engine.module
        if not any(states_in_files(unit) for unit in engine.model_states.units):
            try:
                self._held = HeldCheckpoint(engine)
            except BadInput as fault:
                self._why = fault

    def is_whole(self) -> None:
        """Notes the module's parameters, which are whole now."""
        self._known = self._now()

    def _now(self) -> list[tuple[int, int]]:
        return [(param.data_ptr(), param._version) for param in self._module.parameters()]

    def save(self, folder: Path, checkpoint: Mapping[str, Any]) -> None:
        """Saves as :func:`save_folder`.

        Raises:
            BadInput: where no checkpoint could be held, or the module is another than fit left.
        """
        if self._held is None:
            raise self._why
        if self._now() != self._known:
            raise went("parameters were changed since fit() ended")
        save_folder(self._held, folder, checkpoint)


def went(what: str) -> BadInput:
    """The error for a whole checkpoint after fit that cannot be: `what` says why."""
    remedy = "save while it runs, by ModelCheckpoint(save_last=True), or give weights_only=True"
    return BadInput(what, where="trainer.save_checkpoint", remedy=remedy)


def load_folder(engine: Engine, folder: Path, *, trains: bool, weights_only: bool | None) -> dict[str, Any]:
    """Loads a folder that :func:`save_folder` wrote on any number of ranks, at any stage. Every rank must call it.

    Args:
        engine: the engine.
        folder: the folder.
        trains: load the optimizer's states and the counts, too.
        weights_only: refuse objects whose loading could run code, as ``torch.load`` does. By default they are loaded, as
            Lightning does with its own files.

    Returns:
        What Lightning saved beside the parameters and the optimizer's states.

    Raises:
        BadInput: when the folder holds no checkpoint of this strategy, or it is damaged.
    """
    _, client = engine.load_checkpoint(folder, TAG, load_lr_scheduler_states=False, load_module_only=not trains)
    return decode(client, folder, weights_only=weights_only)


def decode(client: Mapping[str, Any], folder: Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Returns what Lightning saved, from a checkpoint's client state.

    Raises:
        BadInput: when it holds nothing of Lightning's.
    """
    if LIGHTNING not in client:
        raise BadInput("was not saved by Lightning", where=str(folder), remedy="use engine.load_checkpoint()")
    found: dict[str, Any] = torch.load(io.BytesIO(client[LIGHTNING]), map_location="cpu", weights_only=bool(weights_only))
    return found


@torch.no_grad()
def load_state_dict(engine: Engine, state: Mapping[str, torch.Tensor], *, strict: bool) -> None:
    """Writes whole parameters and buffers into the engine's shards and masters. Every rank must call it with the same.

    Raises:
        BadInput: if `strict`, when names are missing or unknown; and for a tensor of another shape.
    """
    module = engine.module
    params = dict(module.named_parameters(remove_duplicate=False))
    buffers: dict[str, torch.Tensor] = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    }
    missing = [name for name in (*params, *buffers) if name not in state]
    unknown = [name for name in state if name not in params and name not in buffers]
    if strict and (missing or unknown):
        what = "; ".join(
            f"{len(names)} {word}, such as {names[0]!r}"
            for word, names in (("missing", missing), ("unknown", unknown))
            if names
        )
        raise BadInput(f"has other names than the module: {what}", where="state_dict", remedy="set strict_loading = False")
    written: set[int] = set()
    for name, value in state.items():
        into = params.get(name, buffers.get(name))
        if into is None:
            continue
        if into.shape != value.shape:
            raise BadInput(f"{name!r} has shape {tuple(value.shape)}, not {tuple(into.shape)}", where="state_dict")
        if name in buffers:
            into.copy_(value)
        elif id(into) not in written:
            written.add(id(into))
            write_value(engine, params[name], value.to(engine.device))
