"""What of each tensor lies on this rank, as torch.distributed.checkpoint's planners want it.

A checkpoint holds every parameter and every state as one flat tensor under ``<kind>/<parameter's name>``, whatever the
number of ranks, the stage and the padding it was saved from. Each rank writes and reads the pieces that it owns.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.errors import BadInput
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.unit_state import FlatParam, UnitState


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[offset, offset + length)`` of a flat tensor of `numel` elements.

    `tensor()` gives them, 1-D: the live memory, or, of what is in a file, what is read there.
    """

    name: str
    numel: int
    offset: int
    length: int
    dtype: torch.dtype
    tensor: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, name: str, numel: int, offset: int, tensor: torch.Tensor) -> Piece:
        """The piece that lies in `tensor`."""
        return cls(name, numel, offset, tensor.numel(), tensor.dtype, lambda: tensor)


def pieces(model_states: ModelStates, *, loading: bool, optimizer: bool = True) -> Iterator[Piece]:
    """Every piece of parameters and optimizer states that this rank writes or, `loading`, needs.

    To write, the parts of the ranks never overlap; to load, a rank that keeps something whole asks for the whole.
    """
    for unit in model_states.units:
        if unit.trainable is not None and not (loading and states_in_files(unit)):
            whole = not model_states.setup.shards_states
            for buffer in _kept(model_states, unit) if optimizer else (Buffer.PARAM_MASTER,):
                held = _held(model_states, unit, buffer)
                yield from _of_flat(model_states, unit, unit.trainable, _kind(buffer), held, whole=whole, loading=loading)
        if unit.frozen is not None and not (loading and unit.in_files):
            whole = not model_states.setup.shards_params
            frozen = unit.frozen.full if whole else unit.frozen.shard
            held = Held(frozen.dtype, frozen)
            if unit.in_files:
                held = Held(frozen.dtype, read=partial(model_states.param_swapper.read, unit.name, Buffer.PARAM_FROZEN))
            yield from _of_flat(model_states, unit, unit.frozen, "param", held, whole=whole, loading=loading)


def states_in_files(unit: UnitState) -> bool:
    """Whether a unit's optimizer is in files."""
    return unit.trainable is not None and unit.layout.place is Place.NVME


def pieces_in_files(
    model_states: ModelStates, unit: UnitState, *, optimizer: bool
) -> tuple[list[Piece], dict[Buffer, torch.Tensor]]:
    """What of a unit in files this rank needs to load, in new memory: the pieces, and the tensors that they lie in."""
    made: list[Piece] = []
    tensors: dict[Buffer, torch.Tensor] = {}
    if states_in_files(unit):
        assert unit.trainable is not None
        for buffer in _kept(model_states, unit) if optimizer else [Buffer.PARAM_MASTER]:
            if buffer in model_states.optimizer_swapper.state_buffers:
                tensors[buffer] = torch.zeros(model_states.layout.share(unit.layout))
                held = Held(torch.float32, tensors[buffer])
            else:
                held = _held(model_states, unit, buffer)
            whole = not model_states.setup.shards_states
            made += _of_flat(model_states, unit, unit.trainable, _kind(buffer), held, whole=whole, loading=True)
    if unit.frozen is not None and unit.in_files:
        tensor = tensors[Buffer.PARAM_FROZEN] = torch.zeros(unit.frozen.layout.shard, dtype=unit.frozen.shard.dtype)
        made += _of_flat(model_states, unit, unit.frozen, "param", Held(tensor.dtype, tensor), whole=False, loading=True)
    return made, tensors


def _kept(model_states: ModelStates, unit: UnitState) -> list[Buffer]:
    return [Buffer.PARAM_MASTER, *model_states.setup.states]


def _kind(buffer: Buffer) -> str:
    return "master" if buffer is Buffer.PARAM_MASTER else buffer.value


@dataclass(frozen=True, slots=True)
class Held:
    """One of a unit's tensors: in memory, or in a file from where `read` brings elements ``[begin, end)``."""

    dtype: torch.dtype
    tensor: torch.Tensor | None = None
    read: Callable[[int, int], torch.Tensor] | None = None

    def part(self, begin: int, end: int) -> Callable[[], torch.Tensor]:
        """What gives elements ``[begin, end)``."""
        if self.tensor is not None:
            view = self.tensor[begin:end]
            return lambda: view
        assert self.read is not None
        return partial(self.read, begin, end)


def _held(model_states: ModelStates, unit: UnitState, buffer: Buffer) -> Held:
    tensor = unit.master if buffer is Buffer.PARAM_MASTER else unit.optim_states.get(buffer)
    if tensor is not None:
        return Held(tensor.dtype, tensor)
    return Held(torch.float32, read=partial(model_states.optimizer_swapper.read, unit.name, buffer))


def _of_flat(
    model_states: ModelStates, unit: UnitState, flat: FlatParam, kind: str, held: Held, *, whole: bool, loading: bool
) -> Iterator[Piece]:
    rank = model_states.comm.rank
    base = 0 if whole else rank * flat.layout.shard
    for position, (i, offset, numel) in enumerate(
        zip(flat.layout.params, flat.layout.offsets, flat.layout.numels, strict=True)
    ):
        start, end = (0, numel) if whole and loading else flat.layout.overlap(position, rank)
        if start < end:
            name = f"{kind}/{unit.layout.shape.params[i].name}"
            tensor = held.part(offset + start - base, offset + end - base)
            yield Piece(name, numel, start, end - start, held.dtype, tensor)


def check(model_states: ModelStates, metadata: Metadata, *, optimizer: bool) -> None:
    """Compares the whole model with a checkpoint's table of contents, so that all ranks find the same fault.

    Raises:
        BadInput: for the first tensor that the checkpoint lacks or holds with another number of elements.
    """
    for unit in model_states.units:
        for shape in unit.layout.shape.params:
            states = [buffer.value for buffer in model_states.setup.states] if optimizer else []
            for kind in ["master", *states] if shape.trainable else ["param"]:
                name = f"{kind}/{shape.name}"
                stored = metadata.state_dict_metadata.get(name)
                if shape.numel and not isinstance(stored, TensorStorageMetadata):
                    raise BadInput(f"the checkpoint has no {name!r}", where="load_checkpoint")
                if isinstance(stored, TensorStorageMetadata) and stored.size[0] != shape.numel:
                    raise BadInput(
                        f"{name!r} has {stored.size[0]} elements in the checkpoint and {shape.numel} here",
                        where="load_checkpoint",
                    )


class SavePieces(DefaultSavePlanner):
    """Plans the writing of pieces."""

    def __init__(self, wanted: list[Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._pieces = {(piece.name, piece.offset): piece for piece in wanted}

    def create_local_plan(self) -> SavePlan:
        """One write a piece."""
        items = [
            WriteItem(
                index=MetadataIndex(piece.name, torch.Size([piece.offset])),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size([piece.offset]), torch.Size([piece.length])),
                    properties=TensorProperties(dtype=piece.dtype),
                    size=torch.Size([piece.numel]),
                ),
            )
            for piece in self._pieces.values()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor behind a write."""
        assert index.offset is not None
        return self._pieces[index.fqn, index.offset[0]].tensor().detach()


class LoadPieces(DefaultLoadPlanner):
    """Plans the reading of pieces, in place. The checkpoint has been found to hold them: :func:`check`."""

    def __init__(self, wanted: list[Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._pieces = {(piece.name, piece.offset): piece for piece in wanted}

    def create_local_plan(self) -> LoadPlan:
        """The reads that cover every piece."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for piece in self._pieces.values():
            stored = self.metadata.state_dict_metadata[piece.name]
            assert isinstance(stored, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(torch.Size([piece.offset]), torch.Size([piece.length]))
            items += create_read_items_for_chunk_list(piece.name, stored, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Where a read goes."""
        assert index.offset is not None
        return self._pieces[index.fqn, index.offset[0]].tensor().detach()


class SafeReader(FileSystemReader):
    """Reads a checkpoint without running what a foreign file asks: its metadata, a pickle, may name known classes only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's table of contents.

        Raises:
            BadInput: when it names anything but the classes of torch.distributed.checkpoint, or is damaged.
        """
        path = Path(self.path) / ".metadata"
        try:
            metadata = _KnownOnly(io.BytesIO(path.read_bytes())).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, OSError) as fault:
            raise BadInput(f"damaged or foreign checkpoint: {fault}", where=os.fspath(path)) from None
        assert isinstance(metadata, Metadata)
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class _KnownOnly(pickle.Unpickler):
    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _NAMES = frozenset(
        {
            ("torch", "Size"),
            ("torch", "device"),
            ("torch.serialization", "_get_layout"),
            ("torch._utils", "_rebuild_dtype"),
            ("builtins", "set"),
            ("builtins", "getattr"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
            *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if "." not in name and (module in self._MODULES or (module, name) in self._NAMES) and name != "getattr":
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")
