"""From a model and its config to the units' states: what is checked first, and what the setup of the layout is.

Parameters that share memory with something else are refused: the engine gives each parameter memory of its own, so they would
part, where plain torch goes on sharing. Tied parameters, which are one object under several names, stay tied.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from zeroplan.core.arena.layout_setup import RuntimeSetup, require_exchange
from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import STATELESS
from zeroplan.core.zero_config import OffloadOptimizer, ZeroConfig
from zeroplan.ds_config.rules_runtime import require_offloadable
from zeroplan.ds_config.runtime import runtime_setup
from zeroplan_runtime.arena import DTYPES, Arena
from zeroplan_runtime.checks import freeze_outside, groups_of, require_model
from zeroplan_runtime.compiled import is_compiled, require_whole
from zeroplan_runtime.config import RuntimeConfig
from zeroplan_runtime.local_tensors import is_distributed, local_of
from zeroplan_runtime.mesh import MeshRanks
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.offload.host_setup import make_nvme_offload
from zeroplan_runtime.optim.zero_optimizer import ZeroOptimizer
from zeroplan_runtime.replicas import is_shared, require_distributed, require_divisible, require_equal_values
from zeroplan_runtime.techniques.quantize_training import require_quantisable
from zeroplan_runtime.units import Policy, cast_floating, find_units

logger = logging.getLogger("zeroplan_runtime")


def require_own_memory(model: nn.Module) -> None:
    """Refuses parameters whose elements are also those of another parameter or of a buffer.

    Raises:
        BadInput: with both names.
    """
    named: list[tuple[str, torch.Tensor]] = []
    own = [(name, local_of(param)) for name, param in model.named_parameters()]
    named += [(name, param) for name, param in own if param.numel() and not param.is_meta]
    parameters = len(named)
    named += [(name, buffer) for name, buffer in model.named_buffers() if buffer.numel() and not buffer.is_meta]
    by_storage: dict[int, list[int]] = defaultdict(list)
    for i, (name, tensor) in enumerate(named):
        if tensor.layout is not torch.strided:
            continue
        by_storage[tensor.untyped_storage().data_ptr()].append(i)
        if i < parameters and torch._debug_has_internal_overlap(tensor) == 1:
            raise BadInput(f"elements of {name!r} share memory", where="model", remedy="make it contiguous()")
    for members in by_storage.values():
        for i, first in enumerate(members):
            for second in members[i + 1 :]:
                if first < parameters and _overlap(named[first][1], named[second][1]):
                    raise BadInput(
                        f"{named[first][0]!r} and {named[second][0]!r} share memory, but are two tensors",
                        where="model",
                        remedy="tie parameters by assigning the parameter itself, and copy what is to be apart by clone()",
                    )


def warn_of_aliases(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Logs which parameters share their memory with a tensor outside the model, where moving or casting would not part them."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return
    plain = [(name, param) for name, param in model.named_parameters() if not is_distributed(param)]
    params = [(name, param) for name, param in plain if param.device == device and param.dtype == dtype]
    known = Counter(_storages([*(param for _, param in plain), *model.buffers()]))
    shared = [name for name, p in params if p.numel() and count(p.untyped_storage()._cdata) > known[_storage(p)] + 1]
    if shared:
        more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        logger.warning(
            "the memory of parameter %r%s is shared with a tensor outside the model's parameters and buffers, which keeps the "
            "present values: the engine's parameters have memory of their own",
            shared[0],
            more,
        )


def _storages(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [_storage(tensor) for tensor in tensors if tensor.layout is torch.strided]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors of the same storage have a byte in common."""
    begin = max(one.data_ptr(), other.data_ptr())
    end = min(_end(one), _end(other))
    if begin >= end:
        return False
    if one.is_contiguous() or other.is_contiguous() or one.element_size() != other.element_size():
        return True
    elements = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool, device="cpu")
    elements.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(elements.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _end(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def zero_of(config: RuntimeConfig, optimizer: ZeroOptimizer | None) -> ZeroConfig:
    """Returns the config's ZeRO section; nothing is offloaded where there is no optimizer."""
    return config.zero if optimizer is not None else replace(config.zero, offload_optimizer=OffloadOptimizer())


def make_states(
    model: nn.Module,
    config: RuntimeConfig,
    optimizer: ZeroOptimizer | None,
    ranks: MeshRanks,
    arena: Arena,
    policy: Policy | None,
) -> tuple[ModelStates, list[nn.Parameter]]:
    """Moves the model into the units' memory, in the config's dtype.

    Returns:
        The states, and the parameters that were frozen since no optimizer group has them.

    Raises:
        BadInput: for a model that an engine cannot take, and for an optimizer that does not go with the config.
    """
    require_model(model, ranks.shard.world_size, on_mesh=ranks.mesh is not None)
    require_distributed(model, ranks)
    if is_compiled(model):
        require_whole(model)
    require_equal_values(model, ranks)
    require_own_memory(model)
    dtype = DTYPES[config.dtype]
    warn_of_aliases(model, arena.device, dtype)
    groups = groups_of(model, optimizer)
    frozen = freeze_outside(model, groups) if groups else []
    setup = _setup(config, optimizer, ranks)
    if any(p.is_floating_point() and p.dtype != dtype for p in model.parameters()):
        cast_floating(model, dtype)
    shared = is_shared if ranks.ep is not None else None
    units = find_units(model, groups, policy=policy, wide_numel=config.runtime_options.wide_numel, experts=shared)
    files = make_nvme_offload(zero_of(config, optimizer), in_memory=config.runtime_options.nvme_in_memory)
    states = ModelStates(units, setup, ranks, arena, files)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = ranks.shard.broadcast_from_first(buffer.to(arena.device))
    return states, frozen


def _setup(config: RuntimeConfig, optimizer: ZeroOptimizer | None, ranks: MeshRanks) -> RuntimeSetup:
    zero = zero_of(config, optimizer)
    if optimizer is not None and optimizer.row.compresses:
        require_exchange(zero.stage, zero.offload_optimizer.device, local_steps=optimizer.steps_alone)
    if optimizer is not None and zero.offload_optimizer:
        require_offloadable(optimizer.kind, zero)
    setup = runtime_setup(
        zero,
        config.runtime_options,
        ranks=ranks.shard.world_size,
        dtype=config.dtype,
        optimizer=optimizer.row_with_states.name if optimizer is not None else STATELESS,
        grad_accum=config.grad_accum,
        quantize_training=config.quantize_training if optimizer is not None else None,
        local_steps=optimizer is not None and optimizer.steps_alone,
        ep=ranks.degrees.get("ep", 1),
        across=ranks.across,
    )
    if setup.quantize_training is not None:
        require_quantisable(setup, ranks)
    require_divisible(setup, ranks.degrees)
    return setup
