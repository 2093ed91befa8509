"""Compares what every rank must have alike before an engine is made: config, optimizer, and the model's parameters.

Each rank updates its own shard by its own rule, so ranks that differ would train one model by several rules, or part at the
first collective. A digest is compared; where it differs, the facts are, and the first that differs is named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from zeroplan.core.errors import BadInput
from zeroplan_runtime.comm import Communicator
from zeroplan_runtime.config import RuntimeConfig
from zeroplan_runtime.mesh import MeshRanks
from zeroplan_runtime.optim.zero_optimizer import ZeroOptimizer

#: Fields that may differ: what one rank shows, and folders of its own.
_OWN = frozenset({"monitors", "flops_profiler", "without_effect", "nvme_path", "timeout"})
#: Fields by the keys of the ds_config, where they are called otherwise.
_KEYS = {
    "zero": "zero_optimization",
    "grad_accum": "gradient_accumulation_steps",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "zero.step.gradient_clipping": "gradient_clipping",
}

_Facts = list[tuple[str, str]]


def require_same_everywhere(
    model: nn.Module, settings: RuntimeConfig, optimizer: ZeroOptimizer | None, ranks: MeshRanks
) -> None:
    """Compares config over all ranks, and model and optimizer over those that hold the same part of the model.

    Raises:
        BadInput: on every rank, naming what differs.
    """
    _compare(ranks.world, list(_flat("", settings)), "ds_config")
    _compare(ranks.shard, [*_of_optimizer(optimizer), *_of_model(model, optimizer)], "initialize")


def _compare(comm: Communicator, facts: _Facts, where: str) -> None:
    if comm.world_size == 1:
        return
    digests = comm.all_gather_object(hashlib.sha256(repr(facts).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everyone: list[_Facts] = comm.all_gather_object(facts)
    rank = next(i for i, digest in enumerate(digests) if digest != digests[0])
    here, there = dict(everyone[rank]), dict(everyone[0])
    name = next((one for one in [*there, *here] if here.get(one) != there.get(one)), "")
    if name:
        differs = f"{name} is {here.get(name, 'not there')} on rank {rank} and {there.get(name, 'not there')} on rank 0"
    else:
        pairs = zip_longest((name for name, _ in everyone[rank]), (name for name, _ in everyone[0]))
        mine, theirs = next((a, b) for a, b in pairs if a != b)
        differs = f"rank {rank} has {mine} where rank 0 has {theirs}"
    raise BadInput(differs, where=where, remedy="give every rank the same config, model and optimizer")


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The leaves of a config by their names, those of parts with a dot."""
    if is_dataclass(value) and not isinstance(value, type):
        parts: Mapping[str, Any] = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, Mapping):
        parts = dict(sorted(value.items(), key=lambda pair: (isinstance(pair[1], Mapping), str(pair[0]))))
    else:
        yield _KEYS.get(name, name), repr(getattr(value, "value", value))
        return
    for key, part in parts.items():
        if key not in _OWN:
            prefix = _KEYS.get(name, name)
            yield from _flat(f"{name}.{key}" if f"{name}.{key}" in _KEYS else f"{prefix}.{key}" if prefix else str(key), part)


def _of_optimizer(optimizer: ZeroOptimizer | None) -> Iterator[tuple[str, str]]:
    if optimizer is None:
        yield "the optimizer", "None"
        return
    yield "the optimizer", f"{optimizer.kind}{'' if optimizer.decoupled else ' with coupled weight decay'}"
    for i, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                yield f"{key} of parameter group {i}", repr(value)


def _of_model(model: nn.Module, optimizer: ZeroOptimizer | None) -> Iterator[tuple[str, str]]:
    groups = {id(param): i for i, group in enumerate(optimizer.param_groups if optimizer else ()) for param in group["params"]}
    for name, param in model.named_parameters():
        kind = "without a shape" if is_lazy(param) else f"{tuple(param.shape)} {str(param.dtype).removeprefix('torch.')}"
        group = f" of parameter group {groups[id(param)]}" if id(param) in groups else ""
        yield f"parameter {name!r}", f"{kind} {'trained' if param.requires_grad else 'frozen'}{group}"
