"""The choice of DeepSpeed's optimizer wrapper, which decides every buffer that the engine allocates."""

from __future__ import annotations

from enum import StrEnum

from zeroplan.core.errors import BadInput
from zeroplan.core.versions import Version
from zeroplan.core.workload import DType
from zeroplan.core.zero_config import OffloadDevice, OffloadOptimizer, ZeroConfig

#: From here on bf16 at stage 0 runs in the wrappers of fp16; before, in BF16_Optimizer, which shards masters and states.
#: Source: runtime/engine.py, _do_optimizer_sanity_check
STAGE0_UNSHARDED_SINCE: Version = (0, 17, 6)
#: From there to here (excluded) the two wrappers of bf16 have one name: stage 1 with fp32 accumulation gets that of stage 0.
#: Source: runtime/constants.py, DDP_BFLOAT16; runtime/engine.py, _configure_optimizer
BF16_OPTIMIZER_FOUND: Version = (0, 18, 5)
#: From here on stage 2 accumulates in fp32 where ``grad_accum_dtype`` says so. Source: runtime/zero/stage_1_and_2.py
STAGE2_ACCUM_DTYPE: Version = (0, 19, 8)


class Wrapper(StrEnum):
    """The wrappers, by the names of DeepSpeed's classes."""

    NONE = "none"  # the optimizer itself
    FP16 = "FP16_Optimizer"
    FP16_UNFUSED = "FP16_UnfusedOptimizer"
    BF16 = "BF16_Optimizer"
    ZERO_1_2 = "DeepSpeedZeroOptimizer"
    ZENFLOW_1_2 = "ZenFlowZeroOptimizerSequential"
    ZENFLOW_1_2_OVERLAPPED = "ZenFlowZeroOptimizerParallel"
    ZERO_3 = "DeepSpeedZeroOptimizer_Stage3"
    SUPER_OFFLOAD = "SuperOffloadOptimizer_Stage3"


def wrapper(zero: ZeroConfig, dtype: DType, *, fused: bool = True, pipeline: bool = False) -> Wrapper:
    """Return the wrapper that ``deepspeed.initialize`` puts around an optimizer.

    Args:
        dtype: of the model: bf16 or fp16 by their blocks, else fp32 (also under ``torch_autocast``).
        fused: whether the optimizer is DeepSpeed's ``FusedAdam``, what ``Adam`` and ``AdamW`` of the config become on a GPU
            unless ``torch_adam`` is set; an optimizer that the program brings, such as the HF Trainer's, is not.
        pipeline: whether the model is a ``PipelineModule``.

    Source: ``_do_optimizer_sanity_check``, ``_configure_fp16_optimizer`` and ``_configure_zero_optimizer`` of
    runtime/engine.py, DeepSpeed 0.19.8.

    Raises:
        BadInput: stage 0 with a gradient accumulation dtype other than the model's.
    """
    accum = zero.step.grad_accum_dtype or stage0_accumulates(zero, dtype)
    if zero.stage == 0 and accum is not stage0_accumulates(zero, dtype):
        raise BadInput(
            f"stage 0 cannot accumulate {dtype} gradients in {accum}",
            where="data_types.grad_accum_dtype",
            remedy="leave it out, or use stage 1",
        )
    zero = as_built_today(zero, dtype)
    if zero.stage:
        if bf16_optimizer_takes_stage_1(zero, dtype):
            return Wrapper.BF16
        if zero.stage == 3:
            return Wrapper.SUPER_OFFLOAD if zero.offload_optimizer.super_offload else Wrapper.ZERO_3
        if zero.zenflow is None:
            return Wrapper.ZERO_1_2
        return Wrapper.ZENFLOW_1_2_OVERLAPPED if zero.zenflow.overlap_step else Wrapper.ZENFLOW_1_2
    if dtype is DType.FP32:
        return Wrapper.NONE
    if dtype is DType.BF16 and pipeline:
        return Wrapper.BF16
    return Wrapper.FP16 if fused else Wrapper.FP16_UNFUSED


def stage0_accumulates(zero: ZeroConfig, dtype: DType) -> DType:
    """Return the one dtype in which stage 0 accumulates: the model's; before :data:`STAGE0_UNSHARDED_SINCE` fp32 for bf16."""
    return DType.FP32 if dtype is DType.BF16 and zero.deepspeed < STAGE0_UNSHARDED_SINCE else dtype


def as_built_today(zero: ZeroConfig, dtype: DType) -> ZeroConfig:
    """Return the config to which today's DeepSpeed gives the wrapper that ``zero.deepspeed`` builds for `zero`."""
    if dtype is not DType.BF16 or zero.deepspeed >= BF16_OPTIMIZER_FOUND:
        return zero
    if zero.deepspeed < STAGE0_UNSHARDED_SINCE:
        return zero if zero.stage else zero.but(stage=1, grad_accum_dtype=DType.FP32)
    if bf16_optimizer_takes_stage_1(zero, dtype):
        return zero.but(stage=0, grad_accum_dtype=None, offload_optimizer=OffloadOptimizer())
    return zero


def bf16_optimizer_takes_stage_1(zero: ZeroConfig, dtype: DType) -> bool:
    """Return whether ``BF16_Optimizer`` runs: at stage 1 in bf16 with fp32 accumulation, unless offloaded to the CPU."""
    return (
        zero.stage == 1
        and dtype is DType.BF16
        and zero.step.grad_accum_dtype is DType.FP32
        and zero.offload_optimizer.device is not OffloadDevice.CPU
    )
