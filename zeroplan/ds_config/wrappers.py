"""The choice of DeepSpeed's optimizer wrapper, which decides every buffer that the engine allocates."""

from __future__ import annotations

from enum import StrEnum

from zeroplan.core.errors import BadInput
from zeroplan.core.workload import DType
from zeroplan.core.zero_config import OffloadDevice, ZeroConfig


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
        zero: the configuration.
        dtype: of the model: bf16 or fp16 by their blocks, else fp32 (also under ``torch_autocast``).
        fused: whether the optimizer is DeepSpeed's ``FusedAdam``, what ``Adam`` and ``AdamW`` of the config become on a GPU
            unless ``torch_adam`` is set; an optimizer that the program brings, such as the HF Trainer's, is not.
        pipeline: whether the model is a ``PipelineModule``.

    Source: ``_do_optimizer_sanity_check``, ``_configure_fp16_optimizer`` and ``_configure_zero_optimizer`` of
    runtime/engine.py, DeepSpeed 0.19.8.

    Raises:
        BadInput: stage 0 with a gradient accumulation dtype other than the model's.
    """
    accum = zero.grad_accum_dtype or dtype
    if zero.stage:
        if bf16_optimizer_takes_stage_1(zero, dtype):
            return Wrapper.BF16
        if zero.stage == 3:
            return Wrapper.SUPER_OFFLOAD if zero.offload_optimizer.super_offload else Wrapper.ZERO_3
        if zero.zenflow is None:
            return Wrapper.ZERO_1_2
        return Wrapper.ZENFLOW_1_2_OVERLAPPED if zero.zenflow.overlap_step else Wrapper.ZENFLOW_1_2
    if accum is not dtype:
        raise BadInput(
            f"stage 0 cannot accumulate {dtype} gradients in {accum}",
            where="data_types.grad_accum_dtype",
            remedy="leave it out, or use stage 1",
        )
    if dtype is DType.FP32:
        return Wrapper.NONE
    if dtype is DType.BF16 and pipeline:
        return Wrapper.BF16
    return Wrapper.FP16 if fused else Wrapper.FP16_UNFUSED


def bf16_optimizer_takes_stage_1(zero: ZeroConfig, dtype: DType) -> bool:
    """Return whether ``BF16_Optimizer`` runs: at stage 1 in bf16 with fp32 accumulation, unless offloaded to the CPU."""
    return (
        zero.stage == 1
        and dtype is DType.BF16
        and zero.grad_accum_dtype is DType.FP32
        and zero.offload_optimizer.device is not OffloadDevice.CPU
    )
