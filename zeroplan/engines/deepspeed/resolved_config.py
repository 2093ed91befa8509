"""A workload and a config as DeepSpeed resolves them: widths of elements, wrappers of the optimizer, devices.

Paths of sources are those of DeepSpeed 0.19.8 under ``deepspeed/runtime/``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.versions import Version
from zeroplan.core.workload import DType, OptimizerKind, Precision, Workload
from zeroplan.core.zero_config import OffloadDevice, ZeroConfig
from zeroplan.engines.deepspeed.versions import Knob, planned_as
from zeroplan.ledger.line import means

#: swap_tensor/utils.py, MIN_AIO_BYTES: smaller tensors are not worth a file.
_MIN_AIO_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """Widths of elements and the memories that hold them. Widths (``*_bytes``) are bytes an element.

    Attributes:
        param_bytes: of a model parameter and, unless said otherwise, of its gradient.
        master_bytes: of what the optimizer steps.
        accum_bytes: of an accumulated gradient.
        comm_bytes: of a gradient while it is reduced; under ``torch_autocast`` of those that are not cast.
        state_bytes: of an element of an optimizer state.
        own_masters: whether the optimizer steps copies of its own; stage 0 in fp32 steps the model's parameters, and one
            version's stage 3 their shards.
        full_fp32_grads: whether DeepSpeed wraps the optimizer in BF16_Optimizer, whose gradients are never sharded.
        uses_grad_accum_attribute: whether gradients are added up in an attribute of their own, beside ``.grad``.
        compact: whether stages 1 and 2 reduce into one fp32 partition, slice by slice.
        contiguous_gradients: whether gradients are copied into a bucket before they are reduced.
        optimizer_device: where optimizer states are.
        param_device: where parameters are.
        fused_adam: whether the optimizer is DeepSpeed's FusedAdam, the only one that stage 0 flattens for.
        torch_adam: whether it is torch's own Adam in place of DeepSpeed's.
        least_swapped: bytes from which on a tensor goes to a file.
        version: of DeepSpeed.
    """

    param_bytes: int = means("bytes of one model parameter")
    master_bytes: int = means("bytes of one master parameter")
    accum_bytes: int = means("bytes of one accumulated gradient element")
    comm_bytes: int = means("bytes of one gradient element on its way")
    state_bytes: int = means("bytes of one element of an optimizer state")
    own_masters: bool
    full_fp32_grads: bool
    uses_grad_accum_attribute: bool
    compact: bool
    contiguous_gradients: bool
    optimizer_device: OffloadDevice
    param_device: OffloadDevice
    fused_adam: bool
    torch_adam: bool
    least_swapped: int
    version: Version

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer states leave the GPU."""
        return self.optimizer_device is not OffloadDevice.NONE

    def does(self, knob: Knob) -> bool:
        """Return whether this DeepSpeed does what the knob says of its later versions."""
        return knob.at(self.version)

    def values(self) -> dict[str, Any]:
        """Return the fields by name, for classes that extend this one."""
        return {field.name: getattr(self, field.name) for field in fields(ResolvedConfig)}


def resolve_config(workload: Workload, zero: ZeroConfig, *, pipeline: bool = False) -> ResolvedConfig:
    """Resolve the widths and devices of one configuration.

    Gradients accumulate in the model's dtype unless ``grad_accum_dtype`` says otherwise, and travel in it unless
    ``communication_data_type`` does. States are as wide as masters; only DeepSpeedCPUAdam keeps fp32 ones beside 16-bit
    masters (``fp32_optimizer_states``). A stage of a pipeline in bf16 has BF16_Optimizer at stage 0, which then shards.

    Source: engine.py, _do_optimizer_sanity_check, get_data_types, communication_data_type, _configure_basic_optimizer;
        base_optimizer.py, _configure_master_weights; zero/stage_1_and_2.py, __init__, _use_compact_grad_partition_buffer
    """
    stage, numerics = zero.stage, workload.numerics
    width = numerics.param_bytes
    masters_16 = _narrow_masters(workload, zero)
    master = width if masters_16 else 4
    accum = width if zero.step.grad_accum_dtype is None else zero.step.grad_accum_dtype.bytes
    full_fp32_grads = _keeps_fp32_grads(workload, zero, accum, pipeline=pipeline and not masters_16)
    offload = OffloadDevice.NONE if full_fp32_grads else _optimizer_device(zero)
    aliased = stage == 3 and width == 4 and not zero.offload_optimizer and Knob.FP32_MASTERS_ALIAS.at(zero.deepspeed)
    compacts = stage in (1, 2) and not full_fp32_grads and Knob.COMPACT_FP32_GRADS.at(zero.deepspeed)
    written = find_optimizer(numerics.optimizer).written
    adam = written is not None and written.adam
    fused = numerics.optimizer_kind is OptimizerKind.FUSED
    states_follow = zero.step.bf16_optimizer_states or not zero.step.fp32_optimizer_states or offload is OffloadDevice.NONE
    return ResolvedConfig(
        param_bytes=width,
        master_bytes=master,
        accum_bytes=accum,
        comm_bytes=width if zero.step.communication_data_type is None else zero.step.communication_data_type.bytes,
        state_bytes=master if states_follow else 4,
        own_masters=(stage > 0 or width == 2) and not aliased,
        full_fp32_grads=full_fp32_grads,
        uses_grad_accum_attribute=stage == 1 and not full_fp32_grads and accum != width,
        compact=compacts and (accum, width) == (4, 2),
        contiguous_gradients=zero.buckets.contiguous_gradients or (stage in (1, 2) and offload is not OffloadDevice.NONE),
        optimizer_device=offload,
        param_device=_param_device(zero),
        fused_adam=adam and fused and not numerics.torch_adam,
        torch_adam=adam and not fused,
        least_swapped=max(_MIN_AIO_BYTES, zero.aio.block_size),
        version=planned_as(zero.deepspeed),
    )


def _narrow_masters(workload: Workload, zero: ZeroConfig) -> bool:
    """Return whether masters are in 16 bits."""
    asked = zero.step.bf16_master_weights_and_grads or zero.step.fp16_master_weights_and_grads
    return workload.numerics.param_bytes == 2 and (asked or workload.numerics.precision is Precision.PURE)


def _keeps_fp32_grads(workload: Workload, zero: ZeroConfig, accum: int, *, pipeline: bool) -> bool:
    """Return whether BF16_Optimizer runs, which keeps whole gradients in fp32: at stage 1 that accumulates in it on the GPU,
    and at stage 0 on the stage of a `pipeline` with fp32 masters.
    """
    if workload.numerics.param_bytes != 2 or workload.numerics.dtype is not DType.BF16:
        return False
    on_gpu = zero.offload_optimizer.device is not OffloadDevice.CPU
    return (zero.stage == 1 and accum == 4 and on_gpu) or (zero.stage == 0 and pipeline)


def _optimizer_device(zero: ZeroConfig) -> OffloadDevice:
    """Return where the optimizer's states are: stages 1 and 2 only ask whether the device is "none"."""
    device = zero.offload_optimizer.device if zero.stage else OffloadDevice.NONE
    return OffloadDevice.CPU if zero.stage < 3 and device is OffloadDevice.NVME else device


def _param_device(zero: ZeroConfig) -> OffloadDevice:
    return zero.offload_param.device if zero.stage == 3 else OffloadDevice.NONE


def groups_on_gpu(count: int, zero: ZeroConfig) -> int:
    """Return how many of `count` sub-groups a partial offload leaves on the GPU: the first ones.

    Source: zero/stage3.py, subgroup_to_device
    """
    return int((1 - zero.offload_optimizer.ratio) * count) if zero.offload_optimizer.device is OffloadDevice.CPU else 0


def muon_updates(name: str, dimensions: int) -> bool:
    """Return whether Muon updates a parameter; it leaves embeddings, the head and vectors to Adam.

    Source: deepspeed/__init__.py, set_optimizer_flags
    """
    return dimensions >= 2 and "embed" not in name.lower() and "lm_head" not in name.lower()
