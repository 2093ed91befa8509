"""From a model and its config to the units' states: what is checked first, and what the setup of the layout is."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from zeroplan.core.arena.layout_setup import RuntimeSetup, require_exchange
from zeroplan.core.optimizers import STATELESS
from zeroplan.core.zero_config import OffloadOptimizer, ZeroConfig
from zeroplan.ds_config.rules_runtime import require_offloadable
from zeroplan.ds_config.runtime import runtime_setup
from zeroplan_runtime.arena import DTYPES, Arena
from zeroplan_runtime.checks import freeze_outside, groups_of, require_model
from zeroplan_runtime.compiled import is_compiled, require_whole
from zeroplan_runtime.config import RuntimeConfig
from zeroplan_runtime.mesh import MeshRanks
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.offload.host_setup import make_nvme_offload
from zeroplan_runtime.optim.zero_optimizer import ZeroOptimizer
from zeroplan_runtime.replicas import is_shared, require_distributed, require_divisible, require_equal_values
from zeroplan_runtime.shared_memory import require_own_memory, warn_of_aliases
from zeroplan_runtime.techniques.quantize_training import require_quantisable
from zeroplan_runtime.units import Policy, cast_floating, find_units


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
