"""What a user's own files have to say for another configuration: the fewest changes of their values, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import OffloadDevice, ZeroConfig
from zeroplan.ds_config.framework_forms import hf_trainer_form
from zeroplan.ds_config.writer import dump_ds_config
from zeroplan.interop.edits.places import ACCELERATE, DS_CONFIG, SourceFile, text_at
from zeroplan.interop.edits.texts import (
    REMOVED,
    UneditableError,
    edit_environment,
    edit_json,
    edit_python,
    edit_shell,
    edit_yaml,
)
from zeroplan.interop.readers import ALLOCATOR_VARIABLES
from zeroplan.techniques.base import Technique

#: Programs that have the Trainer's arguments.
_TRAINERS = ("hf-trainer", "trl", "llama-factory", "ms-swift", "open-instruct")
#: The keys by which programs say an option, the usual one first.
_MICRO = {
    **dict.fromkeys(_TRAINERS, ("per_device_train_batch_size", "per_gpu_train_batch_size")),
    "axolotl": ("micro_batch_size",),
    "torchtune": ("batch_size",),
}
_ACCUM = dict.fromkeys((*_TRAINERS, "axolotl", "torchtune"), ("gradient_accumulation_steps",))
_CHECKPOINTS = {
    **dict.fromkeys((*_TRAINERS, "axolotl"), ("gradient_checkpointing",)),
    "torchtune": ("enable_activation_checkpointing",),
}
_OFF = {"llama-factory": "disable_gradient_checkpointing"}
#: Those that take a ds_config by the key ``deepspeed``.
_TAKE_DS_CONFIG = ("hf-trainer", "trl", "llama-factory", "axolotl")
_MICRO_KEY, _ACCUM_KEY, _TRAIN_KEY = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The configuration that files shall say.

    Attributes:
        zero: sharding and offload.
        micro_batch: samples a GPU and pass.
        grad_accum: passes a step.
        checkpointing: whether blocks are checkpointed.
        ds_config: all of it, for an engine that takes one.
        alloc_conf: the allocator's settings; empty leaves them alone.
    """

    zero: ZeroConfig
    micro_batch: int
    grad_accum: int
    checkpointing: bool
    ds_config: Mapping[str, Any] | None = None
    alloc_conf: str = ""


@dataclass(slots=True)
class Edits:
    """Changed texts by path, what no file could be made to say, and files that are added."""

    texts: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    added: list[SourceFile] = field(default_factory=list)

    def put(self, place: SourceFile, path: Sequence[str], value: Any) -> None:
        """Change one value of a place; what cannot be changed is listed."""
        text = self.texts.get(place.path) or text_at(place.path)
        among = [str(key) for key in place.data]
        keys = (*place.within, *path)
        try:
            if place.kind == "json":
                changed = edit_json(text, keys, value)
            elif place.kind == "yaml":
                changed = edit_yaml(text, keys, value)
            elif place.kind == "shell" and not place.within and value is not REMOVED and not isinstance(value, Mapping):
                changed = edit_shell(text, keys[-1], value, among)
            elif place.kind == "python" and not place.within and not isinstance(value, Mapping):
                changed = edit_python(text, keys[-1], None if value is REMOVED else value, among)
            else:
                raise UneditableError("it is not edited here")
        except UneditableError as error:
            self.left.append(f"{place.path}: set {'.'.join(keys)} to {value} yourself, since {error}")
        else:
            self.texts[place.path] = changed


def edits_for(places: Sequence[SourceFile], wanted: Wanted, now: Workload, *, whole: bool = False) -> Edits:
    """Change what must be changed for a configuration.

    Args:
        places: of the user's files.
        wanted: the configuration.
        now: what the files run as they are: a key that they leave out is added only where its value has to be another.
        whole: whether buckets and the like are those of its ds_config, too, in place of the user's.
    """
    edits = Edits()
    arguments = [one for one in places if one.program not in (DS_CONFIG, ACCELERATE, "launcher", "")]
    batch = now.batch
    _argument(edits, arguments, _MICRO, wanted.micro_batch, batch.micro_batch)
    _argument(edits, arguments, _ACCUM, wanted.grad_accum, batch.grad_accum)
    _checkpointing(edits, places, arguments, wanted.checkpointing, now.gradient_checkpointing)
    configs = [one for one in places if one.program == DS_CONFIG]
    for place in configs:
        if wanted.ds_config is not None:
            for path, value in _ds_changes(place.data, wanted, bool(arguments), whole):
                edits.put(place, path, value)
    if not configs and not _with_ds_config(edits, places, arguments, wanted):
        _sharding(edits, places, arguments, wanted)
    if wanted.alloc_conf:
        _allocator(edits, places, wanted.alloc_conf)
    return edits


def ask_for(edits: Edits, places: Sequence[SourceFile], added: Sequence[tuple[Technique[Any], Any]]) -> None:
    """Have the files ask for techniques, each with its value, that they leave out; what no program has a key for is listed."""
    for technique, value in added:
        written = next(((one, keys) for one in places if (keys := technique.written(value, one.program))), None)
        if written is None:
            edits.left += [f"{what} in your program" for what in technique.instructions(value)]
            continue
        for key, setting in written[1].items():
            edits.put(written[0], [key], setting)


def _with_ds_config(edits: Edits, places: Sequence[SourceFile], arguments: Sequence[SourceFile], wanted: Wanted) -> bool:
    """Add a ds_config for a program on the Trainer that has none. Returns whether it did."""
    taking = [one for one in arguments if one.program in _TAKE_DS_CONFIG and not one.has("deepspeed")]
    if wanted.ds_config is None or not taking or any(one.program == ACCELERATE or one.has("fsdp") for one in places):
        return False
    path, number = "ds_config.json", 1
    while os.path.lexists(os.path.join(os.path.dirname(taking[-1].path), path)):
        number += 1
        path = f"ds_config_{number}.json"
    edits.put(taking[-1], ["deepspeed"], path)
    added = os.path.join(os.path.dirname(taking[-1].path), path)
    edits.texts[added] = dump_ds_config(hf_trainer_form(wanted.ds_config)[0])
    edits.added.append(SourceFile(added, "json", DS_CONFIG, {}, (), (taking[-1], "deepspeed"), path))
    return True


def _argument(edits: Edits, arguments: Sequence[SourceFile], keys: Mapping[str, tuple[str, ...]], value: int, now: int) -> None:
    said = [(place, key) for place in arguments for key in keys.get(place.program, ()) if place.has(key)]
    for place, key in said:
        if place.value(key) != value:
            edits.put(place, key.split("."), value)
    taking = [place for place in arguments if place.program in keys]
    if not said and taking and value != now:
        edits.put(taking[-1], [keys[taking[-1].program][0]], value)


def _checkpointing(
    edits: Edits, places: Sequence[SourceFile], arguments: Sequence[SourceFile], wanted: bool, now: bool
) -> None:
    key = "fsdp_config.fsdp_activation_checkpointing"
    of_fsdp = [one for one in places if one.program == ACCELERATE and one.has(key)]
    for place in of_fsdp:
        if place.value(key) and not wanted:
            edits.put(place, key.split("."), False)
    if any(place.value(key) for place in of_fsdp) and wanted:
        return
    for place in arguments:
        if (off := _OFF.get(place.program)) is not None:
            if bool(place.value(off)) is wanted:
                edits.put(place, [off], not wanted)
            return
    taking = [place for place in arguments if place.program in _CHECKPOINTS]
    said = [(place, key) for place in taking for key in _CHECKPOINTS[place.program] if place.has(key)]
    for place, key in said:
        if place.value(key) is not wanted:
            edits.put(place, key.split("."), wanted)
    if not said and taking and wanted is not now:
        edits.put(taking[-1], [_CHECKPOINTS[taking[-1].program][0]], wanted)


def _ds_changes(said: Mapping[str, Any], wanted: Wanted, filled: bool, whole: bool) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the paths of a ds_config that change, each with its value. `filled`: a program fills what the file leaves open."""
    explicit = wanted.ds_config or {}
    target = explicit.get("zero_optimization", {})
    zero = said.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    if (zero.get("stage") or 0) != wanted.zero.stage:
        yield ("zero_optimization", "stage"), wanted.zero.stage
    for block in ("offload_optimizer", "offload_param"):
        device = getattr(wanted.zero, block).device
        if _device(zero.get(block)) == device:
            continue
        if device is OffloadDevice.NONE:
            yield ("zero_optimization", block), REMOVED
        elif isinstance(zero.get(block), Mapping):
            for key, value in target.get(block, {"device": device.value}).items():
                yield ("zero_optimization", block, key), value
        else:
            yield ("zero_optimization", block), target.get(block, {"device": device.value})
    if wanted.zero.offload_optimizer and "optimizer" not in said and "optimizer" in explicit:
        form = hf_trainer_form(explicit)[0] if filled else explicit
        yield ("optimizer",), form["optimizer"]
    if whole:
        for key, value in target.items():
            if not isinstance(value, Mapping) and key != "stage" and zero.get(key) != value:
                yield ("zero_optimization", key), value
    for key in (_MICRO_KEY, _ACCUM_KEY, _TRAIN_KEY):
        value = explicit.get(key)
        if value is not None and said.get(key) != value and (isinstance(said.get(key), int) or (not filled and key in said)):
            yield (key,), value
    if not filled and not {_MICRO_KEY, _ACCUM_KEY} & said.keys() and _MICRO_KEY in explicit:
        yield (_MICRO_KEY,), explicit[_MICRO_KEY]


def _device(block: Any) -> str:
    device = block.get("device") if isinstance(block, Mapping) else block
    return str(device).lower() if isinstance(device, str) else OffloadDevice.NONE.value


def _sharding(edits: Edits, places: Sequence[SourceFile], arguments: Sequence[SourceFile], wanted: Wanted) -> None:
    """Change stage and offload where no ds_config says them: accelerate's own keys, FSDP's, and programs' flags."""
    zero = wanted.zero
    for place in places:
        if place.program != ACCELERATE:
            continue
        own = place.value("deepspeed_config")
        if isinstance(own, Mapping) and ("zero_stage" in own or wanted.ds_config is not None):
            _accelerate(edits, place, own, wanted)
        fsdp = place.value("fsdp_config")
        if isinstance(fsdp, Mapping) and fsdp and wanted.ds_config is None:
            _fsdp(edits, place, fsdp, zero)
    for place in arguments:
        if place.program == "open-instruct" and place.has("deepspeed_stage"):
            if place.value("deepspeed_stage") != zero.stage:
                edits.put(place, ["deepspeed_stage"], zero.stage)
        elif place.program == "ms-swift" and isinstance(place.value("deepspeed"), str) and wanted.ds_config is not None:
            name = f"zero{zero.stage}" + ("_offload" if zero.offload_optimizer else "")
            if place.value("deepspeed") != name:
                edits.put(place, ["deepspeed"], name)


def _accelerate(edits: Edits, place: SourceFile, own: Mapping[str, Any], wanted: Wanted) -> None:
    zero, within = wanted.zero, () if place.kind == "shell" else ("deepspeed_config",)
    if own.get("zero_stage", 2) != zero.stage:
        edits.put(place, (*within, "zero_stage"), zero.stage)
    for block in ("offload_optimizer", "offload_param"):
        key, device = f"{block}_device", getattr(zero, block).device.value
        if str(own.get(key) or "none").lower() != device:
            edits.put(place, (*within, key), device)
    accum = own.get(_ACCUM_KEY)
    if isinstance(accum, int) and accum != wanted.grad_accum:
        edits.put(place, (*within, _ACCUM_KEY), wanted.grad_accum)


def _fsdp(edits: Edits, place: SourceFile, own: Mapping[str, Any], zero: ZeroConfig) -> None:
    within = () if place.kind == "shell" else ("fsdp_config",)
    reshards = zero.stage == 3
    key = "fsdp_reshard_after_forward" if str(own.get("fsdp_version")) == "2" else "fsdp_sharding_strategy"
    said = str(own.get(key, "true")).lower()
    if (said not in ("false", "no", "shard_grad_op")) is not reshards:
        strategy = "FULL_SHARD" if reshards else "SHARD_GRAD_OP"
        edits.put(place, (*within, key), reshards if key.endswith("forward") else strategy)
    if bool(own.get("fsdp_offload_params")) is not bool(zero.offloads_param):
        edits.put(place, (*within, "fsdp_offload_params"), bool(zero.offloads_param))


def _allocator(edits: Edits, places: Sequence[SourceFile], conf: str) -> None:
    script = next((one.path for one in places if one.kind == "shell"), None)
    if script is None:
        return
    edits.texts[script] = edit_environment(edits.texts.get(script) or text_at(script), ALLOCATOR_VARIABLES, conf)
