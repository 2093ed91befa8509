"""Rules of zeroplan's own runtime, beside the keys that the schema says it refuses.

The rules hold of a ds_config, of flags (:func:`require_runnable`) and of the runtime's file engine (:func:`require_io`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

from zeroplan.core.arena.layout import PAGE, PAGE_NUMEL, ArenaLayout
from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import RUNTIME_RECIPES, Float8Recipe
from zeroplan.core.one_bit import LOCAL_ALONE, NOT_OFFLOADED, NOT_SHARDED, local_steps
from zeroplan.core.optimizers import find_optimizer, optimizer_of_type
from zeroplan.core.workload import DType
from zeroplan.core.zero_config import Aio, OffloadDevice, OffloadOptimizer, OffloadParam, ZeroConfig
from zeroplan.ds_config.dialect import Dialect
from zeroplan.ds_config.rules import Rule, View
from zeroplan.ds_config.runtime_options import FLOAT8, RuntimeOptions
from zeroplan.ds_config.training import TrainingSettings

#: The most bytes of one read or write, blocks in flight for a queue, and queues.
MOST_BLOCK = 1 << 30
MOST_DEPTH = 4096
MOST_QUEUES = 64

#: Loss scales are powers of two that a float holds.
_MOST_SCALE_POWER = 1023

_ZERO = "zero_optimization"
_OFF, _PAR = f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param"
_NVME = OffloadDevice.NVME
_runtime = partial(Rule, dialects=(Dialect.RUNTIME,))


def _params_in_files(v: View) -> bool:
    return v.uses_files and v.zero.offload_param.device is _NVME


def _no_folder(v: View) -> bool:
    states, params = v.zero.offload_optimizer, v.zero.offload_param
    return (states.device is _NVME and states.nvme_path == "") or (params.device is _NVME and params.nvme_path == "")


def _compresses(v: View) -> bool:
    row = optimizer_of_type(v.training.optimizer or "")
    return row is not None and row.compresses


def _steps_locally(v: View) -> bool:
    return _compresses(v) and v.zero.stage == 1 and local_steps(v.training.optimizer_params) > 1


def _nameless(v: View, section: str) -> bool:
    return v.has(section) and not v.says(f"{section}.type") and any(path.startswith(f"{section}.") for path in v.values)


#: What reads and writes of files cannot go by.
IO_REFUSALS: tuple[Rule, ...] = (
    _runtime(
        "runtime.gds",
        "aio.use_gds",
        lambda v: v.uses_files and v.zero.aio.use_gds,
        "GPUDirect Storage is not supported",
        "set it to false",
    ),
    _runtime(
        "runtime.block_size",
        "aio.block_size",
        lambda v: v.uses_files and not (PAGE <= v.zero.aio.block_size <= MOST_BLOCK and v.zero.aio.block_size % PAGE == 0),
        "{v.zero.aio.block_size} is not a block size",
        f"give a multiple of {PAGE} up to 1 GiB",
    ),
    _runtime(
        "runtime.queue_depth",
        "aio.queue_depth",
        lambda v: v.uses_files and not 1 <= v.zero.aio.queue_depth <= MOST_DEPTH,
        "{v.zero.aio.queue_depth} is out of range",
        f"give 1 to {MOST_DEPTH}",
    ),
    _runtime(
        "runtime.queues",
        "aio.intra_op_parallelism",
        lambda v: v.uses_files and not 1 <= v.zero.aio.intra_op_parallelism <= MOST_QUEUES,
        "{v.zero.aio.intra_op_parallelism} is out of range",
        f"give 1 to {MOST_QUEUES}",
    ),
)

#: What the runtime cannot offload, by whatever way it is asked for.
OFFLOAD_REFUSALS: tuple[Rule, ...] = (
    _runtime(
        "runtime.super_offload",
        _OFF,
        lambda v: v.zero.offload_optimizer.super_offload,
        "super_offload is not supported by this runtime",
        "leave it out",
    ),
    _runtime(
        "runtime.ratio",
        _OFF,
        lambda v: not 0.0 <= v.zero.offload_optimizer.ratio <= 1.0,
        "ratio {v.zero.offload_optimizer.ratio} is not between 0 and 1",
        "1 offloads all, 0.5 half of the parameters' states",
    ),
    _runtime(
        "runtime.cores",
        _OFF,
        lambda v: not 0.0 < v.zero.offload_optimizer.cpuadam_cores_perc <= 1.0,
        "cpuadam_cores_perc {v.zero.offload_optimizer.cpuadam_cores_perc} is not above 0 and at most 1",
        f"use {OffloadOptimizer().cpuadam_cores_perc} for that part of the cores",
    ),
    _runtime(
        "runtime.state_buffers",
        _OFF,
        lambda v: v.uses_files and v.zero.offload_optimizer.buffer_count < 1,
        "buffer_count {v.zero.offload_optimizer.buffer_count} is not above 0",
        f"use {OffloadOptimizer().buffer_count}, or leave it out",
    ),
    _runtime(
        "runtime.param_buffers",
        _PAR,
        lambda v: _params_in_files(v) and v.zero.offload_param.buffer_count < 1,
        "buffer_count {v.zero.offload_param.buffer_count} is not above 0",
        f"use {OffloadParam().buffer_count}, or leave it out",
    ),
    _runtime(
        "runtime.param_pages",
        _PAR,
        lambda v: _params_in_files(v) and v.zero.offload_param.buffer_size < PAGE_NUMEL,
        "buffer_size {v.zero.offload_param.buffer_size:,} holds no page of a file",
        f"use {PAGE_NUMEL:,} elements or more",
    ),
    _runtime(
        "runtime.params_in_cpu",
        _PAR,
        lambda v: _params_in_files(v) and v.zero.offload_param.max_in_cpu < 0,
        "max_in_cpu {v.zero.offload_param.max_in_cpu} is negative",
        "use 0 to keep none there",
    ),
    *IO_REFUSALS,
    _runtime(
        "runtime.params_alone",
        _PAR,
        lambda v: bool(v.zero.offload_param) and (not v.zero.offload_optimizer or v.zero.offload_optimizer.ratio < 1.0),
        "parameters can leave the device only where their whole optimizer does",
        "add offload_optimizer with ratio 1",
    ),
    _runtime(
        "runtime.delayed",
        "zeroplan.delayed_update",
        lambda v: v.runtime_options.delayed_update > 0 and (v.offload is not OffloadDevice.CPU or bool(v.zero.offload_param)),
        "the delayed update is for an optimizer in host memory and parameters on the device",
        'use offload_optimizer.device "cpu" without offload_param',
    ),
)

_ASYNC = _runtime(
    "runtime.async_checkpoints",
    "zeroplan.async_checkpoints",
    lambda v: v.runtime_options.async_checkpoints and v.uses_files,
    "what is in swap files is not copied to memory for a checkpoint",
    "leave the key out, or offload to host memory",
)

#: What 8-bit products and gathers do not go together with.
FLOAT8_REFUSALS: tuple[Rule, ...] = (
    _runtime(
        "runtime.float8_recipe",
        FLOAT8,
        lambda v: bool(v.runtime_options.float8) and v.runtime_options.float8 not in RUNTIME_RECIPES,
        "no recipe is called {v.runtime_options.float8!r}",
        f"use {', '.join(RUNTIME_RECIPES[:-1])} or {RUNTIME_RECIPES[-1]}",
    ),
    _runtime(
        "runtime.float8_dtype",
        FLOAT8,
        lambda v: bool(v.runtime_options.float8) and v.training.dtype not in (DType.BF16, None),
        "8-bit products stand in for bf16's, not {v.dtype}'s",
        "enable bf16",
    ),
    _runtime(
        "runtime.float8_gathers",
        f"{FLOAT8}_gathers",
        lambda v: (
            v.runtime_options.float8_gathers
            and (v.runtime_options.float8 != Float8Recipe.TENSORWISE or v.zero.stage != 3 or bool(v.zero.offload_optimizer))
        ),
        "gathers in 8 bits are of tensorwise products at stage 3, with the optimizer on the device",
        "leave the key out",
    ),
    _runtime(
        "runtime.bf16_layers",
        "zeroplan.num_layers_at_start_in_bf16",
        lambda v: v.runtime_options.bf16_layers is not None and not v.runtime_options.float8,
        "all layers are in 16 bits without float8",
        "set float8 beside it, or leave the keys of both ends out",
    ),
)

#: What the runtime refuses in a ds_config.
RUNTIME_REFUSALS: tuple[Rule, ...] = (
    *OFFLOAD_REFUSALS,
    *FLOAT8_REFUSALS,
    _ASYNC,
    _runtime(
        "runtime.folder",
        "nvme_path",
        _no_folder,
        "the path of a folder on the disk is empty",
        'write it, or set device to "cpu"',
    ),
    _runtime(
        "runtime.clipping",
        "gradient_clipping",
        lambda v: not 0 <= v.zero.step.gradient_clipping < math.inf,
        "{v.zero.step.gradient_clipping:g} is not a number of zero or more",
        "use 0 to clip nothing",
    ),
    _runtime(
        "runtime.one_bit_stage",
        f"{_ZERO}.stage",
        lambda v: _compresses(v) and v.zero.stage >= 2,
        NOT_SHARDED.what,
        NOT_SHARDED.remedy,
    ),
    _runtime(
        "runtime.local_steps", "optimizer.params.local_step_clipper", _steps_locally, LOCAL_ALONE.what, LOCAL_ALONE.remedy
    ),
    _runtime(
        "runtime.one_bit_offload",
        _OFF,
        lambda v: _compresses(v) and v.zero.stage < 2 and v.offload is not OffloadDevice.NONE,
        NOT_OFFLOADED.what,
        NOT_OFFLOADED.remedy,
    ),
    _runtime(
        "runtime.scale_power",
        "fp16.initial_scale_power",
        lambda v: not 0 <= v.says("fp16.initial_scale_power", 16) <= _MOST_SCALE_POWER,
        "{v.values[fp16.initial_scale_power]} is out of range",
        f"give 0 to {_MOST_SCALE_POWER}",
    ),
    _runtime(
        "runtime.optimizer_type", "optimizer", lambda v: _nameless(v, "optimizer"), "'type' is missing", 'write "type": "AdamW"'
    ),
    _runtime(
        "runtime.scheduler_type",
        "scheduler",
        lambda v: _nameless(v, "scheduler"),
        "'type' is missing",
        'write "type": "WarmupLR"',
    ),
)


def _require(rules: Iterable[Rule], view: View) -> None:
    for rule in rules:
        if rule.applies(view):
            found = rule.finding(view)
            raise BadInput(found.what, where=found.where, remedy=found.remedy)


def require_runnable(zero: ZeroConfig, runtime_options: RuntimeOptions) -> None:
    """Refuse offload that the runtime does not do."""
    zero.require_possible()
    _require(OFFLOAD_REFUSALS, View(zero, TrainingSettings(), {}, runtime_options=runtime_options))


def require_io(aio: Aio) -> None:
    """Refuse an ``aio`` section that reads and writes of files cannot go by.

    Raises:
        BadInput: GPUDirect Storage, blocks that are no pages, counts out of range.
    """
    in_files = OffloadOptimizer(device=OffloadDevice.NVME)
    _require(IO_REFUSALS, View(ZeroConfig(stage=3, offload_optimizer=in_files, aio=aio), TrainingSettings(), {}))


def require_offloadable(optimizer: str, zero: ZeroConfig) -> None:
    """Refuse an optimizer that cannot leave the device in this way.

    Raises:
        BadInput: for one that takes whole tensors' norms (LAMB), which need every rank between two passes; for one with
            quantised states where states or parameters are in files, whose update passes fp32 states through pinned buffers.
    """
    kernel = find_optimizer(optimizer).runtime
    if kernel is not None and kernel.quantised and _NVME in (zero.offload_optimizer.device, zero.offload_param.device):
        raise BadInput(
            f"the quantised states of {kernel.type} are not stepped from files",
            where="offload_optimizer" if zero.offload_optimizer.device is _NVME else "offload_param",
            remedy='use device "cpu", or AdamW',
        )
    if kernel is not None and kernel.takes_norms:
        raise BadInput(
            f"{optimizer.upper()} cannot be offloaded", where="offload_optimizer", remedy="use AdamW, or keep it on the device"
        )


def remark(layout: ArenaLayout) -> str:
    """Return a warning about what may surprise the user of this layout; an empty string for none."""
    if layout.setup.params_in_files and not layout.param_buffer:
        most = layout.setup.params_in_host
        return f"offload_param: all parameters stay in host memory, as max_in_cpu is {most:,} elements; 0 keeps none there"
    return ""
