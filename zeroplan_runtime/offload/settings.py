"""What a ds_config says about offload, checked: what the runtime cannot do is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.offload_rules import require_runnable
from zeroplan.core.zero_config import ActivationCheckpointing, Aio, Device, OffloadOptimizer, OffloadParam
from zeroplan_runtime.offload.probe import ALLOW_MEMORY_KEY

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


def read_offload(raw: Mapping[str, Any], stage: int) -> tuple[Offload, list[str]]:
    """The offload of a ds_config at `stage`, and the keys given there that have no effect.

    Raises:
        BadInput: for unknown keys, values of a wrong type, and combinations that the runtime does not do.
    """
    zero = raw.get("zero_optimization") or {}
    ignored: list[str] = []
    optimizer = _read(OffloadOptimizer, zero, "offload_optimizer", "zero_optimization.", ignored)
    param = _read(OffloadParam, zero, "offload_param", "zero_optimization.", ignored)
    checkpoints = _read(ActivationCheckpointing, raw, "activation_checkpointing", "", ignored)
    aio = _read(Aio, raw, "aio", "", ignored)
    delayed = (raw.get("zeroplan") or {}).get("delayed_update", 0)
    if not isinstance(delayed, int) or isinstance(delayed, bool) or delayed < 0:
        raise BadInput(
            f"{delayed!r} is not a step", where="zeroplan.delayed_update", remedy="name the first step, or 0 for none"
        )
    in_memory = bool((raw.get("zeroplan") or {}).get(ALLOW_MEMORY_KEY, False))
    made = Offload(optimizer, param, aio, checkpoints.cpu_checkpointing, delayed, in_memory)
    require_runnable(stage, optimizer, param, delayed=delayed > 0)
    for section, one in (("offload_optimizer", optimizer), ("offload_param", param)):
        if one.device is Device.NVME and not one.nvme_path:
            raise BadInput("a folder on the disk is missing", where=section, remedy='add "nvme_path"')
    return made, ignored


def _read(kind: type[Any], holder: Mapping[str, Any], key: str, prefix: str, ignored: list[str]) -> Any:
    section = holder.get(key) or {}
    where = prefix + key
    if not isinstance(section, Mapping):
        raise BadInput(f"{section!r} is not an object", where=where)
    known = {f.name: f.default for f in fields(kind)}
    given: dict[str, Any] = {}
    for name, value in section.items():
        if name not in known:
            raise BadInput(f"key {name!r} is not supported", where=where, remedy=did_you_mean(name, known) or "remove it")
        if value == "auto" or value is None:
            continue
        given[name] = _value(value, known[name], f"{where}.{name}")
    without = WITHOUT_EFFECT.get(key, ())
    if given.get("device") is not Device.NVME:
        without += FOR_FILES.get(key, ())
    ignored += [f"{where}.{name}" for name in given if name in without]
    return kind(**given)


def _value(value: Any, default: Any, where: str) -> Any:
    if isinstance(default, Device):
        try:
            return Device(value)
        except ValueError:
            raise BadInput(f"{value!r} is not a device", where=where, remedy="use none, cpu or nvme") from None
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wanted = str if default is None and where.endswith("path") else type(default) if default is not None else int
    if type(value) is not wanted:
        raise BadInput(f"{value!r} is no {wanted.__name__}", where=where)
    return value
