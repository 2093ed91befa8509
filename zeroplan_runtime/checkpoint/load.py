"""Loads checkpoints that any number of ranks saved at any stage, once all that is needed has been found to be whole."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_by_plan

from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan_runtime.checkpoint import atomic_files
from zeroplan_runtime.checkpoint.agreement import by_torch, on_all_ranks
from zeroplan_runtime.checkpoint.deepspeed_zero import is_deepspeed_checkpoint, load_deepspeed_checkpoint
from zeroplan_runtime.checkpoint.manifest import SaveId, read_manifest, read_state
from zeroplan_runtime.checkpoint.parameter_shapes import require_same_groups, require_same_order
from zeroplan_runtime.checkpoint.planners import (
    ShardLoadPlanner,
    StateShard,
    buffer_shards,
    check_metadata,
    error_shards,
    shards_in_files,
    state_shards,
    states_in_files,
)
from zeroplan_runtime.checkpoint.reader import VerifyingReader
from zeroplan_runtime.checkpoint.typed_json import decode
from zeroplan_runtime.engine_parts import EngineParts
from zeroplan_runtime.unit_state import UnitState
from zeroplan_runtime.units import modules_with_extra_state

logger = logging.getLogger("zeroplan_runtime")

#: Keys of the state whose values keep their Python types.
_TYPED = ("groups", "schedule", "client_state")


def load_checkpoint(
    engine: EngineParts,
    folder: str | Path,
    tag: str | None = None,
    *,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
) -> tuple[str | None, dict[str, Any]]:
    """Loads a checkpoint that any number of ranks saved at any stage, or DeepSpeed's engine did. Every rank must call it.

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
        BadInput: on every rank, when one finds it damaged, of another model or of another optimizer. Unless parameters or
            states are in files, or the disk fails in between, the engine is as it was before.
        RankLost: when a rank died.
    """
    comm, where = engine.ranks.world, "engine.load_checkpoint"
    engine.checks.require_usable(where, allow_failed_step=True)
    engine.wait_for_checkpoint()
    with engine.activity.inside("finding the checkpoint to load"):
        paths = on_all_ranks(engine, lambda: _find(Path(folder), tag), where)
        path = paths[comm.rank]
        _require_same([one.name if one is not None else None for one in paths], str(folder))
        if path is None:
            logger.warning("%s holds no checkpoint: nothing was loaded", folder)
            return None, {}
        if is_deepspeed_checkpoint(path):
            options = {"load_optimizer_states": load_optimizer_states, "load_lr_scheduler_states": load_lr_scheduler_states}
            return str(path), load_deepspeed_checkpoint(engine, path, load_module_only=load_module_only, **options)
        optimizer = load_optimizer_states and not load_module_only
        found: list[_Checkpoint] = []

        def open_checkpoint() -> str:
            found.append(_Checkpoint.open(engine, path, optimizer=optimizer))
            return found[0].save.name

        engine.activity.begin(f"opening {path.name}")
        _require_same(on_all_ranks(engine, open_checkpoint, where), str(path))
        checkpoint = found[0]
        engine.drain()
        engine.schedule.grads.drop(anyway=True)
        engine.checks.grads_were_dropped()
        frozen = checkpoint.has_frozen
        shards = state_shards(engine.model_states, loading=True, optimizer=optimizer, frozen=frozen)
        errors = error_shards(engine.model_states) if checkpoint.has_errors else ()
        wanted = [*shards, *errors, *buffer_shards(engine.module, engine.ranks.part)]
        in_files = [unit for unit in engine.model_states.units if unit.in_files or states_in_files(unit)]
        checkpoint.verify(wanted)
        with engine.checks.during_load():
            checkpoint.read(wanted)
            for unit in in_files:
                _read_into_files(checkpoint, unit, optimizer=optimizer)
            if optimizer and not checkpoint.has_errors:
                _forget_errors(engine, checkpoint)
            if engine.model_states.quantiser is not None and not load_module_only:
                engine.model_states.quantiser.step = checkpoint.state["progress"]["global_steps"]
            _refresh(engine)
            extra = decode(checkpoint.state.get("extra_state", {}))
            for name, module in modules_with_extra_state(engine.module).items():
                if name in extra:
                    module.set_extra_state(extra[name])
            if not load_module_only:
                _take_over(engine, checkpoint.state, optimizer=optimizer, schedule=load_lr_scheduler_states)
            comm.barrier()
    return str(path), checkpoint.state["client_state"]


def _require_same(found: Sequence[str | None], where: str) -> None:
    """Checks that every rank finds the same checkpoint.

    Raises:
        BadInput: that says which ranks differ.
    """
    other = next((rank for rank, one in enumerate(found) if one != found[0]), 0)
    if other:
        raise BadInput(
            f"rank {other} finds another checkpoint there than rank 0 ({found[other]}, not {found[0]})",
            where=where,
            remedy="give a folder on a file system that all ranks share",
        )


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A checkpoint that is being loaded."""

    engine: EngineParts
    path: Path
    save: SaveId
    state: dict[str, Any]
    reader: VerifyingReader
    has_errors: bool  # what compression left out is loaded from it

    @property
    def has_frozen(self) -> bool:
        """Whether it holds the frozen parameters; they keep their present values where it does not."""
        return not self.state.get("model", {}).get("without_frozen", False)

    @classmethod
    def open(cls, engine: EngineParts, path: Path, *, optimizer: bool) -> _Checkpoint:
        """Reads all but the tensors.

        Raises:
            BadInput: when it is damaged or does not fit the engine.
        """
        state = read_state(path)
        save = SaveId(state["save"], state["step"])
        manifest = read_manifest(path, state)
        reader = VerifyingReader(path, save, manifest, engine.activity)
        _require_degrees(engine, state, path)
        _require_optimizer(engine, state, path, optimizer=optimizer)
        frozen = not state.get("model", {}).get("without_frozen", False)
        buffers = buffer_shards(engine.module, engine.ranks.part)
        compresses = engine.model_states.setup.compresses and state["ranks"] == engine.comm.world_size
        errors = optimizer and compresses and state.get("errors", False)
        require_same_order(engine, state, path)
        check_metadata(engine.model_states, buffers, reader.metadata, optimizer=optimizer, frozen=frozen, errors=errors)
        return cls(engine, path, save, {**state, **{key: decode(state[key]) for key in _TYPED}}, reader, errors)

    def verify(self, wanted: list[StateShard]) -> None:
        """Checks the files and checksums of what is wanted on every rank; nothing is read into the engine."""

        def verify() -> None:
            planner = ShardLoadPlanner(wanted)
            planner.set_up_planner({}, self.reader.metadata)
            self.reader.require_pieces(planner.create_local_plan().items)

        self.engine.activity.begin(f"verifying {self.path.name}")
        on_all_ranks(self.engine, verify, str(self.path))

    def read(self, wanted: list[StateShard]) -> None:
        """Reads what is wanted on every rank; :meth:`verify` it before."""
        comm = self.engine.ranks.world
        self.engine.activity.begin(f"loading {self.path.name}")
        with by_torch(comm, "load a checkpoint", str(self.path)):
            load_by_plan(
                {},
                storage_reader=self.reader,
                planner=ShardLoadPlanner(wanted),
                process_group=comm.group,
                no_dist=comm.world_size == 1,
            )


def _require_degrees(engine: EngineParts, state: dict[str, Any], path: Path) -> None:
    saved, here = state.get("mesh", {}), engine.ranks.degrees
    for name in sorted({*saved, *here}):
        if saved.get(name, 1) != here.get(name, 1):
            raise BadInput(
                f"it was saved on {saved.get(name, 1)} ranks of {name}, and the mesh has {here.get(name, 1)}",
                where=str(path),
                remedy=f"use {saved.get(name, 1)} here (dp may differ), or load what save_16bit_model wrote",
            )


def _require_optimizer(engine: EngineParts, state: dict[str, Any], path: Path, *, optimizer: bool) -> None:
    if not optimizer or engine.optimizer is None:
        return
    kind = engine.optimizer.kind
    if state["optimizer"] != kind:
        raise BadInput(
            f"the checkpoint's optimizer is {state['optimizer']}, not {kind}", where=str(path), remedy="load_module_only=True"
        )
    # under a pipeline the names are those of the first stage
    saved = state.get("model", {}).get("groups", {}) if engine.ranks.pp is None else {}
    require_same_groups(engine, len(state["groups"]), saved, path)


def _find(folder: Path, tag: str | None) -> Path | None:
    """See :func:`~zeroplan_runtime.checkpoint.atomic_files.find`; finds checkpoints of DeepSpeed's engine, too."""
    try:
        return atomic_files.find(folder, tag)
    except BadInput:
        with suppress(BadInput):
            path = folder / (tag or atomic_files.latest(folder))
            if is_deepspeed_checkpoint(path):
                return path
        raise


def _take_over(engine: EngineParts, state: dict[str, Any], *, optimizer: bool, schedule: bool) -> None:
    """Continues from the checkpoint's counts, hyperparameters and schedule."""
    engine.progress.load_state_dict(state["progress"], optimizer=optimizer)
    engine.techniques.load_state_dict(state)
    if optimizer and engine.optimizer is not None:
        engine.optimizer.take_hyperparameters(state["groups"])
        if engine.optimizer_step is not None:
            engine.optimizer_step.load_coefficient_state(state.get("coefficients", {}))
            engine.optimizer_step.load_missed_steps(state.get("missed_steps", {}))
    if schedule and engine.lr_scheduler is not None and state["schedule"] is not None:
        try:
            engine.lr_scheduler.load_state_dict(state["schedule"])
        except Exception as fault:  # the user's own object
            raise BadInput(
                f"{type(engine.lr_scheduler).__name__} does not take the checkpoint's state ({type(fault).__name__}: {fault})",
                where="engine.load_checkpoint",
                remedy="give the schedule that was saved, or load_lr_scheduler_states=False",
            ) from fault


@torch.no_grad()
def _read_into_files(checkpoint: _Checkpoint, unit: UnitState, *, optimizer: bool) -> None:
    """Loads one unit into its swap files, so that only one unit's states at a time are in host memory."""
    engine = checkpoint.engine
    wanted, tensors = shards_in_files(engine.model_states, unit, optimizer=optimizer, frozen=checkpoint.has_frozen)
    if states_in_files(unit) or unit.frozen is not None:  # the same on all ranks, as loading is a collective
        checkpoint.verify(wanted)
        checkpoint.read(wanted)
    for buffer, tensor in tensors.items():
        engine.model_states.swapper_of(buffer).write(unit.name, buffer, tensor)
    master = tensors.get(Buffer.PARAM_MASTER, unit.master)
    if unit.trainable is None or master is None:
        return
    if unit.in_files:
        engine.model_states.param_swapper.write(unit.name, Buffer.PARAM_SHARD, master)
    else:
        unit.trainable.shard.copy_(master)


@torch.no_grad()
def _forget_errors(engine: EngineParts, checkpoint: _Checkpoint) -> None:
    """Lets the errors of compression begin at zero, as the checkpoint has none for these ranks."""
    if checkpoint.state.get("errors", False) and engine.model_states.setup.compresses:
        logger.warning(
            "%s was saved on %d ranks: on %d, what their compressed momentum left out begins at zero",
            checkpoint.path,
            checkpoint.state["ranks"],
            engine.comm.world_size,
        )
    engine.model_states.forget_errors()


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
    if engine.optimizer_step is not None:
        engine.optimizer_step.states_were_written()
    engine.schedule.prefetch_forward()
