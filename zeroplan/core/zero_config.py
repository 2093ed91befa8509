"""ZeroConfig: how states are sharded, offloaded and moved, by DeepSpeed's own names for the knobs.

Note [ZeroConfig and Workload]
    A ``ds_config.json`` speaks of two things. What is computed (micro batch, accumulation, dtype, optimizer) belongs to
    :class:`~zeroplan.core.workload.Workload`; how it is sharded and moved belongs here. Neither repeats the other.
    The defaults are those of DeepSpeed 0.19.8, stated here once: the schema of ``ds_config`` reads them from these
    classes. All sizes of buckets and thresholds are **elements**, not bytes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.versions import Version, parse_version
from zeroplan.core.workload import DType

#: The DeepSpeed whose defaults these are.
DEEPSPEED_VERSION = "0.19.8"
NEWEST_DEEPSPEED: Version = parse_version(DEEPSPEED_VERSION)

_LEAF_CLASSES = tuple(
    f"transformers.models.{module}.modeling_{module}.{name}SparseMoeBlock"
    for module, name in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
)


class OffloadDevice(StrEnum):
    """Memories that offloaded state can go to."""

    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"


@dataclass(frozen=True, slots=True)
class OffloadOptimizer:
    """``zero_optimization.offload_optimizer``. `ratio` is the part of sub-groups that goes to the host (stage 3)."""

    device: OffloadDevice = OffloadDevice.NONE
    nvme_path: str | None = None
    buffer_count: int = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: float = 0.8

    def __bool__(self) -> bool:
        """Return whether anything is offloaded."""
        return self.device is not OffloadDevice.NONE


@dataclass(frozen=True, slots=True)
class OffloadParam:
    """``zero_optimization.offload_param``. `buffer_size` and `max_in_cpu` are elements."""

    device: OffloadDevice = OffloadDevice.NONE
    nvme_path: str | None = None
    buffer_count: int = 5
    buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    pin_memory: bool = True

    def __bool__(self) -> bool:
        """Return whether anything is offloaded."""
        return self.device is not OffloadDevice.NONE


@dataclass(frozen=True, slots=True)
class ZenFlow:
    """``zero_optimization.zenflow``: the important gradient columns update on the GPU, the rest on the host."""

    topk_ratio: float = 0.1
    select_strategy: str = "auto"
    select_interval: str | int = "auto"
    update_interval: str | int = "auto"
    overlap_step: bool = False
    offload: bool = False
    auto_ratio: float = 0.99
    full_warm_up_rounds: int = 0
    pt_reserved_cores_perc: float = 0.5


@dataclass(frozen=True, slots=True)
class LeafModule:
    """``zero_optimization.leaf_module``: modules that stage 3 gathers whole."""

    classes: tuple[str, ...] = _LEAF_CLASSES
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """The ``activation_checkpointing`` block. It acts only on code that calls ``deepspeed.checkpointing``."""

    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: int | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


@dataclass(frozen=True, slots=True)
class Aio:
    """The ``aio`` block. `block_size` is bytes."""

    block_size: int = 1_048_576
    queue_depth: int = 8
    intra_op_parallelism: int = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


@dataclass(frozen=True, slots=True)
class Buckets:
    """How gradients are gathered and reduced, and weights gathered after the step, below stage 3; `reduce_bucket_size` also
    sizes stage 3's bucket. `overlap_comm` None leaves the choice to DeepSpeed; read :attr:`ZeroConfig.overlaps_comm`.
    """

    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = 500_000_000
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    round_robin_gradients: bool = False
    parameter_alignment: bool = False


@dataclass(frozen=True, slots=True)
class Stage3Keys:
    """How stage 3 gathers weights, keeps and releases them, ZeRO++ among it; names are without the ``stage3_`` prefix."""

    sub_group_size: int = 1_000_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = sys.maxsize
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    gather_16bit_weights_on_model_save: bool = False
    module_granularity_threshold: int = 0
    use_all_reduce_for_fetch_params: bool = False
    allgather_sequential: bool = False
    zero_hpz_partition_size: int = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: LeafModule = LeafModule()


@dataclass(frozen=True, slots=True)
class StepKeys:
    """Keys outside ``zero_optimization`` that decide the element types of gradients, masters and states, and what a step does
    with gradients. `communication_data_type` and `grad_accum_dtype` None follow the model's dtype, and so does
    `seq_parallel_communication_data_type`, whose default is fp32.
    """

    gradient_clipping: float = 1.0
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    communication_data_type: DType | None = None
    seq_parallel_communication_data_type: DType | None = DType.FP32
    grad_accum_dtype: DType | None = None
    fp16_master_weights_and_grads: bool = False
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False
    immediate_grad_update: bool = False
    loss_scale: float = 0.0  # of the fp16 block; 0 for one that falls while gradients overflow
    check_grad_overflow: bool = True  # of the bf16 block; fp16 always checks
    fp32_optimizer_states: bool = True  # of optimizer.params; DeepSpeedCPUAdam's moments
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: bool = True


@dataclass(frozen=True, slots=True)
class ZeroConfig:
    """Sharding, offload, buckets and thresholds of one run, in parts. See Note [ZeroConfig and Workload].

    Names are DeepSpeed's. `deepspeed` is the version that reads the config; it is no key, nor is `filled_later`: the fields at
    ``auto`` that the HF Trainer fills from the hidden size when training begins, so that an engine made before it
    (:attr:`before_training`) has their defaults.
    """

    stage: int = 0
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    offload_param: OffloadParam = OffloadParam()
    buckets: Buckets = Buckets()
    stage3: Stage3Keys = Stage3Keys()
    step: StepKeys = StepKeys()
    zenflow: ZenFlow | None = None
    activation_checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    aio: Aio = field(default_factory=Aio)
    deepspeed: Version = NEWEST_DEEPSPEED
    filled_later: tuple[str, ...] = ()

    def __hash__(self) -> int:
        """Hash the fields in which the candidates of a search differ. To hash all of them takes most of a floor's time."""
        devices = self.offload_optimizer.device, self.offload_param.device
        return hash(
            (self.stage, *devices, self.buckets.overlap_comm, self.buckets.reduce_bucket_size, self.stage3.sub_group_size)
        )

    @classmethod
    def of(
        cls,
        stage: int = 0,
        offload_optimizer: str | OffloadOptimizer = "none",
        offload_param: str | OffloadParam = "none",
        *,
        nvme_path: str | None = None,
        **knobs: Any,
    ) -> ZeroConfig:
        """Make a config from plain values, as flags give them: ``ZeroConfig.of(2, "cpu", reduce_bucket_size=200_000_000)``.

        `knobs` are fields by their bare or ``stage3_`` names. `nvme_path` serves every offload to NVMe without a path.

        Raises:
            BadInput: an unknown knob or device, a negative size, or a combination that no DeepSpeed runs as written
                (offload at stage 0, parameter offload below stage 3, NVMe below stage 3).
        """
        names = ZERO_DEFAULTS.keys()
        bare = {key.removeprefix("stage3_"): value for key, value in knobs.items()}
        for key in bare:
            if key not in names:
                raise BadInput(f"unknown ZeRO knob {key!r}", remedy=did_you_mean(key, names))
        optimizer = (
            offload_optimizer
            if isinstance(offload_optimizer, OffloadOptimizer)
            else OffloadOptimizer(_device(offload_optimizer, "offload_optimizer"))
        )
        param = (
            offload_param if isinstance(offload_param, OffloadParam) else OffloadParam(_device(offload_param, "offload_param"))
        )
        if nvme_path is not None:
            if optimizer.device is OffloadDevice.NVME and optimizer.nvme_path is None:
                optimizer = replace(optimizer, nvme_path=nvme_path)
            if param.device is OffloadDevice.NVME and param.nvme_path is None:
                param = replace(param, nvme_path=nvme_path)
        config = cls(stage=stage, offload_optimizer=optimizer, offload_param=param).but(**bare)
        config.require_possible()
        return config

    def but(self, **leaves: Any) -> ZeroConfig:
        """Return the config with other values of its fields and of its parts' fields, each of which has one name.

        Raises:
            TypeError: a field that neither has.
        """
        changed: dict[str, dict[str, Any]] = {}
        for name, value in leaves.items():
            changed.setdefault(_PART_OF.get(name, ""), {})[name] = value
        whole = changed.pop("", {})
        parts = {part: replace(getattr(self, part), **values) for part, values in changed.items()}
        return replace(self, **parts, **whole)

    def leaves(self) -> dict[str, Any]:
        """Return the fields of the config and of its parts, by their names."""
        return {name: self.leaf(name) for name in ZERO_DEFAULTS}

    def leaf(self, name: str) -> Any:
        """Return a field of the config or of a part, by its name."""
        return getattr(getattr(self, _PART_OF[name]) if name in _PART_OF else self, name)

    def require_possible(self) -> None:
        """Refuse what no engine runs as written."""
        if self.stage not in (0, 1, 2, 3):
            raise BadInput(f"stage {self.stage!r} does not exist", where="stage", remedy="use 0, 1, 2 or 3")
        if self.offload_param and self.stage < 3:
            raise BadInput(
                f"parameter offload needs stage 3, not {self.stage}", where="offload_param", remedy="use stage 3 or none"
            )
        if self.offload_optimizer and self.stage < 1:
            raise BadInput("optimizer offload needs stage 1, 2 or 3", where="offload_optimizer", remedy="raise the stage")
        if self.offload_optimizer.device is OffloadDevice.NVME and self.stage < 3:
            raise BadInput(
                f"NVMe offload needs stage 3, not {self.stage}", where="offload_optimizer", remedy="use cpu, or stage 3"
            )
        for name, value in self.leaves().items():
            if isinstance(value, int) and value < 0:
                raise BadInput(f"{value} is negative", where=name, remedy="use a number of elements")

    @property
    def label(self) -> str:
        """``"stage 3, optimizer cpu, parameters cpu"``."""
        return sharding_label(self.stage, *self.devices)

    @property
    def devices(self) -> tuple[OffloadDevice, OffloadDevice]:
        """Where optimizer states and parameters are: below stage 3 DeepSpeed takes NVMe as the host, and ignores parameters."""
        optimizer, param = self.offload_optimizer.device, self.offload_param.device
        if self.stage == 3:
            return optimizer, param
        return OffloadDevice.CPU if optimizer is OffloadDevice.NVME else optimizer, OffloadDevice.NONE

    @property
    def overlaps_comm(self) -> bool:
        """`overlap_comm` as DeepSpeed resolves it: on at stage 3, off below, unless set (zero/config.py)."""
        return self.stage == 3 if self.buckets.overlap_comm is None else self.buckets.overlap_comm

    @property
    def before_training(self) -> ZeroConfig:
        """The config of an engine without an optimizer that a trainer makes before training begins."""
        defaults = {name: ZERO_DEFAULTS[name] for name in self.filled_later}
        return self.but(offload_optimizer=OffloadOptimizer(), filled_later=(), **defaults)

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer states leave the GPU."""
        return bool(self.offload_optimizer)

    @property
    def offloads_param(self) -> bool:
        """Whether parameters leave the GPU: stage 3 only, DeepSpeed ignores the block below."""
        return self.stage == 3 and bool(self.offload_param)


_TODAY = ZeroConfig()
#: The part of a ZeroConfig that has a field, by the field's name; the others are its own.
_PARTS = {"buckets": Buckets, "stage3": Stage3Keys, "step": StepKeys}
_PART_OF = {f.name: part for part, kind in _PARTS.items() for f in fields(kind)}
#: The defaults of a ZeroConfig's fields and of its parts' fields, by name.
ZERO_DEFAULTS: dict[str, Any] = {
    name: getattr(getattr(_TODAY, _PART_OF[name]) if name in _PART_OF else _TODAY, name)
    for name in (*(f.name for f in fields(ZeroConfig) if f.name not in _PARTS), *_PART_OF)
}


def sharding_label(stage: int, offload_optimizer: str, offload_param: str) -> str:
    """``"stage 3, optimizer cpu, parameters cpu"``, without what is not offloaded."""
    parts = [("optimizer", offload_optimizer), ("parameters", offload_param)]
    return ", ".join([f"stage {stage}", *(f"{what} {device}" for what, device in parts if device != OffloadDevice.NONE)])


def _device(text: str, where: str) -> OffloadDevice:
    try:
        return OffloadDevice(text)
    except ValueError:
        raise BadInput(f"{text!r} is not a device", where=where, remedy="use none, cpu or nvme") from None


#: Where the optimizer and the parameters may lie, by stage.
_OFFLOADS: dict[int, tuple[tuple[str, str], ...]] = {
    0: (("none", "none"),),
    1: (("none", "none"), ("cpu", "none")),
    2: (("none", "none"), ("cpu", "none")),
    3: (
        *(("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "none")),
        *(("cpu", "nvme"), ("nvme", "cpu"), ("nvme", "nvme")),
    ),
}


def stages_and_offloads(*, apart: bool = False) -> list[ZeroConfig]:
    """Return every stage with each offload that it allows.

    Args:
        apart: also those of the optimizer to one device and of the parameters to another.
    """
    rows = [(stage, optimizer, param) for stage, pairs in _OFFLOADS.items() for optimizer, param in pairs]
    return [ZeroConfig.of(*row) for row in rows if apart or row[2] in ("none", row[1])]
