"""Rules of ``deepspeed.initialize``, which refuses configs that parse but give no engine."""

from __future__ import annotations

from zeroplan.core.optimizers import DEEPSPEED_OPTIMIZERS, RUNTIME_OPTIMIZERS, runtime_type, torch_optimizers
from zeroplan.core.zero_config import OffloadDevice
from zeroplan.ds_config.findings import At
from zeroplan.ds_config.rules import BOTH, Rule, View
from zeroplan.ds_config.wrappers import stage0_accumulates

_ZC, _RC, _EN, _S12, _S3 = (
    "runtime/zero/config.py",
    "runtime/config.py",
    "runtime/engine.py",
    "runtime/zero/stage_1_and_2.py",
    "runtime/zero/stage3.py",
)
_ZERO, _OFF, _OPT = "zero_optimization", "zero_optimization.offload_optimizer", "optimizer.type"


def _unsupported(v: View) -> bool:
    name = v.training.optimizer or ""
    known = name.lower() in DEEPSPEED_OPTIMIZERS or name in torch_optimizers() or _of_older(v)
    return bool(name) and not known


def _of_runtime(v: View) -> bool:
    """Whether only the included runtime has an optimizer of that name."""
    row = RUNTIME_OPTIMIZERS.get((v.training.optimizer or "").lower())
    return row is not None and bool(runtime_type(row.name)) and _unsupported(v)


def _of_older(v: View) -> bool:
    return v.training.optimizer_type is not None and v.training.optimizer_type.until is not None


def _removed(v: View) -> bool:
    until = None if v.training.optimizer_type is None else v.training.optimizer_type.until
    return until is not None and v.zero.deepspeed >= until


def _untested(v: View) -> bool:
    kind = v.training.optimizer_type
    refused = _of_older(v) or _unsupported(v)
    return bool(v.training.optimizer) and not refused and not (kind is not None and kind.tested)


def _of_adam(v: View) -> bool:
    return v.training.optimizer_type is not None and v.training.optimizer_type.adam


def _needs_dynamic_scale(v: View) -> bool:
    return v.training.optimizer_type is not None and v.training.optimizer_type.dynamic_scale


def _splits(v: View) -> bool:
    return v.training.optimizer_type is not None and v.training.optimizer_type.splits


def _prescales(v: View) -> bool:
    return bool(v.zero.step.prescale_gradients) or v.zero.step.gradient_predivide_factor != 1.0


def _reduce_scatters(v: View) -> bool:
    z = v.zero
    mean = v.says("gradient_allreduce_op", "mean") != "sum"
    return z.buckets.reduce_scatter and (z.stage == 3 or (z.stage == 2 and mean))


def _masters_need_cpu_adam(v: View) -> bool:
    z = v.zero
    bf16 = z.step.bf16_master_weights_and_grads and (not z.step.bf16_optimizer_states or v.offload is not OffloadDevice.NONE)
    needed = z.stage > 0 and (bf16 or z.step.fp16_master_weights_and_grads) and not v.bf16_optimizer
    return needed and v.training.optimizer is not None and not v.cpu_adam


def _zenflow_interval(v: View) -> bool:
    zen = v.zero.zenflow
    return zen is not None and (zen.select_strategy == "auto") == isinstance(zen.select_interval, int)


def _zenflow_order(v: View) -> bool:
    zen = v.zero.zenflow
    return (
        zen is not None
        and zen.select_strategy == "step"
        and isinstance(zen.select_interval, int)
        and isinstance(zen.update_interval, int)
        and 0 != zen.select_interval < zen.update_interval
    )


def _no_path(v: View) -> bool:
    z = v.zero
    optimizer = v.offload is OffloadDevice.NVME and z.offload_optimizer.nvme_path is None
    param = z.offload_param.device is OffloadDevice.NVME and z.offload_param.nvme_path is None
    return z.stage == 3 and (optimizer or param)


#: Refused while the engine is built, or at the first step.
ENGINE_REFUSALS: tuple[Rule, ...] = (
    Rule(
        "norm.with",
        f"{_ZERO}.compute_grad_norm",
        lambda v: (
            not v.zero.buckets.compute_grad_norm
            and v.zero.stage in (1, 2)
            and (
                v.zero.step.gradient_clipping > 0
                or v.zero.zenflow is not None
                or v.offload is not OffloadDevice.NONE
                or v.bf16_optimizer
            )
        ),
        "compute_grad_norm false forbids clipping (1.0 by default), optimizer offload, ZenFlow and BF16_Optimizer",
        "set gradient_clipping to 0 and offload nothing, or leave compute_grad_norm out",
        source=_S12,
    ),
    Rule(
        "masters.both",
        "bf16.bf16_master_weights_and_grads",
        lambda v: v.zero.stage > 0 and v.zero.step.fp16_master_weights_and_grads and v.zero.step.bf16_master_weights_and_grads,
        "fp16 and bf16 master weights exclude each other",
        "keep one",
        source="runtime/base_optimizer.py",
    ),
    Rule(
        "masters.offload",
        _OFF,
        _masters_need_cpu_adam,
        "16-bit master weights need optimizer offload with DeepSpeedCPUAdam (bf16: or bf16_optimizer_states and no offload)",
        'set offload_optimizer.device to "cpu" with an Adam or AdamW of the config',
        source="runtime/base_optimizer.py",
    ),
    Rule(
        "zenflow.interval",
        f"{_ZERO}.zenflow.select_interval",
        _zenflow_interval,
        "with strategy auto it must stay auto, with step or epoch it must be an integer",
        "set both or neither",
        source="runtime/zenflow/engine.py",
    ),
    Rule(
        "zenflow.order",
        f"{_ZERO}.zenflow.select_interval",
        _zenflow_order,
        "must not be below update_interval",
        "raise it",
        source="runtime/zenflow/engine.py",
    ),
    Rule(
        "zenflow.offload",
        f"{_ZERO}.zenflow",
        lambda v: v.zero.zenflow is not None and v.zero.stage in (1, 2) and v.offload is OffloadDevice.NONE,
        "ZenFlow needs the optimizer offloaded",
        'set offload_optimizer.device to "cpu"',
        source="runtime/zenflow/zenflow_stage_1_and_2.py",
    ),
    Rule(
        "zenflow.overlap",
        f"{_ZERO}.zenflow.offload",
        lambda v: v.zero.zenflow is not None and v.zero.stage > 0 and v.zero.zenflow.offload and not v.zero.overlaps_comm,
        "offloading the selected states needs overlap_comm",
        "set overlap_comm to true",
        source="runtime/zenflow/zenflow_stage_1_and_2.py, runtime/zenflow/engine_stage3.py",
    ),
    Rule(
        "optimizer.one_bit",
        _OPT,
        _removed,
        "{v.training.optimizer} is gone since DeepSpeed 0.19.7, and before that the 1-bit optimizers refused ZeRO (here stage"
        " {v.zero.stage})",
        'the nearest config that runs: optimizer.type "AdamW" with the same ZeRO block, without cuda_aware, freeze_step and'
        " comm_backend_name; zeroplan_runtime has all three, at stages 0 and 1",
        source=_RC,
    ),
    Rule(
        "optimizer.one_bit_zero",
        f"{_ZERO}.stage",
        lambda v: _of_older(v) and not _removed(v) and v.zero.stage > 0,
        "{v.training.optimizer} is not compatible with ZeRO (here stage {v.zero.stage})",
        "use stage 0, or AdamW",
        source=_EN,
    ),
    Rule(
        "optimizer.unsupported",
        _OPT,
        lambda v: _unsupported(v) and not _of_runtime(v),
        "{v.training.optimizer!r} is neither one of DeepSpeed's optimizers nor a class of torch.optim",
        "use AdamW, Adam, Adagrad, Lamb, Lion, Muon, or a torch.optim class by its exact name",
        source=_EN,
    ),
    Rule(
        "optimizer.of_runtime",
        _OPT,
        _of_runtime,
        "{v.training.optimizer!r} is an optimizer of zeroplan_runtime, of which DeepSpeed has none",
        "train by zeroplan_runtime (--engine zeroplan), or use AdamW",
        source=_EN,
    ),
    Rule(
        "optimizer.max_grad_norm",
        "optimizer.params.max_grad_norm",
        lambda v: "max_grad_norm" in v.training.optimizer_params,
        "is no optimizer parameter",
        "use the top-level gradient_clipping",
        source=_EN,
    ),
    Rule(
        "optimizer.untested",
        _OPT,
        lambda v: v.zero.stage > 0 and _untested(v) and not v.zero.step.zero_allow_untested_optimizer,
        "{v.training.optimizer} is untested with ZeRO, and DeepSpeed refuses it",
        "set zero_allow_untested_optimizer to true",
        source=_EN,
    ),
    Rule(
        "optimizer.lamb_scale",
        _OPT,
        lambda v: _needs_dynamic_scale(v) and v.says("fp16.loss_scale", 0) != 0,
        "{v.training.optimizer} needs a dynamic loss scale",
        "set fp16.loss_scale to 0",
        source=_EN,
    ),
    Rule(
        "optimizer.muon_reduce_scatter",
        f"{_ZERO}.reduce_scatter",
        lambda v: v.zero.stage == 3 and _splits(v) and v.zero.buckets.reduce_scatter,
        "{v.training.optimizer} and reduce_scatter exclude each other at stage 3",
        "set reduce_scatter to false",
        source=_S3,
    ),
    Rule(
        "scale.reduce_scatter",
        "prescale_gradients",
        lambda v: _prescales(v) and _reduce_scatters(v) and not v.bf16_optimizer,
        "prescale_gradients and gradient_predivide_factor exclude reduce_scatter at stages 2 and 3",
        "leave them out, or set reduce_scatter to false",
        source=f"{_S12}, {_S3}",
    ),
    Rule(
        "accum.stage0",
        "data_types.grad_accum_dtype",
        lambda v: (
            v.zero.stage == 0
            and v.zero.step.grad_accum_dtype not in (None, v.dtype and stage0_accumulates(v.zero, v.dtype))
            and v.training.optimizer is not None
        ),
        "stage 0 cannot accumulate {v.dtype} gradients in {v.zero.step.grad_accum_dtype}",
        "leave it out, or use stage 1",
        source=_EN,
    ),
    Rule(
        "dtype.param",
        "data_types.param_dtype",
        lambda v: v.says("data_types.param_dtype") not in (None, v.dtype),
        "differs from the model's dtype, {v.dtype}",
        "enable the matching block, or leave it out",
        source=_EN,
    ),
    Rule(
        "autocast.quantized",
        "torch_autocast",
        lambda v: bool(v.says("torch_autocast.enabled")) and v.zero.stage3.zero_quantized_weights,
        "torch_autocast excludes zero_quantized_weights",
        "disable one of the two",
        source="runtime/torch_autocast.py",
    ),
    Rule(
        "stage1.legacy",
        f"{_ZERO}.legacy_stage1",
        lambda v: bool(v.says(f"{_ZERO}.legacy_stage1")) and v.zero.stage > 0 and not v.bf16_optimizer,
        "the old stage 1 is gone",
        "remove it",
        source=_EN,
    ),
    Rule(
        "bucket.even",
        f"{_ZERO}.allgather_bucket_size",
        lambda v: v.zero.stage in (1, 2) and v.zero.buckets.allgather_bucket_size % 2 == 1 and not v.bf16_optimizer,
        "must be even",
        "add one",
        source=_S12,
    ),
    Rule(
        "quantized.reduce_scatter",
        f"{_ZERO}.zero_quantized_gradients",
        lambda v: v.zero.stage == 3 and v.zero.stage3.zero_quantized_gradients and not v.zero.buckets.reduce_scatter,
        "quantized gradients need reduce_scatter",
        "set reduce_scatter to true",
        source=_S3,
    ),
    Rule(
        "hpz.nvme",
        f"{_ZERO}.zero_hpz_partition_size",
        lambda v: (
            v.zero.stage == 3
            and v.zero.stage3.zero_hpz_partition_size > 1
            and v.zero.offload_param.device is OffloadDevice.NVME
        ),
        "the second parts are made on the device of the parameters, and no tensor can be made on a disk",
        "set it to 1, or offload_param.device to cpu",
        source="runtime/zero/partition_parameters.py",
    ),
    Rule(
        "offload.path",
        "nvme_path",
        _no_path,
        "device nvme without nvme_path, which fails only when the engine opens the folder",
        'add "nvme_path" to every block whose device is nvme',
        source=f"{_S3}, runtime/swap_tensor/partitioned_param_swapper.py",
        dialects=BOTH,
    ),
    Rule(
        "aio.positive",
        "aio",
        lambda v: v.uses_files and min(v.zero.aio.block_size, v.zero.aio.queue_depth, v.zero.aio.intra_op_parallelism) < 1,
        "block_size, queue_depth and intra_op_parallelism must be above zero",
        "use 1 or more",
        source="runtime/swap_tensor/aio_config.py",
        at=At.RUN,
    ),
    Rule(
        "offload.hybrid",
        f"{_OFF}.ratio",
        lambda v: (
            v.zero.stage == 3
            and v.zero.offload_optimizer.ratio < 1.0
            and v.offload is not OffloadDevice.NONE
            and v.training.optimizer is not None
            and not v.cpu_adam
        ),
        "partial offload runs only with DeepSpeedCPUAdam",
        "use AdamW or Adam without torch_adam",
        source=_S3,
    ),
    Rule(
        "offload.buffers",
        f"{_OFF}.buffer_count",
        lambda v: (
            v.zero.stage == 3 and v.offload is OffloadDevice.NVME and _of_adam(v) and v.zero.offload_optimizer.buffer_count < 4
        ),
        "Adam swaps four tensors (parameter, gradient, two moments) and asserts with {v.zero.offload_optimizer.buffer_count}"
        " buffers",
        "use 4 or more",
        source="runtime/swap_tensor/partitioned_optimizer_swapper.py",
        at=At.RUN,
    ),
    Rule(
        "accumulation.managed",
        "managed_gradient_accumulation",
        lambda v: v.says("managed_gradient_accumulation") is False and v.zero.stage < 2 and v.zero.overlaps_comm,
        "false with overlap_comm needs stage 2 or 3",
        "set overlap_comm to false",
        source=_EN,
    ),
)
