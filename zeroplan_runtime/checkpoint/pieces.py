"""What of each tensor lies on this rank, as torch.distributed.checkpoint's planners want it.

A checkpoint holds every parameter and every state as one flat tensor under ``<kind>/<parameter's name>``, whatever the
number of ranks, the stage and the padding it was saved from. Each rank writes and reads the pieces that it owns.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
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

from zeroplan.core.errors import BadInput
from zeroplan_runtime.store import FlatState, Store, UnitState


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[offset, offset + len(tensor))`` of a flat tensor of `numel` elements; `tensor` is 1-D and live."""

    name: str
    numel: int
    offset: int
    tensor: torch.Tensor


def pieces(store: Store, *, loading: bool, optimizer: bool = True) -> Iterator[Piece]:
    """Every piece of parameters and optimizer states that this rank writes or, `loading`, needs.

    To write, the parts of the ranks never overlap; to load, a rank that keeps something whole asks for the whole.
    """
    for unit in store.units:
        if unit.trainable is not None:
            assert unit.master is not None
            whole = not store.setup.shards_states
            yield from _of_flat(store, unit, unit.trainable, "master", unit.master, whole=whole, loading=loading)
            if optimizer:
                for buffer, state in unit.states.items():
                    yield from _of_flat(store, unit, unit.trainable, buffer.value, state, whole=whole, loading=loading)
        if unit.frozen is not None:
            whole = not store.setup.shards_params
            held = unit.frozen.full if whole else unit.frozen.shard
            yield from _of_flat(store, unit, unit.frozen, "param", held, whole=whole, loading=loading)


def _of_flat(
    store: Store, unit: UnitState, flat: FlatState, kind: str, held: torch.Tensor, *, whole: bool, loading: bool
) -> Iterator[Piece]:
    rank = store.ranks.rank
    base = 0 if whole else rank * flat.layout.shard
    for position, (i, offset, numel) in enumerate(
        zip(flat.layout.params, flat.layout.offsets, flat.layout.numels, strict=True)
    ):
        start, end = (0, numel) if whole and loading else flat.layout.overlap(position, rank)
        if start < end:
            tensor = held[offset + start - base : offset + end - base]
            yield Piece(f"{kind}/{unit.layout.shape.params[i].name}", numel, start, tensor)


def check(store: Store, metadata: Metadata, *, optimizer: bool) -> None:
    """Compares the whole model with a checkpoint's table of contents, so that all ranks find the same fault.

    Raises:
        BadInput: for the first tensor that the checkpoint lacks or holds with another number of elements.
    """
    for unit in store.units:
        for shape in unit.layout.shape.params:
            states = [buffer.value for buffer in unit.states] if optimizer else []
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
                    chunk=ChunkStorageMetadata(torch.Size([piece.offset]), torch.Size([piece.tensor.numel()])),
                    properties=TensorProperties(dtype=piece.tensor.dtype),
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
        return self._pieces[index.fqn, index.offset[0]].tensor.detach()


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
            chunk = ChunkStorageMetadata(torch.Size([piece.offset]), torch.Size([piece.tensor.numel()]))
            items += create_read_items_for_chunk_list(piece.name, stored, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Where a read goes."""
        assert index.offset is not None
        return self._pieces[index.fqn, index.offset[0]].tensor.detach()


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
