"""Checkpoints of plain torch (FSDP2, DDP): ``torch.distributed.checkpoint`` of a model's and an optimizer's state dict.

``python -m zeroplan_runtime.checkpoint.dcp CHECKPOINTS OUTPUT`` writes one of a checkpoint of this runtime, which
``torch.distributed.checkpoint.load`` reads into ``{"model": …, "optim": …}``, the state dicts that ``get_state_dict`` gives, on
any number of ranks. :func:`load_dcp_checkpoint` reads one into an engine, whatever its state dicts were called.

Note [Names in a checkpoint of torch]
    A state dict is stored flat: a parameter under ``<prefix><name>``, a state of it under ``<prefix>state.<name>.<state>``.
    What stands before is the program's own: ``model.`` and ``optim.`` here, ``app.model.`` in torch's tutorial, nothing in
    torchtitan, a folder each in accelerate. So a prefix is the one under which every parameter of the engine's model is found.
    Source: torch 2.13, distributed/checkpoint/state_dict.py and _nested_dict.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import OPTIMIZERS
from zeroplan_runtime.checkpoint import atomic_files
from zeroplan_runtime.checkpoint.foreign import TrainingCounts, WantedTensors, load_whole
from zeroplan_runtime.checkpoint.manifest import METADATA
from zeroplan_runtime.checkpoint.reader import unpickled_metadata
from zeroplan_runtime.checkpoint.whole import WholeCheckpoint, run_conversion
from zeroplan_runtime.engine_parts import EngineParts
from zeroplan_runtime.parameter_states import MASTER

_STEP = "step"


def to_dcp(checkpoint_dir: str | Path, output_dir: str | Path, tag: str | None = None) -> Path:
    """Write a checkpoint of plain torch from one of this runtime; one tensor at a time is in memory.

    Parameters are the fp32 masters. Learning rates and other hyperparameters are in ``optim.param_groups``.

    Args:
        checkpoint_dir: the folder of all checkpoints.
        output_dir: the new folder.
        tag: the checkpoint's name; by default the one in the file ``latest``.

    Raises:
        BadInput: when there is no checkpoint, it is damaged, or lacks its frozen parameters.
        OSError, RuntimeError: when the disk is full or fails; nothing has the new folder's name then.
    """
    checkpoint = WholeCheckpoint(checkpoint_dir, tag)
    checkpoint.require_frozen()
    steps = checkpoint.steps()
    stored: dict[str, _LazyTensor] = {}
    for kind in ("master", "param", "buffer"):
        for name in checkpoint.names(kind):
            size, dtype = checkpoint.shapes[name], checkpoint.dtype(kind, name)
            stored[f"model.{name}"] = _LazyTensor(
                torch.empty(size, dtype=dtype, device="meta"), partial(checkpoint.read, kind, name)
            )
    stored |= {f"model.{name}": stored[f"model.{first}"] for name, first in checkpoint.tied.items()}
    defaults = _defaults(checkpoint.state["optimizer"])
    groups = [{**defaults, **group, "params": []} for group in checkpoint.typed("groups")]
    for name in checkpoint.names("master"):
        groups[checkpoint.state["model"]["groups"].get(name, 0)]["params"].append(name)
        shape = torch.empty(checkpoint.shapes[name], device="meta")
        states = {key: _LazyTensor(shape, read) for key, read in checkpoint.optimizer_states(name)}
        counted = {_STEP: _LazyTensor(torch.empty((), device="meta"), steps[name].clone)} if states else {}
        stored |= {f"optim.state.{name}.{key}": value for key, value in (states | counted).items()}
    final = Path(output_dir)
    name = atomic_files.require_tag(final.name, str(final))
    folder = atomic_files.begin(final.parent, name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process needs none
        plan: dict[str, Any] = {key: one.shape for key, one in stored.items()} | {"optim.param_groups": groups}
        save(plan, storage_writer=FileSystemWriter(folder), planner=_LazyPlanner(stored), no_dist=True)
    atomic_files.finish(final.parent, name)
    return final


def _defaults(optimizer: str | None) -> dict[str, Any]:
    """Return the options of torch's own optimizer, which a load asks for one by one; none where torch has no such optimizer."""
    row = OPTIMIZERS.get(optimizer or "")
    kind = None if row is None or row.torch is None else getattr(torch.optim, row.torch.name, None)
    if kind is None:
        return {}
    made = kind([torch.zeros(1, 1)], **{} if row is None or row.torch is None else row.torch.params)
    return {key: value for key, value in made.param_groups[0].items() if key != "params"}


@dataclass(frozen=True, slots=True)
class _LazyTensor:
    """A tensor on the meta device, and what reads its values."""

    shape: torch.Tensor
    read: Callable[[], torch.Tensor]


class _LazyPlanner(DefaultSavePlanner):
    """Plans a save of tensors on the meta device, and reads each when its turn comes."""

    def __init__(self, stored: dict[str, _LazyTensor]) -> None:
        super().__init__()
        self._stored = stored

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what is stored under a name."""
        one = self._stored.get(index.fqn)
        return super().lookup_object(index) if one is None else one.read().to(one.shape.dtype)


def load_dcp_checkpoint(engine: EngineParts, *folders: str | Path, load_optimizer_states: bool = True) -> int:
    """Load a checkpoint of plain torch into an engine of any stage and number of ranks. Every rank must call it.

    Learning rates, other hyperparameters and the loss scale stay the engine's own: they are pickled, and reading them could run
    code.

    Args:
        engine: the engine.
        folders: the checkpoint's folder, or those of model and optimizer.
        load_optimizer_states: load the optimizer's states, too.

    Returns:
        The steps that the optimizer has taken; 0 without its states.

    Raises:
        BadInput: on every rank, when one finds a tensor missing, damaged or of another shape; the engine is as it was before,
            unless the disk fails in between.
    """
    where = str(folders[0]) if folders else "folders"
    wanted = WantedTensors.of(engine, where, optimizer_states=load_optimizer_states)
    paths = [Path(folder) for folder in folders]
    found = load_whole(
        engine,
        wanted,
        lambda: _TorchCheckpoint(paths, wanted),
        lambda checkpoint: TrainingCounts.of(checkpoint.steps),
        where=where,
        name=where,
    )
    return max(found.steps.values(), default=0)


class _TorchReader(FileSystemReader):
    """Reads tensors of one folder, whose metadata may name nothing but what torch's writer puts there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = unpickled_metadata(folder / METADATA, (folder / METADATA).read_bytes())
        stored = self._metadata.state_dict_metadata
        self.tensors = {name: kind for name, kind in stored.items() if isinstance(kind, TensorStorageMetadata)}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata."""
        self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class _TorchCheckpoint:
    """The tensors of a checkpoint; see :class:`~zeroplan_runtime.checkpoint.foreign.WholeTensors`.

    Attributes:
        steps: those that each parameter has taken.

    Raises:
        BadInput: when one that is wanted is not there, or has another shape.
    """

    def __init__(self, folders: list[Path], wanted: WantedTensors) -> None:
        self._home: dict[str, _TorchReader] = {}
        for folder in folders:
            if not (folder / METADATA).is_file():
                raise BadInput(
                    "is no checkpoint of torch.distributed.checkpoint",
                    where=str(folder),
                    remedy=f"give the folder that has the file {METADATA}",
                )
            reader = _TorchReader(folder)
            self._home |= dict.fromkeys(reader.tensors, reader)
        self._where = " and ".join(map(str, folders)) or "folders"
        every = {**wanted.trained, **wanted.frozen}
        shapes = {name: param.shape for name, param in every.items()}
        self._model = self._prefix(shapes, "parameter", lambda key: ".state." not in key)
        keys = [key for key in wanted.keys if key != MASTER]
        of_states = {f"{name}.{key}": shapes[name] for name in wanted.trained for key in keys}
        self._optimizer = self._prefix(of_states, "optimizer state", lambda key: "state." in key)
        self.steps = self._steps(wanted) if keys else {}

    def state(self, name: str, key: str) -> torch.Tensor:
        """Return a trained parameter or a state of it."""
        return self._read(self._model + name if key == MASTER else f"{self._optimizer}{name}.{key}")

    def frozen(self, name: str) -> torch.Tensor:
        """Return a parameter that is not trained."""
        return self._read(self._model + name)

    def buffer(self, name: str) -> torch.Tensor | None:
        """Return a buffer; None where the checkpoint has none of that name."""
        return self._read(self._model + name) if self._model + name in self._home else None

    def _read(self, key: str) -> torch.Tensor:
        stored = self._home[key].tensors[key]
        value = torch.empty(stored.size, dtype=stored.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank reads for itself
            load({key: value}, storage_reader=self._home[key], no_dist=True)
        return value

    def _prefix(self, wanted: dict[str, torch.Size], what: str, may_be: Callable[[str], bool]) -> str:
        """Find what stands before each name. See Note [Names in a checkpoint of torch]."""
        if not wanted:
            return ""
        first, remedy = next(iter(wanted)), "build the model that was saved"
        begins = {key.removesuffix(first) for key in self._home if key == first or key.endswith(f".{first}")}
        able = [begin for begin in sorted(begins) if may_be(begin + first)]
        if not able:
            raise BadInput(f"holds no {what} {first!r}", where=self._where, remedy=remedy)
        faults = {begin: fault for begin in able if (fault := self._fault(begin, wanted))}
        fitting = [begin for begin in able if begin not in faults]
        if len(fitting) > 1:
            raise BadInput(
                f"holds {what}s under {_listed(fitting)}", where=self._where, remedy="give a folder with one of them"
            )
        if not fitting and len(able) > 1:
            what = f"holds no model whose {first!r} has the shape {list(wanted[first])} and whose others fit"
            raise BadInput(what, where=self._where, remedy=remedy)
        if not fitting:
            raise BadInput(faults[able[0]], where=self._where, remedy=remedy)
        return fitting[0]

    def _fault(self, begin: str, wanted: dict[str, torch.Size]) -> str:
        """Say what is not as it is wanted behind a prefix; empty where all is."""
        for name, shape in wanted.items():
            home = self._home.get(begin + name)
            if home is None:
                return f"holds no {begin + name!r}"
            if home.tensors[begin + name].size != shape:
                return f"{begin + name!r} has the shape {list(home.tensors[begin + name].size)}, not {list(shape)}"
        return ""

    def _steps(self, wanted: WantedTensors) -> dict[str, int]:
        keys = {name: f"{self._optimizer}{name}.{_STEP}" for name in wanted.trained}
        return {name: int(self._read(key)) for name, key in keys.items() if key in self._home}


def _listed(prefixes: Iterable[str]) -> str:
    return " and ".join(repr(one) for one in prefixes)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    run_conversion(to_dcp, __doc__, arguments)


if __name__ == "__main__":
    main()
