"""Saving and resuming, by torch.distributed.checkpoint: any stage, any number of ranks, all or nothing."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from zeroplan.core.buffers import Buffer, Phase
from zeroplan.core.errors import BadInput
from zeroplan_runtime.checkpoint import atomic_files
from zeroplan_runtime.checkpoint.planners import (
    LoadPieces,
    Piece,
    SafeReader,
    SavePieces,
    check,
    pieces,
    pieces_in_files,
    states_in_files,
)
from zeroplan_runtime.checkpoint.training_state import TrainingState
from zeroplan_runtime.checkpoint.writer import PieceWriter
from zeroplan_runtime.unit_state import UnitState

logger = logging.getLogger("zeroplan_runtime")


def save_checkpoint(
    engine: TrainingState,
    folder: str | Path,
    tag: str | None = None,
    client_state: dict[str, Any] | None = None,
    *,
    latest: bool = True,
) -> Path:
    """Writes masters, optimizer states, frozen parameters, buffers, loss scale, schedule and `client_state`.

    Every rank must call it, between two steps. The checkpoint appears under its name when all of it is on the disk; until then
    the last one stays the latest.

    Args:
        tag: the checkpoint's name; ``global_step<N>`` by default.
        client_state: anything that JSON can hold.
        latest: point the file ``latest`` at it.

    Returns:
        The checkpoint's folder.

    Raises:
        BadInput: for a tag with a path in it, or a state that JSON cannot hold.
    """
    folder, tag = Path(folder), tag or f"global_step{engine.global_steps}"
    if tag != Path(tag).name or tag.startswith("."):
        raise BadInput(f"{tag!r} is not a name", where="save_checkpoint")
    engine.drain()
    first = engine.comm.rank == 0
    engine.arena.phase = Phase.SAVE
    if first:
        atomic_files.write_state(atomic_files.begin(folder, tag), _state(engine, client_state))
    engine.comm.barrier()
    wanted = [*pieces(engine.model_states, loading=False), *(_buffers(engine) if first else ())]
    path = atomic_files.unfinished(folder, tag)
    if engine.device.type == "cuda":
        torch.cuda.current_stream(engine.device).synchronize()
    with _quiet():
        save(
            {},
            storage_writer=PieceWriter(path, sync_files=True),
            planner=SavePieces(wanted),
            process_group=engine.comm.group,
            no_dist=engine.comm.world_size == 1,
        )
    engine.comm.barrier()
    if first:
        atomic_files.finish(folder, tag)
        if latest:
            atomic_files.write_durably(folder / atomic_files.LATEST, tag.encode())
    engine.comm.barrier()
    return folder / tag


def load_checkpoint(
    engine: TrainingState,
    folder: str | Path,
    tag: str | None = None,
    *,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
) -> tuple[str | None, dict[str, Any]]:
    """Resumes from a checkpoint saved by any number of ranks at any stage.

    Args:
        tag: the checkpoint's name; the one that ``latest`` names by default.
        load_module_only: the parameters alone, with a fresh optimizer, schedule and step count.

    Returns:
        The checkpoint's folder and the client state; ``(None, {})`` when there is none to load.

    Raises:
        BadInput: when it is damaged, of another model, or of another optimizer.
    """
    path = atomic_files.find(Path(folder), tag)
    if path is None:
        logger.warning("%s holds no checkpoint%s: nothing was loaded", folder, f" {tag}" if tag else "")
        return None, {}
    state = atomic_files.read_state(path)
    optimizer = load_optimizer_states and not load_module_only
    kind = engine.optimizer.kind if engine.optimizer is not None else None
    if optimizer and kind is not None and state["optimizer"] != kind:
        raise BadInput(
            f"the checkpoint's optimizer is {state['optimizer']}, not {kind}", where=str(path), remedy="load_module_only=True"
        )
    engine.drain()
    wanted = [*pieces(engine.model_states, loading=True, optimizer=optimizer), *_buffers(engine)]
    check(engine.model_states, SafeReader(path).read_metadata(), optimizer=optimizer)
    _read(engine, path, wanted)
    for unit in engine.model_states.units:
        if unit.in_files or states_in_files(unit):
            _read_into_files(engine, path, unit, optimizer=optimizer)
    _refresh(engine)
    if not load_module_only:
        engine.load_progress(state["progress"])
        if optimizer and engine.optimizer is not None:
            for group, values in zip(engine.optimizer.param_groups, state["groups"], strict=False):
                group.update({k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
        if load_lr_scheduler_states and engine.lr_scheduler is not None and state["schedule"] is not None:
            engine.lr_scheduler.load_state_dict(state["schedule"])
    engine.comm.barrier()
    return str(path), state["client_state"]


def _read(engine: TrainingState, path: Path, wanted: list[Piece]) -> None:
    try:
        with _quiet():
            load(
                {},
                storage_reader=SafeReader(path),
                planner=LoadPieces(wanted),
                process_group=engine.comm.group,
                no_dist=engine.comm.world_size == 1,
            )
    except CheckpointException as fault:  # of all ranks at once, so all of them end here
        first = next((error for error, _ in fault.failures.values()), fault)
        reason = str(first).split(". ")[0] or type(first).__name__
        raise BadInput(f"cannot be read ({reason})", where=str(path), remedy="load another checkpoint by its tag") from fault


@torch.no_grad()
def _read_into_files(engine: TrainingState, path: Path, unit: UnitState, *, optimizer: bool) -> None:
    """One unit at a time, so that what is in files need not fit into host memory."""
    wanted, tensors = pieces_in_files(engine.model_states, unit, optimizer=optimizer)
    if states_in_files(unit) or unit.frozen is not None:  # on every rank or on none
        _read(engine, path, wanted)
    for buffer, tensor in tensors.items():
        if buffer is Buffer.PARAM_FROZEN:
            engine.model_states.param_swapper.write(unit.name, buffer, tensor)
        else:
            engine.model_states.optimizer_swapper.write(unit.name, buffer, tensor)
    master = tensors.get(Buffer.PARAM_MASTER, unit.master)
    if unit.trainable is None or master is None:
        return
    if unit.in_files:
        engine.model_states.param_swapper.write(unit.name, Buffer.PARAM_SHARD, master)
    else:
        unit.trainable.shard.copy_(master)


@contextmanager
def _quiet() -> Iterator[None]:
    """One rank alone is no reason for a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _state(engine: TrainingState, client_state: dict[str, Any] | None) -> dict[str, Any]:
    groups = engine.optimizer.param_groups if engine.optimizer is not None else []
    return {
        "format": 1,
        "ranks": engine.comm.world_size,
        "stage": engine.config.zero.stage,
        "dtype": engine.config.dtype,
        "optimizer": engine.optimizer.kind if engine.optimizer is not None else None,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
        "progress": engine.progress(),
        "schedule": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        "client_state": client_state or {},
    }


def _buffers(engine: TrainingState) -> list[Piece]:
    """The model's persistent buffers, equal on all ranks."""
    made = []
    for prefix, module in engine.module.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.numel() and name not in module._non_persistent_buffers_set:
                full = f"{prefix}.{name}" if prefix else name
                made.append(Piece.of(f"buffer/{full}", buffer.numel(), 0, buffer.view(-1)))
    return made


@torch.no_grad()
def _refresh(engine: TrainingState) -> None:
    """Derives the 16-bit parameters from the masters that were read, and sends them where they are needed."""
    for unit in engine.model_states.units:
        if unit.param_16bit is not None and unit.master is not None:
            unit.param_16bit.copy_(unit.master)
        elif unit.master is not None and unit.trainable is not None and unit.layout.offloaded and not unit.in_files:
            unit.trainable.shard.copy_(unit.master)
        unit.param_slot.holder = unit if not engine.model_states.setup.shards_params else None
        engine.schedule.mark_updated(unit)
    engine.schedule.prefetch_forward()


def remove_checkpoint(folder: str | Path, tag: str) -> None:
    """Deletes one checkpoint; ``latest`` must not name it."""
    pointer = Path(folder) / atomic_files.LATEST
    if pointer.exists() and pointer.read_text().strip() == tag:
        raise BadInput(f"{tag!r} is the latest checkpoint", where=str(folder))
    shutil.rmtree(Path(folder) / tag)
