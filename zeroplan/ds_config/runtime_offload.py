"""What a ds_config says about the runtime's offload, checked: what the runtime cannot do is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.zero_config import ActivationCheckpointing, Aio, OffloadDevice, OffloadOptimizer, OffloadParam
from zeroplan.ds_config.coercion import to_bool, to_float, to_int
from zeroplan.ds_config.runtime_keys import Knobs, section
from zeroplan.ds_config.runtime_offload_rules import require_runnable

#: Keys of DeepSpeed's that choose between its own ways and change nothing here.
WITHOUT_EFFECT = {
    "offload_optimizer": ("pin_memory", "pipeline_read", "pipeline_write", "fast_init"),
    "offload_param": ("pin_memory",),
    "activation_checkpointing": (
        "partition_activations",
        "contiguous_memory_optimization",
        "number_checkpoints",
        "synchronize_checkpoint_boundary",
        "profile",
    ),
}
#: Keys for what is in files, which change nothing elsewhere.
FOR_FILES = {"offload_param": ("buffer_count", "buffer_size", "max_in_cpu")}
#: Older names that configs still have, with the newer.
OLDER = {"aio": {"thread_count": "intra_op_parallelism"}}
#: Sections that DeepSpeed reads by pydantic, which takes 2e8 and "4" for integers.
LAX = ("offload_optimizer", "offload_param")


@dataclass(frozen=True, slots=True)
class Offload:
    """What leaves the device. `delayed_from` is the first step whose update is delayed (0: none); `in_memory` accepts an
    ``nvme_path`` on a file system in host memory.
    """

    optimizer: OffloadOptimizer = field(default_factory=OffloadOptimizer)
    param: OffloadParam = field(default_factory=OffloadParam)
    aio: Aio = field(default_factory=Aio)
    checkpoints: bool = False
    delayed_from: int = 0
    in_memory: bool = False

    def __bool__(self) -> bool:
        """Whether optimizer or parameters leave the device."""
        return bool(self.optimizer or self.param)


def read_offload(raw: Mapping[str, Any], knobs: Knobs, stage: int) -> tuple[Offload, list[str]]:
    """The offload of a ds_config at `stage`, and the keys given there that have no effect.

    Raises:
        BadInput: for unknown keys, values of a wrong type, and combinations that the runtime does not do.
    """
    made, ignored = read_sections(raw, knobs)
    require_runnable(stage, made.optimizer, made.param, delayed=made.delayed_from > 0, aio=made.aio)
    for name, one in (("offload_optimizer", made.optimizer), ("offload_param", made.param)):
        if one.device is OffloadDevice.NVME and not one.nvme_path:
            raise BadInput("a folder on the disk is missing", where=name, remedy='add "nvme_path"')
    return made, ignored


def read_sections(raw: Mapping[str, Any], knobs: Knobs) -> tuple[Offload, list[str]]:
    """The same, whether or not it can be done.

    Raises:
        BadInput: for unknown keys and values of a wrong type.
    """
    zero = section(raw, "zero_optimization")
    ignored: list[str] = []
    optimizer = _read(OffloadOptimizer, zero, "offload_optimizer", "zero_optimization.", ignored)
    param = _read(OffloadParam, zero, "offload_param", "zero_optimization.", ignored)
    checkpoints = _read(ActivationCheckpointing, raw, "activation_checkpointing", "", ignored)
    aio = _read(Aio, raw, "aio", "", ignored)
    return Offload(optimizer, param, aio, checkpoints.cpu_checkpointing, knobs.delayed_update, knobs.nvme_in_memory), ignored


def _read(kind: type[Any], holder: Mapping[str, Any], key: str, prefix: str, ignored: list[str]) -> Any:
    where = prefix + key
    known = {f.name: f.default for f in fields(kind)}
    older = OLDER.get(key, {})
    given: dict[str, Any] = {}
    for told, value in section(holder, key).items():
        name = older.get(told, told)
        if name not in known:
            raise BadInput(f"key {name!r} is not supported", where=where, remedy=did_you_mean(name, known) or "remove it")
        if value == "auto" or value is None or (told in older and name in section(holder, key)):
            continue
        given[name] = _value(value, known[name], f"{where}.{told}", lax=key in LAX)
    without = WITHOUT_EFFECT.get(key, ())
    if given.get("device") is not OffloadDevice.NVME:
        without += FOR_FILES.get(key, ())
    ignored += [f"{where}.{name}" for name in given if name in without]
    return kind(**given)


_TAKES: dict[type[Any], tuple[str, Callable[[Any], Any]]] = {
    bool: ("true or false", to_bool),
    int: ("a whole number", to_int),
    float: ("a number", to_float),
}


def _value(value: Any, default: Any, where: str, *, lax: bool) -> Any:
    if isinstance(default, OffloadDevice):
        try:
            return OffloadDevice(value)
        except ValueError:
            raise BadInput(f"{value!r} is not a device", where=where, remedy="use none, cpu or nvme") from None
    if default is None and where.endswith("path"):
        if not isinstance(value, str) or not value:
            raise BadInput(f"{value!r} is not a path", where=where, remedy="write the path of a folder")
        return value
    kind = int if default is None else type(default)
    what, coerce = _TAKES[kind]
    exact = type(value) is kind or (kind is float and type(value) is int)
    try:
        if not lax and not exact:
            raise ValueError
        return coerce(value)
    except ValueError:
        raise BadInput(f"{value!r} is not {what}", where=where, remedy=f"write {what}") from None
