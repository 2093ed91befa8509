"""Checkpoints that DeepSpeed's own engine saved under ZeRO, at stages 1 to 3, loaded at any stage and on any number of ranks.

Note [DeepSpeed's shards]
    ``mp_rank_00_model_states.pt`` (at stage 3 ``zero_pp_rank_<r>_mp_rank_00_model_states.pt``, one a rank) has the 16-bit
    model, shapes, frozen parameters, buffers, the schedule and counts. ``zero_pp_rank_<r>_mp_rank_00_optim_states.pt``, with
    ``bf16_`` before it in bf16, has one rank's part of masters and states in flat tensors, one a parameter group, at stage 3
    one a sub-group. Up to stage 2 ``param_slice_mappings`` says which elements of a rank's flat are which parameter's; at
    stage 3 a parameter of n elements takes ceil(n / ranks) of every rank's, in the order of ``param_shapes``.
    The client's state follows DeepSpeed's own keys, of which ``ds_version`` is the last.
    Source: DeepSpeed 0.19.8, runtime/{engine,bf16_optimizer,zero/stage_1_and_2,zero/stage3}.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeroplan.core.errors import BadInput
from zeroplan_runtime.checkpoint.foreign import TrainingCounts, WantedTensors, load_whole, resume_schedule
from zeroplan_runtime.checkpoint.parameter_shapes import require_same_groups
from zeroplan_runtime.checkpoint.torch_files import read_torch_file, require_sums
from zeroplan_runtime.engine_parts import EngineParts
from zeroplan_runtime.parameter_states import MASTER

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)(?:_\d+)?_model_states\.pt")
_SHARD_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)(?:_\d+)?_optim_states\.pt")
_CONVERT = "make it universal by DeepSpeed's ds_to_universal, and load that"


class _Attributes:
    """Stands for an object of DeepSpeed's: it holds the attributes that were saved, and has no code."""


#: The classes of DeepSpeed's that its files name.
_STAND_INS: Mapping[str, Callable[..., Any]] = {
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _Attributes,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _Attributes,
    "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig": _Attributes,
    "deepspeed.runtime.fp16.loss_scaler.LossScaleProfile": str,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.utils.tensor_fragment.fragment_address": _Attributes,
}


def is_deepspeed_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of DeepSpeed's engine; no universal one is."""
    try:
        return any(_MODEL_FILE.fullmatch(one.name) for one in folder.iterdir()) and not (folder / "zero").is_dir()
    except OSError:
        return False


def load_deepspeed_checkpoint(
    engine: EngineParts,
    folder: Path,
    *,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
) -> dict[str, Any]:
    """Load a checkpoint of DeepSpeed's ZeRO into an engine of any stage and number of ranks. Every rank must call it.

    Args:
        engine: the engine.
        folder: the checkpoint's own folder.
        load_optimizer_states: load the optimizer's states, hyperparameters and loss scale, too.
        load_lr_scheduler_states: load the schedule's state.
        load_module_only: load the parameters and buffers only; parameters are the masters.

    Returns:
        The client's state.

    Raises:
        BadInput: on every rank, when one finds a file missing, damaged, of another model or that names what could run code;
            the engine is as it was before, unless the disk fails in between.
    """
    optimizer = load_optimizer_states and not load_module_only
    wanted = WantedTensors.of(engine, str(folder), optimizer_states=optimizer)
    found = load_whole(
        engine,
        wanted,
        lambda: _ZeroCheckpoint(engine, folder, wanted),
        lambda checkpoint: None if load_module_only else checkpoint.counts,
        where=str(folder),
        name=folder.name,
    )
    if optimizer:
        found.take_over(engine)
    if load_lr_scheduler_states and not load_module_only:
        resume_schedule(engine, found.model.get("lr_scheduler"))
    keys = list(found.model)
    return {key: found.model[key] for key in keys[keys.index("ds_version") + 1 if "ds_version" in keys else 0 :]}


@dataclass(frozen=True, slots=True)
class _Piece:
    """A parameter's elements in one rank's flat tensor: ``flats[flat][start : start + numel]``."""

    rank: int
    flat: int
    start: int
    numel: int


class _ZeroCheckpoint:
    """The tensors of a checkpoint; see :class:`~zeroplan_runtime.checkpoint.foreign.WholeTensors`.

    Attributes:
        model: what the first rank's file of the model holds.
        counts: where the training stood.

    Raises:
        BadInput: when something that is wanted is not there, or of another shape.
    """

    def __init__(self, engine: EngineParts, folder: Path, wanted: WantedTensors) -> None:
        self._engine, self._where, self._wanted = engine, str(folder), wanted
        models, shards = _files(folder, _MODEL_FILE), _files(folder, _SHARD_FILE)
        if not shards:
            raise BadInput(
                "was saved by DeepSpeed at stage 0, without shards",
                where=self._where,
                remedy="load its 'module' into the model before initialize(), or save it at stage 1",
            )
        self._models = [self._read(file) for file in models]
        self._shards = [self._read(file)["optimizer_state_dict"] for file in shards]
        self.model = self._models[0]
        if self.model.get("mp_world_size", 1) != 1:
            raise BadInput("its ranks held parts of the model", where=self._where, remedy=_CONVERT)
        self._flats = [shard.get("single_partition_of_fp32_groups", shard.get("fp32_flat_groups")) for shard in self._shards]
        self._base = [shard.get("base_optimizer_state", shard.get("optimizer_state_dict")) for shard in self._shards]
        counts = self._shards[0].get("partition_count", len(shards))
        saved = max(counts) if isinstance(counts, list) else counts
        if saved != len(shards):
            raise BadInput(f"holds the shards of {len(shards)} ranks of {saved}", where=self._where, remedy="copy all files")
        if any(not isinstance(one, dict) or "state" not in one for one in self._base) or None in self._flats:
            raise BadInput("holds shards in a form that is not read (elastic, or swapped)", where=self._where, remedy=_CONVERT)
        self._has_states = any(one["state"] for one in self._base)  # not before the first step that is applied
        self._pieces = self._by_slices() if "param_slice_mappings" in self._shards[0] else self._by_shapes()
        self._check_trained()
        self._check_frozen()
        self.counts = self._counts()

    # ------------------------------------------------------------------ what write_whole asks for

    def state(self, name: str, key: str) -> torch.Tensor:
        """Return a trained parameter or a state of it."""
        parts = []
        for piece in self._pieces[name]:
            flat = self._flats[piece.rank][piece.flat]
            if key != MASTER:
                flat = self._states(piece.rank, piece.flat)[key] if self._has_states else torch.zeros_like(flat)
            parts.append(flat.detach().reshape(-1)[piece.start : piece.start + piece.numel])
        shape = self._wanted.trained[name].shape
        return torch.cat(parts)[: shape.numel()].view(shape)

    def frozen(self, name: str) -> torch.Tensor | None:
        """Return a parameter that is not trained; None where all were left out (``exclude_frozen_parameters``)."""
        if not self.model.get("frozen_param_shapes"):
            return None
        shape = self._wanted.frozen[name].shape
        parts = [model["frozen_param_fragments"][name].detach().reshape(-1) for model in self._models]
        return torch.cat(parts)[: shape.numel()].view(shape)

    def buffer(self, name: str) -> torch.Tensor | None:
        """Return a buffer; None where the checkpoint has none of that name."""
        return self.model["module"].get(name) if name in (self.model.get("buffer_names") or ()) else None

    def take_over(self, engine: EngineParts) -> None:
        """Go on with the hyperparameters and the loss scale."""
        if engine.optimizer is not None:
            pairs = zip(engine.optimizer.param_groups, self._base[0]["param_groups"], strict=True)
            engine.optimizer.take_hyperparameters(
                [{key: value for key, value in saved.items() if key in group and key != "params"} for group, saved in pairs]
            )
        scaler, saved = engine.progress.scaler, vars(self._shards[0].get("loss_scaler") or _Attributes())
        if scaler.dynamic and saved.get("dynamic"):
            counts = {"iteration": saved["cur_iter"], "last_overflow": saved["last_overflow_iter"]}
            scaler.load_state_dict({"scale": saved["cur_scale"], "left": saved["cur_hysteresis"], **counts})

    # ------------------------------------------------------------------ where elements are

    def _by_slices(self) -> dict[str, list[_Piece]]:
        pieces: dict[str, list[_Piece]] = {}
        for rank, shard in enumerate(self._shards):
            for flat, names in enumerate(shard["param_slice_mappings"]):
                for name, place in names.items():
                    pieces.setdefault(name, []).append(_Piece(rank, flat, place.start, place.numel))
        return pieces

    def _by_shapes(self) -> dict[str, list[_Piece]]:
        pieces: dict[str, list[_Piece]] = {}
        ranks = len(self._shards)
        for flat, shapes in enumerate(self.model["param_shapes"]):
            start = 0
            for name, shape in shapes.items():
                part = -(-torch.Size(shape).numel() // ranks)
                pieces[name] = [_Piece(rank, flat, start, part) for rank in range(ranks)]
                start += part
        return pieces

    def _states(self, rank: int, flat: int) -> dict[str, Any]:
        states: dict[str, Any] = self._base[rank]["state"].get(flat, {})
        return states

    # ------------------------------------------------------------------ checks

    def _read(self, file: Path) -> dict[str, Any]:
        self._engine.activity.piece(f"verifying {file.name}")
        require_sums(file)
        found = read_torch_file(file, _STAND_INS)
        if not isinstance(found, dict):
            raise BadInput("is not what DeepSpeed writes", where=str(file))
        return found

    def _check_trained(self) -> None:
        shapes = {name: tuple(shape) for one in self.model.get("param_shapes") or () for name, shape in one.items()}
        remedy = "build the model that was saved, and freeze what was frozen"
        for name, param in self._wanted.trained.items():
            if name not in self._pieces:
                raise BadInput(f"holds no trained parameter {name!r}", where=self._where, remedy=remedy)
            if shapes.get(name, tuple(param.shape)) != tuple(param.shape):
                said = f"{name!r} was saved as {shapes[name]} and is {tuple(param.shape)} here"
                raise BadInput(said, where=self._where, remedy=remedy)
            if sum(piece.numel for piece in self._pieces[name]) < param.numel():
                raise BadInput(f"lacks elements of {name!r}", where=self._where, remedy="copy all files")
        if more := sorted(set(self._pieces) - set(self._wanted.trained)):
            raise BadInput(f"holds {more[0]!r}, which this model does not train", where=self._where, remedy=remedy)
        if len(self._wanted.keys) > 1:
            self._check_states()

    def _check_states(self) -> None:
        """Check that the optimizer keeps these states, and that its groups have these parameters."""
        wanted = set(self._wanted.keys) - {MASTER} if self._has_states else set()
        for piece in {piece for pieces in self._pieces.values() for piece in pieces if piece.numel}:
            states, size = self._states(piece.rank, piece.flat), self._flats[piece.rank][piece.flat].numel()
            kept = {key for key, one in states.items() if isinstance(one, torch.Tensor) and one.dim() and one.numel() >= size}
            if kept != wanted:
                said = f"its optimizer keeps {', '.join(sorted(kept)) or 'nothing'}, this one {', '.join(sorted(wanted))}"
                raise BadInput(
                    said, where=self._where, remedy="use the optimizer that was saved, or load_optimizer_states=False"
                )
        groups = self._base[0]["param_groups"]
        group_of = {flat: number for number, group in enumerate(groups) for flat in group["params"]}
        saved = {name: group_of.get(pieces[0].flat, 0) for name, pieces in self._pieces.items()}
        require_same_groups(self._engine, len(groups), saved, self._where)

    def _check_frozen(self) -> None:
        shapes = self.model.get("frozen_param_shapes") or {}
        for name, param in self._wanted.frozen.items() if shapes else ():
            if tuple(shapes.get(name, ())) != tuple(param.shape):
                raise BadInput(f"holds no frozen {name!r} of its shape", where=self._where, remedy="freeze what was frozen")

    def _counts(self) -> TrainingCounts:
        steps, skipped = (int(self.model.get(key, 0)) for key in ("global_steps", "skipped_steps"))
        states, groups = self._base[0]["state"].values(), self._base[0]["param_groups"]
        taken = next((one["step"] for one in [*states, *groups] if "step" in one), steps - skipped)
        return TrainingCounts(int(taken), steps, skipped)


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the files of a kind, by rank.

    Raises:
        BadInput: when ranks held parts of the model.
    """
    found = {}
    for one in folder.iterdir():
        match = pattern.fullmatch(one.name)
        if match is None:
            continue
        if int(match[2]):
            raise BadInput("its ranks held parts of the model", where=str(folder), remedy=_CONVERT)
        found[int(match[1] or 0)] = one
    return [found[rank] for rank in sorted(found)]
