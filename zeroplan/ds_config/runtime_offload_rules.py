"""Which offload the included runtime does: read by the runtime and by the plan of it."""

from __future__ import annotations

from zeroplan.core.errors import BadInput
from zeroplan.core.layout import PAGE, PAGE_NUMEL, Layout
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.zero_config import Aio, OffloadDevice, OffloadOptimizer, OffloadParam, ZeroConfig

#: Checkpointed inputs of fewer bytes stay on the device: torch's allocator gives no tensor less than this.
LEAST_MOVED_BYTES = 512

#: The most bytes of one read or write, blocks in flight for a queue, and queues.
MOST_BLOCK = 1 << 30
MOST_DEPTH = 4096
MOST_QUEUES = 64


def require_runnable(
    stage: int, optimizer: OffloadOptimizer, param: OffloadParam, *, delayed: bool = False, aio: Aio | None = None
) -> None:
    """Refuse what the runtime does not do. `delayed`: the delayed parameter update is asked for. `aio` matters for files only.

    Raises:
        BadInput: with the remedy.
    """
    ZeroConfig.of(stage, optimizer, param)
    if optimizer.super_offload:
        raise BadInput("super_offload is not supported by this runtime", where="offload_optimizer", remedy="leave it out")
    if not 0.0 <= optimizer.ratio <= 1.0:
        raise BadInput(
            f"ratio {optimizer.ratio} is not between 0 and 1",
            where="offload_optimizer",
            remedy="1 offloads all, 0.5 half of the parameters' states",
        )
    if not 0.0 < optimizer.cpuadam_cores_perc <= 1.0:
        raise BadInput(
            f"cpuadam_cores_perc {optimizer.cpuadam_cores_perc} is not above 0 and at most 1",
            where="offload_optimizer",
            remedy=f"use {OffloadOptimizer().cpuadam_cores_perc} for that part of the cores",
        )
    if OffloadDevice.NVME in (optimizer.device, param.device):
        _require_buffers(optimizer, param)
        require_io(aio or Aio())
    if param and (not optimizer or optimizer.ratio < 1.0):
        raise BadInput(
            "parameters can leave the device only where their whole optimizer does",
            where="offload_param",
            remedy="add offload_optimizer with ratio 1",
        )
    if delayed and (optimizer.device is not OffloadDevice.CPU or param):
        raise BadInput(
            "the delayed update is for an optimizer in host memory and parameters on the device",
            where="zeroplan.delayed_update",
            remedy='use offload_optimizer.device "cpu" without offload_param',
        )


def _require_buffers(optimizer: OffloadOptimizer, param: OffloadParam) -> None:
    streamed: list[tuple[str, OffloadOptimizer | OffloadParam]] = [("offload_optimizer", optimizer)]
    if param.device is OffloadDevice.NVME:
        streamed.append(("offload_param", param))
    for where, one in streamed:
        if one.buffer_count < 1:
            raise BadInput(
                f"buffer_count {one.buffer_count} is not above 0",
                where=where,
                remedy=f"use {type(one)().buffer_count}, or leave it out",
            )
    if param.device is OffloadDevice.NVME and param.buffer_size < PAGE_NUMEL:
        raise BadInput(
            f"buffer_size {param.buffer_size:,} holds no page of a file",
            where="offload_param",
            remedy=f"use {PAGE_NUMEL:,} elements or more",
        )
    if param.max_in_cpu < 0:
        raise BadInput(f"max_in_cpu {param.max_in_cpu} is negative", where="offload_param", remedy="use 0 to keep none there")


def require_io(aio: Aio) -> None:
    """Refuse an ``aio`` section that reads and writes cannot go by.

    Raises:
        BadInput: GPUDirect Storage, blocks that are no pages, counts out of range.
    """
    if aio.use_gds:
        raise BadInput("GPUDirect Storage is not supported", where="aio.use_gds", remedy="set it to false")
    if not (PAGE <= aio.block_size <= MOST_BLOCK and aio.block_size % PAGE == 0):
        raise BadInput(
            f"{aio.block_size} is not a block size", where="aio.block_size", remedy=f"give a multiple of {PAGE} up to 1 GiB"
        )
    for name, value, most in (
        ("queue_depth", aio.queue_depth, MOST_DEPTH),
        ("intra_op_parallelism", aio.intra_op_parallelism, MOST_QUEUES),
    ):
        if not 1 <= value <= most:
            raise BadInput(f"{value} is out of range", where=f"aio.{name}", remedy=f"give 1 to {most}")


def remark(layout: Layout) -> str:
    """What may surprise whoever asked for this layout; an empty string where nothing does."""
    if layout.setup.params_in_files and not layout.param_buffer:
        most = layout.setup.params_in_host
        return f"offload_param: all parameters stay in host memory, as max_in_cpu is {most:,} elements; 0 keeps none there"
    return ""


def require_offloadable(optimizer: str) -> None:
    """Refuse an optimizer that cannot leave the device.

    Raises:
        BadInput: for one that takes whole tensors' norms (LAMB), which need every rank between two passes.
    """
    kernel = find_optimizer(optimizer).runtime
    if kernel is not None and kernel.takes_norms:
        raise BadInput(
            f"{optimizer.upper()} cannot be offloaded", where="offload_optimizer", remedy="use AdamW, or keep it on the device"
        )
