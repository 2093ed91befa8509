"""A checkpoint's tensors, whole, read by one process without an engine."""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan.core.optimizer_row import RuntimeKernel
from zeroplan.core.optimizers import OPTIMIZERS, variant_of
from zeroplan_runtime import kernels
from zeroplan_runtime.checkpoint import atomic_files
from zeroplan_runtime.checkpoint.agreement import as_line
from zeroplan_runtime.checkpoint.manifest import SaveId, read_manifest, read_state
from zeroplan_runtime.checkpoint.planners import ShardLoadPlanner, StateShard
from zeroplan_runtime.checkpoint.reader import VerifyingReader
from zeroplan_runtime.checkpoint.typed_json import decode
from zeroplan_runtime.checkpoint.writer import Unwatched


class WholeCheckpoint:
    """One checkpoint of this runtime.

    Args:
        folder: the folder of all checkpoints.
        tag: the checkpoint's name; by default the one in the file ``latest``.

    Attributes:
        path: its folder.
        state: what it holds beside tensors.
        shapes: the parameters' and buffers' shapes, by name; tied parameters under their first name.
        tied: the other names of tied parameters, each with its first.

    Raises:
        BadInput: when there is none, or it is damaged.
    """

    def __init__(self, folder: str | Path, tag: str | None = None) -> None:
        found = atomic_files.find(Path(folder), tag)
        if found is None:
            raise BadInput("holds no checkpoint", where=str(folder), remedy="give the folder that save_checkpoint() was given")
        self.path = found
        self.state: dict[str, Any] = read_state(found)
        if self.state.get("mesh"):
            raise BadInput(
                "it holds parts of the model, by ranks of " + " and ".join(self.state["mesh"]),
                where=str(found),
                remedy="load it into an engine on such a mesh, and call save_16bit_model() or module_state_dict() there",
            )
        model = self.state.get("model")
        if not isinstance(model, dict):
            raise BadInput(
                "was saved before checkpoints held their tensors' shapes",
                where=str(found),
                remedy="load it into an engine and save it again",
            )
        self.shapes: dict[str, list[int]] = model["shapes"]
        self.tied: dict[str, str] = model["tied"]
        nobody: Any = Unwatched()
        save = SaveId(self.state["save"], self.state["step"])
        self._reader = VerifyingReader(found, save, read_manifest(found, self.state), nobody)
        metadata = self._reader.metadata.state_dict_metadata
        self._stored = {name: kind for name, kind in metadata.items() if isinstance(kind, TensorStorageMetadata)}

    def require_frozen(self) -> None:
        """Refuse a checkpoint that was saved without the frozen parameters.

        Raises:
            BadInput: it lacks them.
        """
        if self.state["model"]["without_frozen"]:
            raise BadInput("the checkpoint lacks the frozen parameters", where=str(self.path), remedy="save all of them")

    def steps(self) -> dict[str, torch.Tensor]:
        """The steps that the optimizer has taken with each parameter, fp32: all but those in which it was frozen."""
        applied, missed = self.state["progress"]["applied"], self.state.get("missed_steps", {})
        return {name: torch.tensor(float(applied - missed.get(name, 0))) for name in self.shapes}

    def names(self, kind: str) -> Iterator[str]:
        """The names of the parameters or buffers of which it has a tensor of `kind`, in the model's order."""
        return (name for name in self.shapes if f"{kind}/{name}" in self._stored or self._is_empty(kind, name))

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """The dtype in which a tensor is stored."""
        stored = self._stored.get(f"{kind}/{name}")
        return torch.get_default_dtype() if stored is None else stored.properties.dtype

    def read(self, kind: str, name: str) -> torch.Tensor:
        """A tensor, whole, in its shape; `kind` is ``master``, ``param``, ``buffer`` or a state such as ``optim.exp_avg``."""
        shape = self.shapes[name]
        if self._is_empty(kind, name):
            return torch.empty(shape)
        flat = self.read_flat(kind, name)
        if flat.numel() != math.prod(shape):
            raise BadInput(f"'{kind}/{name}' has {flat.numel()} elements and the shape {shape}", where=str(self.path))
        return flat.view(shape)

    def read_flat(self, kind: str, name: str) -> torch.Tensor:
        """A tensor as it is stored, 1-D: codes or scales of quantised states have other lengths than the parameter."""
        key = f"{kind}/{name}"
        stored = self._stored[key]
        whole = torch.empty(stored.size, dtype=stored.properties.dtype)
        planner = ShardLoadPlanner([StateShard.of(key, whole.numel(), 0, whole)])
        planner.set_up_planner({}, self._reader.metadata)
        self._reader.require_pieces(planner.create_local_plan().items)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process needs none
            load({}, storage_reader=self._reader, planner=planner, no_dist=True)
        return whole

    def optimizer_states(self, name: str) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Yield each state of a trained parameter: its name in torch's optimizers, and what reads it, whole: fp32, in the
        parameter's shape. A state that is quantised is read as the values that it stands for.
        """
        row = OPTIMIZERS.get(self.state["optimizer"] or "")
        if row is None:
            return
        for group in self.typed("groups"):  # momentum and other options of any group add states
            row = variant_of(row, {key: value for key, value in group.items() if value})
        kernel = row.runtime
        for state in row.states:
            kind = state.buffer.value
            if state.buffer is Buffer.OPTIM_SCALE or f"{kind}/{name}" not in self._stored:
                continue
            quantised = kernel is not None and kernel.quantised
            yield (
                state.state_key,
                partial(self._decoded, kernel, state.buffer, name) if kernel and quantised else partial(self.read, kind, name),
            )

    def _decoded(self, kernel: RuntimeKernel, buffer: Buffer, name: str) -> torch.Tensor:
        kept, which = kernels.block_format(kernel.bits, kernel.block), int(buffer is Buffer.OPTIM_EXP_AVG_SQ)
        shape = self.shapes[name]
        codes, scales = (self.read_flat(kind, name) for kind in (buffer.value, Buffer.OPTIM_SCALE.value))
        values = kernels.decode(codes, scales.view(-1, 2)[:, which], kept, (kept.first, kept.second)[which])
        return values[: math.prod(shape)].view(shape)

    def typed(self, key: str) -> Any:
        """Returns a part of the state that keeps its Python types: ``groups``, ``schedule`` or ``client_state``."""
        return decode(self.state[key])

    def _is_empty(self, kind: str, name: str) -> bool:
        return math.prod(self.shapes[name]) == 0 and kind == "param"


def run_conversion(
    convert: Callable[[str, str, str | None], object], description: str | None, arguments: list[str] | None
) -> None:
    """Run the command line of a conversion, which ends in one line where it cannot be.

    Args:
        convert: given the folder of all checkpoints, the new folder, and the checkpoint's name or None.
        description: what its help says.
        arguments: its words; None takes the process's own.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint_dir", help="the folder that save_checkpoint() was given")
    parser.add_argument("output_dir", help="the new folder")
    parser.add_argument("-t", "--tag", default=None, help="the checkpoint's name; the latest by default")
    given = parser.parse_args(arguments)
    try:
        convert(given.checkpoint_dir, given.output_dir, given.tag)
    except (BadInput, OSError, RuntimeError) as fault:  # torch.save raises the last where a disk is full
        line = as_line(fault, given.output_dir)
        parser.exit(line.exit_code, f"{line}\n")
