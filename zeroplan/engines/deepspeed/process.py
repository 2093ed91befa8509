"""DeepSpeed's process beside torch's allocator. See Note [Measured, not derived] in ``zeroplan/engines/process.py``."""

from __future__ import annotations

from zeroplan.core.buffers import Phase
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.sizes import MIB
from zeroplan.core.workload import DType, OptimizerKind, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.deepspeed.resolved_config import resolve_config
from zeroplan.engines.process import (
    ADAPTERS,
    EXPERTS,
    FURTHER_ALONE,
    FURTHER_COMMUNICATOR,
    NO_ROTARY,
    ONE_COMMUNICATOR,
    PAIRS,
    Change,
    arithmetic_change,
    changed,
    in_bytes,
)

#: DeepSpeed's barriers, broadcasts and reductions of scalars open more channels and kernels than two collectives do.
_NCCL = 482 * MIB
#: PipelineModule makes five groups more (runtime/pipe/module.py, topology.py). DeepSpeed binds its process to a device
#: (comm/torch.py), so torch makes each one's communicator at once, also of a single rank: 1900 to 1905 MiB on the ranks of P00
#: to P02 (benchmarks/mesh/deepspeed_ranks.py).
_STAGES = 1905 * MIB
_MEASURED_STAGES = 2

#: Resident MiB of a rank by the end of each phase at stage 2, bf16 and fused attention, without DeepSpeed's buffers.
_RSS = {Phase.LOAD: 1400, Phase.INIT: 1480, Phase.FORWARD: 1870, Phase.BACKWARD: 1920, Phase.STEP: 2147}
#: The step beside that of stages 1 and 2: neither stage 0 nor stage 3 takes norms of slices in double precision and
#: flattens them (a4 and a5; D04 and D03); torch's multi-tensor AdamW has kernels for lists of tensors (E17 and a5).
_STEP_OF_STAGE = {0: -120, 3: -88}
_FOREACH_STEP = 50
#: With the optimizer on the host, stages 1 and 2 take the norms of gradients as the backward makes them, and the GPU runs no
#: optimizer (K02, K09, K25 and E06); stage 3 leaves the norms to the step.
_OFFLOADED: Change = {Phase.BACKWARD: 100, Phase.STEP: -124}
#: Stage 3 also partitions adapters itself, which are made after zero.Init (E08, E107).
_ADAPTERS_STAGE3 = 105


def nccl_bytes(workload: Workload, zero: ZeroConfig, layout: ParallelLayout) -> int:
    """Return the bytes of NCCL's buffers and kernels on one GPU.

    Where AutoTP's ranks are all, gradients are reduced in a group of one rank (R12, R13, A00, A01: 2004 MiB outside torch).

    A pipeline stage has the communicators that two stages were measured with, and one more for its second neighbour. Stages 0
    to 2 reduce in a group of DeepSpeed's own, stage 3 in torch's default one, of which transformers' Trainer asks collectives,
    too. A single rank at stage 3 asks for a second one with fp16 alone, whose overflow flag is all-reduced.
    Sources: runtime/pipe/topology.py, PipelineParallelGrid; runtime/pipe/p2p.py; utils/groups.py, _clone_world_group; measured:
    ds2_two, ds2_offload, trl_sft_lora_zero2, trainer_ds2 and, at stage 3, ds3_two (benchmarks/from_files).
    """
    alone = layout.tp > 1 and layout.dp == 1
    two_groups = workload.loop.in_trainer and zero.stage < 3
    if layout.world_size > 1:
        stages = _STAGES + ONE_COMMUNICATOR * (layout.pp > _MEASURED_STAGES) if layout.pp > 1 else 0
        experts = _of_experts(workload, zero, layout) if layout.own_experts else 0
        own = ONE_COMMUNICATOR + FURTHER_COMMUNICATOR if two_groups else FURTHER_ALONE if alone else _NCCL
        return own + ONE_COMMUNICATOR * (max(layout.tp, layout.ulysses) > 1) + stages + experts
    return FURTHER_ALONE if two_groups or (zero.stage == 3 and workload.numerics.dtype is DType.FP16) else 0


def _of_experts(workload: Workload, zero: ZeroConfig, layout: ParallelLayout) -> int:
    """Return the bytes of the two groups that experts need more: ranks with other experts, all to all, and ranks with the same.

    A group of one rank has a communicator, too. Stage 0 and BF16_Optimizer also add up the experts' norm over the first group
    (runtime/utils.py, get_norm_with_moe_layers). Stage 3 shards AutoEP's routers in DeepSpeed's own clone of torch's default
    group, and the rest in that one (stepped_groups.py, routers); one row alone was measured there.
    Sources: utils/groups.py, _create_expert_and_data_parallel; measured: X00 to X04 (benchmarks/mesh/deepspeed_ranks.py) and
    Y00 to Y03 (benchmarks/mesh/auto_ep.py), all met to 17 MiB.
    """
    exchange = PAIRS if layout.ep > 1 else FURTHER_ALONE
    if zero.stage == 3:
        return exchange + 2 * FURTHER_COMMUNICATOR
    adds = zero.stage == 0 or resolve_config(workload, zero).full_fp32_grads
    alike = FURTHER_COMMUNICATOR if layout.expert_shard_group > 1 else FURTHER_ALONE
    return exchange + alike + ONE_COMMUNICATOR * (adds and layout.ep > 1)


def host_rss(workload: Workload, zero: ZeroConfig, *, rotary: bool, experts: bool) -> dict[Phase, int]:
    """Return the resident bytes of DeepSpeed's process; see :meth:`zeroplan.engines.base.Engine.host_rss`."""
    sliced_norms = zero.stage in (1, 2)
    changes = [arithmetic_change(workload)]
    if not rotary:  # the norms of stages 1 and 2 raise to a power, too, so their step has the kernel all the same
        changes.append({phase: change for phase, change in NO_ROTARY.items() if phase is not Phase.STEP or not sliced_norms})
    if experts:
        changes.append(EXPERTS)
    if sliced_norms and zero.offloads_optimizer:
        changes.append(_OFFLOADED)
    found = changed(_RSS, changes)
    # The step's norms need some of the experts' kernels, so that stage 3, which takes none, ends where stage 2 does (F18).
    found[Phase.STEP] += 0 if experts and zero.stage == 3 else _STEP_OF_STAGE.get(zero.stage, 0)
    if workload.numerics.optimizer_kind is OptimizerKind.FOREACH and not zero.offloads_optimizer:
        found[Phase.STEP] += _FOREACH_STEP
    adapters = _ADAPTERS_STAGE3 if zero.stage == 3 else ADAPTERS
    return in_bytes(found, adapters if workload.lora_rank else 0)
