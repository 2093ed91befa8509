"""Rules on settings that DeepSpeed runs, but not as the file seems to say: warnings and notes."""

from __future__ import annotations

from functools import partial

from zeroplan.core.workload import DType
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.ds_config.findings import At, Severity
from zeroplan.ds_config.rules import BOTH, Rule, View
from zeroplan.ds_config.wrappers import STAGE2_ACCUM_DTYPE

_warning, _note = partial(Rule, severity=Severity.WARNING), partial(Rule, severity=Severity.NOTE)
_ZERO, _OFF, _PAR = "zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
_EN, _S12, _S3 = "runtime/engine.py", "runtime/zero/stage_1_and_2.py", "runtime/zero/stage3.py"


def _pinned_by_default(v: View) -> bool:
    optimizer, param = v.zero.offload_optimizer, v.zero.offload_param
    first = v.zero.stage > 0 and bool(optimizer) and optimizer.pin_memory and not v.in_file(f"{_OFF}.pin_memory")
    return first or (v.zero.offloads_param and param.pin_memory and not v.in_file(f"{_PAR}.pin_memory"))


def _accumulates_apart(v: View) -> bool:
    """Return whether stage 2 accumulates in fp32 beside a 16-bit model (_use_compact_grad_partition_buffer)."""
    newer = v.zero.deepspeed >= STAGE2_ACCUM_DTYPE
    return newer and v.zero.step.grad_accum_dtype is DType.FP32 and v.dtype in (DType.BF16, DType.FP16)


def _accumulates(v: View) -> bool:
    return (v.training.grad_accum or 1) > 1


#: What DeepSpeed runs all the same.
REMARKS: tuple[Rule, ...] = (
    _warning(
        "param.ignored",
        _PAR,
        lambda v: v.zero.stage < 3 and bool(v.zero.offload_param),
        "parameter offload is ignored below stage 3 (here stage {v.zero.stage})",
        "use stage 3, or remove the block",
        source=_EN,
    ),
    _warning(
        "offload.ignored",
        _OFF,
        lambda v: v.zero.stage == 0 and bool(v.zero.offload_optimizer),
        "optimizer offload shards nothing at stage 0: only a CPU optimizer is built",
        "use stage 1, 2 or 3, or remove the block",
        source=_EN,
    ),
    _warning(
        "offload.nvme_as_cpu",
        f"{_OFF}.device",
        lambda v: v.zero.stage in (1, 2) and v.offload is OffloadDevice.NVME and not v.bf16_optimizer,
        "nvme is treated as cpu below stage 3 (here stage {v.zero.stage})",
        'use stage 3, or write "cpu"',
        source=_S12,
    ),
    _warning(
        "offload.lost",
        f"{_OFF}.device",
        lambda v: v.bf16_optimizer and v.offload is OffloadDevice.NVME,
        "stage 1 in bf16 with fp32 accumulation builds BF16_Optimizer, which offloads nothing",
        'write "cpu", or drop grad_accum_dtype',
        source=_EN,
    ),
    _note(
        "accum.bf16_optimizer",
        "data_types.grad_accum_dtype",
        lambda v: v.bf16_optimizer,
        "stage 1 in bf16 with fp32 accumulation builds BF16_Optimizer: fp32 gradients for every parameter, no buckets",
        source=_EN,
    ),
    _warning(
        "accum.ignored",
        "data_types.grad_accum_dtype",
        lambda v: v.zero.stage == 2 and v.zero.step.grad_accum_dtype not in (None, v.dtype) and not _accumulates_apart(v),
        "stage 2 ignores it and accumulates in {v.dtype}",
        "use stage 1 or 3",
        source=_S12,
    ),
    _note(
        "accum.bf16",
        "data_types.grad_accum_dtype",
        lambda v: v.dtype is DType.BF16 and v.zero.step.grad_accum_dtype is None and _accumulates(v),
        "unset, so gradients are accumulated in bf16",
        'set it to "fp32" where the last digits matter',
        source=_EN,
    ),
    _note(
        "offload.pinned",
        f"{_OFF}.pin_memory",
        _pinned_by_default,
        "unset, so offloaded memory is pinned: true is the default since 0.19.5, and pinned memory cannot be swapped out",
        "set pin_memory to false where host memory is tight",
        source="runtime/zero/offload_config.py",
    ),
    _warning(
        "param.pinned",
        f"{_PAR}.pin_memory",
        lambda v: v.zero.offloads_param and v.says(f"{_PAR}.pin_memory") is False,
        "false does not unpin the flat parameter buffer, which stage 3 always pins",
        source=_S3,
    ),
    _note(
        "clipping.default",
        "gradient_clipping",
        lambda v: not v.in_file("gradient_clipping") and v.zero.stage > 0 and v.zero.step.gradient_clipping > 0,
        "unset, so gradients are clipped at 1.0, the default since 0.19.3",
        "set it to 0 to clip nothing",
        source="runtime/constants.py",
        at=At.CONFIG,
    ),
    _warning(
        "precision.fp32",
        "bf16.enabled",
        lambda v: v.training.dtype is DType.FP32 and v.training.autocast is None and v.zero.stage > 0,
        "neither bf16, fp16 nor torch_autocast is enabled, so the model trains in fp32",
        'add "bf16": {"enabled": true} if that is not meant',
        source=_EN,
        at=At.CONFIG,
        dialects=BOTH,
    ),
    _note(
        "precision.autocast",
        "torch_autocast",
        lambda v: v.training.autocast is not None and v.training.dtype is DType.FP32,
        "weights, gradients and states stay fp32; the arithmetic and the cast copies are {v.training.autocast}",
        source="runtime/torch_autocast.py",
    ),
    _note(
        "zero.off",
        _ZERO,
        lambda v: v.zero.stage == 0,
        "trains at stage 0: every rank holds everything",
        source="runtime/zero/config.py",
        at=At.CONFIG,
    ),
    _note(
        "checkpointing.api",
        "activation_checkpointing",
        lambda v: v.has("activation_checkpointing"),
        "acts only on code that calls deepspeed.checkpointing, not on the HF Trainer's gradient_checkpointing",
        source="runtime/activation_checkpointing/checkpointing.py",
        at=At.RUN,
    ),
    _note(
        "optimizer.client",
        "optimizer",
        lambda v: v.training.optimizer is None and v.zero.stage > 0 and bool(v.zero.offload_optimizer),
        "none in the file: one that the program brings must be DeepSpeedCPUAdam (the HF Trainer sees to it)",
        "name one here, or set zero_force_ds_cpu_optimizer to false",
        source=_EN,
    ),
    _warning(
        "elastic.stage3",
        f"{_ZERO}.elastic_checkpoint",
        lambda v: v.zero.stage == 3 and bool(v.says(f"{_ZERO}.elastic_checkpoint")),
        "no longer supported at stage 3",
        "use universal checkpoints",
        source="runtime/zero/config.py",
        at=At.CONFIG,
    ),
    _warning(
        "super.ignored",
        f"{_OFF}.super_offload",
        lambda v: v.zero.stage != 3 and v.zero.offload_optimizer.super_offload,
        "acts only at stage 3",
        source=_EN,
    ),
    _warning(
        "vocabulary.aligned",
        "vocabulary_size",
        lambda v: bool(v.says("vocabulary_size")) and v.says("vocabulary_size") % 8 != 0,
        "not a multiple of 8, which costs tensor cores their speed",
        "pad the vocabulary",
        source="runtime/config.py",
        at=At.CONFIG,
    ),
)
