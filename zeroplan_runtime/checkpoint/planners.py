"""The part of each tensor that a rank saves and loads, as planners for torch.distributed.checkpoint.

A checkpoint holds every parameter and every optimizer state as one flat tensor named ``<kind>/<parameter's name>``,
independent of the number of ranks, the stage and the padding of the run that saved it. States that are quantised in blocks are
held as they are, codes and scales: parameters and shards begin on whole blocks, so a parameter's blocks are the same at any
number of ranks, and what is loaded is exactly what was saved. Where tensor-parallel ranks or pipeline
stages hold parts of the model, each part's names begin with its place in the mesh (:attr:`MeshRanks.part`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zeroplan.core.arena.layout import ParamShape
from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.errors import BadInput
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.unit_state import FlatParam, UnitState
from zeroplan_runtime.units import plain_name


@dataclass(frozen=True, slots=True)
class StateShard:
    """A rank's part of one flat tensor of a checkpoint.

    Attributes:
        name: the tensor's name.
        numel: the tensor's elements.
        offset, length: the part is elements ``[offset, offset + length)``.
        dtype: the tensor's dtype.
        tensor: gives the part, 1-D: the live memory, or a new tensor read from a swap file.
    """

    name: str
    numel: int
    offset: int
    length: int
    dtype: torch.dtype
    tensor: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, name: str, numel: int, offset: int, tensor: torch.Tensor) -> StateShard:
        """The shard whose elements are `tensor`, 1-D."""
        return cls(name, numel, offset, tensor.numel(), tensor.dtype, lambda: tensor)


def state_shards(
    model_states: ModelStates, *, loading: bool, optimizer: bool = True, frozen: bool = True
) -> Iterator[StateShard]:
    """Yields the shards of parameters and optimizer states that this rank saves or, if `loading`, needs.

    Saved shards of different ranks never overlap. A rank that holds a tensor unsharded loads all of it. To load what is in
    swap files see :func:`shards_in_files`.

    Args:
        model_states: the units.
        loading: for loading instead of saving.
        optimizer: include the optimizer states, not only the masters.
        frozen: include the frozen parameters.
    """
    for unit in model_states.units:
        if unit.trainable is not None and not (loading and states_in_files(unit)):
            whole = not model_states.setup.shards_states
            for buffer in _kept(model_states, unit) if optimizer else (Buffer.PARAM_MASTER,):
                source, count = _source(model_states, unit, buffer), _count(model_states, buffer)
                yield from _of_flat(
                    model_states, unit, unit.trainable, _kind(buffer), source, whole=whole, loading=loading, count=count
                )
        if unit.frozen is not None and frozen and not (loading and unit.in_files):
            whole = not model_states.setup.shards_params
            values = unit.frozen.full if whole else unit.frozen.shard
            source = TensorSource(values.dtype, values)
            if unit.in_files:
                source = TensorSource(
                    values.dtype, read=partial(model_states.param_swapper.read, unit.name, Buffer.PARAM_FROZEN)
                )
            yield from _of_flat(model_states, unit, unit.frozen, "param", source, whole=whole, loading=loading)


def error_shards(model_states: ModelStates) -> Iterator[StateShard]:
    """Yields the shards of what compression has left out, to save or to load on as many ranks.

    A rank has its part of the server's error, and a worker's error of its own, whose name begins with the rank's number.
    """
    for unit in model_states.units:
        if unit.exchanged is None or unit.trainable is None:
            continue
        server, worker = unit.exchanged.server_error, unit.exchanged.worker_error
        kind, source = Buffer.OPTIM_SERVER_ERROR.value, TensorSource(server.dtype, server)
        yield from _of_flat(model_states, unit, unit.trainable, kind, source, whole=False, loading=False)
        kind, source = f"{Buffer.OPTIM_ERROR_FEEDBACK}/{model_states.comm.rank}", TensorSource(worker.dtype, worker)
        yield from _of_flat(model_states, unit, unit.trainable, kind, source, whole=True, loading=True)


def states_in_files(unit: UnitState) -> bool:
    """Returns whether the unit's optimizer states are in files."""
    return unit.trainable is not None and unit.layout.place is Place.NVME


def shards_in_files(
    model_states: ModelStates, unit: UnitState, *, optimizer: bool, frozen: bool = True
) -> tuple[list[StateShard], dict[Buffer, torch.Tensor]]:
    """The shards that this rank needs to load for one unit with states or parameters in files.

    Args:
        model_states: the units.
        unit: one with something in files.
        optimizer: include the optimizer states, not only the masters.
        frozen: include the frozen parameters.

    Returns:
        The shards, and by Buffer the new tensors that hold them, for the caller to write to the files.
    """
    made: list[StateShard] = []
    tensors: dict[Buffer, torch.Tensor] = {}
    if states_in_files(unit):
        assert unit.trainable is not None
        for buffer in _kept(model_states, unit) if optimizer else [Buffer.PARAM_MASTER]:
            if buffer in model_states.optimizer_swapper.state_buffers:
                tensors[buffer] = torch.zeros(model_states.layout.share(unit.layout), device="cpu")
                source = TensorSource(torch.float32, tensors[buffer])
            else:
                source = _source(model_states, unit, buffer)
            whole = not model_states.setup.shards_states
            made += _of_flat(model_states, unit, unit.trainable, _kind(buffer), source, whole=whole, loading=True)
    if unit.frozen is not None and frozen and unit.in_files:
        tensor = tensors[Buffer.PARAM_FROZEN] = torch.zeros(
            unit.frozen.layout.shard, dtype=unit.frozen.shard.dtype, device="cpu"
        )
        made += _of_flat(
            model_states, unit, unit.frozen, "param", TensorSource(tensor.dtype, tensor), whole=False, loading=True
        )
    return made, tensors


def _kept(model_states: ModelStates, unit: UnitState) -> list[Buffer]:
    return [Buffer.PARAM_MASTER, *model_states.setup.states]


def _count(model_states: ModelStates, buffer: Buffer) -> Callable[[int], int]:
    """How many elements of a buffer a number of masters has."""
    if buffer is Buffer.PARAM_MASTER:
        return int
    return lambda numel: model_states.setup.state_elements(buffer, numel)[0]


def _kind(buffer: Buffer) -> str:
    return "master" if buffer is Buffer.PARAM_MASTER else buffer.value


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A unit's tensor: `tensor` in memory, or in a file, from which ``read(begin, end)`` gives elements ``[begin, end)``."""

    dtype: torch.dtype
    tensor: torch.Tensor | None = None
    read: Callable[[int, int], torch.Tensor] | None = None

    def part(self, begin: int, end: int) -> Callable[[], torch.Tensor]:
        """A function that gives elements ``[begin, end)``."""
        if self.tensor is not None:
            view = self.tensor[begin:end]
            return lambda: view
        assert self.read is not None
        return partial(self.read, begin, end)


def _source(model_states: ModelStates, unit: UnitState, buffer: Buffer) -> TensorSource:
    tensor = unit.master if buffer is Buffer.PARAM_MASTER else unit.optim_states.get(buffer)
    if tensor is not None:
        return TensorSource(tensor.dtype, tensor)
    return TensorSource(torch.float32, read=partial(model_states.optimizer_swapper.read, unit.name, buffer))


def _of_flat(
    model_states: ModelStates,
    unit: UnitState,
    flat: FlatParam,
    kind: str,
    source: TensorSource,
    *,
    whole: bool,
    loading: bool,
    count: Callable[[int], int] = int,
) -> Iterator[StateShard]:
    """`count` gives the tensor's elements for a number of elements of the flat, of which the tensor holds whole blocks."""
    rank = model_states.comm_of(flat.layout).rank
    base = 0 if whole else rank * flat.layout.shard
    for position, (i, offset, numel) in enumerate(
        zip(flat.layout.params, flat.layout.offsets, flat.layout.numels, strict=True)
    ):
        start, end = (0, numel) if whole and loading else flat.layout.overlap(position, rank)
        if start < end:
            name = f"{model_states.part_of(unit)}{kind}/{unit.layout.shape.params[i].name}"
            tensor = source.part(count(offset + start - base), count(offset + end - base))
            yield StateShard(name, count(numel), count(start), count(end) - count(start), source.dtype, tensor)


def buffer_shards(model: nn.Module, part: str = "") -> list[StateShard]:
    """The model's persistent buffers, which are equal on all ranks that hold the same part of it."""
    made = []
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.numel() and name not in module._non_persistent_buffers_set:
                full = plain_name(f"{prefix}.{name}" if prefix else name)
                made.append(StateShard.of(f"{part}buffer/{full}", buffer.numel(), 0, buffer.view(-1)))
    return made


def check_metadata(
    model_states: ModelStates,
    buffers: Iterable[StateShard],
    metadata: Metadata,
    *,
    optimizer: bool,
    frozen: bool = True,
    errors: bool = False,
) -> None:
    """Checks the checkpoint's metadata against the whole model, so that all ranks raise the same error.

    Args:
        model_states: the units.
        buffers: the model's buffers.
        metadata: the checkpoint's.
        optimizer: the optimizer states will be loaded, too.
        frozen: the frozen parameters will be.
        errors: what compression left out will be.

    Raises:
        BadInput: for the first tensor that the checkpoint lacks, or holds with another number of elements, and for a parameter
            of the checkpoint that the model lacks.
    """
    shapes = [(model_states.part_of(unit), s) for unit in model_states.units for s in unit.layout.shape.params if s.numel]
    shapes = [(part, shape) for part, shape in shapes if shape.trainable or frozen]
    needed = _needed(model_states, shapes, optimizer=optimizer, errors=errors)
    needed |= {one.name: one.numel for one in buffers}
    stored = metadata.state_dict_metadata
    remedy = "build the model that was saved"
    for name, numel in needed.items():
        found = stored.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise BadInput(f"the checkpoint has no {name!r}", where="load_checkpoint", remedy=remedy)
        if found.size.numel() != numel:
            raise BadInput(
                f"{name!r} has {found.size.numel()} elements in the checkpoint and {numel} here",
                where="load_checkpoint",
                remedy=remedy,
            )
    known = tuple(f"{part}{kind}/" for part in {part for part, _ in shapes} for kind in ("master", "param"))
    for name in stored:
        if name not in needed and name.startswith(known):
            raise BadInput(f"the checkpoint has {name!r}, which this model lacks", where="load_checkpoint", remedy=remedy)


def _needed(
    model_states: ModelStates, shapes: list[tuple[str, ParamShape]], *, optimizer: bool, errors: bool
) -> dict[str, int]:
    """Returns the elements of each tensor of parameters and their states that will be loaded, by its name."""
    states = model_states.setup.states if optimizer else ()
    trained = [(part, s) for part, s in shapes if s.trainable]
    needed = {f"{part}param/{s.name}": s.numel for part, s in shapes if not s.trainable}
    counts = {buffer: _count(model_states, buffer) for buffer in (Buffer.PARAM_MASTER, *states)}
    needed |= {f"{part}{_kind(buffer)}/{s.name}": count(s.numel) for part, s in trained for buffer, count in counts.items()}
    if errors:
        workers = [f"{Buffer.OPTIM_ERROR_FEEDBACK}/{rank}" for rank in range(model_states.comm.world_size)]
        kinds = (Buffer.OPTIM_SERVER_ERROR.value, *workers)
        needed |= {f"{part}{kind}/{s.name}": s.numel for part, s in trained for kind in kinds}
    return needed


class ShardSavePlanner(DefaultSavePlanner):
    """Plans the writes of a rank's shards."""

    def __init__(self, wanted: list[StateShard]) -> None:
        super().__init__(flatten_state_dict=False)
        self._shards = {(shard.name, shard.offset): shard for shard in wanted}

    def create_local_plan(self) -> SavePlan:
        """Plans one write for each shard."""
        items = [
            WriteItem(
                index=MetadataIndex(shard.name, torch.Size([shard.offset])),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size([shard.offset]), torch.Size([shard.length])),
                    properties=TensorProperties(dtype=shard.dtype),
                    size=torch.Size([shard.numel]),
                ),
            )
            for shard in self._shards.values()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns the tensor of a write."""
        assert index.offset is not None
        return self._shards[index.fqn, index.offset[0]].tensor().detach()


class ShardLoadPlanner(DefaultLoadPlanner):
    """Plans the reads of a rank's shards, into their memory. Call :func:`check_metadata` before."""

    def __init__(self, wanted: list[StateShard]) -> None:
        super().__init__(flatten_state_dict=False)
        self._shards = {(shard.name, shard.offset): shard for shard in wanted}

    def create_local_plan(self) -> LoadPlan:
        """Plans the reads that cover every shard."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for shard in self._shards.values():
            stored = self.metadata.state_dict_metadata[shard.name]
            assert isinstance(stored, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(torch.Size([shard.offset]), torch.Size([shard.length]))
            items += create_read_items_for_chunk_list(shard.name, stored, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Returns the tensor that a read fills."""
        assert index.offset is not None
        return self._shards[index.fqn, index.offset[0]].tensor().detach()
