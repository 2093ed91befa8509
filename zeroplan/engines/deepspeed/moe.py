"""DeepSpeed's own MoE layers (``deepspeed.moe.layer.MoE``): which parameters are experts', and how they are divided.

Note [Groups of experts]
    A rank holds num_experts / ep_size experts of a layer, whole. Ranks r, r + ep_size, … hold the same ones: they are the
    experts' data-parallel group, over which stages 1 and 2 partition what the optimizer steps of them. Experts are parameter
    groups of their own behind that of all other parameters, none of more than 178,956,971 elements, in the order of
    ``module.parameters()``. Gradients of both kinds go through the same bucket, and are reduced apart.

    Of these layers the module of one rank is the whole that a rank has, so its trace is that rank's; the tensors of gates,
    dispatch and exchange are the trace's.

    Sources: DeepSpeed 0.19.8, moe/layer.py, moe/experts.py; moe/utils.py (split_params_into_different_moe_groups_for_optimizer,
    as the engine and create_moe_param_groups of user's scripts call it); utils/groups.py (_create_expert_and_data_parallel);
    runtime/zero/stage_1_and_2.py (_configure_moe_settings, average_tensor).
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import find_optimizer
from zeroplan.engines.case import Case

#: Elements of one parameter group of experts, at most (moe/utils.py, max_group_size).
LARGEST_GROUP = 178_956_971
_EXPERTS = "deepspeed_experts"


def is_expert(name: str) -> bool:
    """Return whether a parameter, by its full name, is an expert's of a MoE layer."""
    return _EXPERTS in name.split(".")


def expert_groups(experts: Sequence[int], numel: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the parameter groups of experts: each filled, in order, with as many as it may hold."""
    found: list[list[int]] = []
    filled = LARGEST_GROUP
    for p in experts:
        if not found or filled + numel[p] > LARGEST_GROUP:
            found.append([])
            filled = 0
        found[-1].append(p)
        filled += numel[p]
    return [tuple(group) for group in found]


def require_moe(case: Case) -> None:
    """Refuse what DeepSpeed refuses of a module with MoE layers, and what is not modelled of it.

    Source: runtime/engine.py, _validate_zero3_moe_compatibility; runtime/zero/stage_1_and_2.py, _configure_moe_settings
    """
    layout, zero = case.layout, case.zero
    if zero.stage == 3:
        raise BadInput(
            "Native DeepSpeed MoE is not supported with ZeRO Stage 3", where="--stage", remedy="use ZeRO stage 1 or 2"
        )
    if zero.stage == 2 and not zero.buckets.contiguous_gradients and not zero.offload_optimizer:
        raise BadInput(
            "contiguous gradients must be set to true for MoE in ZeRO stage 2",
            where="zero_optimization.contiguous_gradients",
            remedy="leave it out",
        )
    if zero.stage and not zero.buckets.reduce_scatter:
        raise BadInput(
            "reduce scatter must be set to true for MoE", where="zero_optimization.reduce_scatter", remedy="leave it out"
        )
    for name in ("tp", "ulysses", "pp"):
        if getattr(layout, name) > 1:
            raise BadInput(f"{name} beside DeepSpeed's MoE layers is not modelled", where=f"--{name}", remedy="leave it at 1")
    if find_optimizer(case.workload.numerics.optimizer).rest or find_optimizer(case.workload.numerics.optimizer).compresses:
        raise BadInput(
            f"{case.workload.numerics.optimizer} beside DeepSpeed's MoE layers is not modelled",
            where="--optimizer",
            remedy="use adamw",
        )
    if zero.zenflow is not None:
        raise BadInput("ZenFlow beside DeepSpeed's MoE layers is not modelled", where="zenflow", remedy="leave it out")
    parameters = case.spec.parameters
    first = next((p for p in parameters.trained if is_expert(parameters.names[p])), None)
    if zero.stage and first is not None and parameters.numel[first] > LARGEST_GROUP:
        raise BadInput(
            f"{parameters.names[first]} has more than the {LARGEST_GROUP:,} elements of a parameter group of experts, of which"
            " DeepSpeed then makes an empty one that ZeRO cannot flatten",
            where="model",
            remedy="use smaller experts, or --stage 0",
        )
