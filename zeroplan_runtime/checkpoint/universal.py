"""DeepSpeed's universal checkpoints: one folder a parameter, whole, for any number of ranks and any stage.

``python -m zeroplan_runtime.checkpoint.universal CHECKPOINTS OUTPUT`` makes one of a checkpoint of this runtime, as DeepSpeed's
``ds_to_universal`` does of its own; :func:`load_universal_checkpoint` loads one into an engine, whoever wrote it. The layout is
that of deepspeed/checkpoint/ds_to_universal.py of 0.19.8.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeroplan.core.errors import BadInput
from zeroplan.core.zero_config import DEEPSPEED_VERSION
from zeroplan_runtime.checkpoint import atomic_files
from zeroplan_runtime.checkpoint.foreign import TrainingCounts, WantedTensors, load_whole, resume_schedule
from zeroplan_runtime.checkpoint.torch_files import read_torch_file, require_sums
from zeroplan_runtime.checkpoint.whole import WholeCheckpoint, run_conversion
from zeroplan_runtime.engine_parts import EngineParts
from zeroplan_runtime.parameter_states import MASTER

LATEST = "latest_universal"
_MODEL = "mp_rank_00_model_states.pt"
#: The same where DeepSpeed's stage 3 has written it, and where it looks for it: a file a rank.
_MODELS = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
_OPTIMIZER = "optimizer_state.pt"
_STATES = "zero"
_FP32 = "fp32"


def to_universal(checkpoint_dir: str | Path, output_dir: str | Path, tag: str | None = None) -> Path:
    """Writes a universal checkpoint from one of this runtime; one parameter at a time is in memory.

    Args:
        checkpoint_dir: the folder of all checkpoints.
        output_dir: the new folder; its parent gets the file ``latest_universal``.
        tag: the checkpoint's name; by default the one in the file ``latest``.

    Raises:
        BadInput: when there is no checkpoint, it is damaged, or lacks its frozen parameters.
        OSError, RuntimeError: when the disk is full or fails; nothing has the new folder's name then.
    """
    checkpoint = WholeCheckpoint(checkpoint_dir, tag)
    checkpoint.require_frozen()
    final = Path(output_dir)
    tag = atomic_files.require_tag(final.name, str(final))
    folder = atomic_files.begin(final.parent, tag)  # a kill leaves no folder of that name, or the one from before
    groups = [{**group, "params": []} for group in checkpoint.typed("groups")]
    progress = checkpoint.state["progress"]
    steps = checkpoint.steps()
    module: dict[str, torch.Tensor] = {}
    for name in checkpoint.names("master"):
        place = folder / _STATES / name
        place.mkdir(parents=True, exist_ok=True)
        torch.save({"param": checkpoint.read("master", name)}, place / f"{_FP32}.pt")
        for key, read in checkpoint.optimizer_states(name):
            torch.save({"param": read()}, place / f"{key}.pt")
        torch.save(steps[name], place / "step.pt")
    for kind in ("param", "buffer"):
        module |= {name: checkpoint.read(kind, name) for name in checkpoint.names(kind)}
    torch.save(
        {
            "ds_version": DEEPSPEED_VERSION,
            "zero_stage": checkpoint.state["stage"],
            "param_groups": groups,
            "optimizer_state_dict": {
                "state": {0: {"step": torch.tensor(float(progress["applied"]))}},
                "param_groups": [_common(groups)],
            },
        },
        folder / _STATES / _OPTIMIZER,
    )
    torch.save(
        {
            "module": module,
            "lr_scheduler": checkpoint.typed("schedule"),
            "global_steps": progress["global_steps"],
            "skipped_steps": progress["skipped"],
            "ds_version": DEEPSPEED_VERSION,
            "dp_world_size": checkpoint.state["ranks"],  # DeepSpeed's engine asks for both
            "mp_world_size": 1,
            "client_state": checkpoint.typed("client_state"),
        },
        folder / _MODEL,
    )
    _link(folder / _MODEL, folder / _MODELS.format(0))
    atomic_files.finish(final.parent, tag)
    atomic_files.write_durably(final.parent / LATEST, tag.encode())
    return final


def load_universal_checkpoint(
    engine: EngineParts, folder: str | Path, *, load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True
) -> dict[str, Any]:
    """Loads a universal checkpoint into an engine of any stage and number of ranks. Every rank must call it.

    Learning rates are those of the schedule at the step that is loaded; other hyperparameters and the loss scale stay the
    engine's own.

    Args:
        engine: the engine.
        folder: the checkpoint's own folder.
        load_optimizer_states: load the optimizer's states, too.
        load_lr_scheduler_states: load the schedule's state.

    Returns:
        What the file of the model holds beside tensors.

    Raises:
        BadInput: on every rank, when one finds a file missing, damaged or of another model; the engine is as it was before,
            unless the disk fails in between.
    """
    folder = Path(folder)
    wanted = WantedTensors.of(engine, str(folder), optimizer_states=load_optimizer_states)
    sources = {
        (name, key): folder / _STATES / name / f"{_FP32 if key == MASTER else key}.pt"
        for name in wanted.trained
        for key in wanted.keys
    }

    def find() -> _UniversalTensors:
        _require_names(folder / _STATES, set(wanted.trained), known=wanted.names)
        for (name, _), file in sources.items():
            engine.activity.piece(f"verifying {folder.name}")
            require_sums(file)
            _fitting(read_torch_file(file), wanted.trained[name], file)
        files = _model_files(folder)
        for file in files:
            require_sums(file)
        model = read_torch_file(files[0])
        if missing := [name for name in wanted.frozen if name not in (model.get("module") or {})]:
            raise BadInput(f"holds no frozen parameter {missing[0]!r}", where=str(files[0]), remedy="train what was trained")
        return _UniversalTensors(files, model, sources, wanted)

    def counts(found: _UniversalTensors) -> TrainingCounts:
        steps, model = _steps(folder / _STATES, found.model), found.model
        asked = int(model.get("global_steps", max(steps.values())))
        return TrainingCounts.of(steps, asked, int(model.get("skipped_steps", 0)))

    model = load_whole(engine, wanted, find, counts, where=str(folder), name=folder.name).model
    if load_lr_scheduler_states:
        resume_schedule(engine, model.get("lr_scheduler"))
    return {key: value for key, value in model.items() if key != "module"}


@dataclass(frozen=True, slots=True)
class _UniversalTensors:
    """The tensors of a universal checkpoint; see :class:`~zeroplan_runtime.checkpoint.foreign.WholeTensors`."""

    files: list[Path]
    model: dict[str, Any]
    sources: Mapping[tuple[str, str], Path]
    wanted: WantedTensors

    def state(self, name: str, key: str) -> torch.Tensor:
        file = self.sources[name, key]
        return _fitting(read_torch_file(file), self.wanted.trained[name], file)

    def frozen(self, name: str) -> torch.Tensor:
        return _fitting({"param": _frozen(self.files, self.model, name)}, self.wanted.frozen[name], self.files[0])

    def buffer(self, name: str) -> torch.Tensor | None:
        return (self.model.get("module") or {}).get(name)


def _common(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What all groups have alike: DeepSpeed's stage 3 gives every group what the first of these has."""
    first = groups[0] if groups else {}
    return {key: value for key, value in first.items() if all(group.get(key) == value for group in groups)}


def _link(file: Path, other: Path) -> None:
    """Makes `other` the same file, or a copy where the file system knows no links."""
    other.unlink(missing_ok=True)
    try:
        os.link(file, other)
    except OSError:
        shutil.copyfile(file, other)


def _model_files(folder: Path) -> list[Path]:
    """The file with what is not a trained parameter, or of DeepSpeed's stage 3 every rank's."""
    found = [folder / _MODELS.format(rank) for rank in range(len(list(folder.glob(_MODELS.format("*")))))]
    return [folder / _MODEL] if (folder / _MODEL).exists() or not found else found


def _frozen(files: list[Path], model: dict[str, Any], name: str) -> torch.Tensor:
    """A frozen parameter, whole; of several files each holds a part, and the last one's is padded."""
    whole: torch.Tensor = model["module"][name]
    shape = (model.get("frozen_param_shapes") or {}).get(name)
    if len(files) == 1 or shape is None:
        return whole
    parts = [read_torch_file(file)["frozen_param_fragments"][name] for file in files]
    return torch.cat(parts)[: shape.numel()].view(shape)


def _steps(states: Path, model: dict[str, Any]) -> dict[str, int]:
    """The steps that each parameter has taken. DeepSpeed writes them beside the parameters, at stage 3 once for all."""
    if files := sorted(states.glob("*/step.pt")):
        return {file.parent.name: int(read_torch_file(file)) for file in files}
    try:
        return {"": int(read_torch_file(states / _OPTIMIZER)["optimizer_state_dict"]["state"][0]["step"])}
    except (BadInput, LookupError, TypeError):  # it may hold DeepSpeed's own objects
        return {"": int(model.get("global_steps", 0)) - int(model.get("skipped_steps", 0))}


def _require_names(folder: Path, wanted: set[str], *, known: frozenset[str]) -> None:
    """Checks that the trained parameters `wanted` are there, and others only if `known` and without states.

    DeepSpeed writes frozen parameters there, too, at stages 1 and 2.

    Raises:
        BadInput: for the first that is missing or too many.
    """
    if not folder.is_dir():
        raise BadInput("is no universal checkpoint", where=str(folder.parent), remedy="make one by ds_to_universal")
    found = {path.name for path in folder.iterdir() if path.is_dir()}
    remedy = "build the model that was saved"
    if missing := sorted(wanted - found):
        raise BadInput(f"holds no parameter {missing[0]!r}", where=str(folder), remedy=remedy)
    frozen = {name for name in found & known if [file.name for file in (folder / name).iterdir()] == [f"{_FP32}.pt"]}
    if more := sorted(found - wanted - frozen):
        raise BadInput(f"holds {more[0]!r}, which this model does not train", where=str(folder), remedy=remedy)


def _fitting(data: Any, param: torch.Tensor, file: Path) -> torch.Tensor:
    """The tensor in `data`; of DeepSpeed's stage 3 it is not in a dict, and flat."""
    value = data.get("param") if isinstance(data, dict) else data
    if not isinstance(value, torch.Tensor):
        raise BadInput("holds no tensor 'param'", where=str(file))
    if value is data and value.shape == (param.numel(),):
        value = value.view(param.shape)
    if value.shape != param.shape:
        raise BadInput(f"holds the shape {list(value.shape)}, not {list(param.shape)}", where=str(file))
    return value.detach()


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    run_conversion(to_universal, __doc__, arguments)


if __name__ == "__main__":
    main()
