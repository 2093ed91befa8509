"""Which offload the included runtime does: read by the runtime and by the plan of it."""

from __future__ import annotations

from zeroplan.core.errors import BadInput
from zeroplan.core.layout import PAGE_NUMEL
from zeroplan.core.zero_config import Device, OffloadOptimizer, OffloadParam, ZeroConfig

#: Checkpointed inputs of fewer bytes stay on the device: torch's allocator gives no tensor less than this.
LEAST_MOVED_BYTES = 512


def require_runnable(stage: int, optimizer: OffloadOptimizer, param: OffloadParam, *, delayed: bool = False) -> None:
    """Refuse what the runtime does not do. `delayed`: the delayed parameter update is asked for.

    Raises:
        BadInput: with the remedy.
    """
    ZeroConfig.of(stage, optimizer, param)
    if optimizer.super_offload:
        raise BadInput("super_offload is not supported by this runtime", where="offload_optimizer", remedy="leave it out")
    if not 0.0 <= optimizer.ratio <= 1.0:
        raise BadInput(f"ratio {optimizer.ratio} is not between 0 and 1", where="offload_optimizer")
    if not 0.0 < optimizer.cpuadam_cores_perc <= 1.0:
        raise BadInput(
            f"cpuadam_cores_perc {optimizer.cpuadam_cores_perc} is not above 0 and at most 1", where="offload_optimizer"
        )
    if optimizer.buffer_count < 1:
        raise BadInput(f"buffer_count {optimizer.buffer_count} is not above 0", where="offload_optimizer")
    if param.device is Device.NVME and param.buffer_count < 1:
        raise BadInput(f"buffer_count {param.buffer_count} is not above 0", where="offload_param")
    if param.device is Device.NVME and param.buffer_size < PAGE_NUMEL:
        raise BadInput(
            f"buffer_size {param.buffer_size:,} holds no page of a file",
            where="offload_param",
            remedy=f"use {PAGE_NUMEL:,} elements or more",
        )
    if param and (not optimizer or optimizer.ratio < 1.0):
        raise BadInput(
            "parameters can leave the device only where their whole optimizer does",
            where="offload_param",
            remedy="add offload_optimizer with ratio 1",
        )
    if delayed and (optimizer.device is not Device.CPU or param):
        raise BadInput(
            "the delayed update is for an optimizer in host memory and parameters on the device",
            where="zeroplan.delayed_update",
            remedy='use offload_optimizer.device "cpu" without offload_param',
        )


def require_offloadable(optimizer: str) -> None:
    """Refuse an optimizer that cannot leave the device.

    Raises:
        BadInput: for LAMB, whose trust ratios need every rank between two passes.
    """
    if optimizer == "lamb":
        raise BadInput("LAMB cannot be offloaded", where="offload_optimizer", remedy="use AdamW, or keep it on the device")
