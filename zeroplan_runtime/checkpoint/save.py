"""Saves and loads checkpoints by torch.distributed.checkpoint, for any stage and number of ranks, all or nothing."""

from __future__ import annotations

import logging
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
    SafeFileSystemReader,
    ShardLoadPlanner,
    ShardSavePlanner,
    StateShard,
    check_metadata,
    shards_in_files,
    state_shards,
    states_in_files,
)
from zeroplan_runtime.checkpoint.typed_json import decode, encode
from zeroplan_runtime.checkpoint.writer import ShardWriter
from zeroplan_runtime.engine_parts import EngineParts
from zeroplan_runtime.unit_state import UnitState

logger = logging.getLogger("zeroplan_runtime")


def save_checkpoint(
    engine: EngineParts,
    folder: str | Path,
    tag: str | None = None,
    client_state: dict[str, Any] | None = None,
    *,
    latest: bool = True,
) -> Path:
    """Saves masters, optimizer states, frozen parameters, buffers, loss scale, learning-rate schedule and `client_state`.

    Every rank must call it, between two steps. The checkpoint gets its name when all of it is on the disk.

    Args:
        engine: the engine.
        folder: the folder of all checkpoints.
        tag: the checkpoint's name; ``global_step<N>`` by default.
        client_state: anything that JSON can hold.
        latest: write the tag to the file ``latest``, so that loading finds it by default.

    Returns:
        The checkpoint's folder.

    Raises:
        BadInput: for a tag that is not a plain name, or a state that JSON cannot hold.
    """
    folder, tag = Path(folder), tag or f"global_step{engine.progress.global_steps}"
    if tag != Path(tag).name or tag.startswith("."):
        raise BadInput(f"{tag!r} is not a name", where="save_checkpoint")
    engine.drain()
    state = _state(engine, client_state)
    first = engine.comm.rank == 0
    engine.arena.phase = Phase.SAVE
    if first:
        atomic_files.write_state(atomic_files.begin(folder, tag), state)
    engine.comm.barrier()
    wanted = [*state_shards(engine.model_states, loading=False), *(_buffers(engine) if first else ())]
    path = atomic_files.unfinished(folder, tag)
    if engine.device.type == "cuda":
        torch.cuda.current_stream(engine.device).synchronize()
    with _quiet():
        save(
            {},
            storage_writer=ShardWriter(path, sync_files=True),
            planner=ShardSavePlanner(wanted),
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
    engine: EngineParts,
    folder: str | Path,
    tag: str | None = None,
    *,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
) -> tuple[str | None, dict[str, Any]]:
    """Loads a checkpoint that any number of ranks saved at any stage. Every rank must call it.

    Args:
        engine: the engine.
        folder: the folder of all checkpoints.
        tag: the checkpoint's name; by default the one in the file ``latest``.
        load_optimizer_states: load the optimizer's states and hyperparameters.
        load_lr_scheduler_states: load the learning-rate schedule's state.
        load_module_only: load the parameters and buffers only.

    Returns:
        The checkpoint's folder and the client state; ``(None, {})`` when there is no checkpoint.

    Raises:
        BadInput: when it is damaged, of another model or of another optimizer.
    """
    path = atomic_files.find(Path(folder), tag)
    if path is None:
        logger.warning("%s holds no checkpoint%s: nothing was loaded", folder, f" {tag}" if tag else "")
        return None, {}
    state = _read_state(path)
    optimizer = load_optimizer_states and not load_module_only
    kind = engine.optimizer.kind if engine.optimizer is not None else None
    if optimizer and kind is not None and state["optimizer"] != kind:
        raise BadInput(
            f"the checkpoint's optimizer is {state['optimizer']}, not {kind}", where=str(path), remedy="load_module_only=True"
        )
    engine.drain()
    wanted = [*state_shards(engine.model_states, loading=True, optimizer=optimizer), *_buffers(engine)]
    check_metadata(engine.model_states, SafeFileSystemReader(path).read_metadata(), optimizer=optimizer)
    _read(engine, path, wanted)
    for unit in engine.model_states.units:
        if unit.in_files or states_in_files(unit):
            _read_into_files(engine, path, unit, optimizer=optimizer)
    _refresh(engine)
    if not load_module_only:
        engine.progress.load_state_dict(state["progress"])
        if optimizer and engine.optimizer is not None:
            for group, values in zip(engine.optimizer.param_groups, state["groups"], strict=False):
                group.update({k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
        if load_lr_scheduler_states and engine.lr_scheduler is not None and state["schedule"] is not None:
            engine.lr_scheduler.load_state_dict(state["schedule"])
    engine.comm.barrier()
    return str(path), state["client_state"]


def _read(engine: EngineParts, path: Path, wanted: list[StateShard]) -> None:
    try:
        with _quiet():
            load(
                {},
                storage_reader=SafeFileSystemReader(path),
                planner=ShardLoadPlanner(wanted),
                process_group=engine.comm.group,
                no_dist=engine.comm.world_size == 1,
            )
    except CheckpointException as fault:  # all ranks raise it together
        first = next((error for error, _ in fault.failures.values()), fault)
        reason = str(first).split(". ")[0] or type(first).__name__
        raise BadInput(f"cannot be read ({reason})", where=str(path), remedy="load another checkpoint by its tag") from fault


@torch.no_grad()
def _read_into_files(engine: EngineParts, path: Path, unit: UnitState, *, optimizer: bool) -> None:
    """Loads one unit into its swap files, so that only one unit's states at a time are in host memory."""
    wanted, tensors = shards_in_files(engine.model_states, unit, optimizer=optimizer)
    if states_in_files(unit) or unit.frozen is not None:  # the same on all ranks, as loading is a collective
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


def _read_state(path: Path) -> dict[str, Any]:
    state = atomic_files.read_state(path)
    try:
        return {**state, **{key: decode(state[key]) for key in ("groups", "schedule", "client_state")}}
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as fault:
        raise BadInput(f"damaged checkpoint: {fault}", where=str(path / atomic_files.STATE)) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without torch's warning that one rank needs no torch.distributed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _state(engine: EngineParts, client_state: dict[str, Any] | None) -> dict[str, Any]:
    groups = engine.optimizer.param_groups if engine.optimizer is not None else []
    return {
        "format": 1,
        "ranks": engine.comm.world_size,
        "stage": engine.config.zero.stage,
        "dtype": str(engine.config.dtype),
        "optimizer": engine.optimizer.kind if engine.optimizer is not None else None,
        "groups": encode([{k: v for k, v in group.items() if k != "params"} for group in groups], "optimizer.param_groups"),
        "progress": engine.progress.state_dict(),
        "schedule": encode(engine.lr_scheduler.state_dict(), "lr_scheduler") if engine.lr_scheduler is not None else None,
        "client_state": encode(client_state or {}, "client_state"),
    }


def _buffers(engine: EngineParts) -> list[StateShard]:
    """The model's persistent buffers, which are equal on all ranks."""
    made = []
    for prefix, module in engine.module.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.numel() and name not in module._non_persistent_buffers_set:
                full = f"{prefix}.{name}" if prefix else name
                made.append(StateShard.of(f"buffer/{full}", buffer.numel(), 0, buffer.view(-1)))
    return made


@torch.no_grad()
def _refresh(engine: EngineParts) -> None:
    """Copies the loaded masters to the parameters and unshards what the next forward needs first."""
    for unit in engine.model_states.units:
        if unit.param_16bit is not None and unit.master is not None:
            unit.param_16bit.copy_(unit.master)
        elif unit.master is not None and unit.trainable is not None and unit.layout.offloaded and not unit.in_files:
            unit.trainable.shard.copy_(unit.master)
        unit.param_slot.holder = unit if not engine.model_states.setup.shards_params else None
        engine.schedule.mark_updated(unit)
    engine.schedule.prefetch_forward()
