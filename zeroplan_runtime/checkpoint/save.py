"""Saves checkpoints by torch.distributed.checkpoint, for any stage and number of ranks, all or nothing."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_by_plan

from zeroplan.core.buffers import Phase
from zeroplan.core.errors import BadInput
from zeroplan_runtime.checkpoint import atomic_files
from zeroplan_runtime.checkpoint.agreement import by_torch, on_all_ranks
from zeroplan_runtime.checkpoint.background import BackgroundSave, plan_writes, snapshot
from zeroplan_runtime.checkpoint.manifest import Manifest, SaveId, write_manifest
from zeroplan_runtime.checkpoint.parameter_shapes import parameter_groups, parts_held
from zeroplan_runtime.checkpoint.planners import ShardSavePlanner, StateShard, buffer_shards, error_shards, state_shards
from zeroplan_runtime.checkpoint.typed_json import encode
from zeroplan_runtime.checkpoint.writer import ShardWriter, Unwatched
from zeroplan_runtime.engine_parts import EngineParts
from zeroplan_runtime.full_tensors import other_entries
from zeroplan_runtime.streams import Event, Stream
from zeroplan_runtime.units import modules_with_extra_state, plain_named


def save_checkpoint(
    engine: EngineParts,
    folder: str | Path,
    tag: str | None = None,
    client_state: dict[str, Any] | None = None,
    *,
    latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> Path:
    """Saves masters, optimizer states, frozen parameters, buffers, loss scale, learning-rate schedule and `client_state`.

    Every rank must call it, between two steps. The checkpoint gets its name when all of it is on the disk.

    Args:
        engine: the engine.
        folder: the folder of all checkpoints.
        tag: the checkpoint's name; ``global_step<N>`` by default.
        client_state: anything that JSON can hold.
        latest: write the tag to the file ``latest``, so that loading finds it by default.
        exclude_frozen_parameters: leave out parameters that are not trained; on loading they keep the values that they have.

    Returns:
        The checkpoint's folder; with ``async_checkpoints`` it is there once :meth:`Engine.wait_for_checkpoint` returns.

    Raises:
        BadInput: on every rank, when one cannot save: for a tag that is no plain name, a state that JSON cannot hold, a full
            disk. What was saved before stays.
        RankLost: when a rank died.
    """
    where = "engine.save_checkpoint"
    if not isinstance(folder, str | os.PathLike) or not str(folder):
        raise BadInput(f"{folder!r} is no folder", where=where, remedy="give the path of one")
    frozen = not exclude_frozen_parameters
    _require_savable(engine, where)
    engine.wait_for_checkpoint()
    folder, tag = Path(folder), f"global_step{engine.progress.global_steps}" if tag is None else tag
    with engine.activity.inside(f"saving {str(tag)[:80]!r}"):
        _make_current(engine)

        def state() -> dict[str, Any]:
            return {**_state(engine, frozen=frozen), "client_state": encode(client_state or {}, "client_state")}

        in_background = engine.model_states.snapshot is not None
        shards = partial(_shards, engine, frozen=frozen)
        return _save(engine, folder, tag, state, shards, latest=latest, in_background=in_background)


class HeldCheckpoint:
    """What a checkpoint of now holds, in host memory, to be written after the engine's end. Every rank must make it.

    Args:
        engine: between two steps, with no states in files; it may be destroyed afterwards.

    Raises:
        BadInput: where a checkpoint cannot be saved now.
    """

    def __init__(self, engine: EngineParts) -> None:
        _require_savable(engine, "engine.save_checkpoint")
        _make_current(engine)
        self._engine, self._state = engine, _state(engine, frozen=True)
        self._shards = [
            StateShard.of(one.name, one.numel, one.offset, one.tensor().detach().to("cpu", copy=True))
            for one in _shards(engine, frozen=True)
        ]

    def save(self, folder: Path, tag: str, client_state: dict[str, Any]) -> Path:
        """Saves it as :func:`save_checkpoint` does, without the file ``latest``. Every rank must call it."""

        def state() -> dict[str, Any]:
            return {**self._state, "client_state": encode(client_state, "client_state")}

        return _save(self._engine, folder, tag, state, lambda: self._shards)


def _require_savable(engine: EngineParts, where: str) -> None:
    engine.checks.require_usable(where)
    engine.checks.require_no_gradients(engine.schedule.grads.has_grads)
    if engine.optimizer_step is not None:
        engine.optimizer_step.require_common_masters(where)
    engine.checks.require_same_names(engine.module)


def _make_current(engine: EngineParts) -> None:
    engine.drain()
    if engine.schedule.has_aliases:  # which show a delayed update, too, now that it was sent
        engine.schedule.wait_for_unshard()


def _save(
    engine: EngineParts,
    folder: Path,
    tag: str,
    contents: Callable[[], dict[str, Any]],
    shards: Callable[[], list[StateShard]],
    *,
    latest: bool = False,
    in_background: bool = False,
) -> Path:
    """Writes all ranks' files and gives the checkpoint its name; `contents` and `shards` are this rank's."""
    where = "engine.save_checkpoint"
    first = engine.ranks.world.rank == 0
    state: dict[str, Any] = {}

    def prepare() -> tuple[str, SaveId, dict[str, str]]:
        atomic_files.require_tag(tag, where)
        state.update(contents())
        return tag, SaveId(uuid.uuid4().hex, engine.progress.global_steps), state["model"]["parts"]

    prepared = on_all_ranks(engine, prepare, where)
    _require_one_tag([chosen for chosen, _, _ in prepared])
    save = prepared[0][1]
    state["model"]["parts"] = {name: cut for _, _, parts in prepared for name, cut in parts.items()}
    path = atomic_files.unfinished(folder, tag)

    def make_folder() -> None:
        if first:
            (atomic_files.begin(folder, tag) / save.name).touch()

    def require_same_folder() -> None:  # torch would make one of its own, and the checkpoint would lack that rank's file
        if not (path / save.name).exists():
            remedy = "give a folder on a file system that all ranks share"
            raise BadInput("this rank does not see the folder that rank 0 has made", where=str(path), remedy=remedy)

    def complete(manifest: Manifest) -> None:
        (path / save.name).unlink()
        write_manifest(path, manifest, {"save": save.name, "step": save.step, **state})
        atomic_files.finish(folder, tag)
        if latest:
            atomic_files.write_durably(folder / atomic_files.LATEST, tag.encode())

    try:
        on_all_ranks(engine, make_folder, where)
        on_all_ranks(engine, require_same_folder, where)
        if in_background:

            def abandon() -> None:
                atomic_files.abandon(folder, tag)

            engine.model_states.pending_save = _begin(engine, path, save, shards(), complete, abandon)
            return folder / tag
        manifest = _write(engine, path, save, shards)
        engine.activity.begin(f"completing {tag!r}")
        on_all_ranks(engine, lambda: None if manifest is None else complete(manifest), where)
    except BadInput:
        if first:  # what is left of it would keep a full disk full
            atomic_files.abandon(folder, tag)
        raise
    return folder / tag


def _require_one_tag(tags: list[str]) -> None:
    other = next((rank for rank, tag in enumerate(tags) if tag != tags[0]), 0)
    if other:
        raise BadInput(
            f"rank {other} saves {tags[other]!r}, rank 0 saves {tags[0]!r}",
            where="engine.save_checkpoint",
            remedy="give the same tag on every rank",
        )


def _write(engine: EngineParts, path: Path, save: SaveId, shards: Callable[[], list[StateShard]]) -> Manifest | None:
    """Writes every rank's file and the metadata; returns the checksums on the first rank."""
    comm = engine.ranks.world
    engine.arena.phase = Phase.SAVE
    wanted = shards()
    if engine.device.type == "cuda":
        torch.cuda.current_stream(engine.device).synchronize()
    writer = ShardWriter(path, save, comm.rank, engine.activity)
    engine.activity.begin(f"writing {path.name}")
    with by_torch(comm, "save a checkpoint", str(path)):
        save_by_plan(
            {},
            storage_writer=writer,
            planner=ShardSavePlanner(wanted),
            process_group=comm.group,
            no_dist=comm.world_size == 1,
        )
    return writer.manifest


def _shards(engine: EngineParts, *, frozen: bool) -> list[StateShard]:
    shards = state_shards(engine.model_states, loading=False, frozen=frozen)
    errors = error_shards(engine.model_states) if _has_errors(engine) else ()
    return [*shards, *errors, *(buffer_shards(engine.module, engine.ranks.part) if engine.comm.rank == 0 else ())]


def _begin(
    engine: EngineParts,
    path: Path,
    save: SaveId,
    shards: list[StateShard],
    complete: Callable[[Manifest], None],
    abandon: Callable[[], None],
) -> BackgroundSave:
    """Copies every rank's shards to the host, and lets threads write them. See Note [A save in the background]."""
    comm, memory = engine.ranks.world, engine.model_states.snapshot
    assert memory is not None
    engine.arena.phase = Phase.SAVE
    stream, begun, copied = Stream(engine.device), Event(engine.device), Event(engine.device)
    begun.record(engine.schedule.compute_stream)
    planner = ShardSavePlanner(snapshot(shards, memory, stream, begun))
    copied.record(stream)
    if engine.host is not None or not engine.model_states.setup.has_masters:
        copied.synchronize()  # the host, or the user's own writes, may change them at once
    writer = ShardWriter(path, save, comm.rank, Unwatched())
    plans, metadata = plan_writes(engine, writer, planner)
    return BackgroundSave(path, writer, planner, plans, metadata, comm.rank, copied, complete, abandon)


def _state(engine: EngineParts, *, frozen: bool) -> dict[str, Any]:
    groups = engine.optimizer.param_groups if engine.optimizer is not None else []
    return {
        "ranks": engine.comm.world_size,
        "mesh": engine.ranks.degrees,
        "stage": engine.settings.zero.stage,
        "dtype": str(engine.settings.dtype),
        "optimizer": engine.optimizer.kind if engine.optimizer is not None else None,
        "errors": _has_errors(engine),
        "groups": encode([{k: v for k, v in group.items() if k != "params"} for group in groups], "optimizer.param_groups"),
        "progress": engine.progress.state_dict(),
        "schedule": encode(engine.lr_scheduler.state_dict(), "lr_scheduler") if engine.lr_scheduler is not None else None,
        "coefficients": engine.optimizer_step.coefficient_state() if engine.optimizer_step is not None else {},
        "missed_steps": engine.optimizer_step.frozen.state_dict() if engine.optimizer_step is not None else {},
        **engine.techniques.state_dict(),
        "extra_state": encode(_extra_states(engine), "extra_state"),
        "model": {
            **_names(engine),
            "groups": parameter_groups(engine),
            "parts": parts_held(engine),
            "without_frozen": not frozen,
        },
    }


def _extra_states(engine: EngineParts) -> dict[str, Any]:
    """What modules return from ``get_extra_state()``, by their names.

    Raises:
        BadInput: under a pipeline, and for entries of the model's own state dict that no checkpoint holds.
    """
    found = {name: module.get_extra_state() for name, module in modules_with_extra_state(engine.module).items()}
    others = other_entries(engine.module, engine.schedule)
    if others or (found and engine.ranks.pp is not None):
        raise BadInput(
            f"the model's state_dict() holds {next(iter(others or found))!r}, which no checkpoint "
            + ("holds beside parameters, buffers and extra states" if others else "of a pipeline's stages holds"),
            where="engine.save_checkpoint",
            remedy="put it into client_state, and back after load_checkpoint()",
        )
    return found


def _has_errors(engine: EngineParts) -> bool:
    return engine.optimizer_step is not None and engine.optimizer_step.has_errors(engine.progress.applied)


def _names(engine: EngineParts) -> dict[str, Any]:
    """Shapes of parameters and buffers by name, which their flat tensors do not have, and the names of tied parameters."""
    shapes: dict[str, list[int]] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, param in plain_named(engine.module.named_parameters(remove_duplicate=False)):
        if id(param) in first:
            tied[name] = first[id(param)]
        else:
            first[id(param)], shapes[name] = name, list(param.shape)
    kept = {shard.name.removeprefix("buffer/") for shard in buffer_shards(engine.module)}
    buffers = plain_named(engine.module.named_buffers(remove_duplicate=False))
    shapes |= {name: list(buffer.shape) for name, buffer in buffers if name in kept}
    return {"shapes": shapes, "tied": tied}
