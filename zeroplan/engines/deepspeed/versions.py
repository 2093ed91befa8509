"""What DeepSpeed's versions do differently with memory: one row a knob, and the configs that older wrappers take otherwise.

The schedules and the ledger describe 0.19.8 and ask :meth:`Knob.at` where another version differs. Everything was read in the
source, tag by tag from 0.10.0 on; measured was 0.19.8 alone. Defaults and keys that moved stand in
:mod:`zeroplan.ds_config.versions`. Sources are paths under ``deepspeed/runtime/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.versions import Version, version_text
from zeroplan.core.workload import DType, Workload
from zeroplan.core.zero_config import NEWEST_DEEPSPEED, OffloadDevice, ZeroConfig
from zeroplan.ds_config.wrappers import (
    BF16_OPTIMIZER_FOUND,
    STAGE0_UNSHARDED_SINCE,
    STAGE2_ACCUM_DTYPE,
    as_built_today,
    wrapper,
)

#: The oldest version that was compared; an older one is planned as this one.
OLDEST: Version = (0, 10, 0)


@dataclass(frozen=True, slots=True)
class VersionedKnob:
    """One knob: `after` holds from the version `since` on, before the version `until` (None: to this day), else `before`."""

    since: Version
    before: str
    after: str
    source: str
    until: Version | None = None


class Knob(Enum):
    """The knobs, oldest first."""

    OVERFLOW_FP16_ONLY = VersionedKnob(
        (0, 11, 2),
        "every step looks for inf and nan in the gradients",
        "only fp16 looks; from 0.17.1 on stages 1 and 2 also in bf16 with check_grad_overflow",
        "zero/stage3.py and zero/stage_1_and_2.py, step",
    )
    REDUCED_IN_COPIES = VersionedKnob(
        (0, 12, 4),
        "stages 1 and 2 reduce each owner's slice of the bucket where it lies",
        "they flatten the slices into a copy, and all-reduce that",
        "zero/stage_1_and_2.py, average_tensor, allreduce_bucket",
    )
    STAGE1_BUCKETS = VersionedKnob(
        (0, 13, 0),
        "stage 1 ignores contiguous_gradients, overlap_comm and round_robin_gradients: it has no buckets",
        "it honours them, and contiguous_gradients makes its buckets",
        "engine.py, _configure_zero_optimizer",
    )
    OVERFLOW_ON_DEVICE = VersionedKnob(
        (0, 13, 2),
        "stages 1 and 2 look for inf and nan in an fp32 sum of each gradient",
        "elementwise: an fp32 copy, masks and their fp32 sum, 11 bytes an element of one gradient",
        "zero/stage_1_and_2.py, _has_inf_or_nan",
    )
    STATES_AT_FIRST_STEP = VersionedKnob(
        (0, 13, 2),
        "initialisation steps on zero gradients, so that the optimizer's states are there from then on",
        "the first step makes the optimizer's states",
        "zero/stage_1_and_2.py, zero/stage3.py and bf16_optimizer.py, initialize_optimizer_states",
    )
    REDUCES_FILLED_PART = VersionedKnob(
        (0, 14, 1),
        "a bucket that is cast is cast whole, however little is in it",
        "its filled part is",
        "zero/stage_1_and_2.py, reduce_ipg_grads",
    )
    UPDATES_CAST_ON_GPU = VersionedKnob(
        (0, 14, 1),
        "stages 1 and 2 with offload cast updated masters on the host (before), or in the buffer of 0.17.0 (after)",
        "updated masters go to the GPU in fp32: a partition more there during the step",
        "zero/stage_1_and_2.py, step",
        until=(0, 17, 0),
    )
    BF16_GRADS_STAY = VersionedKnob(
        (0, 12, 6),
        "BF16_Optimizer drops the bf16 gradients when the next backward begins",
        "it zeroes them in place, and they stay",
        "bf16_optimizer.py, clear_lp_grads",
        until=(0, 14, 2),
    )
    BF16_GRADS_DROPPED_BY_STEP = VersionedKnob(
        (0, 16, 5),
        "BF16_Optimizer's bf16 gradients are still there in the next forward",
        "the step drops them",
        "bf16_optimizer.py, zero_grad",
    )
    UPDATES_BUFFER = VersionedKnob(
        (0, 17, 0),
        "stages 1 and 2 with offload keep no buffer for updated parameters on the host",
        "a 16-bit buffer of a partition, for the whole run",
        "zero/stage_1_and_2.py, param_buffer_of_bit16_for_cpu_offload_groups",
    )
    STAGE3_BUCKET_DTYPE = VersionedKnob(
        (0, 17, 2),
        "stage 3's bucket of gradients has the model's dtype, and every gradient is cast to the one in which it travels",
        "the bucket has the dtype in which gradients travel; there is one for each",
        "zero/stage3.py, __init__, __avg_scatter_grads",
    )
    STAGE0_BF16_UNSHARDED = VersionedKnob(
        STAGE0_UNSHARDED_SINCE,
        "bf16 at stage 0 runs in BF16_Optimizer, which shards masters and states and keeps whole fp32 gradients",
        "bf16 at stage 0 runs in FP16_Optimizer or FP16_UnfusedOptimizer, as fp16 does",
        "engine.py, _do_optimizer_sanity_check",
    )
    BF16_OPTIMIZER_MISSED = VersionedKnob(
        STAGE0_UNSHARDED_SINCE,
        "stage 1 in bf16 with fp32 accumulation runs in BF16_Optimizer",
        "two wrappers have the same name, and FP16_Optimizer runs, which shards nothing",
        "engine.py, _configure_optimizer; constants.py, DDP_BFLOAT16",
        until=BF16_OPTIMIZER_FOUND,
    )
    FP32_MASTERS_ALIAS = VersionedKnob(
        (0, 18, 2),
        "stage 3 clones the masters of an fp32 model",
        "an fp32 model's shard is its own master",
        "zero/stage3.py, _create_fp32_partitions (the comparison of devices that 0.18.3 added never holds)",
        until=(0, 18, 3),
    )
    MASTERS_CONVERTED_FIRST = VersionedKnob(
        (0, 18, 3),
        "stage 3 clones a sub-group's shard in the model's dtype, and makes the master of the clone",
        "it converts the shard, and clones the conversion",
        "zero/stage3.py, _create_fp32_partitions",
    )
    BUCKETS_AT_FIRST_GRADIENT = VersionedKnob(
        (0, 18, 3),
        "stages 1 and 2 allocate the buckets of gradients before a backward begins",
        "its first gradient does",
        "zero/stage_1_and_2.py, backward_prologue, setup_buckets",
    )
    MASTERS_CLONED_ON_GPU = VersionedKnob(
        (0, 18, 3),
        "stages 1 and 2 with offload move the model's part to the host, and clone it there",
        "they clone it on the GPU, and move the clone",
        "zero/stage_1_and_2.py, __init__ (weights_partition)",
    )
    MASTERS_PINNED_BY_KEY = VersionedKnob(
        (0, 18, 3),
        "stages 1 and 2 with offload pin the masters, whatever pin_memory says",
        "they pin the masters with pin_memory alone",
        "zero/stage_1_and_2.py, __init__",
    )
    FLATTENS_ON_GPU = VersionedKnob(
        (0, 18, 7),
        "stages 1 and 2 flatten the parameters on the host",
        "they flatten them on the GPU where it has room for the copy",
        "zero/stage_1_and_2.py, __init__",
    )
    STAGE3_ACCUM_DTYPE = VersionedKnob(
        (0, 19, 2),
        "stage 3 casts reduced gradients to the model's dtype, if they travelled in another",
        "it casts them to the dtype in which they accumulate, if that is another",
        "zero/stage3.py, __avg_scatter_grads",
    )
    FROZEN_STAY_FOR_BACKWARD = VersionedKnob(
        (0, 19, 3),
        "stage 3 releases the frozen parameters of a recomputed module after the recomputation",
        "they stay until the module's backward is over; what no hook released goes when the backward ends",
        "zero/partitioned_param_coordinator.py, fetch_sub_module, release_backward_leftovers",
    )
    LINEAR_WITHOUT_INIT = VersionedKnob(
        (0, 19, 4),
        "memory_efficient_linear takes effect under deepspeed.zero.Init alone",
        "it takes effect for a model that was built whole, too",
        "zero/partition_parameters.py, _enable_mem_efficient_linear",
    )
    OVERFLOW_BY_EXTREMES = VersionedKnob(
        (0, 19, 6),
        "stages 1 and 2 look for inf and nan elementwise",
        "in the largest and the smallest element, without a copy",
        "utils.py, has_inf_or_nan",
    )
    IMMEDIATE_UPDATE_FREES = VersionedKnob(
        (0, 19, 8),
        "with immediate_grad_update BF16_Optimizer keeps each bf16 gradient until the step",
        "it frees each as soon as it is added to the fp32 ones",
        "bf16_optimizer.py, accumulate_hp_grads_and_remove_lp",
    )
    COMPACT_FP32_GRADS = VersionedKnob(
        STAGE2_ACCUM_DTYPE,
        "stage 2 ignores grad_accum_dtype: gradients accumulate in the model's dtype",
        "stages 1 and 2 reduce into one fp32 partition where gradients accumulate in fp32",
        "zero/stage_1_and_2.py, _use_compact_grad_partition_buffer",
    )

    def at(self, version: Version) -> bool:
        """Return whether `version` does what the row says under `after`."""
        row = self.value
        return bool(version >= row.since and (row.until is None or version < row.until))


def planned_as(version: Version) -> Version:
    """Return the version whose rows hold for `version`: the nearest that was compared, where it was not."""
    return max(OLDEST, min(version, NEWEST_DEEPSPEED))


def as_wrapped(zero: ZeroConfig, workload: Workload, *, zero_init: bool) -> ZeroConfig:
    """Return the config of 0.19.8 whose wrapper is the one that ``zero.deepspeed`` builds, with its keys as far as they act."""
    version = zero.deepspeed
    if version == NEWEST_DEEPSPEED:
        return zero
    if workload.numerics.param_bytes == 2:
        zero = as_built_today(zero, workload.numerics.dtype)
    if zero.stage == 1 and not Knob.STAGE1_BUCKETS.at(version):
        zero = zero.but(contiguous_gradients=False, overlap_comm=False, round_robin_gradients=False)
    if zero.stage == 2 and not Knob.COMPACT_FP32_GRADS.at(version):
        zero = zero.but(grad_accum_dtype=None)
    if zero.stage == 3 and not zero_init and not Knob.LINEAR_WITHOUT_INIT.at(version):
        zero = zero.but(memory_efficient_linear=False)
    return zero


def require_wrapper(zero: ZeroConfig, workload: Workload) -> None:
    """Refuse what ``zero.deepspeed`` has no wrapper for."""
    if zero.stage == 0 and workload.numerics.param_bytes == 2 and zero.deepspeed < STAGE0_UNSHARDED_SINCE:
        wrapper(zero, workload.numerics.dtype)


def version_remark(zero: ZeroConfig, workload: Workload) -> str:
    """Return what may surprise the user of an older version in this case; an empty string for nothing."""
    wrapped = as_wrapped(zero, workload, zero_init=True)
    if wrapped.stage < zero.stage:
        first, end = version_text(STAGE0_UNSHARDED_SINCE), version_text(BF16_OPTIMIZER_FOUND)
        return f"DeepSpeed {first} to {end} (excluded): stage 1 with fp32 accumulation shards nothing"
    return ""


def _optimizer_by_version(workload: Workload, named: str) -> list[tuple[str, Effect, str]]:
    row = find_optimizer(workload.numerics.optimizer)
    found = []
    if row.compresses:
        says = f"{named} exchanges momentum by temporaries as long as the parameters"
        found.append(("optimizer.type", Effect.MORE, says))
    if row.written is not None and row.written.splits:
        found.append(("optimizer.type", Effect.UNKNOWN, f"{named} has a {row.written.type} of its own"))
    return found


def unmodelled_by_version(zero: ZeroConfig, workload: Workload, *, frozen: bool) -> tuple[Unmodelled, ...]:
    """Return the keys of the case that ``zero.deepspeed`` treats in a way of its own that no row covers."""
    version = zero.deepspeed
    if version == NEWEST_DEEPSPEED:
        return ()
    known, named = planned_as(version), version_text(version)
    found: list[tuple[str, Effect, str]] = []
    if known != version:
        found.append(("--deepspeed-version", Effect.UNKNOWN, f"{named} was not compared, {version_text(known)} is planned"))
    stage, accum = zero.stage, zero.step.grad_accum_dtype
    whole = stage == 1 and workload.numerics.param_bytes == 2 and accum is DType.FP32
    offloads_to_cpu = zero.offload_optimizer.device is OffloadDevice.CPU
    if whole and known < (0, 19, 8) and (workload.numerics.dtype is DType.FP16 or offloads_to_cpu):
        found.append(("data_types.grad_accum_dtype", Effect.UNKNOWN, f"{named} keeps fp32 gradients of stage 1 in its own way"))
    if zero.offload_optimizer.ratio < 1 and offloads_to_cpu and stage == 3 and known < (0, 18, 0):
        says = f"{named} leaves the last sub-groups on the GPU, and the first are planned"
        found.append(("zero_optimization.offload_optimizer.ratio", Effect.UNKNOWN, says))
    if zero.stage3.zero_hpz_partition_size > 1 and stage == 3 and known < (0, 13, 2):
        says = f"{named} makes and drops second shards at other moments"
        found.append(("zero_optimization.zero_hpz_partition_size", Effect.UNKNOWN, says))
    if OffloadDevice.NVME in (zero.offload_optimizer.device, zero.offload_param.device) and stage == 3:
        found.append(("zero_optimization.offload_*.device nvme", Effect.UNKNOWN, f"{named}'s swap buffers were not compared"))
    found += _optimizer_by_version(workload, named)
    if stage == 0 and frozen and workload.numerics.dtype is DType.FP16 and known < (0, 19, 2):
        says = f"{named} flattens frozen parameters with the others, and gives them masters and states"
        found.append(("frozen parameters", Effect.MORE, says))
    return tuple(Unmodelled(*one) for one in found)
